"""One measurement at a time on a machine: a lock that all users share and that goes with the process that holds it.

The file is `edgeopt-measure.lock` in /run/lock, else in /tmp, both writable by everybody. It is never removed: a
lock on a removed file would keep nobody out. Linux refuses O_CREAT on another user's file in such a folder
(fs.protected_regular), hence the two ways to open it.
"""

import contextlib
import errno
import fcntl
import os
import stat
import time

from .failures import Failure

FILE_NAME = "edgeopt-measure.lock"
FOLDERS = ("/run/lock", "/tmp")
_LOOK_S = 0.1


@contextlib.contextmanager
def measuring(path=None, wait_s=0):
    """Hold the machine for the time of the block; yields {"path", "waited_s", "missing": why there is no lock}.

    `path` replaces the machine's file. Failure of kind "locked", with the holder's pid, where another measurement
    goes on for longer than `wait_s`. Where no lock can be made at all the block runs without one.
    """
    started = time.perf_counter()
    path = path or default_path()
    handle, missing = _open(path) if path else (None, "no folder that everybody may write to")
    try:
        if handle is not None:
            _take(handle, path, wait_s, started)
        yield {"path": path, "waited_s": round(time.perf_counter() - started, 3), "missing": missing}
    finally:
        if handle is not None:
            os.close(handle)  # which gives the lock back


def default_path():
    """The machine's lock file, None where neither folder can be written to."""
    for folder in FOLDERS:
        path = os.path.join(folder, FILE_NAME)
        if os.path.exists(path) or os.access(folder, os.W_OK | os.X_OK):
            return path
    return None


def _open(path):
    """(descriptor, None), or (None, why)."""
    common = os.O_CLOEXEC | os.O_NOFOLLOW
    for flags in (os.O_RDWR, os.O_RDWR | os.O_CREAT | os.O_EXCL, os.O_RDWR, os.O_RDONLY):
        try:
            handle = os.open(path, flags | common, 0o666)
        except OSError as error:
            why = "%s: %s" % (path, error.strerror)
            continue
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            return None, "%s is no plain file" % path
        if flags & os.O_CREAT:
            with contextlib.suppress(OSError):
                os.fchmod(handle, 0o666)  # whatever the umask: other users lock it too
        return handle, None
    return None, why


def _take(handle, path, wait_s, started):
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise Failure("locked", "cannot lock %s: %s" % (path, error.strerror)) from None
        if time.perf_counter() - started >= wait_s:
            raise Failure("locked", "another measurement is going on: process %s holds %s" % (_holder(handle), path))
        time.sleep(_LOOK_S)
    with contextlib.suppress(OSError):  # opened to be read only
        os.ftruncate(handle, 0)
        os.pwrite(handle, b"%d\n" % os.getpid(), 0)


def _holder(handle):
    """The pid that the holder wrote, 'unknown' where it could not."""
    text = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
    return text if text.isdigit() else "unknown"
