"""Doctor: this machine and a device are looked at, and what will fail later is said with the command that mends it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgeopt.device import doctor as table
from edgeopt.device import doctor_here, facts
from edgeopt.device.doctor_case import Case, Finding, Needs, needs_of
from edgeopt.device.doctor_probe import probe
from edgeopt.errors import DeviceError, EdgeoptError, HostError, TransferError
from edgeopt.ports.connection import Connection
from edgeopt.ports.local import LABEL, LocalConnection
from edgeopt.runtime.artifact import Artifact
from edgeopt.spec.limits import Limits
from edgeopt.spec.profile import Profile


@dataclass(frozen=True)
class Asked:
    """What is to run on the device. `host` is as the user wrote it, None for this machine; `folder` where builds lie."""

    profile: Profile | None = None
    artifact: Artifact | None = None
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
    needs = needs_of(asked.profile) if asked.artifact is None else _needs_of_artifact(asked.artifact)
    arch = asked.profile.target.arch if asked.profile else None
    remote = connection.label != LABEL
    with LocalConnection() as own:
        here = doctor_here.read(own, arch=arch, folder=asked.folder)
    findings = doctor_here.examine(here, asked.profile, needs, remote=remote)
    return Diagnosis(
        connection.label if not remote else asked.host or connection.label,
        asked.profile.name if asked.profile else None, findings + _of_device(connection, asked, needs),
    )  # fmt: skip


def _of_device(connection: Connection, asked: Asked, needs: Needs) -> tuple[Finding, ...]:
    root = asked.root or (asked.profile.root if asked.profile else None)
    if asked.artifact is not None:
        root = root or asked.artifact.manifest.root
    try:
        connection.run(["true"])
        tried = probe(connection, root=root, python=asked.python)
        known = facts.read(connection, python=asked.python, root=root)
    except (HostError, TransferError, DeviceError) as why:
        return table.unreachable(why)
    case = Case(known, tried, needs, asked.profile, asked.host, asked.python)
    return (table.reachable(connection.label), *table.examine(case))


def _needs_of_artifact(artifact: Artifact) -> Needs:
    manifest = artifact.manifest
    candidates = manifest.candidates
    opsets = [c.opset for c in candidates if c.opset is not None]
    return Needs(
        backends=tuple(dict.fromkeys(c.runtime for c in candidates)), onnx_opset=max(opsets, default=None),
        size_bytes=sum(file.size for file in manifest.files.values()), peak_rss_mb=_limits(artifact).peak_rss_mb,
        op_libraries=bool(manifest.op_libraries), exact=True,
    )  # fmt: skip


def _limits(artifact: Artifact) -> Limits:
    from edgeopt.errors import ArtifactError
    from edgeopt.spec.values import validate

    return validate(Limits, artifact.manifest.limits, source=f"{artifact.folder}: limits", error=ArtifactError)
