"""The layout and the number of channels: the same values, and in channels_last without a conversion inside (V03)."""

from __future__ import annotations

import collections

import onnx
import pytest
import torch
from torch import nn

from edgeopt.backends import onnx_export, torchscript
from edgeopt.passes import optimize
from edgeopt.program import graph
from edgeopt.spec.profile import load_profile
from tests.passes.support import PROFILE, assert_equal, optimized, program, targets
from tests.passes.test_batch_norm import Residual
from tests.passes.test_simplify import model

CHANNELS_LAST = torch.channels_last


def two_convolutions(*last: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 3), *last)


def outputs(result, x: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """What the graph and its frozen TorchScript module give for `x`."""
    with torch.no_grad():
        return [result.module(x), torchscript.frozen(result)(x)]


@pytest.mark.parametrize("batch", [1, 3])
def test_the_layout_does_not_hang_on_the_strides_of_the_input(batch):
    given = program(two_convolutions(), ("N", 3, 8, 8))
    result, records = optimized(given, channels_last=True)
    assert records["channels_last"].changed == 2 and records["channels_last"].nodes_after == len(
        given.module.graph.nodes
    )
    x = torch.rand(batch, 3, 8, 8)
    taken = x.to(memory_format=CHANNELS_LAST)[0].unsqueeze(0) if batch == 1 else x.to(memory_format=CHANNELS_LAST)
    for view in (x, taken):
        for (y,) in outputs(result, view):
            assert y.stride() == (5 * 36, 1, 5 * 6, 5)
    assert_equal(result, given)


def test_off_unless_asked_for_and_weights_stay_plain():
    result, records = optimized(program(two_convolutions(), ("N", 3, 8, 8)))
    assert records["channels_last"].status == "off"
    assert all(p.is_contiguous() for p in result.module.parameters())


class Inside(torch.utils._python_dispatch.TorchDispatchMode):
    """The layouts of four-dimensional results, and the copies that change one."""

    def __init__(self):
        super().__init__()
        self.plain, self.copies = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if (
            isinstance(result, torch.Tensor)
            and result.dim() == 4
            and not result.is_contiguous(memory_format=CHANNELS_LAST)
        ):
            self.plain.append(name)
        self.copies += name in ("clone", "copy_", "_to_copy", "contiguous")
        return result


def test_nothing_inside_a_residual_network_is_converted():
    torch.manual_seed(0)
    given = program(nn.Sequential(nn.Conv2d(3, 4, 3, 2), Residual(), Residual()), ("N", 3, 9, 9))
    result, records = optimized(given, channels_last=True)
    assert records["channels_last"].changed == 5
    x = torch.rand(2, 3, 9, 9)
    with torch.no_grad(), Inside() as inside:
        result.module(x)
    assert inside.plain == [] and inside.copies == 0
    assert_equal(result, given, atol=1e-4)


def views(self, x):
    y = self.inner(x)
    return y.view(x.shape[0], -1), y.unsqueeze(1).view(-1, 36), y.permute(0, 2, 3, 1)


def test_views_of_the_result_still_work(tmp_path):
    module = model(views)
    module.inner = two_convolutions()
    given = program(module, ("N", 3, 8, 8))
    result, records = optimized(given, channels_last=True)
    assert records["channels_last"].changed == 2
    assert_equal(result, given)


def test_the_onnx_file_is_the_same(tmp_path):
    counts = []
    for asked in (False, True):
        folder = tmp_path / str(asked)
        folder.mkdir()
        given = program(two_convolutions(nn.MaxPool2d(2), nn.Flatten()), ("N", 3, 8, 8))
        result, _ = optimized(given, channels_last=asked)
        file = onnx_export.write(result, folder, opset_max=17)
        counts.append(collections.Counter(node.op_type for node in onnx.load(folder / file.name).graph.node))
    assert counts[0] == counts[1] and "Transpose" not in counts[1]


def by_strides(self, x):
    return torch.as_strided(self.inner(x), (3,), (1,))


def written(self, x):
    y = self.inner(x)
    y.view(-1)[0] = 1.0
    return y


LAYOUT_KEPT = {
    "one alone": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), "fewer than 2"),
    "two apart": (
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(2), nn.Softmax(2), nn.Unflatten(2, (8, 8)), nn.Conv2d(4, 5, 1)),
        "fewer",
    ),
    "strides": (by_strides, "by its strides"),
    "written": (written, "writes to a result"),
}


@pytest.mark.parametrize("kind", LAYOUT_KEPT)
def test_the_layout_stays_with_the_reason(kind):
    module, reason = LAYOUT_KEPT[kind]
    if not isinstance(module, nn.Module):
        module = model(module)
        module.inner = two_convolutions()
    given = program(module, (2, 3, 8, 8))
    result, records = optimized(given, channels_last=True)
    assert records["channels_last"].changed == 0 and reason in records["channels_last"].declined[0]
    assert_equal(result, given)


