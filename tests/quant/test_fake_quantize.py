"""The fake-quantizers of training against torch's and torchao's own, and what they leave alone (Q08, Q09, Q10)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edgeopt.quant import convert, finetune, pt2e
from edgeopt.quant.fake_quantize import TrainedFakeQuantize, TrainedPerChannelFakeQuantize
from edgeopt.quant.prepare import prepare
from edgeopt.quant.training import hooks
from edgeopt.spec.project import Qat
from tests.quant.programs import outputs, program, quantization, sqnr_db
from tests.quant.training import cross_entropy, net

ASYMMETRIC = {"dtype": torch.uint8, "quant_min": 0, "quant_max": 255, "qscheme": torch.per_tensor_affine}
SYMMETRIC = {"dtype": torch.int8, "quant_min": -128, "quant_max": 127, "qscheme": torch.per_tensor_symmetric}
CHANNELS = {"dtype": torch.int8, "quant_min": -64, "quant_max": 63, "qscheme": torch.per_channel_symmetric}


def activations(**settings) -> TrainedFakeQuantize:
    return TrainedFakeQuantize(observer=pt2e.MovingAverageMinMaxObserver, **settings)


def weights(axis: int = 0) -> TrainedPerChannelFakeQuantize:
    return TrainedPerChannelFakeQuantize(
        observer=pt2e.MovingAveragePerChannelMinMaxObserver, averaging_constant=1.0, ch_axis=axis, **CHANNELS
    )


def by_torch(fake: TrainedFakeQuantize, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """torch's own operator on `x`, with the range of what was `seen` by definition."""
    axes = [axis for axis in range(x.ndim) if axis != fake.ch_axis] if fake.is_per_channel else list(range(x.ndim))
    low, high = seen.amin(axes).clamp(max=0), seen.amax(axes).clamp(min=0)
    least, most = fake.activation_post_process.quant_min, fake.activation_post_process.quant_max
    if fake.qscheme == torch.per_tensor_affine:
        scale = (high - low) / (most - least)
        return torch.fake_quantize_per_tensor_affine(x, scale, least - (low / scale).round().int(), least, most)
    scale = torch.maximum(-low, high) / ((most - least) / 2)
    if fake.is_per_channel:
        zero_point = torch.zeros_like(scale, dtype=torch.int32)
        return torch.fake_quantize_per_channel_affine(x, scale, zero_point, fake.ch_axis, least, most)
    return torch.fake_quantize_per_tensor_affine(x, scale, torch.zeros(1, dtype=torch.int32), least, most)


KINDS = {"asymmetric": lambda: activations(**ASYMMETRIC), "symmetric": lambda: activations(**SYMMETRIC)}
KINDS |= {"by axis 0": weights, "by axis 1": lambda: weights(1)}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("beyond", [1.0, 3.0], ids=["within its range", "beyond its range"])
def test_values_and_gradients_are_those_of_torchs_operator(make, beyond):
    """Beyond ties between two steps, of which there may be one in ten thousand values."""
    torch.manual_seed(0)
    seen = torch.randn(6, 5, 40, 30)
    ours = make().train()
    ours(seen)
    ours.eval()
    x = seen * beyond
    first, second = (x.clone().requires_grad_(True) for _ in range(2))
    got, expected = ours(first), by_torch(ours, second, seen)
    step = float(ours.scale.max())
    different = (got - expected).detach().abs() > 1e-3 * step
    assert float(different.double().mean()) < 1e-4
    assert float((got - expected).detach().abs().max()) < 1.01 * step
    upstream = torch.randn_like(x)
    got.backward(upstream), expected.backward(upstream)
    cut = (first.grad == 0) != (second.grad == 0)
    assert float(cut.double().mean()) < 1e-3
    assert torch.equal(first.grad[~cut], second.grad[~cut])
    assert bool((first.grad == 0).any()) == (beyond > 1)


