"""Uneven channels under one scale a tensor: the function stays, and the steps come back where a layer reads them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from edgeopt.quant import convert, even_weights
from edgeopt.quant.prepare import prepare
from tests.quant.programs import batches, in_onnxruntime, outputs, program, quantization, sqnr_db


class Residual(nn.Module):
    """Two layers write what one reads."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.read = nn.Conv2d(4, 8, 1), nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(torch.relu(self.one(x) + self.two(x)))


def _chain(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), *layers)


# what writes, and what reads, the channels that are made uneven; and the rest
KINDS = {
    "plain": lambda: _chain(nn.ReLU(), nn.Conv2d(8, 4, 1)),
    "depthwise": lambda: _chain(nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(), nn.Conv2d(8, 4, 1)),
    "in groups": lambda: _chain(nn.LeakyReLU(0.1), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 4, 1)),
    "to a linear": lambda: _chain(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
    "written twice": Residual,
}


def uneven(kind: str, factor: float) -> nn.Module:
    """Every second channel of each written tensor times `factor`, and its readers' weights divided by it."""
    torch.manual_seed(0)
    model = KINDS[kind]().eval()
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    writers = [layers[:2]] if kind == "written twice" else [[layer] for layer in layers[:-1]]
    with torch.no_grad():
        for group, reader in zip(writers, layers[-len(writers) :], strict=True):
            for writer in group:
                writer.weight[::2] *= factor
                writer.bias[::2] *= factor
            inside = reader.weight.shape[1]
            for channel in range(0, len(group[0].weight), 2):
                rows = slice(None)
                if isinstance(reader, nn.Conv2d) and reader.groups > 1:
                    size = len(reader.weight) // reader.groups
                    rows = slice(channel // inside * size, (channel // inside + 1) * size)
                reader.weight[rows, channel % inside] /= factor
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_steps_come_back(kind, tmp_path):
    data = batches(4, 8, 8)
    x = np.concatenate([batch["x"] for batch in data])

    def lost_db(factor: float) -> float:
        given = program(uneven(kind, factor), 4, 8, 8)
        integer, _ = convert.from_batches(given, quantization(per_channel=False, improve=()), data)
        session, _ = in_onnxruntime(integer, tmp_path)
        return sqnr_db(outputs(given, x), session.run(None, {"x": x})[0])

    even, other = (outputs(program(uneven(kind, factor), 4, 8, 8), x) for factor in (1.0, 64.0))
    assert np.allclose(even, other, atol=1e-5)
    assert lost_db(64.0) > lost_db(1.0) - 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("qat", [True, False])
def test_the_function_stays(kind, qat):
    given, settings = program(uneven(kind, 64.0), 4, 8, 8), quantization(per_channel=False)
    x = batches(4, 8, 8)[0]["x"]
    first, second = (prepare(given, settings, qat=qat) for _ in range(2))
    assert sqnr_db(outputs(given, x), outputs(first.program, x)) > 100
    weights = [dict(prepared.module.named_parameters()) for prepared in (first, second)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


class Tied(nn.Module):
    """One weight writes and reads the same channels."""

    def __init__(self):
        super().__init__()
        self.conv, self.last = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.conv(torch.relu(self.conv(x)))))


class ReadOutside(nn.Module):
    """The channels are an output of the model as well."""

    def __init__(self):
        super().__init__()
        self.conv, self.last = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.conv(x))
        return torch.cat([y, self.last(y)], 1)


def clamped() -> nn.Module:
    return _chain(nn.ReLU6(), nn.Conv2d(8, 4, 1))


def smooth() -> nn.Module:
    return _chain(nn.SiLU(), nn.Conv2d(8, 4, 1))


@pytest.mark.parametrize("made", [clamped, smooth, Tied, ReadOutside])
def test_left_alone(made):
    given = program(made(), 4, 8, 8)
    assert even_weights.even(given.module) == 0


def test_dead_channels():
    model = uneven("plain", 64.0)
    with torch.no_grad():
        model[0].weight[1] = 0.0
        model[2].weight[:, 2] = 0.0
    given = program(model, 4, 8, 8)
    prepared = prepare(given, quantization(per_channel=False))
    x = batches(4, 8, 8)[0]["x"]
    assert sqnr_db(outputs(given, x), outputs(prepared.program, x)) > 100
    assert all(bool(value.isfinite().all()) for value in prepared.module.state_dict().values() if value.numel() > 1)
