"""Commands of a Jetson that replay what was recorded of one: POSIX sh, placed into the virtual device.

nvpmodel's questions and complaints are those that NVIDIA's developer guide shows; tegrastats prints the recorded lines
over and over. They need root where the real ones do; `sudo` is a stand-in too, since qemu-user gives no one root.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from edgeopt.testing import recorded_trtexec
from edgeopt.testing.faults import Faults

HERE = "/usr/share/virtual-device"  # the recorded lines, on the device

_ROOT = """\
as_root() { [ "$(id -u)" = 0 ] || [ -n "${VIRTUAL_DEVICE_SUDO:-}" ]; }
"""

_TEGRASTATS = """\
#!/bin/sh
# stand-in: replays recorded lines
AS_ROOT
interval=1000 log=
while [ $# -gt 0 ]; do
  case $1 in
    --interval) interval=$2; shift ;;
    --logfile) log=$2; shift ;;
    --readall | --verbose) ;;
    --stop) exit 0 ;;
    *) echo "tegrastats: unknown option $1" >&2; exit 1 ;;
  esac
  shift
done
NEEDS_ROOT
pause=$((interval / 1000)).$(printf %03d $((interval % 1000)))
[ -z "$log" ] || exec >> "$log"
while :; do
  while IFS= read -r line; do
    printf '%s\\n' "$line" || exit 0
    sleep "$pause"
  done < HERE/tegrastats
done
"""

_TEGRASTATS_NEEDS_ROOT = """\
as_root || { echo "tegrastats: must be run as root" >&2; exit 1; }
"""

# A switch is written to the status file that the real one keeps, which names the mode by its id.
_NVPMODEL = """\
#!/bin/sh
# stand-in: the recorded modes, and a mode that is kept in the status file
AS_ROOT
conf=/etc/nvpmodel.conf status=/var/lib/nvpmodel/status
ids() { sed -n 's/.*POWER_MODEL ID=\\([0-9]*\\) NAME=\\([^ >]*\\).*/\\1 \\2/p' "$conf"; }
now() { sed -n 's/.*pmode:0*\\([0-9][0-9]*\\).*/\\1/p' "$status"; }
say() {
  grep '^NV Fan Mode' HERE/nvpmodel
  id=$(now)
  echo "NV Power Mode: $(ids | sed -n "s/^$id //p")"
  echo "$id"
}
case ${1:-} in
  -q | --query) say ;;
  -p | --parse) ids | while read -r id name; do echo "NVPM VERB: POWER_MODEL: ID=$id NAME=$name"; done ;;
  -m | --mode)
    as_root || { echo "NVPM ERROR: Error opening $status: Permission denied"; exit 255; }
    ids | grep -q "^$2 " || { echo "NVPM ERROR: invalid mode id $2"; exit 255; }
    SWITCH
    ;;
  *) echo "usage: nvpmodel -q | -p --verbose | -m ID" >&2; exit 1 ;;
esac
"""

_OBEYS = """fan=$(sed -n 's/.* fmode:/ fmode:/p' "$status"); printf 'pmode:%04d%s\\n' "$2" "$fan" > "$status" """
_SWITCHES = {
    "obeys": _OBEYS,
    "keeps": "exit 0",
    "reboot": f"""\
if [ "$2" != "$(now)" ]; then
      echo "NVPM WARN: Reboot required for changing to this power mode: $2"
      echo "NVPM WARN: DO YOU WANT TO REBOOT NOW? enter YES/yes to confirm:"
      read -r answer
      case $answer in
        YES | yes) {_OBEYS} ;;
        *) echo "NVPM ERROR: optMask is 1, no request for power mode"; exit 255 ;;
      esac
    fi""",
}

_JETSON_CLOCKS = """\
#!/bin/sh
# stand-in: what was set is kept in a file
AS_ROOT
kept=/var/lib/nvpmodel/clocks
as_root || { echo "Be root to run this script" >&2; exit 1; }
case ${1:-} in
  --show) cat "$kept" ;;
  --store) cat "$kept" > "${2:-/root/l4t_dfs.conf}" ;;
  --restore) [ -r "${2:-/root/l4t_dfs.conf}" ] && cat "${2:-/root/l4t_dfs.conf}" > "$kept" ;;
  "") echo maximum > "$kept" ;;
  *) echo "usage: jetson_clocks [--show|--store FILE|--restore FILE]" >&2; exit 1 ;;
