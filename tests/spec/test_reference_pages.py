"""docs/profiles.md and docs/project.md: their examples load, and no key is missing."""

import re
from pathlib import Path

import pytest

from edgeopt.spec.adaptive import Adaptive
from edgeopt.spec.camera import Camera, Output
from edgeopt.spec.limits import Limits
from edgeopt.spec.overrides import model_in
from edgeopt.spec.profile import load_profile
from edgeopt.spec.profile_values import ProfileFile
from edgeopt.spec.project import Input, ProjectFile, Qat, load_project

DOCS = Path(__file__).resolve().parents[2] / "docs"


def example(page: str) -> str:
    return re.search(r"```yaml\n(.*?)```", (DOCS / page).read_text(), re.DOTALL).group(1)


def documented(page: str) -> set[str]:
    """The keys of the page's tables: in a cell '`qat.epochs`, `.max_steps`' the second is below the first's parent."""
    keys = set()
    for line in (DOCS / page).read_text().splitlines():
        if line.startswith("| `"):
            first, *others = re.findall(r"`([^`]+)`", line.split("|")[1])
            parent = first.rpartition(".")[0]
            keys |= {first} | {parent + other if other.startswith(".") else other for other in others}
    return keys


def test_the_examples_load(tmp_path):
    (tmp_path / "mine.yaml").write_text(example("profiles.md"))
    profile = load_profile(str(tmp_path / "mine.yaml"))
    assert (profile.jetpack, profile.root, profile.passes) == ("4.6", "/data/models", {"fold_constants": False})
    (tmp_path / "edgeopt.yaml").write_text(example("project.md"))
    for name in ("model.py", "data.py", "weights.pt"):
        (tmp_path / name).touch()
    assert load_project(tmp_path).limits.metric_drop == {"accuracy": 0.5}


def test_every_key_of_a_profile_is_on_its_page():
    keys = documented("profiles.md")
    for name, field in ProfileFile.model_fields.items():
        below = model_in(field.annotation)
        if name in ("limits", "fuser") or below is None:
            assert name in keys or f"{name}.*" in keys
        else:
            assert {f"{name}.{key}" for key in below.model_fields} <= keys


MODELS = [
    (ProjectFile, ""),
    (Input, "inputs.NAME."),
    (Camera, "inputs.NAME.camera."),
    (Output, "outputs.NAME."),
    (Qat, "qat."),
    (Limits, ""),
    (Adaptive, "adaptive."),
]


@pytest.mark.parametrize(("model", "prefix"), MODELS)
def test_every_key_of_a_project_is_on_its_page(model, prefix):
    keys = documented("project.md")
    assert {prefix + key for key in model.model_fields} - {"qat"} <= keys
