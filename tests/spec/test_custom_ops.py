"""The key custom_ops: what it may say together, and what is refused with its reason."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from edgeopt.errors import ProjectError
from edgeopt.spec.custom_ops import CustomOp, node_of
from edgeopt.spec.manifest import EngineRecipe, digest
from edgeopt.spec.project import Project, load_project
from tests.tiny import tiny_artifact

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operators.md"


def loaded(folder: Path, **ops) -> Project:
    values = {"name": "m", "model": "model.py:build", "inputs": {"x": {"shape": [1]}}, "custom_ops": ops}
    (folder / "edgeopt.yaml").write_text(json.dumps(values))
    (folder / "model.py").touch()
    return load_project(folder)


WRONG = {
    "no namespace": ({"scale": {"plugin": "Scale"}}, "is not namespace::operator"),
    "nothing": ({"ns::scale": {}}, "nothing is said"),
    "both forms": ({"ns::scale": {"onnx": "model.py:f", "node": "acme::Scale"}}, "keep one"),
    "plugin of another name": ({"ns::s": {"node": "acme::Scale", "plugin": "Other"}}, "by the node's type"),
    "no function": ({"ns::scale": {"onnx": "model.py"}}, "is not file.py:function"),
    "absent file": ({"ns::scale": {"onnxruntime": "libabsent.so"}}, "there is no file libabsent.so"),
    "absent translation": ({"ns::scale": {"onnx": "absent.py:f"}}, "there is no file absent.py"),
    "unknown key": ({"ns::scale": {"tensort": "lib.so"}}, "did you mean 'tensorrt'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_contradicts_itself_is_refused(tmp_path, case):
    ops, said = WRONG[case]
    with pytest.raises(ProjectError) as caught:
        loaded(tmp_path, **ops)
    assert said in caught.value.what and "custom_ops" in caught.value.what


def test_the_node_is_named_by_node_then_plugin_then_the_key():
    assert node_of("ns::scale", CustomOp(node="acme::Scale")) == "acme::Scale"
    assert node_of("ns::scale", CustomOp(plugin="ScalePlugin")) == "ns::ScalePlugin"
    assert node_of("acme::Scale", CustomOp(tensorrt="lib.so")) == "acme::Scale"


def test_every_key_is_on_its_page():
    keys = set(re.findall(r"^\| `(\w+)`", PAGE.read_text(), re.MULTILINE))
    assert set(CustomOp.model_fields) <= keys


def test_a_recipe_without_plugins_leaves_the_digest_as_it_was(tmp_path):
    """Manifests of before the key have the digest that they had."""
    recipe = EngineRecipe(candidate="onnxruntime-fp32", shapes={}, typing="weak")
    manifest = tiny_artifact(tmp_path, torchscript=False, engine_recipes=(recipe,)).manifest
    held = json.loads((tmp_path / "tiny.edgeopt" / "manifest.json").read_bytes())
    assert "plugins" not in held["engine_recipes"][0]
    other = manifest.model_copy(
        update={"engine_recipes": (recipe.model_copy(update={"plugins": ("onboard.pyz",)}),)}
    )  # fmt: skip
    assert digest(other) != digest(manifest)


def test_a_plugin_must_be_a_file_of_the_artifact(tmp_path):
    recipe = EngineRecipe(candidate="onnxruntime-fp32", shapes={}, typing="weak", plugins=("ops/absent.so",))
    with pytest.raises(ValueError, match="ops/absent.so"):
        tiny_artifact(tmp_path, torchscript=False, engine_recipes=(recipe,))
