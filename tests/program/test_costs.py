"""FLOPs, bytes and weights: against torch's own counter on the module itself, and against arithmetic by hand."""

from __future__ import annotations

import dataclasses
import time
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from edgeopt.program import ScriptGraph, graph, parts
from edgeopt.program.costs import costs, costs_of
from edgeopt.program.walk import walk
from tests.passes.support import optimized, program
from tests.program import networks

aten = torch.ops.aten


class Call(nn.Module):
    """A function of tensors, and weights that it may use, as a module."""

    def __init__(self, function, *shapes):
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors, *self.weights)


class First(nn.Module):
    """The first of what a module returns."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


def counted_by_torch(given, sizes) -> int:
    """torch's counter over a real run of the graph, without any formula of ours."""
    inputs = graph.to_tensors(given.signature, graph.synthetic(given.signature, sizes, 0))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        given.module(*inputs)
    return counter.get_total_flops()


KNOWN_TO_TORCH = {
    "conv2d": (nn.Conv2d(6, 8, 3, 2, 1), [("N", 6, 15, 17)]),
    "groups": (nn.Conv2d(6, 12, 3, groups=3), [("N", 6, 9, 9)]),
    "depthwise": (nn.Conv2d(8, 8, 5, padding=2, groups=8), [("N", 8, 9, 9)]),
    "dilation": (nn.Conv2d(4, 4, 3, dilation=2, padding="same"), [("N", 4, 9, 9)]),
    "transposed": (nn.ConvTranspose2d(6, 4, 3, 2, output_padding=1), [("N", 6, 5, 5)]),
    "transposed, groups": (nn.ConvTranspose1d(6, 4, 3, groups=2), [("N", 6, 5)]),
    "conv1d": (nn.Conv1d(3, 5, 7), [("N", 3, 20)]),
    "conv3d": (nn.Conv3d(2, 3, 3), [("N", 2, 5, 6, 7)]),
    "linear": (nn.Linear(7, 5), [("N", 4, 7)]),
    "linear without bias": (nn.Linear(7, 5, bias=False), [("N", 7)]),
    "matmul": (Call(torch.matmul), [("N", 4, 5), ("N", 5, 6)]),
    "matmul, broadcast": (Call(torch.matmul), [("N", 1, 4, 5), ("N", 3, 5, 6)]),
    "matmul, weight": (Call(torch.matmul, (5, 6)), [("N", 3, 4, 5)]),
    "bmm": (Call(torch.bmm), [("N", 4, 5), ("N", 5, 6)]),
    "baddbmm": (Call(torch.baddbmm), [("N", 4, 6), ("N", 4, 5), ("N", 5, 6)]),
    "einsum": (Call(lambda x, w: torch.einsum("nci,co->noi", x, w), (4, 6)), [("N", 4, 5)]),
    "GRUCell": (nn.GRUCell(5, 6), [("N", 5)]),
    "network": (networks.Residual(), [("N", 3, 32, 32)]),
}


@pytest.mark.parametrize("name", KNOWN_TO_TORCH)
def test_contractions_are_those_that_torch_counts(name):
    module, shapes = KNOWN_TO_TORCH[name]
    given = program(module, *shapes)
    for size in (1, 8):
        found = costs(given, {"N": size})
        assert found.contraction_flops == counted_by_torch(given, {"N": size}) > 0


@pytest.mark.parametrize(
    ("module", "shapes", "flops"),
    [
        (Call(lambda q: functional.scaled_dot_product_attention(q, q, q)), [("N", 4, 6, 8)], 2 * 3 * 4 * 6 * 6 * 16),
        (First(nn.LSTM(8, 16, 2, batch_first=True)), [("N", 5, 8)], 2 * 3 * 5 * 64 * (8 + 16 + 16 + 16)),
        (First(nn.LSTM(8, 16, bidirectional=True)), [(5, "N", 8)], 2 * 2 * 3 * 5 * 64 * (8 + 16)),
        (Call(torch.mv), [(4, 5), (5,)], 2 * 4 * 5),
        (Call(torch.dot), [(5,), (5,)], 2 * 5),
        (Call(torch.addbmm), [(4, 6), (3, 4, 5), (3, 5, 6)], 2 * 3 * 4 * 5 * 6),
        (nn.Bilinear(4, 5, 6), [("N", 4), ("N", 5)], 3 * 3 * 6 * 4 * 5),
    ],
    ids=["attention", "LSTM of two layers", "LSTM of both directions", "mv", "dot", "addbmm", "bilinear"],
)
def test_contractions_that_torch_leaves_uncounted_here(module, shapes, flops):
    assert costs(program(module, *shapes)).contraction_flops == flops


@pytest.mark.parametrize(
    ("function", "flops"),
    [
        (lambda x: x + 1, 240),
        (lambda x: torch.exp(x), 240),
        (functional.silu, 2 * 240),
        (lambda x: x * torch.sigmoid(x), 2 * 240),
        (functional.gelu, 5 * 240),
        (lambda x: torch.softmax(x, -1), 5 * 240),
        (lambda x: functional.layer_norm(x, [8]), 7 * 240),
        (lambda x: x.sum(-1), 240),
        (lambda x: functional.max_pool2d(x, 2), 4 * 3 * 2 * 2 * 4),
        (lambda x: x.transpose(1, 2).reshape(x.shape[0], -1), 0),
        (lambda x: torch.cat([x, x], 1), 0),
        (lambda x: functional.dropout(x, training=False), 0),
    ],
    ids=[
        "add", "exp", "silu", "silu by hand", "gelu", "softmax", "layer_norm", "sum", "max_pool", "reshape", "cat",
        "dropout",
    ],
)  # fmt: skip
def test_the_estimates_of_the_others(function, flops):
    found = costs(program(Call(function), ("N", 2, 5, 8)), {"N": 3})
    assert (found.contraction_flops, found.other_flops) == (0, flops)


