"""`load(release).predict`: the user's names and structure, and wrong inputs refused before the call."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections import namedtuple
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edgeopt import onboard
from edgeopt.onboard.structure import flat_inputs
from edgeopt.spec.manifest import Selection
from tests.tiny import expected, tiny_artifact

X = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return tiny_artifact(tmp_path_factory.mktemp("artifact"))


@pytest.mark.parametrize("candidate", ["onnxruntime-fp32", "torchscript-fp32"])
def test_predicts_what_the_model_gives(artifact, candidate):
    with onboard.load(artifact.folder, candidate) as predictor:
        assert predictor.candidate == candidate
        np.testing.assert_allclose(predictor.predict({"x": X}), expected(X), rtol=1e-5, atol=1e-6)
        assert list(predictor.outputs({"x": X})) == ["output"]


def test_runs_the_first_candidate_and_then_the_selected_one(artifact, tmp_path):
    release = tmp_path / "current"
    release.symlink_to(artifact.folder)
    with onboard.load(release) as predictor:
        assert predictor.candidate == "onnxruntime-fp32"
    artifact.write_selection(
        Selection(candidate="torchscript-fp32", decided_by="validate", where="here", reason="r", verdict="faster")
    )
    with onboard.load(str(release)) as predictor:
        assert predictor.candidate == "torchscript-fp32"


def test_arrays_in_any_layout_are_taken(artifact):
    with onboard.load(artifact.folder, "onnxruntime-fp32") as predictor:
        strided = np.repeat(X, 2, axis=1)[:, ::2]
        for x in (strided, np.asfortranarray(X), X.astype(">f4"), X[::-1][::-1]):
            np.testing.assert_allclose(predictor.predict({"x": x}), expected(X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("candidate", ["onnxruntime-fp32", "torchscript-fp32"])
def test_nan_is_an_input_like_any_other(artifact, candidate):
    x = X.copy()
    x[1, 0] = np.nan
    with onboard.load(artifact.folder, candidate) as predictor:
        got = predictor.predict({"x": x})
    np.testing.assert_allclose(got[[0, 2]], expected(X)[[0, 2]], rtol=1e-5, atol=1e-6)


WRONG = {
    "missing": ({}, r"wrong inputs \(missing: x\); the model takes: x"),
    "unknown": ({"x": X, "y": X}, r"unknown: y"),
    "misspelt": ({"X": X}, r"missing: x; unknown: X"),
    "dtype": ({"x": X.astype(np.float64)}, "input 'x' must be float32, given: float64"),
    "list": ({"x": X.tolist()}, "input 'x' must be float32, given: float64"),
    "rank": ({"x": X[0]}, r"input 'x' has shape \(4,\), the model takes \(n, 4\)"),
    "size": ({"x": X[:, :3]}, r"has shape \(3, 3\), the model takes \(n, 4\): axis 1 must be 4"),
    "above": ({"x": np.zeros((9, 4), np.float32)}, r"takes \(n, 4\) with n from 1 to 8"),
    "below": ({"x": np.zeros((0, 4), np.float32)}, r"takes \(n, 4\) with n from 1 to 8"),
}


@pytest.mark.parametrize("candidate", ["onnxruntime-fp32", "torchscript-fp32"])
@pytest.mark.parametrize("inputs, said", WRONG.values(), ids=WRONG)
def test_wrong_inputs_are_refused_before_the_call(artifact, candidate, inputs, said):
    with onboard.load(artifact.folder, candidate) as predictor, pytest.raises(ValueError, match=said):
        predictor.predict(inputs)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused_where_it_is_asked_for(artifact, value):
    x = X.copy()
    x[1, 0] = value
    with onboard.load(artifact.folder, "onnxruntime-fp32", check_finite=True) as predictor:
        np.testing.assert_allclose(predictor.predict({"x": X}), expected(X), rtol=1e-5, atol=1e-6)
        with pytest.raises(ValueError, match="input 'x' holds NaN or infinity in 1 of 12 elements"):
            predictor.predict({"x": x})


def test_what_numpy_cannot_read_is_named(artifact):
    import torch

    elsewhere, graded = torch.zeros(3, 4, device="meta"), torch.zeros(3, 4, requires_grad=True)
    with onboard.load(artifact.folder, "onnxruntime-fp32") as predictor:
        with pytest.raises(ValueError, match="input 'x' lies on the device meta, the CPU's arrays are taken"):
            predictor.predict({"x": elsewhere})
        with pytest.raises(ValueError, match="input 'x' is no array, but a Tensor: Can't call numpy"):
            predictor.predict({"x": graded})
        with pytest.raises(ValueError, match="input 'x' is no array, but a list"):
            predictor.predict({"x": [[1.0], [1.0, 2.0]]})
        np.testing.assert_allclose(predictor.predict({"x": torch.from_numpy(X)}), expected(X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "wanted, shape, said",
    [
        (["n", 3, "h", "w"], (1, 8, 9, 3), r"transpose\(0, 3, 1, 2\)"),
        (["n", "h", "w", 3], (1, 3, 8, 9), r"transpose\(0, 2, 3, 1\)"),
        (["n", 3, "h", "w"], (1, 4, 8, 8), r"axis 1 must be 3$"),
    ],
)
def test_an_image_in_the_other_layout_is_told_so(wanted, shape, said):
    from edgeopt.onboard.predictor import check_inputs

    specs = [{"name": "image", "dtype": "float32", "shape": wanted}]
    with pytest.raises(ValueError, match=said):
        check_inputs({"image": np.zeros(shape, np.float32)}, specs, {})


def test_a_shared_axis_must_have_one_size(tmp_path):
    specs = [{"name": name, "dtype": "float32", "shape": ["n", 4]} for name in ("x", "y")]
    from edgeopt.onboard.predictor import check_inputs

    with pytest.raises(ValueError, match=r"input 'y' has shape \(2, 4\).*: n is 3 in another input"):
        check_inputs({"x": X, "y": X[:2]}, specs, {"n": {"min": 1, "opt": 1, "max": 8}})


def test_closed_is_closed(artifact):
    predictor = onboard.load(artifact.folder, "onnxruntime-fp32")
    predictor.close()
    predictor.close()
    with pytest.raises(ValueError, match="closed"):
        predictor.predict({"x": X})


def test_a_folder_that_is_no_release_and_an_unknown_candidate_are_said(artifact, tmp_path):
    with pytest.raises(ValueError, match="not a release"):
        onboard.load(tmp_path)
    with pytest.raises(ValueError, match="has no candidate 'int8'; it has: onnxruntime-fp32, torchscript-fp32"):
        onboard.load(artifact.folder, "int8")


# What the user's model returned, as JSON around its tensors (case C09): t = x, u = -x.
T, U = {"kind": "tensor", "index": 0}, {"kind": "tensor", "index": 1}
NONE = {"kind": "none"}
STRUCTURES = {
    "nested dict": (
        {"kind": "dict", "items": {"b": {"kind": "dict", "items": {"t": T}, "order": ["t"]}, "a": U}, "order": ["b",
        "a"]}, {"b": {"t": X}, "a": -X},
    ), "tuple with None": ({"kind": "tuple", "items": [T, NONE, U]}, (X, None, -X)), "list": ({"kind": "list",
    "items": [U, {"kind": "tuple", "items": [T]}]}, [-X, (X,)]), "dataclass": ({"kind": "dataclass", "name":
    "Out", "items": {"y": T, "z": NONE, "w": U}, "order": ["y", "z", "w"]}, {"y": X, "z": None, "w": -X}), "constant":
    ({"kind": "tuple", "items": [T, {"kind": "constant", "value": 7}, U]}, (X, 7, -X)), "one tensor twice": ({"kind":
    "tuple", "items": [T, T, U]}, (X, X, -X)),
}  # fmt: skip


def two_outputs(folder: Path, structure: dict, returned: str):
    """An artifact whose outputs are x and -x, as ONNX and as a TorchScript module that returns `returned`."""
    import torch

    value = helper.make_tensor_value_info
    nodes = [helper.make_node("Identity", ["x"], ["t"]), helper.make_node("Neg", ["x"], ["u"])]
    graph = helper.make_graph(
        nodes, "two", [value("x", TensorProto.FLOAT, ["n", 4])],
        [value("u", TensorProto.FLOAT, ["n", 4]), value("t", TensorProto.FLOAT, ["n", 4])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    outputs = [{"name": name, "dtype": "float32", "shape": ["n", 4]} for name in ("t", "u")]
    artifact = tiny_artifact(folder, outputs=outputs, output_structure=structure, torchscript=True)
    onnx.save(model, artifact.folder / "float.onnx")
    source = folder / f"returns_{abs(hash(returned))}.py"  # TorchScript reads the source of what it compiles
    source.write_text(
        "import torch\nclass Model(torch.nn.Module):\n"
        f"    def forward(self, x: torch.Tensor):\n        return {returned}\n"
    )
    scope: dict = {}
    exec(compile(source.read_text(), str(source), "exec"), scope)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(scope["Model"]()), str(artifact.folder / "float.pt"))
    return artifact


@pytest.mark.parametrize("structure, value", STRUCTURES.values(), ids=STRUCTURES)
def test_the_structure_of_the_user_is_restored(tmp_path, structure, value):
    artifact = two_outputs(tmp_path, structure, "(x, -x)")
    for candidate in ("onnxruntime-fp32", "torchscript-fp32"):
        with onboard.load(artifact.folder, candidate) as predictor:
            assert_same(predictor.predict({"x": X}), value)


@pytest.mark.parametrize("returned", ["{'t': x, 'u': -x}", "[x, -x]", "(x, None, (-x,))"])
def test_a_module_that_kept_its_structure_is_flattened_in_order(tmp_path, returned):
    artifact = two_outputs(tmp_path, {"kind": "list", "items": [T, U]}, returned)
    with onboard.load(artifact.folder, "torchscript-fp32") as predictor:
        assert_same(predictor.predict({"x": X}), [X, -X])


def test_a_module_with_another_number_of_tensors_is_refused(tmp_path):
    artifact = two_outputs(tmp_path, T, "(x, -x, x)")
    with (
        onboard.load(artifact.folder, "torchscript-fp32") as predictor,
        pytest.raises(onboard.Failure, match="gives 3 tensors, the manifest names 2"),
    ):
        predictor.predict({"x": X})


def assert_same(got, wanted) -> None:
    assert type(got) is type(wanted)
    if isinstance(wanted, dict):
        assert list(got) == list(wanted)
        got, wanted = list(got.values()), list(wanted.values())
    if isinstance(wanted, list | tuple):
        assert len(got) == len(wanted)
        for a, b in zip(got, wanted, strict=True):
            assert_same(a, b)
    elif isinstance(wanted, np.ndarray):
        np.testing.assert_array_equal(got, wanted)
    else:
        assert got == wanted


def test_bfloat16_travels_as_float32(tmp_path):
    """TorchScript has bfloat16 and numpy has not; onnxruntime cannot hand it over and says so."""
    import torch

    spec = [{"name": "x", "dtype": "bfloat16", "shape": ["n", 4]}]
    out = [{"name": "output", "dtype": "bfloat16", "shape": ["n", 4]}]
    artifact = tiny_artifact(tmp_path, inputs=spec, outputs=out)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        double = torch.jit.trace(lambda x: x + x, torch.zeros(2, 4, dtype=torch.bfloat16))
        torch.jit.save(double, str(artifact.folder / "float.pt"))
    x = np.array([[1, 2.5, -3, 0.15625]], np.float32)  # all exact in bfloat16
    with onboard.load(artifact.folder, "torchscript-fp32") as predictor:
        got = predictor.predict({"x": x})
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, 2 * x)
    with pytest.raises(onboard.Failure, match="no bfloat16: x"):
        onboard.load(artifact.folder, "onnxruntime-fp32")


def tensor(index: int) -> dict:
    return {"kind": "tensor", "index": index}


# forward(batch: {"ids", "deep": (a, b)}, cfg: Config(x, scale=2.0, mask=None), pair: Pair(p, q), image)
NAMES = ["batch.ids", "batch.deep.0", "batch.deep.1", "cfg.x", "pair.q", "pair.p", "image"]
STRUCTURE = {
    "kind": "dict", "order": ["batch", "cfg", "pair", "image"],
    "items": {
        "batch": {
            "kind": "dict", "order": ["ids", "deep"],
            "items": {"ids": tensor(0), "deep": {"kind": "tuple", "items": [tensor(1), tensor(2)]}},
        },
        "cfg": {
            "kind": "dataclass", "name": "Config", "order": ["x", "scale", "mask"],
            "items": {"x": tensor(3), "scale": {"kind": "constant", "value": 2.0}, "mask": NONE},
        },
        "pair": {
            "kind": "namedtuple", "name": "Pair", "order": ["p", "q"], "items": {"p": tensor(5), "q": tensor(4)},
        },
        "image": tensor(6),
    },
}  # fmt: skip
Pair = namedtuple("Pair", "p q")


@dataclasses.dataclass
class Config:
    x: object
    scale: float = 2.0
    mask: object = None


def nested(**changes) -> dict:
    values = {"batch": {"ids": 0, "deep": (1, 2)}, "cfg": Config(3), "pair": Pair(5, 4), "image": 6}
    return {**values, **changes}


NESTED = {
    "nested": nested(),
    "flat": dict(zip(NAMES, range(7), strict=True)),
    "both": {"batch.ids": 0, "batch.deep.1": 2, "batch.deep.0": 1, "cfg": {"x": 3}, "pair": (5, 4), "image": 6},
    "as dicts": nested(cfg={"x": 3, "scale": 2, "mask": None}, pair={"q": 4, "p": 5}),
    "lists for tuples": nested(batch={"deep": [1, 2], "ids": 0}, pair=[5, 4]),
}


@pytest.mark.parametrize("inputs", NESTED.values(), ids=NESTED)
def test_inputs_are_taken_nested_or_flat(inputs):
    assert flat_inputs(STRUCTURE, NAMES, inputs) == dict(zip(NAMES, range(7), strict=True))


WRONG_PARTS = {
    "lacks a key": (nested(batch={"deep": (1, 2)}), "missing: batch.ids);"),
    "lacks an item": (nested(batch={"ids": 0, "deep": (1,)}), "missing: batch.deep.1);"),
    "one item more": (nested(batch={"ids": 0, "deep": (1, 2, 3)}), "unknown: batch.deep.2"),
    "lacks a parameter": ({k: v for k, v in nested().items() if k != "cfg"}, "missing: cfg.x"),
    "unknown key": (nested(batch={"ids": 0, "deep": (1, 2), "mask": 0}), "unknown: batch.mask"),
    "unknown parameter": (nested(more=0), "unknown: more"),
    "None": (nested(cfg=Config(None)), "missing: cfg.x"),
    "too many fields": (nested(pair=(5, 4, 3)), "unknown: pair.2"),
    "an array for a dict": (nested(batch=X), "'batch' must be a dict with ids, deep, given: ndarray"),
    "a dict for a tuple": (nested(batch={"ids": 0, "deep": {"0": 1}}), "'batch.deep' must be a tuple of 2, given:"),
    "a number for a class": (nested(cfg=3), "'cfg' must be Config or a dict with x, given: int"),
    "another constant": (nested(cfg=Config(3, scale=1.0)), "'cfg.scale' was 2.0 when the model was built"),
    "a value for None": (nested(cfg=Config(3, mask=X)), "'cfg.mask' was None when the model was built"),
    "twice": (nested(**{"cfg.x": 3}), "'cfg.x' is given twice"),
    "no dict": ([1, 2], "must be a dict by name, given: list"),
}


@pytest.mark.parametrize("inputs, said", WRONG_PARTS.values(), ids=WRONG_PARTS)
def test_a_part_that_does_not_fit_is_named(inputs, said):
    from edgeopt.onboard.predictor import check_inputs

    specs = [{"name": name, "dtype": "int64", "shape": []} for name in NAMES]
    with pytest.raises(ValueError, match=re.escape(said)):
        check_inputs(flat_inputs(STRUCTURE, NAMES, inputs), specs, {})
