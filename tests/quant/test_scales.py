"""Units do not matter: tiny weights, and inputs in small or large units, keep as many steps as others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from edgeopt.quant import convert
from tests.quant.programs import batches, in_onnxruntime, outputs, program, quantization, sqnr_db


class Layers(nn.Module):
    """Two layers; the first one's weights are scaled by `weights`, its bias too for inputs scaled by `inputs`."""

    def __init__(self, first: nn.Module, second: nn.Module, weights: float, inputs: float):
        super().__init__()
        self.first, self.second = first, second
        with torch.no_grad():
            first.weight.mul_(weights)
            first.bias.mul_(weights * inputs)
            second.weight.div_(weights * inputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


KINDS = {
    "convolution": (lambda: (nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 1)), (4, 8, 8)),
    "linear": (lambda: (nn.Linear(16, 32), nn.Linear(32, 4)), (16,)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize(("weights", "inputs"), [(1e-5, 1e5), (1e-6, 1.0), (1.0, 1e-7), (1e6, 1e-6), (1.0, 1e6)])
def test_units(kind, per_channel, weights, inputs, tmp_path):
    made, sizes = KINDS[kind]

    def lost_db(weights: float, inputs: float, folder) -> float:
        torch.manual_seed(0)
        given = program(Layers(*made(), weights, inputs), *sizes)
        data = batches(*sizes, scale=inputs)
        integer, _ = convert.from_batches(given, quantization(per_channel=per_channel), data)
        session, _ = in_onnxruntime(integer, folder)
        x = np.concatenate([batch["x"] for batch in data])
        return sqnr_db(outputs(given, x), session.run(None, {"x": x})[0])

    (tmp_path / "plain").mkdir()
    assert lost_db(weights, inputs, tmp_path) > lost_db(1.0, 1.0, tmp_path / "plain") - 1.5
