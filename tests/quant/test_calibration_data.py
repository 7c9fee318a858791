"""What calibration says of data that it cannot use."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edgeopt.errors import DataError
from edgeopt.program.data import calibration_batches
from edgeopt.quant import convert
from edgeopt.spec.project import project_for_model
from tests.quant import models
from tests.quant.programs import batches, program, quantization

GOOD = {"x": np.ones((4, 3, 16, 16), np.float32)}


def with_value(value: float) -> dict:
    bad = {"x": GOOD["x"].copy()}
    bad["x"][2, 1, 0, 0] = value
    return bad


BAD = {
    "NaN": (with_value(np.nan), "NaN", "calibration batch 2, input 'x'"),
    "infinity": (with_value(np.inf), "infinity", "calibration batch 2, input 'x'"),
    "another name": ({"image": GOOD["x"]}, "lacks x and has unknown image", "calibration batch 2"),
    "one input more": ({**GOOD, "mask": GOOD["x"]}, "has unknown mask", "calibration batch 2"),
    "no dict": (GOOD["x"], "must be a dict of input name to array, not ndarray", "calibration batch 2"),
    "a dtype": ({"x": GOOD["x"].astype(np.float64)}, "float64 where float32", "calibration batch 2, input 'x'"),
    "a size": (
        {"x": np.ones((4, 3, 16, 20), np.float32)}, "dimension 3 is 20 where 16", "calibration batch 2, input 'x'",
    ),
    "no batch axis": ({"x": np.ones((3, 16, 16), np.float32)}, "3 dimensions", "calibration batch 2, input 'x'"),
    "too large": (
        {"x": np.ones((65, 3, 16, 16), np.float32)}, r"axis 'batch' \(dimension 0\) is 65, outside its range 1 to 64",
        "calibration batch 2, input 'x'",
    ),
    "too small": ({"x": np.ones((0, 3, 16, 16), np.float32)}, "axis 'batch'", "calibration batch 2, input 'x'"),
    "no array": ({"x": object()}, "dtype|array", "calibration batch 2, input 'x'"),
}  # fmt: skip


@pytest.fixture(scope="module")
def net():
    return program(models.Net(), 3, 16, 16)


@pytest.mark.parametrize("bad, message, where", BAD.values(), ids=BAD.keys())
def test_a_batch_that_cannot_be_used_is_named(net, bad, message, where):
    with pytest.raises(DataError, match=message) as refused:
        convert.from_batches(net, quantization(), [GOOD, bad])
    assert refused.value.where == where and refused.value.todo


def test_an_empty_loader_is_refused(net):
    with pytest.raises(DataError, match="the calibration loader yields no batch"):
        convert.from_batches(net, quantization(), [])


def test_torch_tensors_serve_as_well_as_arrays(net):
    convert.from_batches(net, quantization(), [{"x": torch.ones(2, 3, 16, 16)}])


def test_batches_beyond_the_limit_are_not_asked_for(net):
    taken = []

    def loader():
        for batch in batches(3, 16, 16, count=50, size=1):
            taken.append(1)
            yield batch

    convert.from_batches(net, quantization(), loader(), limit=3)
    assert len(taken) == 3


PROJECT = """
import numpy as np

def good():
    for k in range(5):
        yield {"x": np.full((2, 3, 16, 16), k, np.float32)}

def broken():
    yield {"x": np.zeros((2, 3, 16, 16), np.float32)}
    raise OSError("no such picture")

def nothing():
    return []

def scalar():
    return 3
"""


def project(folder, function: str):
    (folder / "data.py").write_text(PROJECT)
    (folder / "model.py").write_text("")
    return project_for_model(
        "model.py:net", folder=folder,
        inputs={"x": {"shape": ["batch", 3, 16, 16]}}, axes={"batch": {"min": 1, "opt": 2, "max": 64}},
        overrides={"calibration": f"data.py:{function}", "calibration_batches": "3"},
    )  # fmt: skip


def test_a_project_yields_its_checked_batches(tmp_path, net):
    found = list(calibration_batches(project(tmp_path, "good"), net.signature))
    assert [float(batch["x"][0, 0, 0, 0]) for batch in found] == [0, 1, 2]


@pytest.mark.parametrize(
    "function, message, where",
    [
        ("broken", "'calibration' failed: OSError: no such picture", "data.py, line 10"),
        ("nothing", "yields no batch", "key 'calibration'"),
        ("scalar", "'int' object is not iterable", "key 'calibration'"),
        ("gud", "has no 'gud'", "key 'calibration': data.py:gud"),
    ],
)
def test_errors_of_the_users_loader_name_their_own_line(tmp_path, net, function, message, where):
    with pytest.raises(DataError, match=message) as refused:
        list(calibration_batches(project(tmp_path, function), net.signature))
    assert refused.value.where == where
