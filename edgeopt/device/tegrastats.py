"""Lines of NVIDIA's tegrastats, of every release from R32 to R39, as values. What a line lacks is None or missing.

Formats: NVIDIA's developer guides ("tegrastats utility"), and recorded lines in DataDog/datadog-agent, jetson_stats
and jetson_exporter#14. A line may begin with a date; a core or an engine may be `off`; power rails are milliwatts as
`now/mean`, with or without the unit, from R39 on `now/mean/max`; `-256C` is a sensor that is off; PMIC is a constant of
100 °C and no sensor; NC is a rail that is connected to nothing. Without root the clocks of memory and GPU are missing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_OFF_C = -100  # below what any board stands: the reading of a sensor that is off is -256

_RAM = re.compile(r"\bRAM\s+([0-9]{1,9})/([0-9]{1,9})MB")
_SWAP = re.compile(r"\bSWAP\s+([0-9]{1,9})/([0-9]{1,9})MB")
_CPU = re.compile(r"\bCPU\s+\[([^\]]*)\]")
_CORE = re.compile(r"^([0-9]{1,3})%(?:@([0-9]{1,9}))?$")
_EMC = re.compile(r"\bEMC_FREQ\s+([0-9]{1,3})%(?:@([0-9]{1,9}))?")
_GPU = re.compile(r"\bGR3D_FREQ\s+(?:([0-9]{1,3})%)?(?:@(?:\[([0-9, ]{1,200})\]|([0-9]{1,9})))?")
_TEMPERATURE = re.compile(r"(?<![\w@])([A-Za-z][\w.-]{0,40})@(-?[0-9]{1,5}(?:\.[0-9]{1,6})?)C(?![A-Za-z])", re.ASCII)
_RAIL = re.compile(r"(?<!\S)([A-Za-z]\w{0,40})\s+([0-9]{1,9})(?:mW)?/[0-9]{1,9}(?:mW)?(?:/[0-9]{1,9}(?:mW)?)?(?!\S)")


@dataclass(frozen=True)
class Line:
    """One line. Loads in percent, clocks in MHz, `cores` None for one that is off; rails in mW, as of now."""

    ram_used_mb: int | None = None
    ram_total_mb: int | None = None
    swap_used_mb: int | None = None
    cores: tuple[tuple[int, int | None] | None, ...] = ()  # (load, clock)
    emc_percent: int | None = None
    emc_mhz: int | None = None
    gpu_percent: int | None = None
    gpu_mhz: int | None = None  # of the fastest of its clusters
    temperatures_c: dict[str, float] = field(default_factory=dict)
    rails_mw: dict[str, int] = field(default_factory=dict)

    @property
    def cpu_mhz(self) -> int | None:
        """The clock of the fastest core."""
        return max((core[1] for core in self.cores if core and core[1] is not None), default=None)

    @property
    def empty(self) -> bool:
        """Whether nothing of it was understood: a message, and no line of figures."""
        return self == Line()


def parse(text: str) -> Line:
    """The values of one line; any text is a Line, at worst an empty one."""
    ram, swap, cpu, emc, gpu = (pattern.search(text) for pattern in (_RAM, _SWAP, _CPU, _EMC, _GPU))
    return Line(
        ram_used_mb=_int(ram, 1),
        ram_total_mb=_int(ram, 2),
        swap_used_mb=_int(swap, 1),
        cores=tuple(map(_core, cpu.group(1).split(","))) if cpu else (),
        emc_percent=_int(emc, 1),
        emc_mhz=_int(emc, 2),
        gpu_percent=_int(gpu, 1),
        gpu_mhz=_gpu_mhz(gpu),
        temperatures_c=_temperatures(text),
        rails_mw={name: int(now) for name, now in _RAIL.findall(text) if name != "NC"},
    )


def _core(text: str) -> tuple[int, int | None] | None:
    found = _CORE.match(text.strip())
    return (int(found.group(1)), _int(found, 2)) if found else None


def _gpu_mhz(found: re.Match | None) -> int | None:
    if found is None or found.group(2) is None:
        return _int(found, 3)
    clocks = [int(word) for word in re.findall("[0-9]{1,9}", found.group(2))]
    return max(clocks, default=None)


def _temperatures(text: str) -> dict[str, float]:
    found = {name: float(value) for name, value in _TEMPERATURE.findall(text) if not name.upper().startswith("PMIC")}
    return {name: value for name, value in found.items() if value > _OFF_C}


def _int(found: re.Match | None, group: int) -> int | None:
    return int(found.group(group)) if found is not None and found.group(group) is not None else None
