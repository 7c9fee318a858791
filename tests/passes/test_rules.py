"""A user's rule finds what it says in whatever spelling, and nothing else; what it puts in is right, or is dropped."""

from __future__ import annotations

import math

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edgeopt.backends import onnx_export, torchscript
from edgeopt.errors import ProfileError, ProjectError
from edgeopt.passes import Run, load_rules, optimize
from edgeopt.passes.rules_run import as_pass
from edgeopt.passes.rules_trace import arguments
from edgeopt.program import graph
from edgeopt.rules import Match, rule, scalar, tensor
from edgeopt.spec.project import load_project
from tests.passes.support import PROFILE, assert_equal, program, targets

SDPA = "aten.scaled_dot_product_attention.default"
ATTENTION = {
    "q": ("batch", "heads", "queries", "width"),
    "k": ("batch", "heads", "keys", "width"),
    "v": ("batch", "heads", "keys", "width"),
}
ROWS = {  # attention as nn.MultiheadAttention writes it: heads among the batch
    "q": ("heads", "queries", "width"),
    "k": ("heads", "keys", "width"),
    "v": ("heads", "keys", "width"),
}


def applied(made, given, on: bool = True, **more):
    """The program with the rule alone applied, and the rule's record."""
    how = Run(rules=(as_pass("mine", made),), last="rule:mine", **more)
    result, records = optimize(given, PROFILE, {"rule:mine": on}, how)
    return result, records[-1]


def finds(made, module, *shapes, places: int = 1):
    """The result where the rule matches `places` times, is kept, and equals the model; its record."""
    given = program(module, *shapes)
    result, record = applied(made, given)
    assert (record.name, record.status, record.changed) == ("rule:mine", "applied", places), record
    assert_equal(result, given)
    for node in result.module.graph.nodes:
        assert node.op == "output" or node.meta.get("val") is not None
    return result, record


def misses(made, module, *shapes) -> str:
    """Why the rule was applied nowhere; the graph is as it would be without the rule."""
    given = program(module, *shapes)
    result, record = applied(made, given)
    without, _ = applied(made, given, on=False)
    assert record.status == "nothing" and record.changed == 0, record
    assert str(result.module.graph) == str(without.module.graph)
    assert record.declined
    return "\n".join(record.declined)


