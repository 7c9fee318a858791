"""An operator's `edgeopt` process that kills itself at a named point: python -m tests.crash_operator STEP WHEN ARGS...

ARGS are command lines of edgeopt, apart by '--then'. The steps are the scripts that are sent to the device.
"""

from __future__ import annotations

import contextlib
import sys

from edgeopt import cli
from edgeopt.flows import place_scripts
from edgeopt.ports import blobs, connect
from tests.crash_points import MIDDLE_BYTES, die

STEPS = {
    place_scripts.LOCK: "lock", place_scripts.STATE: "state", place_scripts.STAGE: "stage",
    place_scripts.PRUNE: "prune", place_scripts.POINT: "switch", place_scripts.SETTLE: "settle",
    blobs.SURVEY: "survey", blobs.RECEIVE: "receive",
}  # fmt: skip


class _Source:
    """A file that is read up to a point."""

    def __init__(self, file):
        self._file = file
        self._left = MIDDLE_BYTES
        self.name = file.name

    def read(self, count: int) -> bytes:
        if self._left <= 0:
            die()
        data = self._file.read(min(count, 32768))
        self._left -= len(data)
        return data


class CrashingConnection:
    """A Connection that kills this process before, after or in the middle of a step."""

    remote = True

    def __init__(self, connection, step: str, when: str):
        self._connection, self._step, self._when = connection, step, when

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._connection.close()

    def run(self, argv, *, stdin=b"", **options):
        here = self._is_here(argv)
        if here and self._when == "before":
            die()
        if here and self._when == "middle":
            stdin = _Source(stdin)
        done = self._connection.run(argv, stdin=stdin, **options)
        if here and self._when == "after":
            die()
        return done

    @contextlib.contextmanager
    def hold(self, argv, **options):
        with self._connection.hold(argv, **options) as line:
            if self._is_here(argv):
                die()
            yield line

    def _is_here(self, argv) -> bool:
        if argv[:2] != ["sh", "-c"]:
            return False
        return STEPS.get(argv[2], argv[-1]) == self._step


def main(argv: list[str]) -> None:
    step, when, *rest = argv
    real = connect.connect
    connect.connect = lambda *args, **options: CrashingConnection(real(*args, **options), step, when)
    command: list[str] = []
    for arg in [*rest, "--then"]:
        if arg != "--then":
            command.append(arg)
            continue
        with contextlib.suppress(SystemExit):
            cli.main(command)
        command = []


if __name__ == "__main__":
    main(sys.argv[1:])
