"""Pure parsers: power modes, clocks, temperatures and which sensors can be read. Text -> fields of DeviceFacts.

Sources of the formats: kernel documentation (thermal, devfreq, hwmon/ina3221, powercap), rbonghi/jetson_stats.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from edgeopt.spec.facts import PowerMode

Fields = dict[str, Any]

# GPU's names in devfreq: rbonghi/jetson_stats and its pull requests 732 and 886 (Thor)
_GPU = re.compile(r"/(?:[0-9a-f]+\.)?(?:gv11b|gp10b|ga10b|gb10b|gm20b|gpu|gpu-gpc-\d)/")
_EMC = re.compile(r"/bwmgr/|/emc/")
_OFF_C = -100.0  # a sensor that is off says -256
_DUMMY = ("PMIC-Die", "PMIC")  # always 100


def power_mode(nvpmodel: str | None, status: str | None, conf: str | None) -> Fields:
    """`nvpmodel -q` ('NV Power Mode: NAME', then the id; 'NV Fan Mode:' may come first), else its status file.

    The modes that the board has stand in /etc/nvpmodel.conf.
    """
    known = power_modes(conf)
    out: Fields = {"power_modes": known} if known else {}
    named = re.search(
        r"^NV Power Mode:[ \t]*(\S+)[ \t]*$(?:\n+(\d{1,4})[ \t]*$)?", nvpmodel or "", re.MULTILINE | re.ASCII
    )
    stored = re.search(r"pmode:(\d{1,4})\b", status or "", re.ASCII)
    if named:
        name, number = named.groups()
        by_name = next((m.id for m in known if m.name == name), None)
        out["power_mode"] = PowerMode(name=name, id=int(number) if number else by_name)
    elif stored:
        out |= next(({"power_mode": m} for m in known if m.id == int(stored.group(1))), {})
    return out


def power_modes(conf: str | None) -> tuple[PowerMode, ...]:
    """The '< POWER_MODEL ID=0 NAME=MAXN >' lines."""
    found = re.findall(r"^\s*<\s*POWER_MODEL\s+ID=(\d{1,4})\s+NAME=(\S+)\s*>", conf or "", re.MULTILINE | re.ASCII)
    return tuple(PowerMode(name=name, id=int(number)) for number, name in found)


def cpu_clocks(cpufreq: Mapping[str, str]) -> Fields:
    """The fastest processor's clock, and the largest that the power mode allows it."""
    return _clocks(cpu=(_largest(cpufreq, "/scaling_cur_freq", 1e3), _largest(cpufreq, "/scaling_max_freq", 1e3)))


def devfreq_clocks(devfreq: Mapping[str, str]) -> Fields:
    """GPU and memory, as far as devfreq says them."""
    gpu = {path: text for path, text in devfreq.items() if _GPU.search(path)}
    emc = {path: text for path, text in devfreq.items() if _EMC.search(path)}
    return _clocks(
        gpu=(_largest(gpu, "/cur_freq", 1e6), _largest(gpu, "/max_freq", 1e6)),
        emc=(_largest(emc, "/cur_freq", 1e6), _largest(emc, "/max_freq", 1e6)),
    )


def emc_clocks(emc: Mapping[str, str]) -> Fields:
    """The memory's clock by debugfs, which only root reads."""
    return _clocks(emc=(_largest(emc, "/rate", 1e6), _largest(emc, "/max_rate", 1e6)))


def smi_clocks(smi: str | None) -> Fields:
    """Of the first GPU in nvidia-smi's lines of seven columns."""
    rows = [[cell.strip() for cell in line.split(",")] for line in (smi or "").splitlines()]
    row = next((r for r in rows if len(r) == 7), [""] * 7)
    temperature = _number(row[6])
    out = _clocks(gpu=(_number(row[4]), _number(row[5])))
    return out | ({"temperatures_c": {"gpu": temperature}} if temperature is not None else {})


def temperatures(thermal: Mapping[str, str]) -> Fields:
    """{zone's type: °C}. A zone that is off says -256 or nothing; PMIC-Die's 100 is a constant. Twins are numbered."""
    found: dict[str, float] = {}
    for path in sorted(thermal, key=_by_number):
        name, value = thermal[path].strip(), _number(thermal.get(path[: -len("type")] + "temp", ""))
        if not path.endswith("/type") or not name or name in _DUMMY or value is None or value / 1e3 < _OFF_C:
            continue
        number = 2
        while name in found:
            name, number = f"{thermal[path].strip()} {number}", number + 1
        found[name] = value / 1e3
    return {"temperatures_c": found} if found else {}


def hwmon_rails(rails: Mapping[str, str]) -> Fields:
    """INA3221 of JetPack 5 and later: channels with a name, a voltage and a current."""
    names = []
    for path in sorted(rails, key=_by_number):
        at = re.fullmatch(r"(.*)/in(\d)_label", path, re.DOTALL)
        if at and {f"{at[1]}/in{at[2]}_input", f"{at[1]}/curr{at[2]}_input"} <= rails.keys():
            names.append(rails[path].strip())
    return _rails(names)


def iio_rails(rails: Mapping[str, str]) -> Fields:
    """INA3221 of JetPack 4: rail_name_N beside in_powerN_input."""
    names = []
    for path in sorted(rails, key=_by_number):
        at = re.fullmatch(r"(.*)/rail_name_(\d+)", path, re.DOTALL)
        if at and f"{at[1]}/in_power{at[2]}_input" in rails:
            names.append(rails[path].strip())
    return _rails(names)


def sensors(
    which: str | None, hwmon: Mapping[str, str], iio: Mapping[str, str], thermal: Mapping[str, str],
    devfreq: Mapping[str, str], smi: str | None, rapl: Mapping[str, str],
) -> Fields:  # fmt: skip
    """What a measurement can be accompanied by, without root."""
    there = {
        "tegrastats": "/tegrastats\n" in f"{which or ''}\n",
        "ina3221": bool(hwmon_rails(hwmon) or iio_rails(iio)),
        "thermal": bool(temperatures(thermal)),
        "devfreq": "gpu" in devfreq_clocks(devfreq).get("clocks_mhz", {}),
        "nvidia-smi": "gpu" in smi_clocks(smi).get("clocks_mhz", {}),
        "rapl": any(_number(text) is not None for text in rapl.values()),
    }
    found = tuple(name for name, is_there in there.items() if is_there)
    return {"sensors": found} if found else {}


def _rails(names: list[str]) -> Fields:
    """Without channels that are connected to nothing ('NC') and the driver's sums of shunt voltages."""
    kept = tuple(dict.fromkeys(n for n in names if n and n != "NC" and "shunt" not in n))
    return {"rails": kept} if kept else {}


def _clocks(**by: tuple[float | None, float | None]) -> Fields:
    now = {name: pair[0] for name, pair in by.items() if pair[0] is not None}
    most = {name: pair[1] for name, pair in by.items() if pair[1] is not None}
    return ({"clocks_mhz": now} if now else {}) | ({"clocks_max_mhz": most} if most else {})


def _largest(files: Mapping[str, str], end: str, divisor: float) -> float | None:
    numbers = [_number(text) for path, text in files.items() if path.endswith(end)]
    return max((n / divisor for n in numbers if n is not None), default=None)


def _number(text: str) -> float | None:
    found = re.fullmatch(r"\s*(-?\d{1,15}(?:\.\d{1,9})?)\s*", text, re.ASCII)
    return float(found.group(1)) if found else None


def _by_number(path: str) -> list[Any]:
    """Paths in the order of their numbers: thermal_zone10 after thermal_zone9."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"([0-9]{1,9})", path)]