class Of(nn.Module):
    """A function of tensors as a module, its result used further."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        returned = self.function(*tensors)
        return torch.cos(returned) if isinstance(returned, torch.Tensor) else tuple(map(torch.cos, returned))


def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), -1) @ v


def fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


FUSED = rule(pattern=attention, replacement=fused, inputs=ATTENTION)


class SelfAttention(nn.Module):
    def __init__(self, scale=lambda scores: scores / math.sqrt(8), axis=-1):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.scale, self.axis = scale, axis

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        weights = torch.softmax(self.scale(q @ k.transpose(-2, -1)), self.axis)
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, c))


# -- what is found


SPELLINGS = {
    "divided": SelfAttention(),
    "multiplied": SelfAttention(lambda scores: scores * 8**-0.5),
    "multiplied from the left": SelfAttention(lambda scores: 8**-0.5 * scores),
    "axis counted from the front": SelfAttention(axis=3),
    "a constant of few digits": SelfAttention(lambda scores: scores * 0.35355339),
}


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("shape", [("N", 5, 32), (2, 5, 32)])
def test_attention_is_found_however_it_is_scaled(name, shape):
    result, _ = finds(FUSED, SPELLINGS[name], shape)
    assert targets(result).count(SDPA) == 1 and "aten.softmax.int" not in targets(result)


@pytest.mark.parametrize("transposed", [lambda k: k.transpose(2, 3), lambda k: k.permute(0, 1, 3, 2), lambda k: k.mT])
def test_axes_are_put_in_order_in_any_spelling(transposed):
    finds(FUSED, Of(lambda q, k, v: torch.softmax(q @ transposed(k) / math.sqrt(8), -1) @ v), *[("N", 2, 5, 8)] * 3)


def silu(x):
    return x * torch.sigmoid(x)


SILU = rule(pattern=silu, replacement=lambda x: F.silu(x), inputs={"x": (...,)})


@pytest.mark.parametrize("shape", [("N", 3), ("N", 2, 3, 4), (3,)])
@pytest.mark.parametrize("function", [silu, lambda x: torch.sigmoid(x) * x])
def test_operands_may_stand_the_other_way_round_on_any_number_of_dimensions(function, shape):
    finds(SILU, Of(function), shape)


def test_two_inputs_may_be_one_tensor():
    added = rule(
        pattern=lambda a, b: torch.relu(a + b), replacement=lambda a, b: torch.clamp_min(a + b, 0),
        inputs={"a": (...,), "b": (...,)},
    )  # fmt: skip
    finds(added, Of(lambda x: torch.relu(x + x)), ("N", 4))
    finds(FUSED, Of(lambda x: attention(x, x, x)), ("N", 2, 5, 8))


def test_an_assignment_that_fails_further_up_is_taken_back():
    """2a + 3b in 3x + 2y: the first way to put the operands is the wrong one."""
    made = rule(
        pattern=lambda a, b: a * 2.0 + b * 3.0, replacement=lambda a, b: torch.add(a * 2.0, b, alpha=3),
        inputs={"a": (...,), "b": (...,)},
    )  # fmt: skip
    finds(made, Of(lambda x, y: x * 3.0 + y * 2.0), ("N", 4), ("N", 4))


def merged_heads(x):
    b, h, t, d = x.shape
    return torch.relu(x.transpose(1, 2).reshape(b, t, h * d))


MERGED = rule(
    pattern=merged_heads, replacement=lambda x: torch.relu(x).transpose(1, 2).flatten(2),
    inputs={"x": ("b", "h", "t", "d")},
)  # fmt: skip


@pytest.mark.parametrize(
    "function",
    [
        merged_heads,
        lambda x: torch.relu(x.transpose(1, 2).flatten(2)),
        lambda x: torch.relu(x.transpose(1, 2).contiguous().view(x.shape[0], -1, 24)),
        lambda x: torch.relu(x.permute(0, 2, 1, 3).reshape(-1, 5, 24)),
    ],
)
@pytest.mark.parametrize("shape", [("N", 4, 5, 6), (2, 4, 5, 6)])
def test_sizes_that_follow_from_the_tensors_are_open_dynamic_or_not(function, shape):
    given = program(Of(function), shape)
    if "aten.contiguous.default" in targets(given):
        made = rule(
            pattern=lambda x: torch.relu(x.transpose(1, 2).contiguous().view(x.shape[0], x.shape[2], -1)),
            replacement=MERGED.replacement, inputs={"x": ("b", "h", "t", "d")},
        )  # fmt: skip
        finds(made, Of(function), shape)
    else:
        finds(MERGED, Of(function), shape)


def norm(x, weight, bias, eps):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + eps) * weight + bias


NORM = rule(
    pattern=norm, replacement=lambda x, weight, bias, eps: F.layer_norm(x, weight.shape, weight, bias, eps),
    inputs={"x": (..., "width"), "weight": ("width",), "bias": ("width",), "eps": scalar(1e-5, 1e-6)},
)  # fmt: skip


class Norm(nn.Module):
    def __init__(self, eps):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.bias, self.eps = nn.Parameter(torch.rand(6)), nn.Parameter(torch.rand(6)), eps

    def forward(self, x):
        return norm(x, self.weight, self.bias, self.eps)


@pytest.mark.parametrize("eps", [1e-5, 1e-3, 0.25])
def test_a_number_left_open_reaches_the_replacement_with_the_models_weights(eps):
    result, _ = finds(NORM, Norm(eps), ("N", 5, 6))
    node = next(n for n in result.module.graph.nodes if n.target is torch.ops.aten.layer_norm.default)
    given = dict(arguments(node))
    assert given["eps"] == eps and given["weight"].op == given["bias"].op == "get_attr"


def three(x, a, b, c):
    return x @ a, x @ b, x @ c


def one(x, a, b, c):
    n, m = a.shape[1], b.shape[1]
    y = x @ torch.cat([a, b, c], 1)
    return y[..., :n], y[..., n : n + m], y[..., n + m :]


THREE = rule(
    pattern=three, replacement=one,
    inputs={"x": ("b", "t", "c"), "a": ("c", "n"), "b": ("c", "m"), "c": ("c", "o")},
)  # fmt: skip


class Three(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Parameter(torch.randn(6, n)) for n in (4, 4, 8))

    def forward(self, x):
        q = x @ self.a
        gate = torch.tanh(q)
        k, v = x @ self.b, x @ self.c
        return gate * k, v


def test_several_outputs_are_found_from_their_common_input():
    result, _ = finds(THREE, Three(), ("N", 5, 6))
    assert targets(result).count("aten.matmul.default") == 1


def test_a_constant_of_the_pattern_is_compared_and_one_of_the_replacement_is_stored():
    steps = torch.tensor([1.0, 2.0, 4.0])
    made = rule(
        pattern=lambda x: torch.relu(x * steps), replacement=lambda x: torch.relu(x) * steps, inputs={"x": (..., 3)}
    )

    class Holds(nn.Module):
        def __init__(self, values):
            super().__init__()
            self.register_buffer("values", torch.tensor(values))

        def forward(self, x):
            return torch.relu(x * self.values)

    result, _ = finds(made, Holds([1.0, 2.0, 4.0]), ("N", 3))
    assert "rule_constant" in dict(result.module.named_buffers())
    assert "has other values" in misses(made, Holds([1.0, 2.0, 3.0]), ("N", 3))


@pytest.mark.parametrize(
    "written",
    [
        lambda x: torch.sigmoid(x).mul_(2).relu_(),
        lambda x: torch.relu(F.dropout(torch.sigmoid(x).float(), 0.5, training=False) * 2),
    ],
)
def test_in_place_operators_and_no_ops_of_a_pattern_go_as_those_of_a_model_do(written):
    made = rule(pattern=written, replacement=lambda x: torch.relu(torch.sigmoid(x) * 2), inputs={"x": (...,)})
    finds(made, Of(written), ("N", 4))
    finds(made, Of(lambda x: torch.relu(2 * torch.sigmoid(x))), ("N", 4))


def test_places_in_a_chain_are_all_replaced():
    finds(SILU, nn.Sequential(*(Of(silu) for _ in range(4))), ("N", 4), places=4)


@pytest.mark.parametrize("needed", [True, False])
def test_torchs_own_multihead_attention(needed):
    """With weights asked for it is written out, 3-d and scaled before; else it is torch's fused operator."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=needed)[0]

    def written(q, k, v):
        return torch.bmm(torch.softmax(torch.bmm(q * math.sqrt(1.0 / q.shape[-1]), k.transpose(-2, -1)), -1), v)

    made = {
        True: rule(pattern=written, replacement=fused, inputs=ROWS),
        False: rule(pattern=fused, replacement=attention, inputs=ATTENTION),
    }[needed]
    given = program(Model(), ("N", 5, 16))
    result, record = applied(made, given)
    assert record.status == "applied" and record.changed == 1, record
    assert_equal(result, given)


