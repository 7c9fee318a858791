"""Doctor's checks of the machine that builds: its facts, read by a few commands, and pure functions over them."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from edgeopt.device.doctor_case import Finding, Needs, Said, fail, ok, skip, warn
from edgeopt.errors import DeviceError
from edgeopt.onboard import environment
from edgeopt.ports import emulation as registered
from edgeopt.ports.connection import Connection
from edgeopt.spec.jetpack import version_tuple
from edgeopt.spec.profile import Profile
from edgeopt.spec.values import Value

Login = Literal["none", "works", "fails"]  # to the device over SSH; none where this machine is the device
GIB = 1 << 30
_PYTHONS = ((3, 10), (3, 13))  # as pyproject.toml
_OLDEST = {"torch": (2, 11), "onnxruntime": (1, 20), "torchao": (0, 17), "onnx": (1, 18)}  # as pyproject.toml
_ENGINES = ("docker", "podman")


class Engine(Value):
    """A container engine: `complaint` is what it says where it cannot be used."""

    name: str
    version: str | None = None
    complaint: str = ""


class HereFacts(Value):
    """The machine that builds. None means that it is not there, or does not say."""

    python: str
    arch: str
    packages: dict[str, str] = {}
    engines: tuple[Engine, ...] = ()
    binfmt: str | None = None  # the interpreter that runs the target's programs, None where none is registered
    binfmt_flags: str = ""
    qemu: str | None = None  # its version
    ssh: str | None = None
    keys: tuple[str, ...] = ()  # private keys in ~/.ssh
    agent_keys: int | None = None  # None without an agent
    disk_free_bytes: int | None = None
    disk_path: str = ""
    disk_writable: bool = True


def read(connection: Connection, *, arch: str | None, folder: Path) -> HereFacts:
    """The facts of this machine over its own `connection`; `arch` is the target's, `folder` where builds are kept."""
    there = _existing(folder)
    binfmt, flags = _binfmt(arch)
    return HereFacts(
        python=platform.python_version(), arch=platform.machine(), packages=_packages(), engines=_engines(connection),
        binfmt=binfmt, binfmt_flags=flags, qemu=_qemu_version(connection, binfmt),
        ssh=_first(connection, ["ssh", "-V"]), keys=_keys(Path.home() / ".ssh"), agent_keys=_agent_keys(connection),
        disk_free_bytes=shutil.disk_usage(there).free, disk_path=str(there), disk_writable=os.access(there, os.W_OK),
    )  # fmt: skip


def examine(facts: HereFacts, profile: Profile | None, needs: Needs, *, login: Login) -> tuple[Finding, ...]:
    """Every check of this machine, in the table's order."""
    out = []
    for name, check in CHECKS:
        said: Said = check(facts, profile, needs, login)
        out.append(
            Finding(name=name, where="here", verdict=said.verdict, sentence=said.sentence, mend=said.mend or None)
        )
    return tuple(out)


def python(facts: HereFacts, profile: Profile | None, needs: Needs, login: Login) -> Said:
    low, high = _PYTHONS
    if low <= version_tuple(facts.python)[:2] <= high:
        return ok(f"Python {facts.python}")
    return fail(
        f"Python {facts.python} is not one of {low[0]}.{low[1]} to {high[0]}.{high[1]}",
        "python3.11 -m venv .venv && .venv/bin/pip install edgeopt",
    )


def packages(facts: HereFacts, profile: Profile | None, needs: Needs, login: Login) -> Said:
    """What a build needs, beside what the profile's backends add."""
    wanted = dict(_OLDEST)
    if "openvino" in needs.backends:
        wanted["openvino"] = (2024, 4)
    lacking = [name for name in wanted if name not in facts.packages]
    known = {name: version_tuple(facts.packages.get(name, "")) for name in wanted}
    old = [f"{name} {facts.packages[name]}" for name, least in wanted.items() if known[name] and known[name] < least]
    if not lacking and not old:
        return ok(", ".join(f"{name} {facts.packages[name]}" for name in wanted))
    words = [*(f"{name} is missing" for name in lacking), *(f"{what} is too old" for what in old)]
    names = [*lacking, *(what.split()[0] for what in old)]
    mend = f"{sys.executable} -m pip install --upgrade {' '.join(names)}"
    return fail("a build needs more: " + ", ".join(words), mend)


