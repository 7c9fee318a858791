"""Rules that are wrong: refused with the user's line, or dropped where the answer changes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from edgeopt.errors import ProjectError
from edgeopt.passes.rules_run import as_pass
from edgeopt.rules import rule, scalar
from tests.passes.rules_support import Of, applied, silu
from tests.passes.support import assert_equal, program


def test_a_rule_that_changes_the_answer_is_dropped_with_the_error():
    made = rule(pattern=silu, replacement=lambda x: x * torch.sigmoid(x * 1.1), inputs={"x": (...,)})
    given = program(Of(silu), ("N", 4))
    result, record = applied(made, given)
    assert record.status == "dropped" and "is off by" in record.reason
    assert_equal(result, given, atol=0)


def test_a_replacement_right_at_some_widths_only_is_left_out_where_it_is_not():
    """The replacement's shape is right where heads and queries are equal, as in the example sizes of the author."""
    made = rule(
        pattern=lambda x: torch.relu(x.transpose(1, 2)), replacement=lambda x: torch.relu(x),
        inputs={"x": ("b", 5, 5)},
    )  # fmt: skip
    given = program(Of(lambda x: torch.relu(x.transpose(1, 2))), ("N", 5, 5))
    _, record = applied(made, given)
    assert record.status == "dropped" and "is off by" in record.reason


def _explode(x):
    raise ValueError("no such thing")


UNUSABLE = {
    "the pattern raises": (dict(pattern=_explode), "ValueError: no such thing"),
    "the replacement raises": (dict(replacement=_explode), "ValueError: no such thing"),
    "no such operator": (dict(replacement=lambda x: torch.ops.nowhere.nothing(x)), "nowhere"),
    "returns a number": (dict(pattern=lambda x: 3), "it returns int, where tensors are wanted"),
    "returns nothing": (dict(replacement=lambda x: None), "it returns NoneType"),
    "returns its input": (dict(pattern=lambda x: x), "it returns what it was given"),
    "another shape": (dict(replacement=lambda x: F.silu(x)[None]), "its shape is [1, "),
    "another dtype": (dict(replacement=lambda x: F.silu(x).double()), "its dtype is float64, the pattern's is float32"),
    "another number": (dict(replacement=lambda x: (x, x)), "it gives 2 tensors, the pattern 1"),
    "writes to its input": (dict(replacement=lambda x: x.mul_(torch.sigmoid(x))), "writes to its input 'x'"),
    "reads values": (dict(pattern=lambda x: x * float(x.sum())), "fails on x ["),
    "depends on the size": (
        dict(pattern=lambda x: torch.relu(x) if x.shape[-1] > 5 else x.sin()), "it does other things at other sizes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNUSABLE)
def test_functions_that_are_unusable_are_refused_with_the_users_line(name):
    changed, reason = UNUSABLE[name]
    given = {"pattern": silu, "replacement": lambda x: F.silu(x), **changed}
    with pytest.raises(ProjectError) as caught:
        as_pass("mine", rule(inputs={"x": ("n", "c")}, **given))
    assert reason in str(caught.value), caught.value
    assert "test_rules_wrong.py, line " in caught.value.where
    assert caught.value.todo


def test_inputs_that_a_pattern_does_not_use_are_refused():
    with pytest.raises(ProjectError, match="does not use 'y'"):
        as_pass("mine", rule(pattern=lambda x, y: x.relu(), replacement=lambda x, y: x, inputs={"x": (2,), "y": (2,)}))
    made = rule(
        pattern=lambda x, n: x * (1 / n), replacement=lambda x, n: x / n, inputs={"x": (2,), "n": scalar(2.0, 4.0)}
    )
    with pytest.raises(ProjectError, match="no operator takes the number 'n' as it is"):
        as_pass("mine", made)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (dict(inputs={"y": (2,)}), "must take the rule's inputs: y"),
        (dict(inputs={"x": (2, ...)}), "may only be the first"),
        (dict(inputs={"x": (2.0,)}), "neither a size"),
        (dict(inputs={"x": "batch"}), "no shape such as"),
        (dict(pattern="silu"), "functions of tensors"),
        (dict(pattern=[]), "functions of tensors"),
        (dict(check="none"), "is no function"),
        (dict(sizes={"c": (3, 3)}), "two different sizes"),
        (dict(sizes={"d": (3, 4)}), "no input has a dimension 'd'"),
    ],
)
def test_what_is_no_rule_is_refused_where_it_is_written(changed, reason):
    given = {"pattern": silu, "replacement": silu, "inputs": {"x": ("n", "c")}, **changed}
    with pytest.raises((TypeError, ValueError)) as caught:
        rule(**given)
    assert reason in str(caught.value)


@pytest.mark.parametrize("given", [(1, 1), (1, 2.0), (True, False), ("a", "b")])
def test_a_scalar_takes_two_numbers(given):
    with pytest.raises(TypeError, match="two different numbers"):
        scalar(*given)


@pytest.mark.parametrize(
    ("check", "said"),
    [
        (lambda match: match["nothing"], "fails: KeyError"),
        (lambda match: True, "returned True"),
        (lambda match: "", "returned ''"),
    ],
)
def test_a_check_that_is_wrong_drops_the_rule_with_the_users_line(check, said):
    made = rule(pattern=silu, replacement=lambda x: F.silu(x), inputs={"x": (...,)}, check=check)
    given = program(Of(silu), ("N", 4))
    result, record = applied(made, given)
    assert record.status == "dropped" and said in record.reason and "test_rules_wrong.py, line " in record.reason
    assert_equal(result, given, atol=0)