def test_a_rule_comes_before_our_own_attention_pass():
    """The user's replacement for attention, and not ours, stands in the end; and where torch's operator stood too."""
    made = rule(
        pattern=[attention, fused], inputs=ATTENTION,
        replacement=lambda q, k, v: torch.softmax(torch.matmul(q, k.mT) * q.shape[-1] ** -0.5, -1, torch.float32) @ v,
    )  # fmt: skip
    for module in (SelfAttention(), Of(lambda q, k, v: F.scaled_dot_product_attention(q, k, v))):
        shapes = [("N", 5, 32)] if isinstance(module, SelfAttention) else [("N", 2, 5, 8)] * 3
        given = program(module, *shapes)
        result, records = optimize(given, PROFILE, {}, Run(rules=(as_pass("mine", made),)))
        by_name = {record.name: record for record in records}
        names = list(by_name)
        assert by_name["rule:mine"].changed == 1
        assert names.index("rule:mine") == names.index("no_ops") + 1
        assert_equal(result, given)


# -- what is left alone, and what is said of it


def test_the_nearest_miss_names_the_node_and_the_difference():
    said = misses(FUSED, SelfAttention(lambda scores: scores * 0.3), ("N", 5, 32))
    assert "nearest is matmul_1" in said and "5 of 5 operators of attention agree" in said
    assert "'other' is 3.33" in said and "the pattern's is 2.828" in said and "test_rules.py, line" in said
    said = misses(FUSED, SelfAttention(lambda scores: torch.tanh(scores)), ("N", 5, 32))
    assert "2 of 5 operators" in said and "it is aten.tanh, the pattern has aten.div by a number" in said
    said = misses(FUSED, SelfAttention(axis=-2), ("N", 5, 32))
    assert "'dim' is -2, the pattern's is -1" in said
    assert "the model has no aten.matmul" in misses(FUSED, nn.ReLU(), ("N", 4))