def torch_age(facts: HereFacts, profile: Profile | None, needs: Needs, login: Login) -> Said:
    """The torch that writes TorchScript files against the one that loads them."""
    newest = profile.target.torch.max if profile and profile.target.torch else None
    if newest is None or "torchscript" not in needs.backends or "torch" not in facts.packages:
        return skip("no torch of the target to compare with")
    if version_tuple(facts.packages["torch"])[:2] <= version_tuple(newest)[:2]:
        return ok(f"torch {facts.packages['torch']}, the target has up to {newest}")
    return warn(
        f"torch {facts.packages['torch']} writes the TorchScript files, and the target has {newest} at the most",
        f"edgeopt build --profile {profile.name} --target-python PYTHON  # one that has torch {newest}",
    )


def container(facts: HereFacts, profile: Profile | None, needs: Needs, login: Login) -> Said:
    usable = [e for e in facts.engines if not e.complaint]
    if usable:
        return ok(", ".join(f"{e.name} {e.version or ''}".strip() for e in usable))
    if profile is None or profile.container is None:
        return skip("no container engine, and the profile needs none")
    if not facts.engines:
        return warn("no container engine: the target's image cannot be built here", "sudo apt install -y podman")
    engine = facts.engines[0]
    denied = "permission denied" in engine.complaint.lower()
    mend = "sudo usermod -aG docker $USER  # and log in again" if denied else "sudo systemctl start docker"
    return warn(f"{engine.name} is there and cannot be used: {engine.complaint}", mend)


def emulation(facts: HereFacts, profile: Profile | None, needs: Needs, login: Login) -> Said:
    if profile is None or profile.target.arch == facts.arch:
        return skip("the target's programs run here as they are")
    wanted = profile.target.arch
    mend = f"sudo apt install -y qemu-user-static binfmt-support && sudo update-binfmts --enable qemu-{wanted}"
    if facts.binfmt is None:
        return warn(f"programs for {wanted} do not run here: its images and its Python cannot be tried", mend)
    if facts.qemu is None:
        return warn(f"{facts.binfmt}, which is to run programs for {wanted}, does not run", mend)
    if "F" not in facts.binfmt_flags:  # the kernel opens the interpreter at once: it need not lie inside an image
        return warn(
            f"{wanted} runs by qemu {facts.qemu}, but not inside containers (no flag F)",
            "sudo apt install -y qemu-user-static && sudo systemctl restart binfmt-support",
        )
    return ok(f"{wanted} runs by qemu {facts.qemu}; what is timed so is no evidence")


def ssh(facts: HereFacts, profile: Profile | None, needs: Needs, login: Login) -> Said:
    if facts.ssh:
        return ok(facts.ssh)
    if login == "none":
        return skip("no device is asked over SSH")
    return warn("no ssh client: edgeopt needs none, the commands that mend do", "sudo apt install -y openssh-client")


def keys(facts: HereFacts, profile: Profile | None, needs: Needs, login: Login) -> Said:
    if login == "none":
        return skip("no device is asked over SSH")
    held = f"the agent holds {facts.agent_keys}" if facts.agent_keys else "no agent holds one"
    if login == "works" or facts.agent_keys or facts.keys:
        return ok(f"keys: {', '.join(facts.keys) or 'none in ~/.ssh'}; {held}")
    return warn(
        "there is no key in ~/.ssh and no agent holds one: only an IdentityFile of ~/.ssh/config can log in",
        "ssh-keygen -t ed25519 && ssh-copy-id HOST  # or name its IdentityFile in ~/.ssh/config",
    )


