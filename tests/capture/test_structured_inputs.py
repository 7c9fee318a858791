"""Parameters of forward with parts: dicts, tuples, lists, named tuples, dataclasses, nested, and None (C09, C10)."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from edgeopt.capture import capture, serialise
from edgeopt.errors import CaptureError, DataError, ProjectError
from edgeopt.program import ExportedGraph, ScriptGraph, batches
from edgeopt.progress import SILENT
from edgeopt.spec.project import project_for_model
from tests.capture.support import captured, run

ROW = {"shape": ["N", 2]}
AXES = {"N": {"min": 1, "opt": 2, "max": 4}}
TYPES = """
from typing import *

class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor
    none: Optional[torch.Tensor] = None

class Outer(NamedTuple):
    x: Pair
    y: Dict[str, torch.Tensor]

@dataclasses.dataclass
class Config:
    a: torch.Tensor
    b: torch.Tensor
    scale: float = 1.0
    mask: Optional[torch.Tensor] = None

class Words(TypedDict, total=False):
    a: torch.Tensor
    b: torch.Tensor

class Own(dict):
    def __getattr__(self, name):
        return self[name]

"""
# parameter: annotation, the two tensors that the model reads, the inputs that the project names, the kinds around them
KINDS = {
    "dict": ("Dict[str, torch.Tensor]", "p['a']", "p['b']", ["p.a", "p.b"], "dict"),
    "tuple": ("Tuple[torch.Tensor, torch.Tensor]", "p[0]", "p[1]", ["p.0", "p.1"], "tuple"),
    "tuple out of order": ("Tuple[torch.Tensor, torch.Tensor]", "p[0]", "p[1]", ["p.1", "p.0"], "tuple"),
    "list": ("List[torch.Tensor]", "p[0]", "p[1]", ["p.0", "p.1"], "list"),
    "named tuple": ("Pair", "p.a", "p.b", ["p.b", "p.a"], "namedtuple"),
    "nested": ("Dict[str, Tuple[torch.Tensor, torch.Tensor]]", "p['k'][0]", "p['j'][1]",
               ["p.k.0", "p.k.1", "p.j.0", "p.j.1"], "dict"),
    "named tuples and a dict": ("Outer", "p.x.b", "p.y['z']", ["p.x.a", "p.x.b", "p.y.z"], "namedtuple"),
}  # fmt: skip
UNANNOTATED = {
    "plain dict": ("", "p['a']", "p['b']", ["p.a", "p.b"], "dict"),
    "plain tuple": ("", "p[0]", "p[1]", ["p.0", "p.1"], "tuple"),
    "plain nested": ("", "p['k'][0]", "p['j']['x']", ["p.k.0", "p.j.x"], "dict"),
    "any": ("Any", "p['a']", "p['b']", ["p.a", "p.b"], "dict"),
    "optional": ("Optional[Pair]", "p.a", "p.b", ["p.a", "p.b"], "namedtuple"),
    "either": ("Union[torch.Tensor, Pair]", "p.a", "p.b", ["p.a", "p.b"], "namedtuple"),
    "text": ("'Pair'", "p.a", "p.b", ["p.a", "p.b"], "namedtuple"),
    "mapping": ("Mapping[str, torch.Tensor]", "p['a']", "p['b']", ["p.a", "p.b"], "dict"),
    "sequence": ("Sequence[torch.Tensor]", "p[0]", "p[1]", ["p.0", "p.1"], "tuple"),
    "dataclass": ("Config", "p.a * p.scale", "p.b", ["p.a", "p.b"], "dataclass"),
    "typed dict": ("Words", "p['a']", "p['b']", ["p.a", "p.b"], "dict"),
    "own kind of dict": ("Own", "p.a", "p.b", ["p.a", "p.b"], "dict"),
    "dataclasses in a tuple": ("Tuple[Config, Config]", "p[0].a", "p[1].b", ["p.0.a", "p.0.b", "p.1.a", "p.1.b"],
                               "tuple"),
}  # fmt: skip


def model(annotation: str, first: str, second: str, *, branch: bool) -> str:
    parameter = f"p: {annotation}" if annotation else "p"
    body = f"y = {first} - 2 * {second}"
    told = "y * 2 if bool(y.sum() > 0) else y - 1" if branch else "y"
    head = f"{TYPES}\nclass Model(nn.Module):\n    def forward(self, {parameter}):\n"
    return f"{head}        {body}\n        return {told}\n"


def named(expression: str) -> str:
    """'p.k.0' for p['k'][0]: the flat name of what the model reads."""
    text = expression.split(" ")[0]
    return text.replace("['", ".").replace("']", "").replace("[", ".").replace("]", "")


def given(names: list[str], rows: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(rows, 2)).astype(np.float32) for name in names}


@pytest.mark.parametrize("kind", [*KINDS, *UNANNOTATED])
def test_a_parameter_with_parts(tmp_path, kind):
    annotation, first, second, names, around = {**KINDS, **UNANNOTATED}[kind]
    program = captured(tmp_path, model(annotation, first, second, branch=False), dict.fromkeys(names, ROW), AXES)
    assert isinstance(program, ExportedGraph)
    assert program.signature.input_names == tuple(names)
    assert program.signature.input_structure["items"]["p"]["kind"] == around
    x = given(names)
    np.testing.assert_allclose(run(program, **x)["output"], x[named(first)] - 2 * x[named(second)], rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_with_a_parameter_with_parts(tmp_path, kind):
    annotation, first, second, names, _ = KINDS[kind]
    program = captured(tmp_path, model(annotation, first, second, branch=True), dict.fromkeys(names, ROW), AXES)
    assert isinstance(program, ScriptGraph) and program.how == "script"
    for sign in (1, -1):
        x = {name: sign * value for name, value in given(names).items()}
        y = x[named(first)] - 2 * x[named(second)]
        want = y * 2 if y.sum() > 0 else y - 1
        np.testing.assert_allclose(run(program, **x)["output"], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_torchscript_file_with_a_parameter_with_parts(tmp_path, kind):
    annotation, first, second, names, around = KINDS[kind]
    (tmp_path / "model.py").write_text(
        "import dataclasses, torch\nfrom torch import nn\n" + model(annotation, first, second, branch=True)
    )
    from edgeopt.ports.user_code import load_attribute

    net = load_attribute("model.py:Model", tmp_path, key="model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(net()).save(str(tmp_path / "net.pt"))
    inputs = dict.fromkeys(names, ROW)
    program = capture(project_for_model("net.pt", folder=tmp_path, inputs=inputs, axes=AXES), progress=SILENT)
    assert program.how == "file"
    assert program.signature.input_structure["items"]["p"]["kind"] == around
    for sign in (1, -1):
        x = {name: sign * value for name, value in given(names).items()}
        y = x[named(first)] - 2 * x[named(second)]
        np.testing.assert_allclose(run(program, **x)["output"], y * 2 if y.sum() > 0 else y - 1, rtol=1e-5, atol=1e-6)


def test_parts_beside_tensors_and_a_given_none(tmp_path):
    code = """
    class Model(nn.Module):
        def forward(self, image, batch, extra=None, unused=None):
            out = image + batch['ids'] * batch['inner'][1]
            if extra is not None:
                out = out + 100 * extra['x']
            return out if unused is None else out * 0
    """
    names = ["extra.x", "batch.ids", "batch.inner.0", "image", "batch.inner.1"]
    program = captured(tmp_path, code, dict.fromkeys(names, ROW), AXES)
    x = given(names)
    want = x["image"] + x["batch.ids"] * x["batch.inner.1"] + 100 * x["extra.x"]
    np.testing.assert_allclose(run(program, **x)["output"], want, rtol=1e-6)


def test_a_model_that_changes_its_container_does_not_change_the_next_call(tmp_path):
    code = """
    class Model(nn.Module):
        def forward(self, batch):
            x = batch.pop('x')
            batch['y'] += x
            batch['z'] = batch['y'] * 2
            return batch['z']
    """
    program = captured(tmp_path, code, dict.fromkeys(["batch.x", "batch.y"], ROW), AXES)
    x = given(["batch.x", "batch.y"])
    before = {name: value.copy() for name, value in x.items()}
    for _ in range(2):
        np.testing.assert_allclose(run(program, **x)["output"], 2 * (x["batch.x"] + x["batch.y"]), rtol=1e-6)
    assert all(np.array_equal(x[name], before[name]) for name in x)


WRONG_NAMES = {
    "gap": (["p.0", "p.2"], r"'p\.2' is given and 'p\.1' is not"),
    "not from 0": (["p.1"], r"'p\.1' is given and 'p\.0' is not"),
    "mixture": (["p.0", "p.a"], "an item of a tuple, and 'p.a' a key"),
    "tensor and parts": (["p", "p.a"], "'p' is a tensor, and 'p.a' names a part"),
    "parts and tensor": (["p.a", "p"], "'p' is a tensor, and other inputs name parts"),
    "deep": (["p.a", "p.a.b"], r"'p\.a' is a tensor"),
    "empty part": (["p..a"], "empty part"),
    "no parameter": (["q.a"], "'q' is no parameter"),
    "leading dot": ([".p"], "empty part"),
    "leading zero": (["p.0", "p.01"], r"'p\.01' is given"),
}


@pytest.mark.parametrize("names, said", WRONG_NAMES.values(), ids=WRONG_NAMES)
def test_names_that_describe_no_structure(tmp_path, names, said):
    code = "class Model(nn.Module):\n    def forward(self, p):\n        return p\n"
    with pytest.raises(ProjectError, match=said) as error:
        captured(tmp_path, code, dict.fromkeys(names, ROW), AXES)
    assert error.value.todo


AGAINST = {
    "a tensor's part": ("torch.Tensor", ["p.a"], "annotated Tensor, and the project names its parts", "name 'p' alone"),
    "keys of a tuple": ("Tuple[torch.Tensor, torch.Tensor]", ["p.a"], "annotated", "p.0"),
    "items of a dict": ("Dict[str, torch.Tensor]", ["p.0"], "annotated", "p.KEY"),
    "too many": ("Tuple[torch.Tensor, torch.Tensor]", ["p.0", "p.1", "p.2"], "a tuple of 2", "p.0 to p.1"),
    "too few": ("Tuple[torch.Tensor, torch.Tensor]", ["p.0"], "a tuple of 2", "p.0 to p.1"),
    "unknown field": ("Config", ["p.a", "p.bb"], "'p.bb' is no field of Config, did you mean 'b'", "a, b, scale, mask"),
    "missing field": ("Config", ["p.a"], "'p.b' is a field of Config that the project does not give", "add 'p.b'"),
    "missing of a named tuple": ("Pair", ["p.b"], "'p.a' is a field of Pair", "add 'p.a'"),
    "items of a named tuple": ("Pair", ["p.0", "p.1"], "annotated Pair", "p.a, p.b, p.none"),
    "a tensor for a class": ("Config", ["p"], "the project gives one tensor", "p.a, p.b"),
    "a tensor for a tuple": ("Tuple[torch.Tensor, torch.Tensor]", ["p"], "one tensor", "p.0, p.1"),
    "a class of their own": ("Path", ["p.a"], "annotated Path", "a dataclass, or wrap the model"),
    "only for type checkers": ("'Nowhere'", ["p.a"], "'Nowhere', which cannot be resolved", "top of the model's file"),
}  # fmt: skip


@pytest.mark.parametrize("annotation, names, said, todo", AGAINST.values(), ids=AGAINST)
def test_names_that_contradict_the_annotation(tmp_path, annotation, names, said, todo):
    code = TYPES + f"from pathlib import Path\n\nclass Model(nn.Module):\n    def forward(self, p: {annotation}):\n" \
        "        return p\n"  # fmt: skip
    with pytest.raises(ProjectError) as error:
        captured(tmp_path, code, dict.fromkeys(names, ROW), AXES)
    assert said in error.value.what and todo in error.value.todo and "Model" in error.value.where


@pytest.mark.parametrize(
    "annotation, hint",
    [("", "annotate forward's 'p', as in p: Dict"), ("Config", "takes no dataclass: annotate 'p' with a NamedTuple")],
)
def test_what_the_compiler_cannot_know_is_asked_for(tmp_path, annotation, hint):
    read = ("p['a']", "p['b']") if not annotation else ("p.a", "p.b")
    with pytest.raises(CaptureError) as error:
        captured(tmp_path, model(annotation, *read, branch=True), dict.fromkeys(["p.a", "p.b"], ROW), AXES)
    assert hint in error.value.what and "model.py, line" in error.value.where


def test_the_structure_survives_the_cache(tmp_path):
    program = captured(tmp_path, model("Config", "p.a", "p.b", branch=False), dict.fromkeys(["p.b", "p.a"], ROW), AXES)
    serialise.save(program, tmp_path / "saved")
    again = serialise.load(tmp_path / "saved").signature
    assert again == program.signature
    assert list(again.input_structure["items"]["p"]["items"]) == ["a", "b", "scale", "mask"]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    names = ["p.b", "p.a"]
    return captured(
        tmp_path_factory.mktemp("config"), model("Config", "p.a", "p.b", branch=False), dict.fromkeys(names, ROW), AXES
    ).signature


A, B = given(["a", "b"]).values()


class Given:
    def __init__(self, **fields):
        self.__dict__.update(fields)
        self.__dataclass_fields__ = fields


GOOD_BATCHES = {
    "flat": {"p.a": A, "p.b": B},
    "nested": {"p": {"a": A, "b": B}},
    "constant as built": {"p": {"a": A, "b": B, "scale": 1.0, "mask": None}},
    "an object": {"p": Given(a=A, b=B, scale=1, mask=None)},
    "tensors": {"p": {"b": torch.from_numpy(B), "a": torch.from_numpy(A)}},
}
BAD_BATCHES = {
    "lacks a part": ({"p": {"a": A}}, "lacks p.b"),
    "None for a part": ({"p": {"a": A, "b": None}}, "lacks p.b"),
    "unknown part": ({"p": {"a": A, "bb": B}}, "unknown p.bb, did you mean 'p.b'"),
    "an array": ({"p": A}, "must be Config or a dict with a, b, given: ndarray"),
    "twice": ({"p.a": A, "p": {"a": A, "b": B}}, "'p.a' is given twice"),
    "another constant": ({"p": {"a": A, "b": B, "scale": 2.0}}, "'p.scale' was 1.0 when the model was built"),
    "a tensor for None": ({"p": {"a": A, "b": B, "mask": A}}, "'p.mask' was None when the model was built"),
    "wrong dtype in a part": ({"p": {"a": A, "b": B.astype(np.float64)}}, "float64 where float32"),
    "a list": ([A, B], "must be a dict"),
}


@pytest.mark.parametrize("batch", GOOD_BATCHES.values(), ids=GOOD_BATCHES)
def test_batches_may_be_nested(config, batch):
    b, a = batches.to_tensors(batch, config, where="batch 1")
    np.testing.assert_array_equal(a, A)
    np.testing.assert_array_equal(b, B)


@pytest.mark.parametrize("batch, said", BAD_BATCHES.values(), ids=BAD_BATCHES)
def test_a_batch_that_lacks_a_part_names_it(config, batch, said):
    with pytest.raises(DataError, match=said) as error:
        batches.to_tensors(batch, config, where="batch 1")
    assert error.value.where.startswith("batch 1") and error.value.todo
