"""`detect`: the facts of a device, the profiles that fit it, and a profile of its own as a file."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeopt.device import facts as device_facts
from edgeopt.device import matching
from edgeopt.device.matching import Fit
from edgeopt.errors import ProfileError, UsageError, disk_error
from edgeopt.ports.connection import Connection
from edgeopt.spec.facts import DeviceFacts
from edgeopt.spec.jetpack import version_tuple
from edgeopt.spec.profile import load_profile
from edgeopt.spec.yaml_file import to_yaml

# CPU instructions that decide which kernels a runtime takes; the rest of /proc/cpuinfo's flags says nothing here
_CPU_FEATURES = (
    "avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "amx_bf16",
    "asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2",
)  # fmt: skip


@dataclass(frozen=True)
class Detected:
    """A device, how each shipped profile fits it (the best first), and where it was reached."""

    label: str
    facts: DeviceFacts
    fits: tuple[Fit, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON data for `--json`."""
        profiles = [{"profile": f.profile, "verdict": f.verdict, "reasons": list(f.reasons)} for f in self.fits]
        return {"device": self.label, "facts": self.facts.model_dump(mode="json"), "profiles": profiles}


def detect(connection: Connection, *, python: str = "python3", root: str | None = None) -> Detected:
    """The device's facts, in one round trip, and the profiles for it. Errors as `device.facts.read`."""
    facts = device_facts.read(connection, python=python, root=root)
    return Detected(connection.label, facts, tuple(matching.fits(facts)))


def nearest(detected: Detected) -> Fit:
    """The profile to start from: for its GPU where it has one that a profile knows, else for its CPU.

    ProfileError where no profile is for such a machine at all.
    """
    usable = [f for f in detected.fits if f.verdict != "no"]
    best = next((f for f in usable if f.gpu), usable[0] if usable else None)
    if best is None:
        reasons = "; ".join(f"{f.profile}: {f.reasons[0]}" for f in detected.fits[:3] if f.reasons)
        raise ProfileError(
            f"no shipped profile is for this device: {reasons}", where=detected.label,
            todo="write a profile with target.kind and target.arch, see docs/profiles.md",
        )  # fmt: skip
    return best


def profile_text(detected: Detected, *, root: str | None = None) -> str:
    """YAML of the device's own profile: the nearest shipped one as `base`, and the facts that it says itself."""
    facts, base = detected.facts, nearest(detected)
    below = load_profile(base.profile)
    data: dict[str, Any] = {"title": facts.model or detected.label, "base": _with_jetpack(base.profile, below.jetpack)}
    if root:
        data["root"] = root
    data["target"] = _target(facts, below.target.kind)
    notes = [f"Differs from the base: {reason}." for reason in base.reasons]
    if below.target.kind == "desktop" and facts.tensorrt is None:
        data["backends"] = [b for b in below.backends if b != "tensorrt"]
        notes.append("No TensorRT was found on the device, so it is no backend here.")
    if facts.emulated:
        notes.append(f"The device is emulated ({facts.emulated}): nothing timed there is a device's latency.")
    head = [f"Read from {facts.model or 'a device'} ({detected.label}) by `edgeopt detect --write`.", *notes]
    return "".join(f"# {_one_line(line)}\n" for line in head) + to_yaml(data)


def write_profile(detected: Detected, path: Path, *, root: str | None = None) -> None:
    """Write `profile_text` to `path`, read back and checked first.

    UsageError where something is there already or the name is no profile's, ProfileError as `nearest`, SpaceError on a
    full disk.
    """
    if path.suffix not in (".yaml", ".yml"):
        raise UsageError("a profile's file ends in .yaml", where=str(path), todo=f"name it {path.name}.yaml")
    if os.path.lexists(path):
        raise _exists(path)
    text = profile_text(detected, root=root)
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".edgeopt-") as folder:
            made = Path(folder) / path.name
            made.write_text(text, encoding="utf-8")
            load_profile(str(made))
            os.link(made, path)  # unlike a rename it never replaces
    except FileExistsError:
        raise _exists(path) from None
    except OSError as why:
        raise disk_error(why, path, error=UsageError) from None


def _exists(path: Path) -> UsageError:
    return UsageError("there is such a file already", where=str(path), todo="choose another name, or remove it")


def _with_jetpack(name: str, jetpack: str | None) -> str:
    """NAME@JETPACK, so that the file means the same when the shipped profile moves on."""
    return name if jetpack is None or "@" in name else f"{name}@{jetpack}"


def _target(facts: DeviceFacts, kind: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if kind == "jetson" and facts.l4t:
        out["l4t"] = facts.l4t
    if kind == "desktop" and facts.sm:
        out["sm"] = facts.sm
    python = version_tuple(facts.python or "")[:2]
    if len(python) == 2:
        out["python"] = ".".join(map(str, python))
    torch = version_tuple(facts.packages.get("torch", ""))[:2]
    if len(torch) == 2:
        out["torch"] = dict.fromkeys(("min", "max"), ".".join(map(str, torch)))
    if kind != "cpu":
        versions = {name: getattr(facts, name) for name in ("cuda", "cudnn", "tensorrt")}
        out |= {name: _numbers(version) for name, version in versions.items() if version and _numbers(version)}
    if facts.memory_bytes and facts.memory_bytes >= 10**9:
        out["memory_gb"] = facts.memory_bytes // 10**9
    features = [f for f in _CPU_FEATURES if f in facts.cpu_flags]
    if kind != "jetson" and features:
        out["cpu_features"] = features
    return out


def _one_line(text: str) -> str:
    """A comment ends with its line, whatever the device's name holds."""
    return "".join(c if c.isprintable() else " " for c in text)


def _numbers(version: str) -> str:
    return ".".join(map(str, version_tuple(version)))
