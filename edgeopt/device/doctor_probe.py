"""What DeviceFacts do not say: a command that tries out, on the device, what the other verbs will do there.

It makes a folder of its own below the releases' root and one below the temporary folder, and removes both.
"""

from __future__ import annotations

from edgeopt.device.doctor_case import DEFAULT_ROOT, Probe
from edgeopt.errors import EdgeoptError
from edgeopt.ports.connection import Connection, script

# $1 the root, $2 the Python. Lines KEY=VALUE; every step that fails is one line less.
_TRY = r"""
LC_ALL=C; export LC_ALL
PATH=$PATH:/usr/sbin:/sbin
say() { printf '%s=%s\n' "$1" "$2"; }
yes_no() { key=$1; shift; if "$@" > /dev/null 2>&1; then say "$key" yes; else say "$key" no; fi; }
case $1 in "~") root=$HOME ;; "~/"*) root=$HOME/${1#??} ;; *) root=$1 ;; esac
at=$root
while [ -n "$at" ] && [ ! -d "$at" ]; do case $at in */*) at=${at%/*} ;; *) at=. ;; esac; done
at=${at:-/}
say root "$root"; say root_at "$at"
made= temporary=
trap 'rm -rf ${made:+"$made"} ${temporary:+"$temporary"}' EXIT
runs() { printf '#!/bin/sh\nexit 0\n' > "$2/run" && chmod +x "$2/run" && yes_no "$1" "$2/run"; }
writes() { printf x > "$2/full" && [ -s "$2/full" ] && say "$1" yes || say "$1" no; }
if made=$(mktemp -d "$at/.edgeopt-doctor-XXXXXX" 2> /dev/null); then
  writes root_writes "$made"; runs root_runs "$made"
else
  say complaint "$(mktemp -d "$at/.edgeopt-doctor-XXXXXX" 2>&1 | tail -n 1)"; say root_writes no; made=
fi
if temporary=$(mktemp -d 2> /dev/null); then
  writes tmp_writes "$temporary"; runs tmp_runs "$temporary"
else
  say tmp_writes no; temporary=
fi
for work in "$made" "$temporary"; do
  [ -n "$work" ] || continue
  mkdir "$work/a" "$work/b" && ln -s a "$work/new" && ln -s b "$work/old" &&
    yes_no renames mv -T "$work/new" "$work/old"
  yes_no locks flock -n "$work/lock" true
  printf abc > "$work/abc"
  for tool in "sha256sum" "shasum -a 256" "openssl dgst -sha256"; do
    case $($tool "$work/abc" 2> /dev/null) in
      *ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad*) say hashes yes; break ;;
    esac
  done
  break
done
hash_code='import hashlib, sys; sys.exit(hashlib.sha256(b"abc").hexdigest()[:8] != "ba7816bf")'
"$2" -c "$hash_code" > /dev/null 2>&1 && say hashes yes
{ tail -n +2 /proc/swaps | while read -r name rest; do say swap "$name"; done; } 2> /dev/null
command -v nvpmodel > /dev/null && yes_no sudo sudo -n nvpmodel -q
[ ! -r /sys/fs/selinux/enforce ] || say selinux "$(cat /sys/fs/selinux/enforce)"
for path in "$(command -v trtexec)" /usr/src/tensorrt/bin/trtexec; do
  [ ! -x "$path" ] || { say trtexec "$path"; break; }
done
known=$(ldconfig -p 2> /dev/null)
for name in libcuda libcudart libnvinfer; do
  case $known in *$name.so*) say library $name ;; esac
done
say groups "$(id -Gn 2> /dev/null)"
for node in /dev/nvmap /dev/nvidia0; do
  [ ! -e $node ] || { [ -r $node ] && [ -w $node ] && say gpu_node yes || say gpu_node no; break; }
done
limit=; command -v timeout > /dev/null && limit="timeout 60"
$limit "$2" -c 'import numpy' > /dev/null 2>&1
say numpy_status $?
"""

_BOOLS = (
    "root_writes", "root_runs", "tmp_writes", "tmp_runs", "renames", "locks", "hashes", "sudo", "gpu_node",
)  # fmt: skip
_TEXTS = ("root", "root_at", "complaint", "trtexec")


def probe(connection: Connection, *, root: str | None = None, python: str = "python3") -> Probe:
    """Try out what push, validate and activate do, in one command; nothing of it stays on the device.

    Raises HostError and its kind where the device cannot be reached, and TransferError where the link breaks.
    """
    done = connection.run(script(_TRY, root or DEFAULT_ROOT, python), timeout_s=120, check=False)
    return parse(done.text, done.noise.decode("utf-8", "replace"))


def parse(text: str, noise: str = "") -> Probe:
    """The lines of the command as a Probe; what is unknown or half a line is left out."""
    fields: dict[str, object] = {"noise": noise}
    many: dict[str, list[str]] = {"swap": [], "library": []}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if not equals:
            continue
        if key in _BOOLS:
            fields[key] = value == "yes"
        elif key in _TEXTS and value:
            fields[key] = value
        elif key in many:
            many[key].append(value)
        elif key == "selinux":
            fields[key] = value.strip() == "1"
        elif key == "groups":
            fields[key] = tuple(value.split())
        elif key == "numpy_status" and value.isdigit():
            fields[key] = int(value)
    if "hashes" not in fields and "root" in fields:
        fields["hashes"] = False
    return Probe(**fields, swaps=tuple(many["swap"]), libraries=tuple(many["library"]))


def second_session(connection: Connection) -> str:
    """'' where a command runs beside one that is held, as a push does; else the reason why not.

    To be asked last: a server that refused a session may take a moment to give the first one back.
    """
    try:
        with connection.hold(script("echo ready; cat > /dev/null")):
            connection.run(["true"])
    except EdgeoptError as why:
        return why.what
    return ""
