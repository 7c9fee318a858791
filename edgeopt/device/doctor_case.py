"""What doctor's checks are asked about, and what each says: values, so that a check is tested without a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from edgeopt.spec.facts import DeviceFacts
from edgeopt.spec.profile import Profile
from edgeopt.spec.values import Value

Verdict = Literal["ok", "warn", "fail", "skip"]
DEFAULT_ROOT = "~/.edgeopt"
MODULE_OF = {"torchscript": "torch", "aoti": "torch"}  # a backend whose module is called otherwise


class Said(NamedTuple):
    """A check's answer: one sentence, and the command that mends it where it is not ok."""

    verdict: Verdict
    sentence: str
    mend: str = ""


class Finding(Value):
    """One check of doctor. `where`: 'here' on the machine that builds, 'device' on the one that runs."""

    name: str
    where: Literal["here", "device"]
    verdict: Verdict
    sentence: str
    mend: str | None = None


class Probe(Value):
    """What one further command tried out on the device; None where it did not say. See doctor_probe."""

    noise: str = ""  # what the login shell printed before the command
    root: str | None = None  # the folder of releases, ~ expanded
    root_at: str | None = None  # it, or the nearest folder above that is there
    root_writes: bool | None = None
    root_runs: bool | None = None  # programs may run from there: no noexec
    tmp_writes: bool | None = None
    tmp_runs: bool | None = None
    complaint: str = ""  # what the system said when a folder refused a file
    renames: bool | None = None  # `mv -T` switches a link
    locks: bool | None = None  # flock takes a lock
    hashes: bool | None = None  # some tool gives the right sha256
    swaps: tuple[str, ...] = ()  # files and devices of /proc/swaps
    sudo: bool | None = None  # `sudo -n nvpmodel -q` works
    selinux: bool | None = None  # enforcing
    trtexec: str | None = None
    libraries: tuple[str, ...] = ()  # of libcuda, libcudart, libnvinfer
    groups: tuple[str, ...] = ()
    gpu_node: bool | None = None  # the GPU's device file may be opened; None where there is none
    numpy_status: int | None = None  # of `python -c 'import numpy'`
    second_session: str | None = None  # '' where it works beside a first one, else why not


class Needs(Value):
    """What is to run: of a profile, or of an artifact, which knows it exactly."""

    backends: tuple[str, ...] = ()
    onnx_opset: int | None = None  # the newest that is written
    size_bytes: int | None = None  # of all files
    peak_rss_mb: float | None = None  # the limit
    op_libraries: bool = False
    exact: bool = False  # of an artifact


@dataclass(frozen=True)
class Case:
    """A device to judge. `host` and `python` are what the user wrote, for the commands that mend."""

    facts: DeviceFacts
    probe: Probe
    needs: Needs = Needs()
    profile: Profile | None = None
    host: str | None = None
    python: str = "python3"

    @property
    def jetson(self) -> bool:
        return self.facts.l4t is not None or (self.facts.soc or "").startswith("tegra")

    def on_device(self, command: str) -> str:
        """`command` as it is typed here: through ssh where the device is another machine."""
        import shlex

        return command if self.host is None else f"ssh -t {shlex.quote(self.host)} {shlex.quote(command)}"


def needs_of(profile: Profile | None) -> Needs:
    """What a build for `profile` writes at the most."""
    if profile is None:
        return Needs()
    onnx = {"onnxruntime", "openvino", "tensorrt"} & set(profile.backends)
    return Needs(
        backends=profile.backends, onnx_opset=profile.target.onnx_opset_max if onnx else None,
        peak_rss_mb=profile.limits.peak_rss_mb,
    )  # fmt: skip


def ok(sentence: str) -> Said:
    return Said("ok", sentence)


def warn(sentence: str, mend: str) -> Said:
    return Said("warn", sentence, mend)


def fail(sentence: str, mend: str) -> Said:
    return Said("fail", sentence, mend)


def skip(sentence: str) -> Said:
    return Said("skip", sentence)
