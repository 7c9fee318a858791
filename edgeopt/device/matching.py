"""Which profiles a device fits, which nearly, and why not: each difference as a sentence.

A difference is `hard` where what the profile builds does not run there (architecture, GPU, CPU instructions), else it
is something that a profile of the device's own says rightly (versions, memory). What a device does not say is no
difference.
"""

from __future__ import annotations

import contextlib
from typing import Literal, NamedTuple

from edgeopt.errors import ProfileError
from edgeopt.spec import jetpack
from edgeopt.spec.facts import DeviceFacts
from edgeopt.spec.jetpack import version_tuple
from edgeopt.spec.profile import Profile, jetpacks_of, load_profile, profile_names
from edgeopt.spec.profile_values import VNNI_FLAGS

# memory that firmware and kernel keep for themselves is no difference: a 4 GB Orin Nano says 3.4 GiB
_MEMORY_SEEN = 0.8
_VERDICTS = ("fits", "nearly", "no")


class Difference(NamedTuple):
    """A sentence; `hard` where what is built for the profile does not run on the device."""

    text: str
    hard: bool


class Fit(NamedTuple):
    """How a profile fits a device."""

    profile: str  # NAME or NAME@JETPACK
    verdict: Literal["fits", "nearly", "no"]
    differences: tuple[Difference, ...]
    gpu: bool  # whether the profile is for a GPU

    @property
    def reasons(self) -> tuple[str, ...]:
        """The sentences alone."""
        return tuple(d.text for d in self.differences)


def fits(facts: DeviceFacts) -> list[Fit]:
    """Every shipped profile, on the device's JetPack where its module has had that, the best first."""
    found = [_best(facts, name) for name in profile_names()]
    return sorted(found, key=_order)


def fit(facts: DeviceFacts, profile: Profile) -> Fit:
    """How one profile fits: 'nearly' where only what is not hard differs."""
    differences = tuple(d for check in _CHECKS for d in check(facts, profile))
    verdict = "no" if any(d.hard for d in differences) else "nearly" if differences else "fits"
    return Fit(profile.name, verdict, differences, profile.target.sm is not None)


def _best(facts: DeviceFacts, name: str) -> Fit:
    profile = load_profile(name)
    tried = [fit(facts, profile)]
    if facts.jetpack != profile.jetpack and facts.jetpack in jetpacks_of(profile):
        # not every intent holds on an older JetPack
        with contextlib.suppress(ProfileError):
            tried.append(fit(facts, load_profile(f"{name}@{facts.jetpack}")))
    return min(tried, key=_order)


def _order(found: Fit) -> tuple[int, int, int, int]:
    hard = sum(d.hard for d in found.differences)
    return _VERDICTS.index(found.verdict), hard, len(found.differences), not found.gpu


def _arch(facts: DeviceFacts, profile: Profile) -> list[Difference]:
    if facts.arch in (None, profile.target.arch):
        return []
    return [Difference(f"it is for {profile.target.arch}, the device is {facts.arch}", True)]


def _gpu(facts: DeviceFacts, profile: Profile) -> list[Difference]:
    target = profile.target
    if target.sm is None:
        return []
    jetson = bool(facts.soc and facts.soc.startswith("tegra") or facts.l4t)
    if target.kind == "jetson" and not jetson:
        return [Difference("it is for a Jetson, and the device is none", True)]
    if target.kind == "desktop" and jetson:
        return [Difference("it is for a graphics card, and the device is a Jetson", True)]
    if facts.sm is None:
        if facts.gpus or jetson:
            return []  # there is one, but it does not say which
        return [Difference(f"it needs an NVIDIA GPU (compute capability {target.sm}), and none was found", True)]
    if version_tuple(facts.sm) != version_tuple(target.sm):
        # a desktop profile names one card of many: the user's own says which
        said = f"its GPU has compute capability {target.sm}, the device's {facts.sm}"
        return [Difference(said, target.kind == "jetson")]
    return []


def _module(facts: DeviceFacts, profile: Profile) -> list[Difference]:
    if None in (facts.module, profile.target.module) or facts.module == profile.target.module:
        return []
    return [Difference(f"it is for the module {profile.target.module}, the device is {facts.module}", False)]


def _release(facts: DeviceFacts, profile: Profile) -> list[Difference]:
    target = profile.target
    if target.l4t is None or facts.l4t is None:
        return []
    if facts.jetpack is not None:
        known = jetpack.release_for_l4t(facts.l4t, of=jetpack.module(target.module or ""))
        if known is not None and known[0].jetpack == profile.jetpack:
            return []
        named = f"JetPack {facts.jetpack} (L4T {facts.l4t})"
    else:
        named = f"L4T {facts.l4t}, which edgeopt does not know"
    return [Difference(f"it is for JetPack {profile.jetpack} (L4T {target.l4t}), the device has {named}", False)]


def _python(facts: DeviceFacts, profile: Profile) -> list[Difference]:
    want, have = profile.target.python, facts.python
    if want is None or have is None or version_tuple(have)[:2] == version_tuple(want)[:2]:
        return []
    return [Difference(f"it is for Python {want}, the device has {have}", False)]


def _torch(facts: DeviceFacts, profile: Profile) -> list[Difference]:
    have, span = facts.packages.get("torch"), profile.target.torch
    version = version_tuple(have or "")[:2]
    if not version or span is None or "torchscript" not in profile.backends:
        return []
    low, high = (version_tuple(end or "")[:2] for end in (span.min, span.max))
    if (low and version < low) or (high and version > high):
        return [Difference(f"it is for torch {span.min or ''} to {span.max or ''}, the device has {have}", False)]
    return []


def _tensorrt(facts: DeviceFacts, profile: Profile) -> list[Difference]:
    want, have = profile.target.tensorrt, facts.tensorrt
    if want is None or have is None or "tensorrt" not in profile.backends:
        return []
    # engines are built on the device; the file's opset and the builder's flags go by major and minor
    if version_tuple(have)[:2] == version_tuple(want)[:2]:
        return []
    return [Difference(f"it is for TensorRT {want}, the device has {have}", False)]


def _memory(facts: DeviceFacts, profile: Profile) -> list[Difference]:
    want, have = profile.target.memory_gb, facts.memory_bytes
    if want is None or have is None or have >= _MEMORY_SEEN * want * 2**30:
        return []
    return [Difference(f"it is for {want} GB of memory, the device has {have / 2**30:.1f} GiB", False)]


def _cpu(facts: DeviceFacts, profile: Profile) -> list[Difference]:
    if not facts.cpu_flags or facts.arch != profile.target.arch:
        return []
    lacking = [f for f in profile.target.cpu_features if f not in facts.cpu_flags]
    if profile.target.vnni and not VNNI_FLAGS & {*facts.cpu_flags, *profile.target.cpu_features}:
        lacking.append("VNNI")
    return [Difference(f"its CPU has {', '.join(lacking)}, the device's has not", True)] if lacking else []


_CHECKS = (_arch, _gpu, _module, _release, _python, _torch, _tensorrt, _memory, _cpu)
