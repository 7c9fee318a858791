"""Products of one input and sums of products become one product where that pays; else they stay, with the reason."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from edgeopt.backends import onnx_export, torchscript
from edgeopt.passes import optimize
from edgeopt.program import graph
from tests.passes.support import PROFILE, assert_equal, optimized, program, targets
from tests.passes.test_simplify import model


def linears(result) -> int:
    return sum(t.startswith(("aten.linear", "aten.matmul", "aten.mm", "aten.bmm")) for t in targets(result))


def assert_lowered_equal(result, given, tmp_path) -> None:
    """The ONNX file in onnxruntime and the TorchScript module give what the program before the passes gives."""
    inputs = graph.synthetic(given.signature, graph.sizes(given.signature, "max"), 9)
    want = graph.run(given, inputs)
    file = onnx_export.write(result, tmp_path, opset_max=17)
    got = onnxruntime.InferenceSession(tmp_path / file.name).run(given.signature.output_names, inputs)
    script = torchscript.frozen(result)(*graph.to_tensors(given.signature, inputs))
    for name, from_onnx, from_script in zip(want, got, script, strict=True):
        np.testing.assert_allclose(from_onnx, want[name], atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(from_script.numpy(), want[name], atol=1e-5, rtol=1e-5)


class Attention(nn.Module):
    """Query, key and value as most models write them: linear layers, views into heads, a transpose."""

    def __init__(self, bias=(True, True, True), sizes=(8, 8, 8), heads=2):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, n, bias=b) for n, b in zip(sizes, bias, strict=True))
        self.heads = heads

    def forward(self, x):
        batch, length, _ = x.shape
        parts = (layer(x).view(batch, length, self.heads, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return torch.cat([part.reshape(batch, -1) for part in parts], 1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(8, 8, 8), (8, 4, 4)])
def test_query_key_value_become_one_product(bias, sizes, tmp_path):
    torch.manual_seed(0)
    given = program(Attention((bias,) * 3, sizes), ("N", 5, 8))
    result, records = optimized(given)
    assert records["parallel_matmuls"].changed == 3 and linears(result) == 1
    assert_equal(result, given)
    assert_lowered_equal(result, given, tmp_path)


def test_a_view_of_the_whole_result_is_still_possible():
    """A part of a product is no contiguous tensor: a view that merges its axes has to become a reshape."""
    a, b = torch.randn(8, 4), torch.randn(8, 6)

    def forward(self, x):
        return (x @ self.a).view(-1), (x @ self.b).view(2, -1).unsqueeze(0).view(-1)

    given = program(model(forward, a=a, b=b), (6, 8))
    result, records = optimized(given)
    assert records["parallel_matmuls"].changed == 2
    assert_equal(result, given)


def shares_a_weight(self, x):
    return x @ self.a, x @ self.a, x @ self.b


def test_the_same_product_twice_is_one_part():
    given = program(model(shares_a_weight, a=torch.randn(8, 4), b=torch.randn(8, 6)), ("N", 8))
    result, records = optimized(given)
    assert linears(result) == 1 and max(p.shape[1] for p in result.module.parameters()) == 10
    assert_equal(result, given)


def with_a_product_for_nothing(self, x):
    (x @ self.b).view(-1).sin()
    return x @ self.a


def test_a_product_that_nothing_reads_is_no_part():
    given = program(model(with_a_product_for_nothing, a=torch.randn(8, 4), b=torch.randn(8, 6)), (3, 8))
    result, records = optimized(given)
    assert records["parallel_matmuls"].changed == 0 and targets(result) == ["aten.matmul.default"]
    assert_equal(result, given)


def writes_to_a_part(self, x):
    y = x @ self.a
    y.view(-1).add_(1)
    return y, x @ self.b


def writes_to_the_input(self, x):
    x = x * 1
    y = x @ self.a
    x.view(-1).add_(1)
    return y, x @ self.b


def by_strides(self, x):
    return torch.as_strided(x @ self.a, (4,), (2,)), x @ self.b


KEPT = {
    "biases": (Attention((True, False, True)), ("N", 5, 8), "some have a bias"),
    "rows": (Attention(), ("N", 17, 8), "17 rows"),
    "part written to": (writes_to_a_part, (3, 8), "writes to"),
    "input written to": (writes_to_the_input, (3, 8), "writes to"),
    "strides": (by_strides, (3, 8), "by its strides"),
}


@pytest.mark.parametrize("kind", KEPT)
def test_kept_with_the_reason(kind):
    torch.manual_seed(0)
    module, shape, reason = KEPT[kind]
    if not isinstance(module, nn.Module):
        module = model(module, a=torch.randn(8, 4), b=torch.randn(8, 6))
    given = program(module, shape)
    result, records = optimized(given)
    assert records["parallel_matmuls"].changed == 0 and reason in records["parallel_matmuls"].declined[0]
    assert_equal(result, given)


def test_the_size_limit_is_a_setting():
    given = program(Attention(), ("N", 5, 8))
    _, records = optimized(given, parallel_matmuls={"max_weight_elements": 191})
    assert "192 values" in records["parallel_matmuls"].declined[0]
    _, records = optimized(program(Attention(), ("N", 17, 8)), parallel_matmuls={"max_rows": 17})
    assert records["parallel_matmuls"].changed == 3


class Gate(nn.Module):
    """A recurrent cell's gate: two inputs, each with its own weights, summed."""

    def __init__(self, inputs=2, bias=True, width=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 5, bias=bias) for _ in range(inputs))

    def forward(self, *given):
        total = self.layers[0](given[0])
        for layer, x in zip(self.layers[1:], given[1:], strict=True):
            total = total + layer(x)
        return torch.sigmoid(total)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("inputs", [2, 4])
