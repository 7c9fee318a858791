"""Pure parsers: processors, memory, disks, system, Python, user and clock. Text -> fields of DeviceFacts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from edgeopt.spec.facts import Disk

Fields = dict[str, Any]

# (implementer, part) of /proc/cpuinfo -> core: arch/arm64/include/asm/cputype.h of Linux
_CORES = {
    (0x41, 0xD03): "Cortex-A53", (0x41, 0xD05): "Cortex-A55", (0x41, 0xD07): "Cortex-A57", (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD0B): "Cortex-A76", (0x41, 0xD0C): "Neoverse-N1", (0x41, 0xD40): "Neoverse-V1",
    (0x41, 0xD42): "Cortex-A78AE", (0x41, 0xD49): "Neoverse-N2", (0x41, 0xD4F): "Neoverse-V2",
    (0x41, 0xD83): "Neoverse-V3AE", (0x4E, 0x003): "Denver 2", (0x4E, 0x004): "Carmel",
}  # fmt: skip
_ONLINE = "/sys/devices/system/cpu/online"
_PRESENT = "/sys/devices/system/cpu/present"


def uname(text: str | None) -> Fields:
    """'Linux 5.10.216-tegra aarch64'."""
    words = (text or "").split()
    return {"kernel": words[1], "arch": words[2]} if len(words) == 3 else {}


def system(os_release: str | None) -> Fields:
    found = re.search(r"""^PRETTY_NAME=["']?([^"'\n]+)""", os_release or "", re.MULTILINE)
    return _said(system=found.group(1).strip() or None if found else None)


def libc(getconf: str | None) -> Fields:
    found = re.match(r"glibc (\d+(?:\.\d+)+)\s*$", getconf or "", re.ASCII)
    return _said(libc=found.group(1) if found else None)


def cpu(cpuinfo: str | None, small: Mapping[str, str]) -> Fields:
    """Model, flags that every processor has, and how many are there and running."""
    processors = _processors(cpuinfo)
    flags = [set((p.get("flags") or p.get("Features") or "").split()) for p in processors]
    flags = [f for f in flags if f]
    online = _count(small.get(_ONLINE)) or len(processors) or None
    return _said(
        cpu_model=_cores(processors) or _named(processors),
        cpu_flags=tuple(sorted(set.intersection(*flags))) if flags else None,
        cpu_count=_count(small.get(_PRESENT)) or online, cpu_online=online,
    )  # fmt: skip


def memory(meminfo: str | None) -> Fields:
    found = dict(re.findall(r"^(\w+):\s+(\d{1,15}) kB", meminfo or "", re.MULTILINE | re.ASCII))
    names = {"MemTotal": "memory_bytes", "MemAvailable": "memory_available_bytes", "SwapTotal": "swap_bytes"}
    return {field: int(found[name]) * 1024 for name, field in names.items() if name in found}


def disks(text: str | None) -> Fields:
    """Blocks of '@PATH writable' and what `df -Pk` prints of it."""
    out = []
    for block in re.split(r"^@", text or "", flags=re.MULTILINE)[1:]:
        asked, _, table = block.partition("\n")
        path, _, mode = asked.rpartition(" ")
        numbers = re.search(r"\s(\d{1,18})\s+(?:\d{1,18})\s+(-?\d{1,18})\s+\S+\s+/", table, re.ASCII)
        total, free = numbers.groups() if numbers else (None, None)
        if path.startswith("/"):
            out.append(Disk(
                path=path, total_bytes=int(total) * 1024 if total else None,
                free_bytes=max(0, int(free)) * 1024 if free else None,
                writable={"writable": True, "read-only": False}.get(mode),
            ))  # fmt: skip
    return _said(disks=tuple(out) or None)


def python(text: str | None) -> Fields:
    """The last line that is a JSON object, after whatever a device's own start-up prints."""
    for line in reversed((text or "").splitlines()):
        try:
            said = json.loads(line) if line.startswith("{") else None
        except (ValueError, RecursionError):
            continue
        if isinstance(said, dict):
            packages = said.get("packages")
            known = packages.items() if isinstance(packages, dict) else ()
            return _said(
                python=_text(said.get("python")), torch_cuda=_text(said.get("torch_cuda")),
                emulated=_text(said.get("emulated")),
                packages={name: version for name, version in sorted(known) if _text(version)} or None,
            )  # fmt: skip
    return {}


def user(text: str | None) -> Fields:
    return _said(user=_line(text))


def shell(text: str | None) -> Fields:
    return _said(shell=_line(text))


def home(text: str | None) -> Fields:
    return _said(home=_line(text))


def commands(which: str | None) -> Fields:
    paths = [line for line in (which or "").splitlines() if line.startswith("/")]
    found: dict[str, str] = {}
    for path in paths:
        found.setdefault(path.rpartition("/")[2], path)
    return _said(commands=found or None)


def container(marks: str | None, small: Mapping[str, str], cgroup: str | None) -> Fields:
    """By the mark of its engine, what systemd was told, or the groups of process 1."""
    marks = marks or ""
    if "/run/.containerenv" in marks:
        return {"container": "podman"}
    if "/.dockerenv" in marks:
        return {"container": "docker"}
    told = _line(small.get("/run/systemd/container"))
    found = re.search(r"\b(docker|libpod|lxc|kubepods)\b", cgroup or "")
    named = {"libpod": "podman", "kubepods": "kubernetes"}
    return _said(container=told or (named.get(found.group(1), found.group(1)) if found else None))


def emulated(uname_text: str | None, cpuinfo: str | None, virt: str | None, marks: str | None) -> Fields:
    """qemu-user: an ARM kernel that counts x86 processors. qemu-system: what systemd says of it, or its fw-cfg.

    On ARM a guest of KVM has fw-cfg too: what was timed in a virtual machine is no device's latency either.
    """
    arch = uname(uname_text).get("arch")
    first = (_processors(cpuinfo) or [{}])[0]
    if arch in ("aarch64", "armv7l", "armv8l") and "vendor_id" in first and "flags" in first:
        return {"emulated": "qemu-user"}
    if _line(virt) == "qemu" or "fw-cfg" in (marks or ""):
        return {"emulated": "qemu-system"}
    return {}


def clock_skew_s(begin: str | None, end: str | None, asked_s: tuple[float, float] | None) -> float | None:
    """The middle of what the device's clock said, less the middle of the round trip by ours; in seconds.

    busybox's `date` has no fractions: half a second is then the best guess.
    """
    said = [_moment(text) for text in (begin, end)]
    if asked_s is None or None in said:
        return None
    return round(sum(said) / 2 - sum(asked_s) / 2, 2)


def _moment(text: str | None) -> float | None:
    found = re.match(r"(\d{1,12})(\.\d{1,9})?", text or "", re.ASCII)
    return float(found.group(1)) + float(found.group(2) or 0.5) if found else None


def _processors(cpuinfo: str | None) -> list[dict[str, str]]:
    out: list[dict[str, str]] = []
    for block in re.split(r"\n\s*\n", cpuinfo or ""):
        pairs = [line.partition(":") for line in block.splitlines()]
        facts = {key.strip(): value.strip() for key, colon, value in pairs if colon}
        if "processor" in facts:
            out.append(facts)
    return out


def _cores(processors: list[dict[str, str]]) -> str | None:
    """'Denver 2 + Cortex-A57': ARM kernels name the instruction set, not the core."""
    names = []
    for facts in processors:
        numbers = [re.fullmatch(r"0x([0-9a-f]{1,4})", facts.get(k, ""), re.I) for k in ("CPU implementer", "CPU part")]
        if all(numbers):
            names.append(_CORES.get(tuple(int(n.group(1), 16) for n in numbers)))
    return " + ".join(dict.fromkeys(n for n in names if n)) or None


def _named(processors: list[dict[str, str]]) -> str | None:
    return next((p["model name"] for p in processors if p.get("model name")), None)


def _count(ranges: str | None) -> int | None:
    """How many '0-3,6' names; None where it is no list of processors."""
    text = (ranges or "").strip()
    if not re.fullmatch(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", text, re.ASCII):
        return None
    ends = [part.partition("-") for part in text.split(",")]
    return sum(max(0, int(last or first) - int(first) + 1) for first, _, last in ends) or None


def _line(text: str | None) -> str | None:
    lines = (text or "").strip().splitlines()
    return lines[-1].strip() or None if lines else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _said(**fields: Any) -> Fields:
    return {name: value for name, value in fields.items() if value is not None}
