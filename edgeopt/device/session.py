"""A device for the time of a build: looked at once, and given the files of each measurement that it lacks.

On this machine the files are used where they lie. Over SSH they lie in a folder of the build below `root`, which goes
with the connection: the process that holds it removes it when its stdin ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeopt import digest
from edgeopt.device import runner
from edgeopt.errors import DeviceError, ProfileError
from edgeopt.ports.connection import CommandEnded, Connection, script, transfer_error
from edgeopt.ports.local import LocalConnection
from edgeopt.ports.posix import EXPAND, with_functions
from edgeopt.spec.manifest import belongs_to
from edgeopt.spec.profile import Profile
from edgeopt.spec.profile_values import VNNI_FLAGS

# instructions that decide which kernels a runtime takes, as /proc/cpuinfo names them
KERNEL_FEATURES = (
    "avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8", "asimddp", "i8mm", "sve", *sorted(VNNI_FLAGS),
)  # fmt: skip

# $1 where releases lie. The folder is printed, kept while stdin is open, and then removed.
_HOLD = with_functions(
    EXPAND,
    text="""\
expand "$1"
mkdir -p "$root" && folder=$(mktemp -d "$root/.build-XXXXXX") || exit 1
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM PIPE
printf '%s\\n' "$folder"
cat > /dev/null
""",
)

# $1 the build's folder; stdin: "HASH PATH" lines. `now` holds the files of one measurement, as links; a file that it
# has no use for is removed, so that the disk holds one measurement's.
_LINK = """\
LC_ALL=C; export LC_ALL
cd "$1" && rm -rf now && mkdir now || exit 1
while IFS= read -r line; do
  hash=${line%% *} path=${line#* }
  case $path in */*) mkdir -p "now/${path%/*}" || exit 1 ;; esac
  ln "$hash" "now/$path" || exit 1
done
find . -maxdepth 1 -type f -links 1 -exec rm -f {} +
"""


@dataclass
class Device:
    """A device that is reached: `facts` as its runner gives them, `python` an interpreter there with the runtimes."""

    connection: Connection
    python: str
    facts: dict[str, Any]
    folder: str | None = None  # of the build, on another machine
    _sent: set[str] = field(default_factory=set)

    @property
    def label(self) -> str:
        return self.connection.label

    def holding(self, folder: Path, files: Iterable[str]) -> str:
        """The path of a folder there that holds `files` of `folder` under their names; only new contents travel."""
        if self.folder is None:
            return str(folder.resolve())
        names = {name: digest.of_file(folder / name) for name in sorted(set(files))}
        for name, sha256 in names.items():
            if sha256 not in self._sent:
                self.connection.put(folder / name, f"{self.folder}/{sha256}")
                self._sent.add(sha256)
        lines = "".join(f"{sha256} {name}\n" for name, sha256 in names.items())
        done = self.connection.run(script(_LINK, self.folder), stdin=lines.encode(), timeout_s=300, check=False)
        if done.status != 0:
            raise transfer_error(done, "cannot lay the files out", where=f"{self.label}:{self.folder}")
        self._sent = set(names.values())
        return f"{self.folder}/now"


@contextlib.contextmanager
def opened(connection: Connection, *, python: str, root: str) -> Iterator[Device]:
    """The device behind `connection` for the time of the block. Raises DeviceError, and what the connection raises."""
    facts = runner.environment(connection, python=python)
    if isinstance(connection, LocalConnection):
        yield Device(connection, python, facts)
        return
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(connection.hold(script(_HOLD, root)))
        except CommandEnded as ended:
            what = "cannot make a folder to measure in"
            raise transfer_error(ended.result, what, where=f"{connection.label}:{root}") from None
        yield Device(connection, python, facts, folder)


def files_of(folder: Path, names: Iterable[str]) -> list[str]:
    """The files of `folder` that `names` are, with external data of model files."""
    every = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return [name for name in every if any(belongs_to(name, wanted) for wanted in names)]


def target_facts(profile: Profile, facts: dict[str, Any], label: str) -> dict[str, str]:
    """Overrides of the profile's target, key -> YAML text, that a device's facts give; {} where they change nothing.

    Only a CPU target takes its instructions from the device; those of a GPU come from its module. Raises ProfileError
    where the device is of another architecture, DeviceError where it lacks an instruction that the profile asks for.
    """
    target, machine = profile.target, facts.get("machine")
    if machine != target.arch:
        raise ProfileError(
            f"{label} is {machine} and the profile '{profile.name}' is for {target.arch}", where="--on",
            todo="choose the profile of that device, or another device",
        )  # fmt: skip
    if target.kind != "cpu":
        return {}
    flags = set(facts.get("cpu_flags", ()))
    if lacking := [name for name in target.cpu_features if name not in flags]:
        raise DeviceError(
            f"its CPU has no {', '.join(lacking)}, which the profile '{profile.name}' asks for", where=label,
            todo="take them out of target.cpu_features, or choose another device",
        )  # fmt: skip
    found = [*target.cpu_features, *(name for name in KERNEL_FEATURES if name in flags - set(target.cpu_features))]
    return {"target.cpu_features": f"[{', '.join(found)}]"} if len(found) > len(target.cpu_features) else {}
