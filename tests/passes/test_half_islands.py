"""Small models on which a plain conversion to fp16 or bf16 gives infinity, NaN or another answer.

Each is compared with the fp32 model in torch, as an ONNX file in onnxruntime and as TorchScript.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from edgeopt.errors import ProjectError
from edgeopt.passes.half import half
from edgeopt.program import graph
from edgeopt.spec.half_formats import FORMATS
from tests.passes.half_support import (
    casts_of_casts,
    converted,
    in_onnxruntime,
    in_torchscript,
    sqnr_db,
    types_of,
)

BOUND = {name: form.least_sqnr_db for name, form in FORMATS.items()}


class Masked(nn.Module):
    """x [n, 2, 8], mask [n, 2] of 0 and 1 -> attention weights [n, 2, 2]; `value` is added where the mask is 0."""

    def __init__(self, value: float):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), value

    def forward(self, x, mask):
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        return (scores + (1 - mask[:, None, :]) * self.value).softmax(-1)


class Filled(Masked):
    def forward(self, x, mask):
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        return scores.masked_fill(mask[:, None, :] < 0.5, self.value).softmax(-1)


class Attention(Masked):
    def forward(self, x, mask):
        added = ((1 - mask[:, None, :]) * self.value).expand(-1, 2, -1)
        return F.scaled_dot_product_attention(self.query(x), self.key(x), x, attn_mask=added)


LOWEST = float(torch.finfo(torch.float32).min)  # beyond bf16's range: it rounds to -inf there
MASKS = [(-1e9, "fp16"), (-1e5, "fp16"), (LOWEST, "fp16"), (LOWEST, "bf16")]


def masked(rows: list[list[float]]) -> dict[str, np.ndarray]:
    x = np.random.default_rng(3).normal(size=(len(rows), 2, 8)).astype(np.float32)
    return {"x0": x, "x1": np.array(rows, np.float32)}


@pytest.mark.parametrize(("value", "precision"), MASKS)
@pytest.mark.parametrize("model", [Masked, Filled])
def test_a_row_that_is_masked_as_a_whole_is_even_and_not_nan(model, value, precision, tmp_path):
    inputs = masked([[1, 1], [1, 0], [0, 0]])
    naive = model(value).to({"fp16": torch.float16, "bf16": torch.bfloat16}[precision])
    with pytest.raises(RuntimeError, match="overflow") if model is Filled else _nan():  # what a plain conversion does
        given = [torch.from_numpy(v).to(naive.query.weight.dtype) for v in inputs.values()]
        assert bool(naive(*given).isnan().any())
        raise _Nan
    float32, result, report = converted(model(value), ("N", 2, 8), ("N", 2), precision=precision, inputs=inputs)
    assert report.refused is None and types_of(result)["linear"] == {str(naive.query.weight.dtype)[6:]}
    wanted = graph.run(float32, inputs)
    if value <= -1e9:  # so large that the scores are lost beside it
        np.testing.assert_array_equal(wanted["y0"][2], 0.5)
    answers = [graph.run(result, inputs), in_torchscript(result, inputs)]
    if precision == "fp16":
        answers.append(in_onnxruntime(result, tmp_path, inputs))
    for found in answers:
        np.testing.assert_allclose(found["y0"][2], wanted["y0"][2], atol=1e-3)
        assert sqnr_db(wanted, found) > BOUND[precision]


class _Nan(Exception):
    pass


def _nan():
    return pytest.raises(_Nan)


@pytest.mark.parametrize(("value", "precision"), MASKS)
def test_the_mask_of_an_attention_is_cut_to_the_range_where_no_row_is_empty(value, precision, tmp_path):
    inputs = masked([[1, 1], [1, 0], [0, 1]])
    float32, result, report = converted(
        _OpenRow(Attention(value)), ("N", 2, 8), ("N", 2), precision=precision, inputs=inputs
    )
    assert report.refused is None
    half_type = {"fp16": "float16", "bf16": "bfloat16"}[precision]
    assert types_of(result)["scaled_dot_product_attention"] == {half_type}
    answers = [graph.run(result, inputs), in_torchscript(result, inputs)]
    if precision == "fp16":
        answers.append(in_onnxruntime(result, tmp_path, inputs))
    for found in answers:
        assert sqnr_db(graph.run(float32, inputs), found) > BOUND[precision]


class _OpenRow(nn.Module):
    """The model with the first place never masked, as a sentence has at least one word."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner
        self.register_buffer("first", torch.tensor([1.0, 0.0]))

    def forward(self, x, mask):
        return self.inner(x, torch.maximum((mask > 0.5).float(), self.first))