def test_without_torch_among_the_backends_there_is_no_layout():
    profile = PROFILE.model_copy(update={"backends": ("onnxruntime",)})
    records = optimize(program(two_convolutions(), ("N", 3, 8, 8)), profile, {"channels_last": True})[1]
    record = next(r for r in records if r.name == "channels_last")
    assert record.changed == 0 and "no backend" in record.declined[0]


XAVIER = load_profile("xavier")


def aligned(given, profile=XAVIER, **settings):
    result, records = optimize(given, profile, {"aligned_channels": settings or True})
    return result, next(r for r in records if r.name == "aligned_channels")


ALIGNED = {
    "conv": (nn.Sequential(nn.Conv2d(3, 5, 3), nn.Sigmoid(), nn.MaxPool2d(2), nn.Conv2d(5, 4, 1)), ("N", 3, 8, 8), 1),
    "no bias": (nn.Sequential(nn.Conv1d(3, 5, 3, bias=False), nn.Conv1d(5, 4, 1, bias=False)), ("N", 3, 8), 1),
    "linear": (nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 6), nn.SiLU(), nn.Linear(6, 2)), ("N", 7, 3), 2),
}  # fmt: skip


@pytest.mark.parametrize("kind", ALIGNED)
def test_channels_between_layers_are_rounded_up(kind):
    torch.manual_seed(0)
    module, shape, count = ALIGNED[kind]
    given = program(module, shape)
    result, record = aligned(given, multiple=8)
    assert record.status == "applied" and record.changed == count
    sizes = [n.meta["val"].shape[1 if len(shape) == 4 or "Conv" in str(module) else -1]
             for n in result.module.graph.nodes if n.target in (torch.ops.aten.conv2d.default,
             torch.ops.aten.conv1d.default, torch.ops.aten.linear.default)]  # fmt: skip
    assert all(size == 8 for size in sizes[:-1])
    assert_equal(result, given)


def test_int8_takes_32_channels_at_once():
    given = program(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)), ("N", 3))
    result, record = aligned(given)
    assert record.changed == 1 and {tuple(p.shape) for p in result.module.parameters()} >= {(32, 3), (2, 32)}
    assert len(list(result.module.parameters())) == 4
    assert_equal(result, given)


CHANNELS_KEPT = {
    "residual": (Residual(), ("N", 4, 5, 5), "read by add"),
    "groups": (nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, groups=4)), ("N", 4, 5, 5), "has groups"),
    "transposed": (nn.Sequential(nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 4, 3)), ("N", 4, 5, 5), "is transposed"),
    "flattened": (nn.Sequential(nn.Conv1d(4, 3, 1), nn.Flatten(), nn.Linear(15, 2)), ("N", 4, 5), "read by"),
    "other axis": (nn.Sequential(nn.Conv1d(4, 3, 1), nn.Linear(5, 2)), ("N", 4, 5), "another axis"),
    "output": (nn.Linear(4, 3), ("N", 4), "read by output"),
}


@pytest.mark.parametrize("kind", CHANNELS_KEPT)
def test_channels_stay_with_the_reason(kind):
    module, shape, reason = CHANNELS_KEPT[kind]
    given = program(module, shape)
    result, record = aligned(given)
    assert any(reason in why for why in record.declined)
    assert_equal(result, given, atol=1e-4)


@pytest.mark.parametrize(("name", "reason"), [("nano", "no Tensor Cores"), ("x86-cpu", "no Tensor Cores")])
def test_a_target_without_tensor_cores_has_no_use_for_it(name, reason):
    given = program(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), ("N", 3))
    _, record = aligned(given, load_profile(name))
    assert record.changed == 0 and reason in record.declined[0]
    assert optimize(given, XAVIER, {})[1][-3].status == "off"


def test_the_padded_file_runs(tmp_path):
    torch.manual_seed(0)
    given = program(nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 1)), ("N", 3, 8, 8))
    result, record = aligned(given, multiple=8)
    assert record.changed == 1
    onnx_export.write(result, tmp_path, opset_max=17)  # compared there with the program in onnxruntime
    inputs = graph.synthetic(given.signature, graph.sizes(given.signature, "max"), 9)
    (got,) = torchscript.frozen(result)(*graph.to_tensors(given.signature, inputs))
    assert torch.allclose(got, torch.from_numpy(graph.run(given, inputs)["y0"]), atol=1e-6)
    assert targets(result).count("aten.conv2d.default") == 2
