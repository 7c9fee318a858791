"""Facts of a device: a literal ordered table of what each is read from and the pure parser that reads it.

The first row that says a field wins, so rows further down are what a device falls back to. What no row says is None or
empty. `read` gathers it all in one round trip, `recorded` from the files of a device that was seen.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from edgeopt.device import facts_board as board
from edgeopt.device import facts_machine as machine
from edgeopt.device import facts_sensors as sensors
from edgeopt.device import facts_sources as sources
from edgeopt.device.facts_sources import Answers
from edgeopt.ports.connection import Connection
from edgeopt.spec.facts import DeviceFacts


class Fact(NamedTuple):
    """Names of `facts_sources.SOURCES` (or of the script's own answers), and what makes fields of them."""

    sources: tuple[str, ...]
    parse: Callable[..., dict[str, Any]]


# fmt: off
FACTS: tuple[Fact, ...] = (
    Fact(("model",), board.model),
    Fact(("small",), board.desktop_model),
    Fact(("compatible", "chip-id", "soc-id"), board.soc),
    Fact(("model", "compatible", "chip-id", "soc-id"), board.module),
    Fact(("nvidia-smi",), board.gpus),
    Fact(("nvidia-smi",), board.gpu_names),
    Fact(("release",), board.l4t_release),
    Fact(("dpkg",), board.l4t_package),
    Fact(("release",), board.l4t_synthesized),
    Fact(("cuda",), board.cuda_file),
    Fact(("dpkg",), board.cuda_package),
    Fact(("nvidia-smi-version",), board.cuda_driver),
    Fact(("dpkg",), board.cudnn_package),
    Fact(("cudnn-header",), board.cudnn_header),
    Fact(("dpkg",), board.tensorrt_package),
    Fact(("tensorrt-header",), board.tensorrt_header),
    Fact(("libraries",), board.libraries),

    Fact(("uname",), machine.uname),
    Fact(("os-release",), machine.system),
    Fact(("getconf",), machine.libc),
    Fact(("cpuinfo", "small"), machine.cpu),
    Fact(("meminfo",), machine.memory),
    Fact(("df",), machine.disks),
    Fact(("python",), machine.python),
    Fact(("user",), machine.user),
    Fact(("shell",), machine.shell),
    Fact(("home",), machine.home),
    Fact(("which",), machine.commands),
    Fact(("marks", "small", "cgroup"), machine.container),
    Fact(("uname", "cpuinfo", "detect-virt", "marks"), machine.emulated),

    Fact(("nvpmodel", "nvpmodel-status", "nvpmodel-conf"), sensors.power_mode),
    Fact(("cpufreq",), sensors.cpu_clocks),
    Fact(("devfreq",), sensors.devfreq_clocks),
    Fact(("emc",), sensors.emc_clocks),
    Fact(("nvidia-smi",), sensors.smi_clocks),
    Fact(("thermal",), sensors.temperatures),
    Fact(("hwmon-rails",), sensors.hwmon_rails),
    Fact(("iio-rails",), sensors.iio_rails),
    Fact(("which", "hwmon-rails", "iio-rails", "thermal", "devfreq", "nvidia-smi", "rapl"), sensors.sensors),
)
# fmt: on


def read(connection: Connection, *, python: str = "python3", root: str | None = None) -> DeviceFacts:
    """The facts of the device behind `connection`, in one round trip.

    `python`: the interpreter whose packages count. `root`: where releases lie, for its disk. DeviceError where the
    device runs no `sh` that answers, HostError and TransferError as every command.
    """
    return of(sources.ask(connection, python=python, root=root))


def recorded(folder: Path) -> DeviceFacts:
    """The facts of the device that `folder` is a recording of."""
    return of(sources.recorded(folder))


def of(answers: Answers) -> DeviceFacts:
    """The facts that a device's answers hold."""
    found: dict[str, Any] = {}
    for fact in FACTS:
        for name, value in fact.parse(*map(answers.of, fact.sources)).items():
            if isinstance(value, dict) and isinstance(found.get(name), dict):
                found[name] = {**value, **found[name]}  # clocks, temperatures: by their own names
            else:
                found.setdefault(name, value)
    if "tensorrt" not in found and "tensorrt" in found.get("packages", {}):
        found["tensorrt"] = found["packages"]["tensorrt"]  # a wheel brings its own
    found["jetpack"] = board.jetpack_line(found.get("l4t"), found.get("module"))
    found["clock_skew_s"] = machine.clock_skew_s(answers.of("date"), answers.of("date-end"), answers.asked_s)
    return DeviceFacts(**found)
