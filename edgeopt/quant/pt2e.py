"""The only place that imports torchao, with the noise of its import taken out.

torchao logs a warning for every CUDA library of its wheel that a CPU machine cannot load, and makes torch log one
about its own enums. Neither is about anything that a user did or can change, so those two are dropped while the
import runs; other messages pass.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

_NOISE = {
    "torchao": "Failed to load ",
    "torch.utils._pytree": "%s is an Enum subclass and is now natively supported",
}


@contextlib.contextmanager
def _without_import_noise() -> Iterator[None]:
    def quiet(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(_NOISE[record.name])

    loggers = [logging.getLogger(name) for name in _NOISE]
    for logger in loggers:
        logger.addFilter(quiet)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(quiet)


with _without_import_noise():
    from torchao.quantization.pt2e import (
        DerivedObserverOrFakeQuantize,
        FakeQuantizeBase,
        FusedMovingAvgObsFakeQuantize,
        MinMaxObserver,
        MovingAverageMinMaxObserver,
        MovingAveragePerChannelMinMaxObserver,
        ObserverBase,
        PerChannelMinMaxObserver,
    )
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e
    from torchao.quantization.pt2e.quantizer import (
        DerivedQuantizationSpec,
        QuantizationAnnotation,
        QuantizationSpec,
        Quantizer,
        SharedQuantizationSpec,
    )
    from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

__all__ = [
    "DerivedObserverOrFakeQuantize",
    "DerivedQuantizationSpec",
    "FakeQuantizeBase",
    "FusedMovingAvgObsFakeQuantize",
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "MovingAveragePerChannelMinMaxObserver",
    "ObserverBase",
    "PerChannelMinMaxObserver",
    "Q_ANNOTATION_KEY",
    "QuantizationAnnotation",
    "QuantizationSpec",
    "Quantizer",
    "SharedQuantizationSpec",
    "convert_pt2e",
    "prepare_pt2e",
    "prepare_qat_pt2e",
]