@pytest.mark.parametrize("layout", ["contiguous", "channels last", "a view", "empty"])
def test_every_layout_of_memory_gives_the_same_values(layout):
    x = torch.randn(4, 6, 80, 90)  # more than one part
    fake = activations(**ASYMMETRIC).train()
    expected = fake(x)
    fake.eval()
    if layout == "channels last":
        assert torch.equal(fake(x.contiguous(memory_format=torch.channels_last)), expected)
    elif layout == "a view":
        assert torch.equal(fake(x.transpose(1, 3)[:, ::2]), expected.transpose(1, 3)[:, ::2])
    elif layout == "empty":
        assert fake(x[:0]).shape == (0, 6, 80, 90)
    else:
        assert torch.equal(fake(x), torch.cat([fake(part) for part in x.split(1)]))


RANGES = {"both signs": (-1.0, 3.0), "positive": (2.0, 3.0), "negative": (-3.0, -2.0), "zero": (0.0, 0.0)}


@pytest.mark.parametrize("settings", [ASYMMETRIC, SYMMETRIC], ids=["asymmetric", "symmetric"])
@pytest.mark.parametrize("limits", RANGES.values(), ids=RANGES.keys())
def test_scales_are_those_of_torchaos_observer(settings, limits):
    fake = activations(**settings).train()
    fake(torch.tensor(limits))
    scale, zero_point = fake.calculate_qparams()
    expected_scale, expected_zero_point = fake.activation_post_process.calculate_qparams()
    torch.testing.assert_close(scale, expected_scale.reshape(()))
    assert int(zero_point) == int(expected_zero_point)
    assert (float(fake.scale), int(fake.zero_point)) == (float(scale), int(zero_point))


def test_the_range_is_the_moving_average_that_torchao_has():
    torch.manual_seed(0)
    fake, observer = activations(**ASYMMETRIC).train(), pt2e.MovingAverageMinMaxObserver(**ASYMMETRIC)
    for k in range(5):
        x = torch.randn(50) * (k + 1)
        fake(x), observer(x)
    ours = fake.activation_post_process
    torch.testing.assert_close((ours.min_val, ours.max_val), (observer.min_val, observer.max_val))


def test_sixteen_bit_values_are_rounded_in_32():
    """255 steps beside a zero point need 16 bits of a product; bfloat16 has 8."""
    x = torch.linspace(-1, 3, 999)
    fake = activations(**ASYMMETRIC).train()
    fake(x)
    fake.eval()
    out = fake(x.bfloat16())
    assert out.dtype == torch.float32
    steps = out / fake.scale
    assert float((steps - steps.round()).abs().max()) < 1e-3


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


def scales(model: hooks.FakeQuantized) -> list[torch.Tensor]:
    return [m.scale.clone() for m in model.modules() if isinstance(m, TrainedFakeQuantize)]


@pytest.mark.parametrize("size", [100.0, 0.0], ids=["larger", "zeros"])
def test_eval_moves_no_range(size):
    """Q08 (Lightning#8507): `.eval()` of the model a trainer is given, and an input a hundred times larger."""
    torch.manual_seed(0)
    model = hooks.FakeQuantized(prepare(program(Conv(), 3, 8, 8), quantization(), qat=True))
    x = torch.randn(4, 3, 8, 8)
    model(x)
    before = scales(model)
    model.eval()
    model(size * x)
    assert all(map(torch.equal, before, scales(model)))
    model.train()
    model(100 * x)
    assert not all(map(torch.equal, before, scales(model)))


class Normed(nn.Module):
    def __init__(self, convolution: nn.Module):
        super().__init__()
        self.conv, self.norm, self.last = convolution, nn.BatchNorm2d(4, eps=1e-3, momentum=0.03), nn.Linear(4, 5)
        self.norm.running_var.uniform_(0.5, 2.0)
        self.norm.running_mean.uniform_(-1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(torch.relu(self.conv(x))).mean((2, 3)))  # no layer takes the norm in