def test_axes_sizes_and_ranks_that_differ_are_no_match():
    said = misses(MERGED, Of(lambda x: torch.relu(x.transpose(1, 3).reshape(x.shape[0], 5, -1))), ("N", 4, 5, 6))
    assert "orders the axes as (0, 3, 2, 1), the pattern as (0, 2, 1, 3)" in said
    said = misses(MERGED, Of(lambda x: torch.relu(x.transpose(1, 2).reshape(x.shape[0], 6, 20))), ("N", 4, 5, 6))
    assert "its shape is [s" in said and "6, 20], the pattern's is [s" in said
    assert "'q' has 3 dimensions, the rule's 4" in misses(FUSED, Of(attention), *[("N", 5, 8)] * 3)
    said = misses(SILU_OF_4, Of(silu), ("N", 3))
    assert "'x' has the size 3 for the rule's 4" in said


SILU_OF_4 = rule(pattern=silu, replacement=lambda x: F.silu(x), inputs={"x": (..., 4)})


@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_dtypes_that_differ_are_no_match(dtype):
    made = rule(
        pattern=lambda x: torch.relu(x * 2), replacement=lambda x: torch.clamp_min(x * 2, 0),
        inputs={"x": tensor(..., dtype=torch.float32)},
    )  # fmt: skip
    given = program(nn.Sequential(Of(lambda x: torch.relu(x * 2).float())), ("N", 4), dtype=dtype)
    _, record = applied(made, given)
    assert record.status == "nothing" and f"'x' is {dtype}, the rule takes float32" in record.declined[0]


class LeaksScores(SelfAttention):
    def forward(self, x):
        scores = x @ x.transpose(-2, -1) / math.sqrt(8)
        return torch.softmax(scores, -1) @ x, scores


class WritesToInput(nn.Module):
    def forward(self, x):
        x = x.clone()
        y = x[0]
        out = x * torch.sigmoid(x)
        y.add_(1)
        return out, x


def test_a_tensor_that_others_read_and_memory_that_is_written_to_stay():
    made = rule(
        pattern=attention, replacement=fused,
        inputs={k: ("batch", *v[2:]) for k, v in ATTENTION.items()},
    )  # fmt: skip
    said = misses(made, LeaksScores(), ("N", 5, 8))
    assert "the result of div is also read by output" in said
    assert "the model writes to the memory of" in misses(SILU, WritesToInput(), (3, 4))