def test_an_attention_with_an_empty_row_keeps_fp32_and_its_answer():
    inputs = masked([[1, 1], [0, 0]])
    float32, result, report = converted(Attention(-1e9), ("N", 2, 8), ("N", 2), inputs=inputs)
    assert types_of(result)["scaled_dot_product_attention"] == {"float32"}
    assert any("its constant -1e+09 is beyond fp16's 65504" in island["why"] for island in report.islands)
    found = graph.run(result, inputs)["y0"]
    np.testing.assert_allclose(found[1], np.broadcast_to(inputs["x0"][1].mean(0), (2, 8)), atol=2e-3)


class DecomposedNorm(nn.Module):
    """[n, 16, 64] -> RMS norm written out, and a projection."""

    def __init__(self, eps: float):
        super().__init__()
        torch.manual_seed(0)
        self.eps, self.project = eps, nn.Linear(64, 64)

    def forward(self, x):
        x = x * 150
        return self.project(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class LayerNorm(nn.Module):
    def __init__(self, eps: float):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.project = nn.LayerNorm(64, eps=eps), nn.Linear(64, 64)

    def forward(self, x):
        return self.project(self.norm(x * 150))


class Squares(LayerNorm):
    """The variance by a product, which no list of operators knows."""

    def forward(self, x):
        x = x * 150
        return self.project(x / (x * x).mean(-1, keepdim=True).sqrt())


@pytest.mark.parametrize("eps", [1e-5, 1e-12])
@pytest.mark.parametrize("model", [DecomposedNorm, LayerNorm, Squares])
def test_a_norm_of_rows_of_300_does_not_overflow(model, eps, tmp_path):
    float32, result, report = converted(model(eps), ("N", 16, 64))
    assert report.refused is None and types_of(result)["linear"] == {"float16"}
    inputs = float32.reference[0].inputs
    assert np.abs(inputs["x0"] * 150).max() > 256  # whose square is no fp16
    wanted = graph.run(float32, inputs)
    for found in (graph.run(result, inputs), in_onnxruntime(result, tmp_path, inputs), in_torchscript(result, inputs)):
        assert sqnr_db(wanted, found) > BOUND["fp16"]


def test_a_small_eps_is_told():
    _, _, report = converted(LayerNorm(1e-12), ("N", 16, 64))
    assert "its eps 1e-12 is 0 in fp16" in str(report.islands)
    _, _, report = converted(LayerNorm(1e-5), ("N", 16, 64))
    assert "its eps" not in str(report.islands)


class Rows(nn.Module):
    def __init__(self, inner):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.inner, self.after = nn.Linear(32, 32), inner, nn.Linear(32, 32)

    def forward(self, x):
        return self.after(self.inner(self.before(x)))


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


MISSING = {"spectrum": (Spectrum, "rfft"), "distances": (Distances, "cdist"), "quantile": (Quantile, "quantile"),
           "response": (Response, "pow")}  # fmt: skip


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", MISSING)
def test_what_has_no_kernel_keeps_fp32_under_its_modules_name(name, precision):
    model, operator = MISSING[name]
    float32, result, report = converted(Rows(model()), ("N", 32, 32), precision=precision)
    half_type = {"fp16": "float16", "bf16": "bfloat16"}[precision]
    assert report.refused is None and types_of(result)["linear"] == {half_type}
    island = next(i for i in report.islands if any(operator in o for o in i["operators"]))
    assert any(path.startswith("inner.inner") for path in island["modules"]) and island["why"]
    inputs = float32.reference[0].inputs
    for found in (graph.run(result, inputs), in_torchscript(result, inputs)) if name != "spectrum" else ():
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
    assert types_of(result)["embedding"] == {{"fp16": "float16", "bf16": "bfloat16"}[precision]}
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


class Wave(nn.Module):
    """[n, t] -> positions as angles, up to thousands: in bf16 257 and 258 are one number."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(16, 16)
        self.register_buffer("frequency", 1 / 10 ** torch.linspace(0, 3, 16))

    def forward(self, x):
        angle = torch.arange(3000, dtype=torch.float32)[:, None] * self.frequency
        return self.project(x) * angle.cos()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_positions_keep_fp32_until_they_are_waves(precision):
    float32, result, report = converted(Wave(), ("N", 3000, 16), precision=precision)
    inputs = float32.reference[0].inputs
    assert report.refused is None
    assert sqnr_db(graph.run(float32, inputs), graph.run(result, inputs)) > BOUND[precision] + 15


def test_values_that_leave_the_range_keep_fp32_until_they_fit_again(tmp_path):
    class Loud(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x):
            return self.c((self.b(self.a(x) * 40) * 2000).relu() * 1e-4)

    float32, result, report = converted(Loud(), ("N", 16))
    inputs = float32.reference[0].inputs
    assert np.isinf(Loud().half()(torch.from_numpy(inputs["x0"]).half()).detach().numpy()).any()
    assert types_of(result)["linear"] == {"float16"}
    island = next(i for i in report.islands if "relu" in i["operators"])
    assert any("values reach" in why and "65504" in why for why in island["why"])
    wanted = graph.run(float32, inputs)
    for found in (graph.run(result, inputs), in_onnxruntime(result, tmp_path, inputs), in_torchscript(result, inputs)):
        assert sqnr_db(wanted, found) > BOUND["fp16"]


@pytest.mark.parametrize(("scale", "word"), [(1e6, "its values reach"), (1e-7, "its values, at most")])
def test_weights_that_do_not_fit_keep_fp32_and_are_named(scale, word):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.fits, self.scaled = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
            self.scaled.weight.data *= scale

        def forward(self, x):
            return self.scaled(self.fits(x)) / scale

    float32, result, report = converted(Scaled(), ("N", 16))
    assert list(report.weights) == ["inner.scaled.weight"] and word in report.weights["inner.scaled.weight"]
    stored = {name: tensor.dtype for name, tensor in result.module.named_parameters()}
    assert stored["inner.scaled.weight"] == torch.float32
    assert stored["inner.fits.weight_fp16"] == torch.float16
    inputs = float32.reference[0].inputs
    assert sqnr_db(graph.run(float32, inputs), graph.run(result, inputs)) > BOUND["fp16"]


def test_calibration_data_shows_ranges_that_the_reference_does_not():
    class Quiet(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return self.b((self.a(x) * 100).tanh())

    loud = {"x0": np.full((2, 16), 4000, np.float32)}
    _, without, _ = converted(Quiet(), ("N", 16))
    _, result, report = converted(Quiet(), ("N", 16), inputs=loud)
    assert types_of(without)["mul"] == {"float16"} and types_of(result)["mul"] == {"float32"}
    assert np.isfinite(graph.run(result, loud)["y0"]).all() and report.refused is None


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


def test_the_program_given_stays_as_it_was():
    float32, _, _ = converted(LayerNorm(1e-5), ("N", 16, 64))
    nodes, names = len(float32.module.graph.nodes), set(dict(float32.module.named_parameters()))
    half(float32, "bf16")
    assert len(float32.module.graph.nodes) == nodes and set(dict(float32.module.named_parameters())) == names
    assert all(p.dtype == torch.float32 for p in float32.module.parameters())


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
    assert types_of(result)["linear"] == {{"fp16": "float16", "bf16": "bfloat16"}[precision]}
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
