"""`virtual_device`: a Jetson for tests that no board is needed for, reached over SSH as one would be.

Tier 1 is a native sshd whose sessions run aarch64 programs in an arm64 root, with the sysfs, release file and commands
of a recorded device: up in about a second. Tier 2 is a whole arm64 machine under qemu-system, which can be rebooted
and whose power can be cut. Nothing that is timed on either says anything of a Jetson; both carry a mark that says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from edgeopt.errors import EdgeoptError, UsageError
from edgeopt.ports import emulation
from edgeopt.testing import arm64_root, machine, namespace, reach, stand_ins
from edgeopt.testing.faults import Faults
from edgeopt.testing.recordings import Recording, recording

DEFAULT_MODEL = "agx-xavier-r35"
ALIAS = "virtual-jetson"
MARK = "etc/edgeopt-virtual-device"


class Unavailable(EdgeoptError):
    """A virtual device cannot be made on this machine; the message says what is missing and how to get it."""


@dataclass
class VirtualDevice:
    """A device that runs. `host` with `config`, an ssh_config, reaches it; `folder` holds keys, logs, what it wrote."""

    model: str
    folder: Path
    port: int
    tier: int = 1
    faults: Faults = field(default_factory=Faults)
    host: str = ALIAS
    _runs: namespace.Namespace | machine.Machine | None = None
    _spec: namespace.Spec | None = None

    @property
    def config(self) -> Path:
        """The ssh_config in which `host` is this device."""
        return self.folder / "ssh_config"

    @property
    def root(self) -> Path:
        """Its file system as this machine sees it, while it runs: to look at and to break. Tier 1 only."""
        if self.tier != 1:
            raise UsageError(
                "the disk of a machine is read over SSH only", where="VirtualDevice.root", todo="use tier 1"
            )
        return Path(f"/proc/{self._runs.first}/root{namespace.ROOT}")

    @property
    def home(self) -> Path:
        """The home folder of its user, as this machine sees it."""
        return self.root / namespace.HOME

    @property
    def pid(self) -> int | None:
        """The process whose end ends the device; None where it is off."""
        return self._runs.pid

    def freeze(self) -> None:
        """Stop all that runs there, as a hung board does: connections stay open and say nothing."""
        self._runs.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._runs.signal(signal.SIGCONT)

    def power_cut(self) -> None:
        """End it at once, with every connection. What was written to its disk stays (tier 1 loses no cache)."""
        self._runs.stop()

    def boot(self) -> None:
        """Start it again after `power_cut`, with the same disk, keys and port; /tmp of a size and /run are empty."""
        self._runs.start(self._spec)

    def reboot(self) -> None:
        """`power_cut`, then `boot`."""
        self.power_cut()
        self.boot()


@contextlib.contextmanager
def virtual_device(
    model: str = DEFAULT_MODEL,
    *,
    tier: int = 1,
    faults: Faults | None = None,
    layers: tuple[Path, ...] = (),
    cache: Path | None = None,
    folder: Path | None = None,
) -> Iterator[VirtualDevice]:
    """A running device, ended and cleaned up with the block, however it ends.

    `model` is a name of `recordings.recordings()`; `layers` are further folders of files over the root, such as
    `wheels.layer` makes; `cache` keeps root and wheels between runs; `folder`, which is made and stays, is for its
    files, else a temporary one. Raises Unavailable where this machine cannot have one.
    """
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="virtual-device-")))
        device = start(model, tier=tier, faults=faults, layers=layers, cache=cache, folder=folder)
        stack.callback(device.power_cut)
        yield device


def start(
    model: str = DEFAULT_MODEL, *, tier: int = 1, faults: Faults | None = None, layers: tuple[Path, ...] = (),
    cache: Path | None = None, folder: Path, detached: bool = False,
) -> VirtualDevice:  # fmt: skip
    """As `virtual_device`, and whoever calls ends it. `detached`: it outlives this process."""
    if tier not in (1, 2):
        raise UsageError(f"no tier {tier}", where="virtual_device", todo="take 1 or 2")
    faults = faults or Faults()
    recorded = recording(model)
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    cache = (cache or arm64_root.default_cache()).resolve()
    device = VirtualDevice(model, folder, 0, tier, faults)
    if tier == 2:

        def write(root: Path, below: Path, mark: dict) -> dict[str, Path]:
            return write_device(root, recorded, faults, below, mark)

        device._runs = machine.make(recorded, faults, layers, cache, folder, write, detached=detached)
        device.port = device._runs.port
        reach.write_client_config(folder, device.port, ALIAS)
        device.boot()
        return device
    runs = unavailable()
    below = arm64_root.arm64_root(cache)
    device.port = reach.free_port()
    reach.make_keys(folder)
    reach.write_client_config(folder, device.port, ALIAS)
    device._runs = namespace.Namespace(folder, device.port)
    device._spec = _spec(device, recorded, below, layers, runs, detached)
    device.boot()
    return device


def unavailable() -> emulation.Emulation:
    """What runs aarch64 programs here; Unavailable, in one sentence, where tier 1 cannot be had."""
    if os.geteuid() != 0:
        raise Unavailable("a virtual device needs root, for mounts and namespaces", todo="run it as root")
    for program, package in (("sshd", "openssh-server"), ("ssh-keygen", "openssh-client"), ("unshare", "util-linux")):
        if shutil.which(program, path=f"{os.environ.get('PATH', '')}:{namespace.PATH}") is None:
            raise Unavailable(f"{program} is not installed", todo=f"apt install {package}")
    found = emulation.preflight()
    if found.problem:
        raise Unavailable(found.problem, where="this machine", todo=found.todo)
    return found


def _spec(
    device: VirtualDevice, recorded: Recording, below: Path, layers: tuple[Path, ...], runs: emulation.Emulation,
    detached: bool,
) -> namespace.Spec:  # fmt: skip
    faults, folder = device.faults, device.folder
    upper = folder / "disk"
    shutil.rmtree(upper, ignore_errors=True)  # of a device that was here before
    for path in (upper, folder / "work"):
        path.mkdir(exist_ok=True)
        path.chmod(0o755)
    below_proc = write_device(upper, recorded, faults, below, mark={"tier": 1, "emulator": f"qemu-user {runs.version}"})
    reach.allow(folder, upper / namespace.KEYS)
    argv = namespace.write_sshd_config(
        folder, device.port, kernel=recorded.kernel, settings=faults.sshd, sftp=faults.sftp, clock=faults.clock_offset_s
    )
    return namespace.Spec(
        root=namespace.ROOT,
        layers=(*map(str, layers), str(below)),
        upper=str(upper),
        work=str(folder / "work"),
        hostname=ALIAS,
        home=namespace.HOME,
        proc={name: str(path) for name, path in below_proc.items()},
        removed=("usr/bin/python3*", "usr/bin/python") if faults.no_python else (),
        read_only_home=faults.read_only_home,
        tmp_mb=faults.tmp_mb,
        disk_mb=faults.disk_mb,
        sshd=argv,
        until_stdin_ends=not detached,
    )


def write_device(root: Path, recorded: Recording, faults: Faults, below: Path, mark: dict) -> dict[str, Path]:
    """All that makes the plain arm64 `below` into the recorded device, into `root`; see Recording.write_files."""
    below_proc = recorded.write_files(root)
    cpus = root / "sys/devices/system/cpu"
    if (cpus / "present").exists() and not (cpus / "possible").exists():
        shutil.copyfile(cpus / "present", cpus / "possible")  # cpuinfo of torch and onnxruntime reads both
    stand_ins.write(root, recorded.folder, faults)
    path = root / MARK
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"model": recorded.name, **mark}) + "\n")
    passwd = (below / "etc/passwd").read_text()
    lines = [line.replace(":/bin/bash", f":{faults.shell}") if line.startswith("nvidia:") else line
             for line in passwd.splitlines()]  # fmt: skip
    (root / "etc/passwd").write_text("\n".join(lines) + "\n")
    (root / "etc/hostname").write_text(f"{ALIAS}\n")
    home = root / namespace.HOME
    home.mkdir(parents=True, exist_ok=True)
    if faults.noise is not None:
        (home / ".bashrc").write_text(f"echo '{faults.noise}'\n")
        fish = home / ".config/fish/config.fish"
        fish.parent.mkdir(parents=True)
        fish.write_text(f"echo '{faults.noise}'\n")
    for path in (home, *home.rglob("*")):
        os.chown(path, 1000, 1000)
    return below_proc
