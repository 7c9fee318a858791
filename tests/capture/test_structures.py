"""Structured outputs become named tensors with the structure around them (case C09)."""

from __future__ import annotations

import numpy as np
import pytest

from edgeopt.errors import CaptureError
from edgeopt.runtime.structure import restore
from tests.capture.support import captured, run

X = np.arange(6, dtype=np.float32).reshape(3, 2)
INPUTS = {"x": {"shape": ["N", 2]}}
AXES = {"N": {"min": 1, "opt": 2, "max": 4}}


def model(returned: str) -> str:
    return f"""
    @dataclasses.dataclass
    class Out:
        y: torch.Tensor
        z: object = None

    class Model(nn.Module):
        def forward(self, x):
            return {returned}
    """


@pytest.mark.parametrize(
    ("returned", "want"),
    [
        ("x * 2", X * 2),
        ("(x, None)", (X, None)),
        ("[x, (x + 1,)]", [X, (X + 1,)]),
        ("{'a': {'t': x}, 'k': 3}", {"a": {"t": X}, "k": 3}),
        ("Out(x + 1)", {"y": X + 1, "z": None}),
    ],
)
def test_the_structure_comes_back(tmp_path, returned, want):
    program = captured(tmp_path, model(returned), INPUTS, AXES)
    outputs = run(program, x=X)
    got = restore(program.signature.output_structure, list(outputs.values()))
    _assert_same(got, want)


def _assert_same(got, want):
    assert type(got) is type(want)
    if isinstance(want, np.ndarray):
        np.testing.assert_array_equal(got, want)
    elif isinstance(want, dict):
        assert list(got) == list(want)
        for key in want:
            _assert_same(got[key], want[key])
    elif isinstance(want, list | tuple):
        for a, b in zip(got, want, strict=True):
            _assert_same(a, b)
    else:
        assert got == want


def test_names_are_the_keys(tmp_path):
    program = captured(tmp_path, model("{'boxes': x, 'scores': {'top': x + 1}}"), INPUTS, AXES)
    assert program.signature.output_names == ("boxes", "scores.top")


def test_a_script_keeps_the_structure(tmp_path):
    code = """
    class Model(nn.Module):
        def forward(self, x):
            y = {'a': x}
            if bool(x.sum() > 0.5):
                y['a'] = x + 1
            return y, [x]
    """
    program = captured(tmp_path, code, INPUTS, AXES)
    assert program.signature.output_names == ("output.0.a", "output.1.0")
    np.testing.assert_array_equal(run(program, x=X)["output.0.a"], X + 1)
    np.testing.assert_array_equal(run(program, x=-X)["output.0.a"], -X)


@pytest.mark.parametrize("returned", ["(x, x.shape[0])", "x if x.shape[0] > 1 else (x, x)", "{'s': object()}", "7"])
def test_what_cannot_be_given_back_is_refused(tmp_path, returned):
    with pytest.raises(CaptureError) as error:
        captured(tmp_path, model(returned), INPUTS, AXES)
    assert error.value.todo