CONVOLUTIONS = {
    "convolution": lambda: nn.Conv2d(3, 4, 3, padding=1),
    "without bias": lambda: nn.Conv2d(3, 4, 3, padding=1, bias=False),
    "transposed": lambda: nn.ConvTranspose2d(3, 4, 3),
}


@pytest.mark.parametrize("make", CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys())
@pytest.mark.parametrize("placement", ["onnxruntime-x86", "tensorrt"])
def test_a_batch_norm_in_the_graph_keeps_its_constants_and_statistics(make, placement):
    """Q09 (ao#4107, #2980): eps 1e-3 and momentum .03 became 1e-5 and .1, and statistics moved."""
    torch.manual_seed(0)
    model = Normed(make()).eval()
    given = program(model, 3, 8, 8)
    prepared = prepare(given, quantization(placement), qat=True)
    x, target = torch.randn(64, 3, 8, 8), torch.randint(0, 5, (64,))
    loader = [({"x": x[i : i + 16].numpy()}, target[i : i + 16]) for i in range(0, 64, 16)]
    training = finetune.train(prepared, lambda: loader, cross_entropy, Qat(epochs=2, learning_rate=1e-2), seed=0)
    integer, _ = convert.from_state(given, quantization(placement), training.state)
    for module in (prepared.module, integer.module):
        (norm,) = [n for n in module.graph.nodes if "batch_norm" in str(n.target)]
        assert norm.target is torch.ops.aten.batch_norm.default
        assert norm.args[5:8] == (False, 0.03, 1e-3)
    for name in ("running_mean", "running_var"):
        assert torch.equal(training.state[f"model.norm.{name}"], getattr(model.norm, name))
    assert not torch.equal(training.state["model.norm.weight"], model.norm.weight)
    with torch.no_grad():
        simulated = prepared.module(x)[0]
    assert sqnr_db(simulated.numpy(), outputs(integer, x.numpy())) > 40


@pytest.mark.parametrize("part", ["all", "weights", "activations"])
def test_fake_quantization_that_was_off_is_warned_of_and_the_integer_program_is_the_simulated_one(part, caplog):
    """Q10 (ao#2138): off, weights ten times larger, one step: the stored scale was .00232 and the true one .00507."""
    torch.manual_seed(0)
    given = program(Conv(), 3, 8, 8)
    model = hooks.FakeQuantized(prepare(given, quantization(), qat=True))
    x = torch.randn(8, 3, 8, 8)
    model(x)
    for name, fake in model.named_modules():
        if isinstance(fake, TrainedFakeQuantize) and part in ("all", kind_of(fake)):
            assert name
            fake.disable_fake_quant()
    with torch.no_grad():
        model.program.get_parameter("model.conv.weight").mul_(10)
    model(x)
    with caplog.at_level("WARNING", logger="edgeopt"):
        state = hooks.finish(model)
    assert "fake quantization was off" in caplog.text
    integer, _ = convert.from_state(given, quantization(), state)
    with torch.no_grad():
        simulated = model(x)
    step = float([m for m in model.modules() if isinstance(m, TrainedFakeQuantize)][-1].scale.max())
    difference = (simulated - torch.from_numpy(outputs(integer, x.numpy()))).abs().max()
    assert float(difference) <= 1.001 * max(step, float(output_scale(model)))


def kind_of(fake: TrainedFakeQuantize) -> str:
    return "weights" if isinstance(fake, TrainedPerChannelFakeQuantize) else "activations"


def output_scale(model: hooks.FakeQuantized) -> torch.Tensor:
    (output,) = [n for n in model.program.graph.nodes if n.op == "output"]
    last = output.args[0][0]
    return model.program.get_submodule(last.target).scale.max()


def test_a_whole_state_is_not_warned_of(caplog):
    model = hooks.FakeQuantized(prepare(net(), quantization(), qat=True))
    model(torch.randn(4, 3, 16, 16))
    with caplog.at_level("WARNING", logger="edgeopt"):
        hooks.finish(model)
    assert "off" not in caplog.text
