"""The device that a build measures on (`--on HOST`), and the profile with what that device has."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping

from edgeopt.device.session import Device, opened, target_facts
from edgeopt.flows.place import DEFAULT_ROOT
from edgeopt.ports.connection import Connection
from edgeopt.ports.local import LocalConnection
from edgeopt.spec.profile import Profile, load_profile

HERE = "here"  # `--on here`: this machine, as no HOST is with other commands


@contextlib.contextmanager
def device_of(
    connection: Connection, profile_name: str, overrides: Mapping[str, str], python: str | None
) -> Iterator[tuple[Device, Profile]]:
    """The device behind `connection` and the profile for it, for the time of the block.

    The profile's CPU target gets the device's instructions, so that int8 weights keep 8 bits where it has VNNI; what
    `overrides` or the profile's own file say of `target.vnni` stays. `python` None: python3, on this machine the
    interpreter that runs edgeopt. Raises ProfileError where the device is of another architecture.
    """
    profile = load_profile(profile_name, overrides)
    python = python or (sys.executable if isinstance(connection, LocalConnection) else "python3")
    with opened(connection, python=python, root=profile.root or DEFAULT_ROOT) as device:
        facts = target_facts(profile, device.facts, connection.label)
        yield device, load_profile(profile_name, {**facts, **overrides}) if facts else profile
