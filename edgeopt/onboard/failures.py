"""Failures as data: why a candidate gave no figures, as a kind, a message, and the signal that ended it."""

import errno
import signal

KINDS = ("missing-runtime", "load", "run", "abort", "timeout", "memory", "space", "request", "locked")

# Messages of allocators that reach Python as plain exceptions: std::bad_alloc through pybind11, torch's CPU
# allocator, CUDA's and onnxruntime's arenas.
_MEMORY_WORDS = ("bad_alloc", "out of memory", "can't allocate memory", "failed to allocate memory")


class Failure(Exception):
    """A failure with its kind, one of KINDS. `signal` is the number of the signal that ended the process."""

    def __init__(self, kind, message, signal=None):
        Exception.__init__(self, message)
        assert kind in KINDS
        self.kind = kind
        self.message = message
        self.signal = signal

    def as_dict(self):
        return {"kind": self.kind, "message": self.message, "signal": self.signal}


def of_exception(error, kind):
    """`error` as a Failure: of `kind`, unless it plainly is one of memory or of space."""
    if isinstance(error, Failure):
        return error
    message = "%s: %s" % (type(error).__name__, str(error).strip() or "no message")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
        where = " (%s)" % error.filename if error.filename else ""
        return Failure("space", "the disk of the device is full%s: free space and try again" % where)
    if isinstance(error, MemoryError) or any(word in message.lower() for word in _MEMORY_WORDS):
        return Failure("memory", "not enough memory: " + message)
    return Failure(kind, message)


def of_exit(status, said):
    """The Failure of a child that ended without an answer; `status` as subprocess has it."""
    said = "; it said: " + said if said else ""
    if status >= 0:
        return Failure("abort", "the process ended with status %d%s" % (status, said))
    number = -status
    if number == signal.SIGKILL:
        return Failure("memory", "the system killed the process, most likely for want of memory%s" % said, number)
    return Failure("abort", "the process ended by %s%s" % (_signal_name(number), said), number)


def _signal_name(number):
    try:
        return signal.Signals(number).name
    except ValueError:
        return "signal %d" % number
