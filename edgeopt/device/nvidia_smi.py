"""Lines of `nvidia-smi --query-gpu=... --format=csv,noheader,nounits` in the runner's order of fields.

Fields: index, power.draw (W), temperature.gpu (°C), clocks.sm, clocks.max.sm (MHz), memory.used (MiB), utilization.gpu
(%), clocks_throttle_reasons.active (a mask). What a GPU does not tell is `[N/A]` or `[Not Supported]`. Bits of the
mask: nvmlClocksThrottleReason* of nvml.h.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

REASONS = (
    (0x08, "its hardware slowed the clock down"),
    (0x40, "too hot: its hardware slowed the clock down"),
    (0x80, "its power supply asked for less (power brake)"),
    (0x20, "too hot: the driver lowered the clock"),
    (0x04, "its power limit is reached"),
)
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,6})?")
_MASK = re.compile(r"0x[0-9a-fA-F]{1,16}")


@dataclass(frozen=True)
class Line:
    """One GPU at one moment."""

    gpu: int
    watts: float | None = None
    temperature_c: float | None = None
    mhz: float | None = None
    max_mhz: float | None = None
    memory_mb: float | None = None
    load_percent: float | None = None
    throttling: tuple[str, ...] = ()  # why its clock is lower than asked for, strongest first


def parse(text: str) -> Line | None:
    """The values of one line; None for what is no such line, such as a message."""
    words = [word.strip() for word in text.split(",")]
    if len(words) != 8 or not re.fullmatch("[0-9]{1,4}", words[0]):
        return None
    numbers = [float(word) if _NUMBER.fullmatch(word) else None for word in words[1:7]]
    mask = int(words[7], 16) if _MASK.fullmatch(words[7]) else 0
    return Line(int(words[0]), *numbers, tuple(reason for bit, reason in REASONS if mask & bit))
