"""Doctor: everything on a device that will fail later, said now. One table of pure checks over its facts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from edgeopt.device import doctor_link as link
from edgeopt.device import doctor_room as room
from edgeopt.device import doctor_runtime as runtime
from edgeopt.device.doctor_case import Case, Finding, Said
from edgeopt.errors import EdgeoptError

CHECKS: tuple[tuple[str, Callable[[Case], Said]], ...] = (
    ("login shell", link.shell),
    ("sessions", link.sessions),
    ("lock", link.lock),
    ("rename", link.rename),
    ("hash", link.hashes),
    ("clock", link.clock),
    ("selinux", link.selinux),
    ("emulation", link.emulation),
    ("architecture", runtime.architecture),
    ("module", runtime.module),
    ("jetpack", runtime.release),
    ("cpu", runtime.cpu),
    ("python", runtime.python),
    ("runtimes", runtime.runtimes),
    ("numpy", runtime.numpy),
    ("torch", runtime.torch),
    ("torch and cuda", runtime.torch_cuda),
    ("tensorrt", runtime.tensorrt),
    ("opset", runtime.opset),
    ("trtexec", runtime.trtexec),
    ("gpu", runtime.gpu),
    ("root folder", room.root_folder),
    ("root runs programs", room.root_runs),
    ("root disk", room.root_disk),
    ("tmp folder", room.tmp_folder),
    ("tmp runs programs", room.tmp_runs),
    ("memory", room.memory),
    ("swap", room.swap),
    ("sudo", room.sudo),
    ("power mode", room.power_mode),
)


def examine(case: Case) -> tuple[Finding, ...]:
    """Every check of the device, in the table's order."""
    return tuple(_finding(name, check(case)) for name, check in CHECKS)


def unreachable(why: EdgeoptError) -> tuple[Finding, ...]:
    """The findings of a device that cannot be asked: the first says why, the others are skipped."""
    where = f" ({why.where})" if why.where else ""
    first = Finding(name="reachable", where="device", verdict="fail", sentence=why.what + where, mend=why.todo)
    return (first, *(_finding(name, Said("skip", "the device cannot be asked")) for name, _ in CHECKS))


def reachable(label: str, *, remote: bool) -> Finding:
    """The finding of a device that answered."""
    sentence = f"{label} answers" + (", its host key is known" if remote else "")
    return Finding(name="reachable", where="device", verdict="ok", sentence=sentence)


def failed(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Those that will fail later."""
    return tuple(f for f in findings if f.verdict == "fail")


def _finding(name: str, said: Said) -> Finding:
    return Finding(name=name, where="device", verdict=said.verdict, sentence=said.sentence, mend=said.mend or None)
