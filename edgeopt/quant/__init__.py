"""Integers: the quantizer, calibration, quantization-aware training, and what each of them found."""

from edgeopt.quant.report import QuantReport
from edgeopt.quant.stages import qat, quantize

__all__ = ["QuantReport", "qat", "quantize"]