def test_a_sum_of_linear_layers_becomes_one(inputs, bias, tmp_path):
    torch.manual_seed(0)
    given = program(Gate(inputs, bias), *[("N", 3, 6)] * inputs)
    result, records = optimized(given)
    assert records["sum_of_matmuls"].changed == 1
    assert targets(result) == ["aten.cat.default", "aten.linear.default", "aten.sigmoid.default"]
    assert_equal(result, given)
    assert_lowered_equal(result, given, tmp_path)


def of_one_input(self, x):
    return x @ self.a + (x @ self.b + x) + torch.nn.functional.linear(x, self.c)


def test_products_of_one_input_add_their_weights(tmp_path):
    torch.manual_seed(0)
    stored = {name: torch.randn(4, 4) for name in "abc"}
    given = program(model(of_one_input, **stored), ("N", 4))
    result, records = optimized(given)
    assert targets(result) == ["aten.linear.default", "aten.add.Tensor"]
    assert_equal(result, given)
    assert_lowered_equal(result, given, tmp_path)


def of_computed(self, x, y):
    return x @ y + torch.relu(x) @ y.sin() + x.cos() @ torch.relu(y)


def test_three_products_of_computed_matrices(tmp_path):
    given = program(model(of_computed), ("N", 3, 4), ("N", 4, 2))
    result, records = optimized(given)
    assert records["sum_of_matmuls"].changed == 1 and linears(result) == 1
    assert targets(result).count("aten.cat.default") == 2
    assert_equal(result, given)
    assert_lowered_equal(result, given, tmp_path)


def two_computed(self, x, y):
    return x @ y + torch.relu(x) @ y.sin()


def of_other_batches(self, x, y):
    return x @ y + torch.relu(x) @ y[0] + x.cos() @ torch.relu(y)


def with_other_users(self, x, y):
    a = x @ self.a
    return a + y @ self.b, a * 2


def scaled(self, x, y):
    return torch.add(x @ self.a, y @ self.b, alpha=2)


def written_to(self, x, y):
    a = x @ self.a
    total = a + y @ self.b
    return total, x.view(-1).add_(1)


def of_other_rows(self, x, y):
    return x @ self.a + y[:, :1] @ self.b


SUMS_KEPT = {
    "two computed": (two_computed, ((2, 3, 4), (2, 4, 5)), "2 products of computed matrices"),
    "broadcast batches": (of_other_batches, ((2, 3, 4), (2, 4, 5)), "batch axes differ"),
    "other users": (with_other_users, ((2, 4), (2, 4)), None),
    "alpha": (scaled, ((2, 4), (2, 4)), None),
    "input written to": (written_to, ((2, 4), (2, 4)), "writes to"),
    "broadcast rows": (of_other_rows, ((2, 3, 4), (2, 3, 4)), None),
}


@pytest.mark.parametrize("kind", SUMS_KEPT)
def test_a_sum_that_stays(kind):
    torch.manual_seed(0)
    forward, shapes, reason = SUMS_KEPT[kind]
    given = program(model(forward, a=torch.randn(4, 5), b=torch.randn(4, 5)), *shapes)
    result, records = optimized(given)
    assert records["sum_of_matmuls"].changed == 0
    if reason:
        assert reason in records["sum_of_matmuls"].declined[0]
    assert_equal(result, given)


def test_what_is_copied_is_limited():
    given = program(Gate(), ("N", 3, 6), ("N", 3, 6))
    result, records = optimized(given, sum_of_matmuls={"max_copied_elements": 35})
    assert "copies 36 values" in records["sum_of_matmuls"].declined[0] and linears(result) == 2
    assert_equal(result, given)


@pytest.mark.parametrize("name", ["parallel_matmuls", "sum_of_matmuls"])
def test_the_profile_may_leave_them_out(name):
    patterns = tuple(p for p in PROFILE.fusion.patterns if p != name)
    profile = PROFILE.model_copy(update={"fusion": PROFILE.fusion.model_copy(update={"patterns": patterns})})
    module = Attention() if name == "parallel_matmuls" else Gate()
    given = program(module, *[("N", 3, 8 if name == "parallel_matmuls" else 6)] * (1 + (name == "sum_of_matmuls")))
    _, records = optimize(given, profile, {})
    record = next(r for r in records if r.name == name)
    assert record.changed == 0 and f"leave out {name}" in record.declined[0]
