"""Validate at several power modes of a Jetson, and put the old mode back whatever happens.

The old mode is put back by a process on the device that waits for the end of its stdin, which comes with the end of
the connection: so it is put back after an error, after Ctrl-C, when this process is killed, and when the link is cut.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from edgeopt.device import nvpmodel
from edgeopt.errors import DeviceError, EdgeoptError, UsageError
from edgeopt.flows.validate import Validated
from edgeopt.ports.connection import CommandEnded, Connection, Result, script
from edgeopt.progress import log
from edgeopt.spec.facts import PowerMode

_RESTORE_S = 400  # six tries of nvpmodel, each of which may hang for a minute


@dataclass(frozen=True)
class InModes:
    """What validate found in each mode, and the mode that the device had and has again."""

    before: PowerMode
    validated: tuple[tuple[PowerMode, Validated], ...]

    def check(self) -> None:
        """Raise what the first validation that did not pass raises."""
        for _, done in self.validated:
            done.check()


def in_power_modes(
    connection: Connection,
    names: Sequence[str],
    validate: Callable[[bool], Validated],
    *,
    jetson_clocks: bool = False,
    most_s: float = 24 * 3600,
    patience_s: float = 60,
) -> InModes:
    """Call `validate(select)` in each of the modes `names`; `select` holds in the mode that the device had before.

    With `jetson_clocks` the clocks are set to the fastest of each mode, stored before and restored after.
    nvpmodel is ended after `patience_s`. After `most_s` the device puts the old mode back whatever it hears. Switching
    takes root, or `sudo` without a password. Raises UsageError for a mode that the device has not, DeviceError where
    it has no modes, cannot switch, needs a reboot for one, or silently keeps the old one.
    """
    wanted = _wanted(connection, names)
    with _guarded(connection, jetson_clocks, most_s, patience_s) as (before, folder):
        found = []
        for mode in wanted:
            _switch(connection, mode, folder, patience_s)
            if jetson_clocks:
                _fastest_clocks(connection)
            log.info("%s: power mode %s", connection.label, mode.name)
            found.append((mode, validate(mode.id == before.id)))
    return InModes(before, tuple(found))


def _wanted(connection: Connection, names: Sequence[str]) -> list[PowerMode]:
    """The modes that `names` mean, each once."""
    done = connection.run(script(nvpmodel.LOOK), check=False, timeout_s=90)
    if done.status == nvpmodel.NONE:
        raise _no_modes(connection)
    modes = {mode.name.lower(): mode for mode in nvpmodel.parse_modes(done.text)}
    missing = [name for name in names if name.lower() not in modes]
    if missing or not names:
        there = ", ".join(mode.name for mode in modes.values()) or "none that nvpmodel lists"
        raise UsageError(
            f"the device has no power mode {', '.join(missing) or 'of an empty name'}: it has {there}",
            where=connection.label, todo="choose of these by name",
        )  # fmt: skip
    return list({modes[name.lower()].id: modes[name.lower()] for name in names}.values())


@contextlib.contextmanager
def _guarded(
    connection: Connection, jetson_clocks: bool, most_s: float, patience_s: float
) -> Iterator[tuple[PowerMode, str]]:
    """(The mode that the device has, and has again after the block whatever happens in it; the guard's folder)."""
    with contextlib.ExitStack() as stack:
        try:
            argv = script(nvpmodel.GUARD, "clocks" if jetson_clocks else "", f"{most_s:.0f}", f"{patience_s:.0f}")
            held = stack.enter_context(connection.hold(argv, timeout_s=_RESTORE_S))
        except CommandEnded as ended:
            raise _cannot_switch(connection, ended.result) from None
        before = _now(connection)
        number, _, folder = held.partition(" ")
        if before is None or str(before.id) != number:
            raise _unreadable(connection, "nvpmodel does not say in which mode the device is")
        yield before, folder
    after = _now(connection)
    if after is None or after.id != before.id:
        raise DeviceError(
            f"the device did not go back to its power mode {before.name}; it is in {after.name if after else 'none'}",
            where=connection.label, todo=f"run there: sudo nvpmodel -m {before.id}",
        )  # fmt: skip
    log.info("%s: power mode %s again", connection.label, before.name)


def _switch(connection: Connection, mode: PowerMode, folder: str, patience_s: float) -> None:
    """Have the device in `mode`, or raise: what nvpmodel says counts less than what it then answers."""
    argv = script(nvpmodel.SWITCH, str(mode.id), folder, f"{patience_s:.0f}")
    done = connection.run(argv, check=False, timeout_s=patience_s + 120)
    if done.status != 0:
        raise _cannot_switch(connection, done)
    said, _, answer = done.text.partition("--\n")
    now = nvpmodel.parse_query(answer)
    if now is not None and now.id == mode.id:
        return
    if nvpmodel.asks_for_a_reboot(said):
        raise DeviceError(
            f"power mode {mode.name} comes with a reboot only, which edgeopt does not do", where=connection.label,
            todo=f"run there: sudo nvpmodel -m {mode.id}, confirm the reboot, and validate again without --power-modes",
        )  # fmt: skip
    words = said.strip().splitlines()
    raise DeviceError(
        f"the device keeps power mode {now.name if now else 'unknown'} instead of {mode.name}"
        + (f"; nvpmodel said: {words[-1][:200]}" if words else ", and nvpmodel says nothing of it"),
        where=connection.label,
        todo=f"run there: sudo nvpmodel -m {mode.id}; nvpmodel -q",
    )


def _fastest_clocks(connection: Connection) -> None:
    done = connection.run(script(nvpmodel.CLOCKS), check=False, timeout_s=90)
    if done.status != 0:
        raise DeviceError(
            f"jetson_clocks failed: {done.complaint}", where=connection.label, todo="leave --jetson-clocks out"
        )


def _now(connection: Connection) -> PowerMode | None:
    done = connection.run(script(nvpmodel.LOOK), check=False, timeout_s=90)
    return nvpmodel.parse_query(done.text.partition("--\n")[0])


def _cannot_switch(connection: Connection, done: Result) -> EdgeoptError:
    if done.status == nvpmodel.NONE:
        return _no_modes(connection)
    if done.status == nvpmodel.NO_SUDO:
        return DeviceError(
            "power modes are root's to change, and sudo asks for a password", where=connection.label,
            todo="log in as root, or allow it there in /etc/sudoers.d:"
            " USER ALL=(root) NOPASSWD: /usr/sbin/nvpmodel, /usr/bin/jetson_clocks",
        )  # fmt: skip
    return _unreadable(connection, f"cannot use nvpmodel: {done.complaint}")


def _no_modes(connection: Connection) -> DeviceError:
    return DeviceError(
        "the device has no nvpmodel, so it has no power modes to choose from", where=connection.label,
        todo="leave --power-modes out",
    )  # fmt: skip


def _unreadable(connection: Connection, what: str) -> DeviceError:
    return DeviceError(what, where=connection.label, todo="run there: sudo nvpmodel -q")