class Late(nn.Module):
    """The second product reads what is computed from the first: one operator cannot give both."""

    def forward(self, x, a, b):
        first = x @ a
        return first, x @ (b + first.mean())


def test_outputs_that_depend_on_each_other_stay():
    made = rule(
        pattern=lambda x, a, b: (x @ a, x @ b), replacement=lambda x, a, b: (x @ b.mT.mT * 0 + x @ a, x @ b),
        inputs={"x": ("n", "c"), "a": ("c", "d"), "b": ("c", "d")},
    )  # fmt: skip
    said = misses(made, Late(), ("N", 3), (3, 4), (3, 4))
    assert "is computed after one of its results is read" in said


def test_the_check_sees_the_place_and_its_reason_is_recorded():
    seen: list[Match] = []

    def check(match: Match) -> str | None:
        seen.append(match)
        return "the head is wider than 4" if match["q"].shape[-1] > 4 else None

    made = rule(pattern=attention, replacement=fused, inputs=ATTENTION, check=check)
    given = program(nn.Sequential(SelfAttention()), ("N", 5, 32))
    _, record = applied(made, given)
    assert record.status == "nothing"
    assert record.declined[0].startswith("matmul_1 (") and "the head is wider than 4" in record.declined[0]
    q = seen[0]["q"]
    assert q.shape[1:] == (4, 5, 8) and isinstance(q.shape[0], str) and q.dtype is torch.float32
    assert q.largest == (8, 4, 5, 8) and q.smallest[0] in (1, 2)  # torch.export reads a size of 1 as 2
    assert [v.operator for v in seen[0].operators][-1] == "aten.matmul.default"
    softmax = seen[0].operators[3]
    assert softmax.operator == "aten.softmax.int" and softmax.arguments["dim"] == -1
    assert softmax.module == "inner.0" and seen[0].profile.name == "x86-cpu"


def test_the_check_sees_stored_tensors():
    def check(match: Match) -> str | None:
        return None if (match["weight"].constant > 0).all() else "a weight is not positive"

    made = rule(pattern=norm, replacement=NORM.replacement, inputs=dict(NORM.inputs), check=check)
    finds(made, Norm(1e-5), ("N", 5, 6))
    negative = Norm(1e-5)
    negative.weight.data[2] = -1
    assert "a weight is not positive" in misses(made, negative, ("N", 5, 6))


# -- what is wrong


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
    assert "test_rules.py, line " in caught.value.where
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
    assert record.status == "dropped" and said in record.reason and "test_rules.py, line " in record.reason
    assert_equal(result, given, atol=0)


# -- in a build


def test_no_guard_is_added_to_dynamic_sizes_and_the_program_given_is_untouched():
    given = program(SelfAttention(), ("N", 5, 32))
    value = next(n for n in given.module.graph.nodes if n.op == "placeholder").meta["val"]
    env = value.fake_mode.shape_env
    before = (len(env.guards), dict(env.replacements), str(env.var_to_range), given.module.code)
    result, _ = finds(FUSED, SelfAttention(), ("N", 5, 32))
    applied(FUSED, given)
    applied(
        rule(pattern=lambda q, k, v: q @ k.mT @ v, replacement=lambda q, k, v: q @ (k.mT @ v), inputs=ATTENTION), given
    )
    assert (len(env.guards), dict(env.replacements), str(env.var_to_range), given.module.code) == before
    assert isinstance(result.module.graph.output_node().args[0][0].meta["val"].shape[0], torch.SymInt)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_a_rule_puts_in_goes_through_torchscript_and_onnx(tmp_path):
    given = program(SelfAttention(), ("N", 5, 32))
    result, _ = applied(FUSED, given)
    torchscript.save(result, tmp_path / "float.pt")
    loaded = torch.jit.load(str(tmp_path / "float.pt"))
    file = onnx_export.write(result, tmp_path, opset_max=17)
    session = onnxruntime.InferenceSession(str(tmp_path / "float.onnx"), providers=["CPUExecutionProvider"])
    assert file.opset <= 17
    for size in (1, 3, 8):
        inputs = graph.synthetic(given.signature, {"N": size}, 4)
        wanted = graph.run(given, inputs)["y0"]
        with torch.no_grad():
            assert abs(loaded(*graph.to_tensors(given.signature, inputs))[0].numpy() - wanted).max() < 1e-5
        assert abs(session.run(None, inputs)[0] - wanted).max() < 1e-5


