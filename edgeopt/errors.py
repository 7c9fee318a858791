"""Every error that edgeopt raises on purpose, with the exit code of its kind.

    EdgeoptError                 1   the root; raised itself only for what has no kind of its own
    +-- UsageError               2   the command line: unknown option, missing argument (click's own code too)
    +-- ProfileError             3   a profile: unknown name or key, wrong type, impossible combination
    +-- ProjectError             4   a project file: unknown key, wrong type, missing file
    |   +-- FleetError           4   a fleet's file, likewise
    +-- ModelError               5   the user's model: factory not found, weights that do not fit, unsafe pickle
    +-- CaptureError             6   a model that cannot be captured faithfully
    +-- DataError                7   calibration, training or evaluation data: empty, NaN, wrong shape
    +-- StageError               8   a stage of the pipeline that cannot go on
    |   +-- DeclinedError        8   one that cannot serve this program after all: the build goes on without it
    +-- LoweringError            9   a backend that cannot write its files; no candidate left
    +-- ArtifactError           10   an artifact: not one, truncated, changed, unsafe, too new
    +-- HostError               11   a device that cannot be reached or used: name, refusal, silence, login
    |   +-- HostKeyError        12   a host key that is unknown or has changed
    +-- TransferError           13   a push or a fetch that broke
    +-- SpaceError              14   a full disk, here or on the device
    +-- DeviceError             15   the runner on the device: no Python, no runtime, crash, timeout
    +-- ValidationError         16   a device that was measured and failed its limits
    +-- LockedError             17   somebody else is at work on the same device and name
    +-- RolloutError            18   a rollout that was halted, or that some devices did not take
    (interrupted by the user)  130

A message says what happened, where (file, key, host), and what to do next.
"""

from __future__ import annotations

import errno

INTERRUPTED = 130
_LINE_CHARACTERS = 300


def first_line(why: BaseException) -> str:
    """The first line of an exception's message, its type where it has none; some libraries put a whole graph there."""
    text = str(why).strip()
    return text.splitlines()[0][:_LINE_CHARACTERS] if text else type(why).__name__


class EdgeoptError(Exception):
    """An error with a message for people: what happened, where, and what to do next."""

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, todo: str | None = None):
        super().__init__(what)
        self.what = what
        self.where = where
        self.todo = todo

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.todo:
            lines.append(f"  next:  {self.todo}")
        return "\n".join(lines)

    def as_dict(self) -> dict:
        """The error as JSON data, for `--json`."""
        return {"error": type(self).__name__, "what": self.what, "where": self.where, "next": self.todo}


class UsageError(EdgeoptError):
    exit_code = 2


class ProfileError(EdgeoptError):
    exit_code = 3


class ProjectError(EdgeoptError):
    exit_code = 4


class FleetError(ProjectError):
    pass


class ModelError(EdgeoptError):
    exit_code = 5


class CaptureError(EdgeoptError):
    exit_code = 6


class DataError(EdgeoptError):
    exit_code = 7


class StageError(EdgeoptError):
    exit_code = 8


class DeclinedError(StageError):
    pass


class LoweringError(EdgeoptError):
    exit_code = 9


class ArtifactError(EdgeoptError):
    exit_code = 10


class HostError(EdgeoptError):
    exit_code = 11


class HostKeyError(HostError):
    exit_code = 12


class TransferError(EdgeoptError):
    exit_code = 13


class SpaceError(EdgeoptError):
    exit_code = 14


class DeviceError(EdgeoptError):
    exit_code = 15


class ValidationError(EdgeoptError):
    exit_code = 16


class LockedError(EdgeoptError):
    exit_code = 17


class RolloutError(EdgeoptError):
    exit_code = 18


def disk_error(
    why: OSError, path: object, *, todo: str = "free space and try again", error: type[EdgeoptError] = EdgeoptError
) -> EdgeoptError:
    """A file that could not be written, as an error for people: SpaceError for a full disk or quota, else `error`."""
    if why.errno in (errno.ENOSPC, errno.EDQUOT):
        return SpaceError(f"the disk is full: {why.strerror}", where=str(path), todo=todo)
    return error(f"cannot write: {why.strerror or why}", where=str(path), todo="check the folder's permissions")
