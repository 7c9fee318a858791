"""Tier 2: a whole arm64 machine under qemu-system, with a kernel, a device tree and an ext4 disk of its own.

Its power is cut by killing the emulator: what its kernel had not written to the disk is lost, as on a board.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from edgeopt.digest import of_value
from edgeopt.errors import HostError, UsageError
from edgeopt.ports import emulation
from edgeopt.testing import arm64_root, reach
from edgeopt.testing.cpio import initramfs
from edgeopt.testing.faults import Faults
from edgeopt.testing.recordings import Recording
from edgeopt.testing.stand_ins import HERE

EMULATOR = "qemu-system-aarch64"
KERNEL = "linux-image-cloud-arm64"
_NEEDED = (
    (EMULATOR, "qemu-system-arm"), ("fdtput", "device-tree-compiler"), ("setpriv", "util-linux"),
    ("mkfs.ext4", "e2fsprogs"), ("mmdebstrap", "mmdebstrap"),
)  # fmt: skip
_DISK_MB = 2048
_MEMORY_MB = 1024
_BOOT_S = 300
_MODULES = ("virtio", "virtio_ring", "virtio_mmio", "virtio_blk", "failover", "net_failover", "virtio_net")  # in order

_FIRST = f"""\
#!/bin/busybox sh
for each in proc sys dev root; do busybox mkdir -p /$each; done
busybox mount -t proc proc /proc
busybox mount -t sysfs sysfs /sys
busybox mount -t devtmpfs dev /dev
for each in {" ".join(_MODULES)}; do busybox insmod /modules/$each.ko; done
tries=0
while [ ! -b /dev/vda ] && [ $tries -lt 600 ]; do busybox sleep 0.1; tries=$((tries + 1)); done
busybox mount -t ext4 /dev/vda /root
for each in proc sys dev; do busybox mount --move /$each /root/$each; done
exec busybox switch_root /root /sbin/virtual-device-init
"""

# 10.0.2.15 and .2 are the addresses that qemu's user network gives (qemu's manual, 'Using the user mode network stack')
_INIT = """\
#!/bin/sh
PATH=/usr/sbin:/usr/bin:/sbin:/bin; export PATH
busybox mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/sshd /dev/pts /dev/shm
busybox mount -t devpts devpts /dev/pts
busybox mount -t tmpfs -o mode=1777 tmpfs /dev/shm
for each in cpuinfo meminfo; do
  [ ! -f HERE/proc/$each ] || busybox mount -o bind HERE/proc/$each /proc/$each
done
hostname -F /etc/hostname
busybox ip link set lo up
busybox ip link set eth0 up
busybox ip addr add 10.0.2.15/24 dev eth0
busybox ip route add default via 10.0.2.2
/usr/sbin/sshd -f /etc/ssh/virtual_device_config
while :; do sleep 3600 & wait; done
"""


class Machine:
    """A machine that runs or is off. Its disk stays as it was until `folder` is deleted."""

    def __init__(self, folder: Path, kernel: Path, port: int, *, detached: bool):
        self.folder, self.kernel, self.port, self.detached = folder, kernel, port, detached
        self._process: subprocess.Popen | None = None

    def start(self, _: object = None) -> None:
        """Boot it and wait until sshd answers; HostError with its console's last lines where it does not."""
        console = self.folder / "console.log"
        argv = [
            *([] if self.detached else ["setpriv", "--pdeathsig", "KILL"]),
            EMULATOR, "-machine", "virt", "-cpu", "cortex-a72", "-smp", "2", "-m", str(_MEMORY_MB), "-nodefaults",
            "-display", "none", "-serial", f"file:{console}",
            "-kernel", str(self.kernel / "vmlinuz"), "-initrd", str(self.kernel / "initrd.gz"),
            "-dtb", str(self.folder / "machine.dtb"), "-append", "console=ttyAMA0 quiet panic=-1 rw",
            "-drive", f"file={self.folder / 'disk.img'},format=raw,if=none,id=disk",
            "-device", "virtio-blk-device,drive=disk",
            "-netdev", f"user,id=net,restrict=on,hostfwd=tcp:127.0.0.1:{self.port}-:22",
            "-device", "virtio-net-device,netdev=net",
        ]  # fmt: skip
        with open(self.folder / "device.log", "ab") as out:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        if not reach.answers(self.port, within_s=_BOOT_S, alive=lambda: self._process.poll() is None):
            self.stop()
            logs = [path.read_text(errors="replace").strip() for path in (self.folder / "device.log", console)
                    if path.exists()]  # fmt: skip
            said = " / ".join("\n".join(logs).splitlines()[-3:])
            raise HostError(f"the machine does not boot: {said}", where=str(console), todo="see its console there")

    @property
    def pid(self) -> int | None:
        """Of the emulator; None where the machine is off."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def stop(self) -> None:
        """Cut its power. Twice does nothing."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(timeout=10)

    def signal(self, number: int) -> None:
        """Send a signal to the emulator: SIGSTOP freezes the machine."""
        if self._process:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)


def unavailable() -> str:
    """The emulator's version; HostError, in one sentence, where tier 2 cannot be had."""
    for program, package in _NEEDED:
        if shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None:
            raise HostError(f"{program} is not installed", where="this machine", todo=f"apt install {package}")
    done = arm64_root.run([EMULATOR, "--version"], "a machine", todo="apt install qemu-system-arm")
    return emulation.parse_version(done.stdout.decode()) or "(version?)"


