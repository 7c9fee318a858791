"""What facts are read from, gathered in one round trip: a literal table of files and commands, and the script for it.

The script is POSIX sh and needs nothing but `head` and `grep`. Each answer stands between lines that begin with a
random boundary, so that what a device's files and tools print, its shell's greeting too, cannot be taken for another
answer. Each command has a time limit of its own (by `timeout`, else by a shell that waits beside it) and its output a
largest size. What a hanging tool keeps from us is missing, and nothing else is.
"""

from __future__ import annotations

import fnmatch
import inspect
import re
import secrets
import shlex
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from edgeopt.errors import DeviceError
from edgeopt.onboard import environment
from edgeopt.ports.connection import Connection, script

MAX_BYTES = 1 << 16  # of one answer; of sysfs' small files the kernel gives a page each
LIMIT_S = 10  # of one command: an emulated device under load takes a second for each
ALL_S = 120  # for all of it; a device whose tools all hang is told by what came


class File(NamedTuple):
    """The first of `paths` that can be read."""

    name: str
    paths: tuple[str, ...]


class Values(NamedTuple):
    """All files that fit `globs`, each a short text, as {path: text}."""

    name: str
    globs: tuple[str, ...]


class Names(NamedTuple):
    """Which paths fit `globs`, one a line."""

    name: str
    globs: tuple[str, ...]


class Command(NamedTuple):
    """What a command prints, where there is one."""

    name: str
    argv: tuple[str, ...]
    limit_s: int = LIMIT_S


_TREE = ("/sys/firmware/devicetree/base", "/proc/device-tree")  # a chroot's /proc has none
_INCLUDE = (
    "/usr/include",
    "/usr/include/aarch64-linux-gnu",
    "/usr/include/x86_64-linux-gnu",
    "/usr/local/cuda/include",
)
_LIB = ("/usr/lib/aarch64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/usr/local/cuda/lib64")
_SMI = "name,compute_cap,driver_version,memory.total,clocks.gr,clocks.max.gr,temperature.gpu"
# drivers before 510 know no compute_cap and refuse the whole question; a call without persistence takes a second
_ASK_SMI = (
    f"said=$(nvidia-smi --query-gpu={_SMI} --format=csv,noheader,nounits) && printf '%s\\n' \"$said\""
    " || nvidia-smi --query-gpu=name --format=csv,noheader,nounits"
)
_PACKAGES = (
    "nvidia-l4t-core",
    "nvidia-jetpack",
    "libnvinfer[0-9]*",
    "libnvinfer-bin",
    "libcudnn[0-9]*",
    "cuda-cudart-[0-9]*",
)

# what `which` looks for: what the other verbs use there
KNOWN_COMMANDS = (
    "flock", "sha256sum", "shasum", "timeout", "python3", "sudo", "rsync", "zstd", "ssh-keygen", "systemctl",
    "nvpmodel", "jetson_clocks", "tegrastats", "nvidia-smi", "nvcc", "trtexec", "docker", "podman", "buildah",
    "nvidia-ctk",
)  # fmt: skip

