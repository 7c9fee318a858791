"""How tensors become integers: the torchao specifications of activations, weights and biases for a profile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Node

from edgeopt.quant import observers, pt2e
from edgeopt.spec.profile import ResolvedQuantization

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


@dataclass(frozen=True)
class Scheme:
    """Specifications that rules put on edges and nodes. `weight` takes the axis of the output channels.

    `table` is for what is looked up and never multiplied: 8 bits, whatever the weights have, and a scale a row.
    `integer_bias`: biases are int32 at the scale input scale times weight scale, zero point 0. onnxruntime up to at
    least 1.16 (the newest for Python 3.8 on aarch64) leaves a convolution with a float bias in float; 1.32 takes both.
    TensorRT wants the bias in float.
    """

    activation: pt2e.QuantizationSpec
    weight: Callable[[int], pt2e.QuantizationSpec]
    table: pt2e.QuantizationSpec
    integer_bias: bool

    def bias(self, source: tuple[Node, Node] | None, weight: tuple[Node, Node]) -> pt2e.DerivedQuantizationSpec:
        """The specification of a bias, from the edges that carry its layer's integer input and weight.

        No `source` is one of scale 1.
        """
        per_channel = self.weight(0).qscheme == torch.per_channel_symmetric
        return pt2e.DerivedQuantizationSpec(
            derived_from=[weight] if source is None else [source, weight],
            derive_qparams_fn=bias_qparams,
            dtype=torch.int32,
            quant_min=INT32_MIN,
            quant_max=INT32_MAX,
            qscheme=torch.per_channel_symmetric if per_channel else torch.per_tensor_symmetric,
            ch_axis=0 if per_channel else None,
        )


def scheme_for(quantization: ResolvedQuantization, *, qat: bool) -> Scheme:
    """The scheme of a profile's quantization, with observers (`qat` false) or fake-quantizers (`qat` true)."""

    def weight(channel_axis: int, bits: int = quantization.weight_bits) -> pt2e.QuantizationSpec:
        return pt2e.QuantizationSpec(
            dtype=torch.int8,
            quant_min=-(2 ** (bits - 1)),
            quant_max=2 ** (bits - 1) - 1,
            qscheme=torch.per_channel_symmetric if quantization.per_channel else torch.per_tensor_symmetric,
            ch_axis=channel_axis if quantization.per_channel else None,
            observer_or_fake_quant_ctr=observers.for_weights(per_channel=quantization.per_channel, qat=qat),
        )

    unsigned = quantization.activations == "uint8-asymmetric"
    activation = pt2e.QuantizationSpec(
        dtype=torch.uint8 if unsigned else torch.int8,
        quant_min=0 if unsigned else -128,
        quant_max=255 if unsigned else 127,
        qscheme=torch.per_tensor_affine if unsigned else torch.per_tensor_symmetric,
        observer_or_fake_quant_ctr=observers.for_activations(quantization.ranges, qat=qat),
    )
    return Scheme(activation, weight, weight(0, bits=8), integer_bias=quantization.placement.startswith("onnxruntime"))


def bias_qparams(sources: list) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point of a bias: the product of the scales of its layer's input (else 1) and weight, and 0."""
    *inputs, weight_scale = (source.calculate_qparams()[0] for source in sources)
    scale = ((inputs[0] if inputs else 1.0) * weight_scale).to(torch.float32)
    return scale, torch.zeros(scale.shape, dtype=torch.int64)