def test_bytes_are_each_operators_reads_and_writes():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(10, 6)

        def forward(self, x):
            return torch.relu(self.linear(x).t())  # the transpose moves nothing

    found = costs(program(Net(), ("N", 10)), {"N": 4})
    assert found.read_bytes == 4 * (4 * 10 + 6 * 10 + 6) + 4 * 24
    assert found.written_bytes == 4 * 24 + 4 * 24
    assert found.intensity == pytest.approx((2 * 4 * 6 * 10 + 24) / found.moved_bytes)


def test_what_is_read_twice_or_broadcast_is_read_once():
    found = costs(program(Call(lambda x: x * x), ("N", 5)), {"N": 2})
    assert found.read_bytes == 2 * 5 * 4
    expanded = costs(program(Call(lambda x: x.unsqueeze(1).expand(-1, 100, -1) + 1), ("N", 5)), {"N": 2})
    assert expanded.read_bytes == 2 * 5 * 4
    assert expanded.written_bytes == 100 * 2 * 5 * 4


def test_an_embedding_reads_the_rows_that_it_returns():
    table = nn.Embedding(1000, 8)
    given = program(Call(lambda x: table(x.abs())), ("N", 4), dtype="int64")
    (found,) = [o for o in walk(given, {"N": 2}).operators if o.op == "embedding"]
    assert found.read_bytes == 2 * 4 * 8 + 2 * 4 * 8 * 4
    assert found.written_bytes == 2 * 4 * 8 * 4


def test_tied_weights_count_once_and_unread_buffers_not_at_all():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight
            self.norm = nn.BatchNorm1d(4)  # its counter of batches is read by training only
            self.register_buffer("unread", torch.zeros(1000))

        def forward(self, x):
            return self.norm(self.b(self.a(x)))

    (weights,) = costs(program(Tied(), ("N", 4))).weights
    assert (weights.dtype, weights.elements, weights.bytes) == ("float32", 16 + 4 * 4, 4 * (16 + 4 * 4))


def test_sizes_that_depend_on_data_are_those_of_a_run():
    given = program(Call(lambda x: torch.nonzero(x > 1e9).sum() + x.sum()), ("N", 5))
    found = costs(given)
    assert found.operators["nonzero"] == 1
    assert found.other_flops >= 15


def test_an_operator_of_the_users_is_named_as_unknown():
    library = torch.library.Library("costs_test", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    torch.library.register_fake("costs_test::twice", lambda x: torch.empty_like(x), lib=library)
    found = costs(program(Call(lambda x: torch.ops.costs_test.twice(x) + 1), ("N", 5)))
    assert found.unknown == {"costs_test.twice": 1}
    assert found.other_flops == 15


def test_folding_batch_norm_takes_its_flops_and_weights_away():
    given = networks.residual()
    before, after = costs(given), costs(optimized(given)[0])
    assert after.contraction_flops == before.contraction_flops
    assert "batch_norm" in before.operators and "batch_norm" not in after.operators
    assert after.other_flops < before.other_flops
    assert after.weight_bytes < before.weight_bytes
    assert after.moved_bytes < before.moved_bytes


def test_torchscript_costs_what_the_graph_does():
    from edgeopt.backends import torchscript

    given = networks.branches()
    script = ScriptGraph(signature=given.signature, reference=given.reference, module=torchscript.frozen(given))
    of_graph, of_script = costs(given, {"N": 2}), costs(script, {"N": 2})
    assert of_script.contraction_flops == of_graph.contraction_flops
    assert of_script.weight_bytes == of_graph.weight_bytes
    assert of_script.peak_activation_bytes == pytest.approx(of_graph.peak_activation_bytes, rel=0.05)
    assert any("TorchScript" in note for note in of_script.notes)


def test_ten_thousand_operators_take_seconds():
    short = program(Call(lambda x: x + 1), ("N", 4))
    made = torch.fx.Graph()
    node = made.placeholder("x")
    for i in range(2500):
        node = made.call_function(aten.add.Tensor, (node, i))
        for target, *rest in ((aten.relu.default,), (aten.unsqueeze.default, 0), (aten.squeeze.dim, 0)):
            node = made.call_function(target, (node, *rest))
    made.output((node,))
    given = dataclasses.replace(short, module=torch.fx.GraphModule({}, made))
    start = time.process_time()
    found = costs_of(walk(given))
    assert sum(found.operators.values()) == 10_000
    assert found.other_flops == 2 * 2500 * 3 * 4
    assert time.process_time() - start < 60  # 5 s on a quiet machine


def test_a_scripted_part_costs_what_is_inside_it():
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            for _ in range(int(x.shape[1]) // 2):
                x = x * 2
            return (self.inner(x).relu(),)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = torch.jit.script(Gate().eval())
    sizes = (parts.Size(0, 0, 1, 0), parts.Size(0, 0, 0, 8))
    part = parts.Part(
        "part_of_test_costs", "encoder.gate", module, (parts.Input("float32", (None, 4)),),
        (parts.Output("float32", sizes),), (),
    )  # fmt: skip
    operator = parts.register(part)
    given = program(Call(lambda x: operator(x) + 1), ("N", 4))
    found = walk(given, {"N": 3})
    assert (found.operators[0].name, found.operators[0].kind) == ("encoder.gate:part", "contraction")
    assert found.operators[0].flops == 2 * 3 * 4 * 8 + 2 * 3 * 4 + 3 * 8
    assert sum(weights.elements for weights in found.weights) == 4 * 8 + 8
    assert any("scripted parts" in note for note in found.notes)
