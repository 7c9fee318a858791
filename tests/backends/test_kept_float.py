"""A layer that is left float between integers stays float in the runtime: what is lowered gives what is simulated."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from edgeopt.backends import integer_kernels, onnx_export, onnxruntime
from edgeopt.onboard import ort
from edgeopt.quant import convert
from edgeopt.runtime.compare import sqnr_db
from tests.quant.programs import batches, outputs, program, quantization


class Between(nn.Module):
    """`layer` behind a convolution and before one; its weights need more than one scale for all of them."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.first, self.layer, self.last = nn.Conv2d(3, 8, 3, padding=1), layer, nn.Conv2d(8, 4, 1)
        with torch.no_grad():
            spread = torch.logspace(0, -3, 8)
            layer.weight.mul_(spread.reshape([-1] + [1] * (layer.weight.ndim - 1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        if isinstance(self.layer, nn.Linear):
            return self.layer(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))
        return self.last(torch.relu(self.layer(x)))


LAYERS = {
    "convolution": lambda: nn.Conv2d(8, 8, 3, padding=1),
    "depthwise": lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8),
    "transposed": lambda: nn.ConvTranspose2d(8, 8, 2, stride=2),
    "linear": lambda: nn.Linear(8, 8),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_the_runtime_does_not_make_int8_of_it(layer, tmp_path):
    torch.manual_seed(0)
    float_program = program(Between(layer()), 3, 8, 8)
    integer, _ = convert.from_batches(float_program, quantization(), batches(3, 8, 8), keep_float=("model.layer",))
    file = onnx_export.write(integer, tmp_path, opset_max=18)
    flags = {"disabled_optimizers": list(integer_kernels.DISABLED_FOR_INT8)}
    candidate = {"file": file.name, "flags": flags}
    specs = [[spec.model_dump() for spec in side] for side in (integer.signature.inputs, integer.signature.outputs)]
    opened = ort.open_program(str(tmp_path), candidate, *specs, [], None)
    x = batches(3, 8, 8)[0]["x"]
    simulated = outputs(integer, x)
    given = np.asarray(opened.call([x])[0])
    assert sqnr_db(simulated, given) > 60
    assert [r["status"] for r in opened.records] == ["applied"]


def test_int8_candidates_carry_the_flag_and_float_ones_do_not(tmp_path):
    from edgeopt.spec.profile import load_profile

    torch.manual_seed(0)
    float_program = program(Between(LAYERS["convolution"]()), 3, 8, 8)
    integer, _ = convert.from_batches(float_program, quantization(), batches(3, 8, 8))
    for made, wanted in ((float_program, None), (integer, ["WeightBiasQuantization"])):
        lowered = onnxruntime.lower(made, load_profile("x86-cpu"), tmp_path)
        assert lowered.candidates[0].flags.get("disabled_optimizers") == wanted