def disk(facts: HereFacts, profile: Profile | None, needs: Needs, login: Login) -> Said:
    if not facts.disk_writable:
        return fail(f"{facts.disk_path} cannot be written", f"sudo chown $USER {facts.disk_path}")
    free = facts.disk_free_bytes
    if free is None:
        return skip("not known")
    said = f"{free / GIB:.1f} GiB free at {facts.disk_path}"
    mend = f"df -h {facts.disk_path}; du -xsh {facts.disk_path}/.edgeopt"
    if free < GIB // 4:
        return fail(f"{said}: a build keeps every stage there", mend)
    return warn(f"{said}: a build keeps every stage there", mend) if free < 2 * GIB else ok(said)


CHECKS: tuple[tuple[str, Callable[[HereFacts, Profile | None, Needs, Login], Said]], ...] = (
    ("python", python),
    ("packages", packages),
    ("torch against the target", torch_age),
    ("container engine", container),
    ("qemu and binfmt", emulation),
    ("ssh", ssh),
    ("keys", keys),
    ("disk", disk),
)


def parse_binfmt(text: str) -> tuple[str | None, str]:
    """(interpreter, flags) of a file of /proc/sys/fs/binfmt_misc; (None, '') where it is switched off."""
    enabled, interpreter, flags = registered.parse_entry(text)
    return (interpreter, flags) if enabled else (None, "")


def _packages() -> dict[str, str]:
    names = (*_OLDEST, "openvino", "tensorrt", "numpy")
    found = {name: environment.version(name) for name in names}
    return {name: version for name, version in found.items() if version}


def _engines(connection: Connection) -> tuple[Engine, ...]:
    return tuple(_engine(connection, name) for name in _ENGINES if shutil.which(name))


def _engine(connection: Connection, name: str) -> Engine:
    """Whether the engine answers: docker by its daemon, podman by itself."""
    ask = {"docker": "{{json .Server.Version}}", "podman": "{{json .Client.Version}}"}[name]
    try:
        done = connection.run([name, "version", "--format", ask], timeout_s=30, check=False)
    except DeviceError as why:
        return Engine(name=name, complaint=why.what)
    if done.status != 0:
        return Engine(name=name, complaint=done.complaint)
    try:
        version = json.loads(done.text.splitlines()[-1])
    except (ValueError, IndexError):
        version = None
    return Engine(name=name, version=version if isinstance(version, str) else None)


def _binfmt(arch: str | None) -> tuple[str | None, str]:
    try:
        return parse_binfmt((registered.BINFMT / f"qemu-{arch}").read_text())
    except OSError:
        return None, ""


def _qemu_version(connection: Connection, interpreter: str | None) -> str | None:
    said = _first(connection, [str(Path(interpreter).resolve()), "--version"]) if interpreter else None
    return registered.parse_version(said or "")


def _first(connection: Connection, argv: list[str]) -> str | None:
    """The first line that a command says on either stream; None where it is not there or fails."""
    try:
        done = connection.run(argv, timeout_s=30, check=False)
    except DeviceError:
        return None
    lines = (done.stdout + done.stderr).decode("utf-8", "replace").strip().splitlines()
    return lines[0] if done.status == 0 and lines else None


def _keys(folder: Path) -> tuple[str, ...]:
    """Names of files that have a public key beside them."""
    try:
        return tuple(sorted(p.stem for p in folder.glob("*.pub") if p.with_suffix("").is_file()))
    except OSError:
        return ()


def _agent_keys(connection: Connection) -> int | None:
    try:
        done = connection.run(["ssh-add", "-l"], timeout_s=10, check=False)
    except DeviceError:
        return None
    if done.status == 2:  # no agent (ssh-add(1))
        return None
    return len(done.text.splitlines()) if done.status == 0 else 0


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())
