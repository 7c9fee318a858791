"""Doctor: this machine and a device are looked at, and what will fail later is said with the command that mends it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgeopt.device import doctor as table
from edgeopt.device import doctor_here, facts
from edgeopt.device.doctor_case import Case, Finding, Needs, needs_of
from edgeopt.device.doctor_probe import probe, second_session
from edgeopt.errors import ArtifactError, DeviceError, HostError, TransferError
from edgeopt.ports.connection import Connection
from edgeopt.ports.local import LocalConnection
from edgeopt.runtime.artifact import Artifact
from edgeopt.spec.limits import Limits, stricter
from edgeopt.spec.profile import Profile
from edgeopt.spec.project import Project
from edgeopt.spec.values import validate


@dataclass(frozen=True)
class Asked:
    """What is to run there. `host`: as the user wrote it, None for this machine; `folder`: where builds lie."""

    profile: Profile | None = None
    artifact: Artifact | None = None
    project: Project | None = None
    host: str | None = None
    python: str = "python3"
    root: str | None = None
    folder: Path = Path(".")


@dataclass(frozen=True)
class Diagnosis:
    """Every finding, those of this machine first."""

    device: str
    profile: str | None
    findings: tuple[Finding, ...]

    def as_dict(self) -> dict:
        counts = {v: sum(f.verdict == v for f in self.findings) for v in ("ok", "warn", "fail", "skip")}
        findings = [f.model_dump(mode="json") for f in self.findings]
        return {"device": self.device, "profile": self.profile, "counts": counts, "findings": findings}

    def check(self) -> None:
        """DeviceError where something will fail."""
        wrong = table.failed(self.findings)
        if wrong:
            raise DeviceError(
                f"{len(wrong)} of {len(self.findings)} checks fail: " + ", ".join(f.name for f in wrong),
                where=self.device, todo=wrong[0].mend or "see the findings above",
            )  # fmt: skip


def doctor(connection: Connection, asked: Asked) -> Diagnosis:
    """Look at this machine and at the device. A device that cannot be reached is a finding, not an error."""
    needs = _needs(asked)
    arch = asked.profile.target.arch if asked.profile else None
    remote = connection.remote
    with LocalConnection() as own:
        here = doctor_here.read(own, arch=arch, folder=asked.folder)
    of_device = _of_device(connection, asked, needs, remote)
    login = "none" if not remote else "works" if of_device[0].verdict == "ok" else "fails"
    findings = doctor_here.examine(here, asked.profile, needs, login=login)
    name = asked.profile.name if asked.profile else None
    return Diagnosis(asked.host or connection.label, name, findings + of_device)


def _of_device(connection: Connection, asked: Asked, needs: Needs, remote: bool) -> tuple[Finding, ...]:
    root = asked.root or (asked.profile.root if asked.profile else None)
    if asked.artifact is not None:
        root = root or asked.artifact.manifest.root
    try:
        connection.run(["true"])
        tried = probe(connection, root=root, python=asked.python)
        known = facts.read(connection, python=asked.python, root=root)
        tried = tried.model_copy(update={"second_session": second_session(connection)})
    except (HostError, TransferError, DeviceError) as why:
        return table.unreachable(why)
    case = Case(known, tried, needs, asked.profile, asked.host, asked.python)
    return (table.reachable(connection.label, remote=remote), *table.examine(case))


def _needs(asked: Asked) -> Needs:
    needs = _needs_of_artifact(asked.artifact) if asked.artifact is not None else needs_of(asked.profile)
    if asked.project is None:
        return needs
    both = stricter(Limits(peak_rss_mb=needs.peak_rss_mb), asked.project.limits)
    return needs.model_copy(update={"peak_rss_mb": both.peak_rss_mb})


def _needs_of_artifact(artifact: Artifact) -> Needs:
    manifest = artifact.manifest
    opsets = [c.opset for c in manifest.candidates if c.opset is not None]
    limits = validate(Limits, manifest.limits, source=f"{artifact.folder}: limits", error=ArtifactError)
    return Needs(
        backends=tuple(dict.fromkeys(c.runtime for c in manifest.candidates)), onnx_opset=max(opsets, default=None),
        size_bytes=sum(file.size for file in manifest.files.values()), peak_rss_mb=limits.peak_rss_mb,
        op_libraries=bool(manifest.op_libraries), exact=True,
    )  # fmt: skip
