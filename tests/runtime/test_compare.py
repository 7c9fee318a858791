from __future__ import annotations

import math

import numpy as np
import pytest

from edgeopt.errors import DataError
from edgeopt.runtime import compare
from edgeopt.runtime.compare import output_error, output_errors, reasons_against
from edgeopt.spec.manifest import Tolerance

R = np.array([3.0, 4.0], np.float32)  # energy 25
X = np.array([3.0, 4.5], np.float32)  # energy of the error 0.25


def test_the_measures_have_their_textbook_values():
    assert compare.sqnr_db(R, X) == pytest.approx(20.0)
    assert compare.output_error([R], [X]).max_abs == pytest.approx(0.5 / 4)
    assert compare.output_error([R / 10], [X / 10]).max_abs == pytest.approx(0.05)  # absolute below 1
    assert compare.output_error([R / 10], [X / 10]).max_rel == pytest.approx(0.125)  # relative to the largest


def test_equal_is_exact():
    error = output_error([R, R], [R, R])
    assert error.exact and error.sqnr_db == math.inf and error.max_abs == 0


def test_energies_are_summed_over_calls():
    error = output_error([R, R * 0], [X, R * 0])
    assert error.sqnr_db == pytest.approx(20.0)
    assert error.max_abs == pytest.approx(0.125)


def test_sums_are_taken_in_float64():
    """In float16 the energy of 1000 values of 100 overflows, in float32 2^25 + 1 is 2^25."""
    big = np.full(1000, 100, np.float16)
    assert compare.sqnr_db(big, big + np.float16(1)) == pytest.approx(40.0)
    n = np.array([2**25 + 1], np.int64)
    assert output_error([n], [n - 1]).mismatches == 1


def test_silence_with_noise_has_no_signal():
    assert compare.sqnr_db(np.zeros(2), np.ones(2)) == -math.inf


SPECIAL = {
    "same NaN": ([np.nan, 1], [np.nan, 1], True),
    "same infinity": ([np.inf, 1], [np.inf, 1], True),
    "NaN for a number": ([2, 1], [np.nan, 1], False),
    "number for NaN": ([np.nan, 1], [2, 1], False),
    "other infinity": ([np.inf, 1], [-np.inf, 1], False),
    "NaN for infinity": ([np.inf, 1], [np.nan, 1], False),
}


@pytest.mark.parametrize("r, x, right", SPECIAL.values(), ids=SPECIAL)
def test_special_values_are_right_only_where_the_reference_has_them(r, x, right):
    error = output_error([np.array(r, np.float32)], [np.array(x, np.float32)])
    if right:
        assert error.exact and error.max_abs == 0
    else:
        assert error.sqnr_db == -math.inf and error.max_abs == math.inf
        assert reasons_against({"y": error}, Tolerance()) == [
            "output 'y' is NaN or infinite where the reference is not, or the other way round"
        ]


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "bool"])
def test_integers_are_compared_exactly(dtype):
    r = np.array([0, 1, 1, 0]).astype(dtype)
    x = np.array([0, 1, 0, 1]).astype(dtype)
    assert output_error([r], [r]).exact
    error = output_error([r], [x])
    assert error.mismatches == 2
    assert reasons_against({"keep": error}, Tolerance(sqnr_db=-100)) == ["output 'keep': 2 integers differ"]


def test_a_tolerance_says_why_not():
    errors = output_errors([{"a": R, "b": R}], [{"a": X, "b": R}])
    assert reasons_against(errors, Tolerance(sqnr_db=20 - 1e-6, max_abs=0.2)) == []
    assert reasons_against(errors, Tolerance(sqnr_db=30)) == ["output 'a': SQNR 20.0 dB, at least 30 is asked"]
    assert reasons_against(errors, Tolerance(max_abs=0.1)) == ["output 'a': error 0.125, at most 0.1 is allowed"]


def test_top1_agreement_is_by_sample():
    r = np.eye(4)
    x = np.eye(4)[[0, 1, 2, 0]]
    assert compare.top1_agreement(r, x) == 0.75
    with pytest.raises(DataError, match="no classes"):
        compare.top1_agreement(np.zeros(4), np.zeros(4))


def test_other_shapes_are_refused():
    with pytest.raises(DataError, match=r"shape \(2, 1\), the reference \(2,\)"):
        compare.sqnr_db(R, X.reshape(2, 1))


def test_empty_outputs_are_equal():
    empty = np.zeros((0, 4), np.float32)
    assert output_error([empty], [empty]).exact
    assert compare.output_error([empty], [empty]).max_rel == 0