def test_new_nodes_say_where_they_come_from():
    result, _ = finds(FUSED, nn.Sequential(SelfAttention()), ("N", 5, 32))
    node = next(n for n in result.module.graph.nodes if str(n.target) == SDPA)
    assert list(node.meta["nn_module_stack"].values())[-1][0] == "inner.0"
    assert "test_rules.py" in node.meta["stack_trace"]


RULES = """
import torch
from edgeopt.rules import rule

def pattern(x):
    return x * torch.sigmoid(x)

def replacement(x):
    return torch.nn.functional.silu(x)

silu = rule(pattern=pattern, replacement=replacement, inputs={"x": (...,)})
number = 3
"""


def project(folder, code: str, *rules: str):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "own_rules.py").write_text(code)
    (folder / "m.py").write_text("import torch\nbuild = torch.nn.SiLU\n")
    listed = ", ".join(rules)
    (folder / "edgeopt.yaml").write_text(
        f"{{name: m, model: m.py:build, inputs: {{x: {{shape: [2]}}}}, rules: [{listed}]}}"
    )
    return load_project(folder)


def test_a_projects_rules_are_passes_that_are_switched_by_name(tmp_path):
    found = load_rules(project(tmp_path / "a", RULES, "own_rules.py:silu"))
    assert [(p.name, p.graphs, p.made_by) for p in found] == [("rule:silu", "float", "the project")]
    given = program(Of(silu), ("N", 4))
    records = {r.name: r for r in optimize(given, PROFILE, {"rule:silu": False}, Run(rules=found))[1]}
    assert records["rule:silu"].status == "off"
    with pytest.raises(ProfileError, match="did you mean 'rule:silu'"):
        optimize(given, PROFILE, {"rule:sliu": False}, Run(rules=found))


@pytest.mark.parametrize(
    ("code", "rules", "what", "where"),
    [
        (RULES, ["own_rules.py:number"], "is int, not a fusion rule", "rules"),
        (RULES, ["own_rules.py:sliu"], "has no 'sliu'", "rules"),
        (RULES, ["own_rules.py:silu", "own_rules.py:silu"], "two rules are named 'rule:silu'", "rules"),
        (RULES.replace("(...,)", "(3.0,)"), ["own_rules.py:silu"], "neither a size", "own_rules.py, line 11"),
        (RULES.replace("(x)\n\ndef rep", "(y)\n\ndef rep"), ["own_rules.py:silu"], "'y'", "own_rules.py, line 6"),
    ],
)
def test_a_project_with_a_wrong_rule_is_told_its_line(tmp_path, code, rules, what, where):
    with pytest.raises(ProjectError) as caught:
        load_rules(project(tmp_path / str(abs(hash(what))), code, *rules))
    assert what in str(caught.value) and where in caught.value.where, caught.value


def test_rules_are_linear_in_the_size_of_the_graph():
    """Nodes looked at, not seconds: 400 layers take no more steps a layer than 40."""
    from edgeopt.passes.rules_match import Search

    def steps(layers: int) -> float:
        counted = 0
        step = Search._step

        def counting(self, *args):
            nonlocal counted
            counted += 1
            return step(self, *args)

        given = program(nn.Sequential(*(Of(silu) for _ in range(layers))), ("N", 4))
        Search._step = counting
        try:
            _, record = applied(SILU, given, verified=False)
        finally:
            Search._step = step
        assert record.changed == layers
        return counted / layers

    assert steps(160) <= steps(20) * 1.01
