"""What keeps fp32 by its operator: one without a 16-bit kernel, one of integers or of the user's, one that is named."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from edgeopt.errors import ProjectError
from edgeopt.program import graph
from tests.passes.half_support import (
    BOUND,
    TYPES,
    Rows,
    casts_of_casts,
    converted,
    in_onnxruntime,
    in_torchscript,
    sqnr_db,
    types_of,
)


class Spectrum(nn.Module):
    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x), n=32)


class Distances(nn.Module):
    def forward(self, x):
        return torch.cdist(x, x)


class Quantile(nn.Module):
    def forward(self, x):
        return x - torch.quantile(x, 0.25, dim=-1, keepdim=True)


class Response(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LocalResponseNorm(3)

    def forward(self, x):
        return self.norm(x)


MISSING = {  # the model, its operator without a kernel, and what that gives in fp32
    "spectrum": (Spectrum, "fft_rfft", "complex64"), "distances": (Distances, "cdist", "float32"),
    "quantile": (Quantile, "quantile", "float32"), "response": (Response, "pow", "float32"),
}  # fmt: skip


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", MISSING)
def test_what_has_no_kernel_keeps_fp32_under_its_modules_name(name, precision):
    model, operator, kept = MISSING[name]
    float32, result, report = converted(Rows(model()), ("N", 32, 32), precision=precision)
    assert report.refused is None and types_of(result)["linear"] == {TYPES[precision]}
    assert types_of(result)[operator] == {kept}
    island = next(i for i in report.islands if operator in i["operators"])
    assert any(path.startswith("inner.inner") for path in island["modules"]) and island["why"]
    inputs = float32.reference[0].inputs
    for found in (graph.run(result, inputs), in_torchscript(result, inputs)):
        assert sqnr_db(graph.run(float32, inputs), found) > BOUND[precision]


def test_an_operator_without_a_kernel_that_no_rule_knows_is_found_by_trying():
    class Unknown(nn.Module):
        def forward(self, x):
            return torch.special.bessel_j0(x)

    with pytest.raises(RuntimeError):
        torch.special.bessel_j0(torch.ones(2, dtype=torch.float16))
    _, result, report = converted(Rows(Unknown()), ("N", 32, 32))
    assert report.refused is None and types_of(result)["special_bessel_j0"] == {"float32"}
    assert "torch cannot run special_bessel_j0 in fp16" in str(report.islands)


class Words(nn.Module):
    """ids [n, 4] and a mask of the same shape -> [n, 4, 4], the ids, and which of them are masked."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.project = nn.Embedding(70_000, 4), nn.Linear(4, 4)

    def forward(self, ids, mask):
        position = torch.arange(ids.shape[1], device=ids.device)
        x = self.table(ids.abs() * 1000 + position)
        return self.project(x), ids + 1, mask > 0


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_integers_and_booleans_keep_their_types_and_values(precision, tmp_path):
    float32, result, report = converted(Words(), ("N", 4), ("N", 4), precision=precision, dtype="int64")
    inputs = {"x0": np.array([[0, 1, 2, 69]] * 2), "x1": np.array([[0, 1, 0, 1]] * 2)}
    assert report.refused is None
    assert types_of(result)["embedding"] == {TYPES[precision]}
    integers = {str(n.target): n.meta["val"].dtype for n in result.module.graph.nodes if n.op == "call_function"}
    assert integers["aten.mul.Tensor"] == integers["aten.arange.default"] == torch.int64
    wanted = graph.run(float32, inputs)
    answers = [graph.run(result, inputs), in_torchscript(result, inputs)]
    if precision == "fp16":
        answers.append(in_onnxruntime(result, tmp_path, inputs))
    for found in answers:
        assert [v.dtype for v in found.values()] == [np.float32, np.int64, np.bool_]
        np.testing.assert_array_equal(found["y1"], wanted["y1"])
        np.testing.assert_array_equal(found["y2"], wanted["y2"])
        assert sqnr_db({"y0": wanted["y0"]}, {"y0": found["y0"]}) > BOUND[precision]


def test_the_user_keeps_modules_and_operators_in_fp32():
    given = Rows(nn.Sequential(nn.Linear(32, 32), nn.SiLU()))
    _, result, report = converted(given, ("N", 32), keep_fp32=("inner.before", "silu"))
    kept = {path for island in report.islands for path in island["modules"]}
    assert "inner.before" in kept and types_of(result)["silu"] == {"float32"}
    assert types_of(result)["linear"] == {"float16", "float32"}
    assert "kept fp32 by 'inner.before'" in str(report.islands)
    with pytest.raises(ProjectError, match="matches no module path"):
        converted(given, ("N", 32), keep_fp32=("inner.befor",))


def test_few_casts_are_left_and_none_of_a_cast():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.n, self.m, self.b = nn.Linear(32, 32), nn.LayerNorm(32), nn.LayerNorm(32), nn.Linear(32, 32)

        def forward(self, x):
            x = self.n(self.a(x)).relu().transpose(1, 2).contiguous().transpose(1, 2)
            return self.b(self.m(x * 2).softmax(-1))

    _, result, report = converted(Chain(), ("N", 4, 32))
    # input down, into the norms, out of the softmax, output up: what lies between the norms joined them
    assert report.casts == 4 and len(report.islands) == 1
    assert casts_of_casts(result) == []
    assert types_of(result)["relu"] == {"float32"}


def test_a_model_without_products_is_refused_with_the_reason():
    float32, result, report = converted(nn.Softmax(-1), ("N", 8))
    assert result is float32 and "no convolution or matrix product" in report.refused


def test_memory_that_is_written_to_keeps_fp32():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            y = self.a(x)
            first = y[:, :4]
            before = first.sum(-1, keepdim=True)
            first.mul_(2)
            return self.b(y) + before

    float32, result, report = converted(Writes(), ("N", 8))
    inputs = float32.reference[0].inputs
    assert report.refused is None
    assert sqnr_db(graph.run(float32, inputs), graph.run(result, inputs)) > BOUND["fp16"]


@torch.library.custom_op("half_tests::only_float32", mutates_args=())
def _only_float32(x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float32:
        raise TypeError("float32 is what it takes")
    return x.abs() + 1


@_only_float32.register_fake
def _(x):
    return torch.empty_like(x)


class Own(nn.Module):
    def forward(self, x):
        return torch.ops.half_tests.only_float32(x)


class Branches(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y - 1, (x,))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("model", [Own, Branches])
def test_an_operator_that_nobody_knows_the_types_of_gets_fp32(model, precision):
    float32, result, report = converted(Rows(model()), ("N", 32), precision=precision)
    assert report.refused is None
    assert types_of(result)["linear"] == {TYPES[precision]}
    inputs = float32.reference[0].inputs
    assert sqnr_db(graph.run(float32, inputs), graph.run(result, inputs)) > BOUND[precision]


def test_one_weight_of_two_layers_is_stored_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table, self.out = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
            self.out.weight = self.table.weight

        def forward(self, ids):
            return self.out(self.table(ids.abs()))

    _, result, report = converted(Tied(), ("N", 4), dtype="int64")
    assert report.bytes_after == 50 * 16 * 2 and report.bytes_before == 50 * 16 * 4
    stored = [*result.module.named_parameters(), *result.module.named_buffers()]
    assert [(t.dtype, tuple(t.shape)) for _, t in stored] == [(torch.float16, (50, 16))]
