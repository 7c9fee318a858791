"""The plan of a rollout: which device gets which artifact, in which wave. Made once, kept, and never changed."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Literal

from edgeopt.errors import UsageError
from edgeopt.runtime.artifact import Artifact
from edgeopt.spec.fleet import Device
from edgeopt.spec.values import Value

WAVES = "10%,50%,100%"
Undo = Literal["wave", "rollout", "none"]


class Planned(Device):
    """A device with the digest of the artifact that it gets."""

    digest: str
    release_root: str | None  # where releases lie there, None for ~/.edgeopt


class Plan(Value):
    """What a rollout does. `artifacts` are digest -> folder; `waves` are names of devices."""

    id: str
    name: str  # of the artifacts
    artifacts: dict[str, str]
    devices: tuple[Planned, ...]
    waves: tuple[tuple[str, ...], ...]
    max_failures: int
    undo: Undo
    count_offline: bool
    soak_s: float
    keep: int

    def device(self, name: str) -> Planned:
        return next(d for d in self.devices if d.name == name)


def sizes_of_waves(count: int, *, canary: int, waves: str) -> tuple[int, ...]:
    """How many of `count` devices each wave takes: `canary` first, then up to each share of all.

    `waves` are cumulative shares or numbers, '10%,50%,100%' or '5,100%', the last of them 100%; a wave that would
    be empty is left out. Shares are rounded up. UsageError for what is not of that form or does not rise.
    """
    reached, sizes = 0, []
    for wanted in (min(canary, count), *_bounds(count, waves)):
        if wanted > reached:
            sizes.append(wanted - reached)
            reached = wanted
    return tuple(sizes)


def _bounds(count: int, waves: str) -> list[int]:
    bounds = []
    for text in waves.split(","):
        number = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(%?)\s*", text)
        if number is None or not (number[2] or number[1].isdigit()) or (number[2] and float(number[1]) > 100):
            raise _wrong(f"'{text.strip()}' is neither a share such as 10% nor a number of devices")
        # 10 % of 10 is one, whatever floating point makes of it
        wanted = math.ceil(round(count * float(number[1]) / 100, 6)) if number[2] else int(number[1])
        bounds.append((text.strip(), min(count, wanted)))
    for (_, before), (text, bound) in zip(bounds, bounds[1:], strict=False):
        if bound < before:
            raise _wrong(f"'{text}' is less than the wave before it: they are cumulative")
    if bounds[-1][1] != count:
        raise _wrong(f"the last wave, '{bounds[-1][0]}', leaves out {count - bounds[-1][1]} devices")
    return [bound for _, bound in bounds]


def _wrong(what: str) -> UsageError:
    return UsageError(what, where="--waves", todo="write rising shares up to 100%, as in --waves 10%,50%,100%")


def waves_of(devices: Sequence[Device], *, canary: int, waves: str) -> tuple[tuple[str, ...], ...]:
    """The names of `devices`, in their order, wave by wave."""
    names, at, found = [d.name for d in devices], 0, []
    for size in sizes_of_waves(len(names), canary=canary, waves=waves):
        found.append(tuple(names[at : at + size]))
        at += size
    return tuple(found)


def assign(devices: Sequence[Device], given: Sequence[Artifact], named: dict[str, Artifact]) -> tuple[Planned, ...]:
    """Each device with its artifact: the one that the fleet names (`named`, by path), else of those `given` the one
    of the device's profile, else the only one given.

    UsageError where none or several fit, and where the artifacts are not all of one name: a rollout is of one.
    """
    every = [*given, *named.values()]
    names = sorted({artifact.manifest.name for artifact in every})
    if len(names) > 1:
        raise UsageError(
            f"the artifacts are of several names: {', '.join(names)}", where="ARTIFACT",
            todo="roll out one name at a time; several artifacts are for several profiles",
        )  # fmt: skip
    planned = []
    for device in devices:
        artifact = named[device.artifact] if device.artifact else _fitting(device, given)
        root = device.root or artifact.manifest.root
        planned.append(Planned(**device.model_dump(), digest=artifact.digest, release_root=root))
    return tuple(planned)


def _fitting(device: Device, given: Sequence[Artifact]) -> Artifact:
    fits = [a for a in given if device.profile is None or a.manifest.profile == device.profile]
    if len({artifact.digest for artifact in fits}) == 1:
        return fits[0]
    profiles = ", ".join(sorted({artifact.manifest.profile for artifact in given}))
    if not fits:
        raise UsageError(
            f"no artifact is for the profile '{device.profile}' of the device '{device.name}'", where="ARTIFACT",
            todo=f"give that one too; given are artifacts for: {profiles}",
        )  # fmt: skip
    raise UsageError(
        f"which artifact the device '{device.name}' gets is not clear: {profiles}", where="ARTIFACT",
        todo="say 'profile' or 'artifact' in the fleet, for the device or a group of it",
    )  # fmt: skip