# Ordered: what is cheap and cannot hang comes first. `user`, `shell`, `home`, `date`, `which`, `df` and `python` are
# the script's own.
SOURCES: tuple[File | Values | Names | Command, ...] = (
    File("model", tuple(f"{at}/model" for at in _TREE)),
    File("compatible", tuple(f"{at}/compatible" for at in _TREE)),
    File("chip-id", ("/sys/module/tegra_fuse/parameters/tegra_chip_id",)),
    File("soc-id", ("/sys/devices/soc0/soc_id",)),
    File("release", ("/etc/nv_tegra_release",)),
    File("os-release", ("/etc/os-release", "/usr/lib/os-release")),
    File("cpuinfo", ("/proc/cpuinfo",)),
    File("meminfo", ("/proc/meminfo",)),
    File("cgroup", ("/proc/1/cgroup",)),
    File("nvpmodel-conf", ("/etc/nvpmodel.conf",)),
    File("nvpmodel-status", ("/var/lib/nvpmodel/status",)),
    File("cuda", ("/usr/local/cuda/version.json", "/usr/local/cuda/version.txt")),
    File("cudnn-header", tuple(f"{at}/{name}" for name in ("cudnn_version.h", "cudnn_version_v9.h", "cudnn.h")
                               for at in _INCLUDE)),
    File("tensorrt-header", tuple(f"{at}/NvInferVersion.h" for at in _INCLUDE)),
    Names("libraries", tuple(f"{at}/{name}.so.*" for at in _LIB for name in ("libnvinfer", "libcudnn"))),
    Names("marks", ("/.dockerenv", "/run/.containerenv", *(f"{at}/fw-cfg*" for at in _TREE))),
    Values("small", ("/run/systemd/container", "/sys/class/dmi/id/sys_vendor", "/sys/class/dmi/id/product_name",
                     "/sys/devices/system/cpu/present", "/sys/devices/system/cpu/online")),
    Values("cpufreq", ("/sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq",
                       "/sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_max_freq")),
    Values("devfreq", ("/sys/class/devfreq/*/cur_freq", "/sys/class/devfreq/*/max_freq")),
    Values("emc", ("/sys/kernel/debug/bpmp/debug/clk/emc/rate", "/sys/kernel/debug/bpmp/debug/clk/emc/max_rate")),
    Values("thermal", ("/sys/class/thermal/thermal_zone*/type", "/sys/class/thermal/thermal_zone*/temp")),
    Values("hwmon-rails", ("/sys/bus/i2c/drivers/ina3221*/*/hwmon/hwmon*/in[1-6]_label",
                           "/sys/bus/i2c/drivers/ina3221*/*/hwmon/hwmon*/in[1-6]_input",
                           "/sys/bus/i2c/drivers/ina3221*/*/hwmon/hwmon*/curr[1-6]_input")),
    Values("iio-rails", ("/sys/bus/i2c/drivers/ina3221*/*/iio:device*/rail_name_[0-9]*",
                         "/sys/bus/i2c/drivers/ina3221*/*/iio:device*/in_power[0-9]*_input")),
    Values("rapl", ("/sys/class/powercap/intel-rapl:*/energy_uj",)),
    Command("uname", ("uname", "-srm")),
    Command("getconf", ("getconf", "GNU_LIBC_VERSION")),
    Command("detect-virt", ("systemd-detect-virt", "--vm")),
    Command("dpkg", ("dpkg-query", "-W", "-f", "${db:Status-Abbrev} ${Package} ${Version}\\n", *_PACKAGES)),
    Command("nvpmodel", ("nvpmodel", "-q")),
    Command("nvidia-smi", ("sh", "-c", _ASK_SMI), 15),
    Command("nvidia-smi-version", ("nvidia-smi",), 15),
)  # fmt: skip
# {"python", "packages", "torch_cuda", "emulated"} of the device's Python, by the runner's own code
_PYTHON = """
import json
_d = describe()
print(json.dumps({"python": _d["python"], "packages": _d["runtimes"], "torch_cuda": torch_cuda(),
                  "emulated": _d.get("emulated")}))
"""

# $1 the boundary, $2 the folder of the releases, $3 the Python, $4 the code for it
_HEAD = r"""
LC_ALL=C; export LC_ALL
PATH=$PATH:/usr/local/bin:/usr/sbin:/sbin:/usr/local/cuda/bin:/usr/src/tensorrt/bin; export PATH
exec 2>/dev/null </dev/null
b=$1 root=$2 python=$3 code=$4
case $root in "~"|"~/"*) root=$HOME${root#"~"};; esac
case $python in "~/"*) python=$HOME${python#"~"};; esac
limit=
if timeout -s KILL 5 true; then limit="timeout -s KILL"
elif timeout -s KILL -t 5 true; then limit="timeout -s KILL -t"; fi
run() {
  s=$1; shift
  if [ -n "$limit" ]; then $limit "$s" "$@"; return; fi
  "$@" & p=$!
  ( sleep "$s"; kill -9 "$p" ) >/dev/null & w=$!
  wait "$p"; kill "$w"
}
frame() { printf '\n%s %s\n' "$b" "$1"; }
file() { n=$1; shift; for p; do if [ -f "$p" ] && [ -r "$p" ]; then frame "$n"; head -c MAX "$p"; return; fi; done; }
values() {
  n=$1; shift
  for p; do if [ -e "$p" ]; then frame "$n"; run LIMIT grep '' /dev/null "$@"; return; fi; done
}
names() { frame "$1"; shift; for p; do [ ! -e "$p" ] || printf '%s\n' "$p"; done; }
ask() { n=$1 t=$2; shift 2; if command -v "$1" >/dev/null; then frame "$n"; run "$t" "$@" | head -c MAX; fi; }
disk() {
  q=$1
  while [ ! -e "${q:-/}" ]; do case $q in */*) q=${q%/*};; *) q=.;; esac; done
  q=${q:-/}
  [ -w "$q" ] && w=writable || w=read-only
  printf '@%s %s\n' "$1" "$w"; run LIMIT df -Pk "$q"
}
frame date; date +%s.%N
frame user; id -un
frame shell; printf '%s\n' "$SHELL"
frame home; printf '%s\n' "$HOME"
frame which; for c in KNOWN; do command -v "$c"; done
"""
_TAIL = r"""
frame df; for d in "$root" "$HOME" /tmp; do disk "$d"; done
ask python 30 "$python" -c "$code"
frame date-end; date +%s.%N
frame end
"""


@dataclass(frozen=True)
class Answers:
    """What a device answered, by the names of `SOURCES`. `asked_s`: our clock before and after, None of a recording."""

    texts: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    asked_s: tuple[float, float] | None = None

    def of(self, name: str) -> str | Mapping[str, str] | None:
        """The text of a file or command (None where there is none), or the {path: text} of `Values`."""
        if any(isinstance(s, Values) and s.name == name for s in SOURCES):
            return self.values.get(name, {})
        return self.texts.get(name)


