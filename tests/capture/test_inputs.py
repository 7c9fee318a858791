"""The project's inputs against forward, and calibration batches against the project's inputs."""

from __future__ import annotations

import numpy as np
import pytest

from edgeopt.errors import DataError, ProjectError
from tests.capture.support import captured

TWO = """
class Model(nn.Module):
    def forward(self, image, *, mask=None):
        return image * 2
"""
IMAGE = {"image": {"shape": ["N", 3]}}
AXES = {"N": {"min": 2, "opt": 4, "max": 32}}


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"imgae": {"shape": [1, 3]}}, "did you mean 'image'"),
        ({"image": {"shape": [1, 3]}, "depth": {"shape": [1]}}, "'depth' is no parameter of forward"),
        ({"mask": {"shape": [1, 3]}}, "forward needs 'image'"),
    ],
)
def test_inputs_that_do_not_fit_forward(tmp_path, inputs, says):
    with pytest.raises(ProjectError, match=says) as error:
        captured(tmp_path, TWO, inputs)
    assert "inputs" in error.value.where and error.value.todo


@pytest.mark.parametrize("parameters", ["*tensors", "x, /"])
def test_a_forward_by_position_only_is_refused(tmp_path, parameters):
    code = f"class Model(nn.Module):\n    def forward(self, {parameters}):\n        return 1\n"
    with pytest.raises(ProjectError, match="by position only"):
        captured(tmp_path, code, {"x": {"shape": [1]}})


def test_a_forward_that_takes_any_keyword_works(tmp_path):
    code = "class Model(nn.Module):\n    def forward(self, **kw):\n        return kw['b'] - kw['a']\n"
    program = captured(tmp_path, code, {"a": {"shape": [2]}, "b": {"shape": [2]}})
    call = program.reference[0]
    np.testing.assert_allclose(call.outputs["output"], call.inputs["b"] - call.inputs["a"])


def calibrated(folder, body: str):
    code = TWO + "\nimport numpy as np\ndef data():\n    " + body + "\n"
    return captured(folder, code, IMAGE, AXES, calibration="model.py:data")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return []", "no batch"),
        ("return iter(())", "no batch"),
        ("return 3", "not iterable"),
        ("return [[1, 2]]", "must be a dict"),
        ("yield {'imag': np.zeros((2, 3), 'float32')}", "did you mean 'image'"),
        ("yield {}", "lacks image"),
        ("yield {'image': np.zeros((2, 3))}", "float64 where float32 is declared"),
        ("yield {'image': np.zeros((2, 4), 'float32')}", "dimension 1 is 4 where 3 is declared"),
        ("yield {'image': np.zeros((2, 3, 1), 'float32')}", "has 3 dimensions"),
        ("yield {'image': np.zeros((64, 3), 'float32')}", "outside its range 2 to 32"),
        ("yield {'image': np.full((2, 3), np.nan, 'float32')}", "NaN"),
        ("yield {'image': torch.full((2, 3), float('inf'))}", "infinity"),
        ("raise OSError('no disk')", "no disk"),
        ("yield {'image': np.zeros((2, 3), 'float32')}; raise OSError('half way')", "half way"),
    ],
)
def test_calibration_that_cannot_be_used(tmp_path, body, says):
    with pytest.raises(DataError, match=says) as error:
        calibrated(tmp_path, body)
    assert error.value.where and error.value.todo


def test_the_reference_is_cut_from_calibration_at_two_sizes(tmp_path):
    program = calibrated(tmp_path, "return [{'image': torch.full((20, 3), float(i))} for i in range(9)]")
    assert [call.inputs["image"].shape for call in program.reference] == [(4, 3), (8, 3)]
    assert [call.inputs["image"].max() for call in program.reference] == [0, 1]
    for call in program.reference:
        np.testing.assert_array_equal(call.outputs["output"], call.inputs["image"] * 2)


def test_the_first_reference_call_has_the_size_to_tune_for_though_batches_are_smaller(tmp_path):
    program = calibrated(tmp_path, "return [{'image': torch.arange(9.0).reshape(3, 3)}]")
    first, second = (call.inputs["image"] for call in program.reference)
    np.testing.assert_array_equal(first[:, 0], [0, 3, 6, 0])
    assert second.shape == (8, 3)


def test_only_the_batches_that_are_needed_are_read(tmp_path):
    body = "\n    ".join(
        ["for i in range(3):", "    assert i < 2, 'read too far'",
         "    yield {'image': np.zeros((2, 3), 'float32')}"]
    )  # fmt: skip
    assert len(calibrated(tmp_path, body).reference) == 2