esac
"""

_SUDO = """\
#!/bin/sh
# stand-in: the stand-ins above take its mark for root
ask=1 list=
while [ $# -gt 0 ]; do
  case $1 in
    -n | --non-interactive) ask= ;;
    -l | --list) list=1 ;;
    --) shift; break ;;
    -*) ;;
    *) break ;;
  esac
  shift
done
PASSWORD
if [ -n "$list" ]; then
  [ $# -eq 0 ] || command -v "$1"
  exit
fi
VIRTUAL_DEVICE_SUDO=1
export VIRTUAL_DEVICE_SUDO
exec "$@"
"""

_PASSWORD = """\
[ -z "$ask" ] && { echo "sudo: a password is required" >&2; exit 1; }
echo "sudo: a terminal is required to read the password" >&2; exit 1
"""


def write(root: Path, recording: Path, faults: Faults) -> None:
    """The stand-ins, into `root`, as far as the recorded device has the commands and `faults` leaves them there."""
    commands = recording / "commands"
    if (commands / "tegrastats").exists() and faults.tegrastats != "missing":
        needs = _TEGRASTATS_NEEDS_ROOT if faults.tegrastats == "root" else ""
        _place(root, "usr/bin/tegrastats", _TEGRASTATS.replace("NEEDS_ROOT", needs))
        _keep(root, commands / "tegrastats")
    if (commands / "nvpmodel").exists():
        if faults.nvpmodel != "missing":
            _place(root, "usr/sbin/nvpmodel", _NVPMODEL.replace("SWITCH", _SWITCHES[faults.nvpmodel]))
            _place(root, "usr/bin/jetson_clocks", _JETSON_CLOCKS)
        _keep(root, commands / "nvpmodel")
        _writable(root, "var/lib/nvpmodel/status", f"pmode:{_id(commands / 'nvpmodel'):04d}\n")
        _writable(root, "var/lib/nvpmodel/clocks", "as the mode says\n")
    _write_trtexec(root, recording)
    if faults.sudo != "missing":
        _place(root, "usr/bin/sudo", _SUDO.replace("PASSWORD\n", _PASSWORD if faults.sudo == "password" else ""))


def _write_trtexec(root: Path, recording: Path) -> None:
    """trtexec of the recorded TensorRT; it runs ONNX files by onnxruntime, and says that it is simulated."""
    header = recording / "files/usr/include/aarch64-linux-gnu/NvInferVersion.h"
    if not header.exists():
        return
    numbers = dict(re.findall(r"define NV_TENSORRT_(MAJOR|MINOR|PATCH) (\d+)", header.read_text()))
    version = ".".join(numbers[part] for part in ("MAJOR", "MINOR", "PATCH"))
    _keep(root, Path(recorded_trtexec.__file__))
    settings = root / HERE.lstrip("/") / "trtexec.json"
    settings.write_text(json.dumps({"version": version, "until": None, "fail": None}))
    words = f'exec python3 {HERE}/recorded_trtexec.py {HERE}/trtexec.json "$@"'
    _place(root, "usr/src/tensorrt/bin/trtexec", f"#!/bin/sh\n{words}\n")


def _id(recorded: Path) -> int:
    return int(recorded.read_text().split()[-1])


def _place(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace("AS_ROOT\n", _ROOT).replace("HERE", HERE))
    path.chmod(0o755)


def _keep(root: Path, recorded: Path) -> None:
    path = root / HERE.lstrip("/") / recorded.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(recorded.read_bytes())


def _writable(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_text(text)
    path.chmod(0o666)
