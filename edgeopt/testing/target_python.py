"""An interpreter with the target's torch on this machine: what `edgeopt build --target-python` asks for.

It is the arm64 root's Python, run by qemu-user, with a layer of old wheels; a board is not needed to have a TorchScript
file test-loaded by the torch that will load it.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from edgeopt.testing import arm64_root, virtual

# In a mount namespace of its own: nothing is left, and nothing is written but below $TMPDIR, which is the machine's.
_SCRIPT = """\
#!/bin/sh
# python3 (aarch64) of the virtual Jetson, by qemu-user; made by edgeopt.testing
temp=$(cd "${TMPDIR:-/tmp}" && pwd -P)
exec unshare --mount --fork --kill-child sh -c '
set -e
temp=$1 at=$2 layers=$3
shift 3
mount -t tmpfs -o mode=755 tmpfs "$at"
mkdir "$at/upper" "$at/work" "$at/root"
mount -t overlay -o "lowerdir=$layers,upperdir=$at/upper,workdir=$at/work" overlay "$at/root"
mount -t proc proc "$at/root/proc"
mount --rbind /dev "$at/root/dev"
mount --rbind /sys "$at/root/sys"
mkdir -p "$at/root$temp"
mount --bind "$temp" "$at/root$temp"
exec env TMPDIR="$temp" chroot "$at/root" /usr/bin/python3 "$@"
' sh "$temp" AT LAYERS "$@"
"""


def target_python(folder: Path, layers: tuple[Path, ...], cache: Path) -> Path:
    """A program in `folder` that is that Python, with the packages of `layers` (see `wheels.layer`).

    Needs root. It sees its own file system and this machine's folder of temporary files. Raises Unavailable.
    """
    virtual.unavailable()
    at = (folder / "target-root").resolve()
    at.mkdir(parents=True, exist_ok=True)
    below = ":".join(str(path.resolve()) for path in (*layers, arm64_root.arm64_root(cache)))
    path = folder / "target-python"
    path.write_text(_SCRIPT.replace("AT LAYERS", f"{shlex.quote(str(at))} {shlex.quote(below)}"))
    path.chmod(0o755)
    return path