def ask(connection: Connection, *, python: str = "python3", root: str | None = None) -> Answers:
    """All of `SOURCES` from the device, in one command.

    `root`: where releases lie there. DeviceError where the device runs no `sh` that answers; what a tool that hangs
    would have said is missing.
    """
    boundary = secrets.token_hex(16)
    code = inspect.getsource(environment) + _PYTHON
    argv = script(_script(), boundary, root or "~/.edgeopt", python, code)
    with tempfile.TemporaryFile() as sink:
        begin = time.time()
        try:
            connection.run(argv, stdout=sink, timeout_s=ALL_S, check=False)
        except DeviceError:  # some tool cannot even be killed: what came before it is still true
            if not sink.tell():
                raise
        end = time.time()
        sink.seek(0)
        found = frames(sink.read(), boundary)
    if not found:
        raise DeviceError(
            "the device's sh answered nothing", where=connection.label, todo="try there: sh -c 'echo ready'"
        )
    return answers(found, (begin, end))


def answers(found: Mapping[str, bytes], asked_s: tuple[float, float] | None = None) -> Answers:
    """Answers from what each name's frame holds."""
    tables = {source.name: source for source in SOURCES if isinstance(source, Values)}
    texts = {name: data.decode("utf-8", "replace") for name, data in found.items()}
    values = {name: _by_path(texts[name], source.globs) for name, source in tables.items() if name in texts}
    return Answers({n: t for n, t in texts.items() if n not in tables}, values, asked_s)


def recorded(folder: Path) -> Answers:
    """Answers as the device would give them that `folder` is a recording of (see testing/recordings/README.md)."""
    found = {path.name: path.read_bytes() for path in (folder / "commands").iterdir()}
    for source in SOURCES:
        if isinstance(source, Command):
            continue
        paths = [path for glob in source[1] for path in _matching(folder / "files", glob)]
        if isinstance(source, File) and paths:
            found[source.name] = paths[0][1].read_bytes()[:MAX_BYTES]
        elif isinstance(source, Values):
            lines = [f"{name}:{line}\n" for name, path in paths for line in path.read_text().splitlines()]
            found[source.name] = "".join(lines).encode()
        elif isinstance(source, Names):
            found[source.name] = "".join(f"{name}\n" for name, _ in paths).encode()
    return answers(found)


def frames(output: bytes, boundary: str) -> dict[str, bytes]:
    """{name: what stood in its frame} of the script's output; what comes before the first frame is noise."""
    found = {}
    for part in output.split(b"\n" + boundary.encode() + b" ")[1:]:
        name, newline, data = part.partition(b"\n")
        if newline:
            found.setdefault(name.decode("ascii", "replace"), data)
    return found


def _script() -> str:
    text = "\n".join([_HEAD, *(_line(source) for source in SOURCES), _TAIL])
    words = {"MAX": MAX_BYTES, "LIMIT": LIMIT_S, "KNOWN": " ".join(KNOWN_COMMANDS)}
    return re.sub(r"\b(MAX|LIMIT|KNOWN)\b", lambda found: str(words[found.group()]), text)


def _line(source: File | Values | Names | Command) -> str:
    if isinstance(source, Command):
        return " ".join(["ask", source.name, str(source.limit_s), *map(shlex.quote, source.argv)])
    kind = {File: "file", Values: "values", Names: "names"}[type(source)]
    return " ".join([kind, source.name, *source[1]])  # globs stay unquoted: the device's shell fills them in


def _by_path(text: str, globs: tuple[str, ...]) -> dict[str, str]:
    """{path: text} of grep's `path:line` lines. A path may hold ':' itself (iio:device0), hence the globs."""
    pattern = re.compile("|".join(f"(?:{_regex(glob)})" for glob in globs))
    found: dict[str, str] = {}
    for line in text.split("\n"):
        at = pattern.match(line)
        if at and line[at.end() : at.end() + 1] == ":":
            path, value = line[: at.end()], line[at.end() + 1 :]
            found[path] = f"{found[path]}\n{value}" if path in found else value
    return found


def _regex(glob: str) -> str:
    return (
        re.escape(glob).replace(r"\*", "[^/]*?").replace(r"\[0\-9\]", "[0-9]").replace(r"\[1\-6\]", "[1-6]") + "(?=:)"
    )


def _matching(files: Path, glob: str) -> list[tuple[str, Path]]:
    """[(path on the device, path here)] of the recorded files that fit, in the order of a shell's glob."""
    fixed = re.split(r"[*?\[]", glob)[0].rpartition("/")[0]
    below = files / fixed.lstrip("/")
    candidates = [below, *below.rglob("*")] if below.is_dir() else []
    names = {"/" + path.relative_to(files).as_posix(): path for path in candidates}
    depth = glob.count("/")
    return [(n, p) for n, p in sorted(names.items()) if n.count("/") == depth and fnmatch.fnmatchcase(n, glob)]