def make(
    recorded: Recording, faults: Faults, layers: tuple[Path, ...], cache: Path, folder: Path, write_device, *,
    detached: bool,
) -> Machine:  # fmt: skip
    """A machine that is off, its disk fresh. `write_device(root, below, mark)` makes the root into the device."""
    cannot = faults.machine_cannot()
    if cannot:
        raise UsageError(f"a machine of tier 2 has no {', '.join(cannot)}", where="Faults", todo="take tier 1")
    version = unavailable()
    below, kernel = arm64_root.arm64_root(cache), _kernel(cache)
    reach.make_keys(folder)
    port = reach.free_port()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        root = Path(scratch) / "root"
        for layer in (below, *reversed(layers)):
            subprocess.run(["cp", "-a", "--reflink=auto", f"{layer}/.", str(root)], check=True)
        _write(root, folder, write_device(root, below, {"tier": 2, "emulator": f"qemu-system {version}"}), faults)
        image = folder / "disk.img"
        image.unlink(missing_ok=True)
        with open(image, "wb") as file:
            file.truncate(_DISK_MB << 20)
        argv = ["mkfs.ext4", "-q", "-F", "-d", str(root), str(image)]
        arm64_root.run(argv, "the machine's disk", todo="apt install e2fsprogs")
    _device_tree(recorded, folder / "machine.dtb")
    return Machine(folder, kernel, port, detached=detached)


def _write(root: Path, folder: Path, below_proc: dict[str, Path], faults: Faults) -> None:
    """What only a machine has: its first program, its sshd's keys, and the recorded files that it puts over /proc."""
    for name, path in below_proc.items():
        kept = root / HERE.lstrip("/") / "proc" / name
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, kept)
    init = root / "sbin/virtual-device-init"
    init.write_text(_INIT.replace("HERE", HERE))
    init.chmod(0o755)
    shutil.rmtree(root / "sys")  # the kernel's own is mounted there
    (root / "sys").mkdir()
    if faults.no_python:
        for path in (root / "usr/bin").glob("python*"):
            path.unlink()
    ssh = root / "etc/ssh"
    shutil.copyfile(folder / "host_key", ssh / "virtual_device_host_key")
    (ssh / "virtual_device_host_key").chmod(0o600)
    reach.allow(folder, ssh / "virtual_device_keys")
    lines = [
        *faults.sshd,
        "HostKey /etc/ssh/virtual_device_host_key",
        "AuthorizedKeysFile /etc/ssh/virtual_device_keys",
        "SetEnv PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PasswordAuthentication no",
        "ChallengeResponseAuthentication no",
        "UsePAM no",
        "StrictModes no",
        "UseDNS no",
        "PrintMotd no",
        *(["Subsystem sftp internal-sftp"] if faults.sftp else []),
    ]
    (ssh / "virtual_device_config").write_text("\n".join(lines) + "\n")


def _kernel(cache: Path) -> Path:
    """A cached folder with `vmlinuz` and `initrd.gz`."""
    key = of_value({"package": KERNEL, "suite": arm64_root.SUITE, "first": _FIRST, "version": 1})
    return arm64_root.cached(cache / "kernels" / key[:16], lambda folder: _fill_kernel(folder, cache))


def _fill_kernel(folder: Path, cache: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        root = Path(scratch) / "root"
        argv = [
            "mmdebstrap", "--quiet", "--mode=root", "--arch=arm64", "--variant=extract", f"--include={KERNEL}",
            arm64_root.SUITE, str(root), arm64_root.MIRROR,
        ]  # fmt: skip
        arm64_root.run(argv, "the machine's kernel", todo="see that the mirror can be reached")
        shutil.copyfile(next((root / "boot").glob("vmlinuz-*")), folder / "vmlinuz")
        found = {path.stem: path for path in (root / "lib/modules").rglob("*.ko")}
        files = {f"modules/{name}.ko": found[name].read_bytes() for name in _MODULES}
        files |= {"init": _FIRST.encode(), "bin/busybox": (arm64_root.arm64_root(cache) / "bin/busybox").read_bytes()}
        (folder / "initrd.gz").write_bytes(initramfs(files, {"bin/sh": "busybox"}))


def _device_tree(recorded: Recording, path: Path) -> None:
    """qemu's own device tree, with the recorded model, and the recorded compatible list before qemu's."""
    todo = "apt install qemu-system-arm device-tree-compiler"
    dump = [EMULATOR, "-machine", f"virt,dumpdtb={path}", "-cpu", "cortex-a72", "-smp", "2", "-m", str(_MEMORY_MB)]
    arm64_root.run([*dump, "-nodefaults", "-net", "none", "-display", "none"], "the device tree", todo=todo)
    tree = recorded.folder / "files/sys/firmware/devicetree/base"
    for name, more in (("model", []), ("compatible", ["linux,dummy-virt"])):
        if (tree / name).exists():
            words = [*filter(None, (tree / name).read_text().split("\0")), *more]
            arm64_root.run(["fdtput", "-t", "s", str(path), "/", name, *words], "the device tree", todo=todo)
