"""Commands that print their sensors in a loop, tegrastats and nvidia-smi: started here, read by the sampler.

Each ends with this process, however that ends: the kernel kills it (prctl), and one that runs under sudo, which the
kernel leaves alone, dies of its next line, which nobody takes.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess

from . import processes

SMI_FIELDS = (
    "index", "power.draw", "temperature.gpu", "clocks.sm", "clocks.max.sm", "memory.used", "utilization.gpu",
    "clocks_throttle_reasons.active",
)  # fmt: skip
_SMI_LEAST_MS = 200  # the driver's own power figures are means of up to 100 ms, and each query costs
_LEAST_MS = 100  # tegrastats refuses or ignores less on some releases
_END_S = 2
_READ_BYTES = 65536


def commands(interval_s, sudo):
    """(name, argv, why there is none) of each command; argv None where it is not on the PATH."""
    interval_ms = max(_LEAST_MS, int(1000 * interval_s))
    yield _command("tegrastats", ["--interval", str(interval_ms)], sudo)
    query = ["--query-gpu=" + ",".join(SMI_FIELDS), "--format=csv,noheader,nounits"]
    yield _command("nvidia-smi", query + ["--loop-ms=%d" % max(_SMI_LEAST_MS, interval_ms)], False)


def _command(name, options, sudo):
    path = shutil.which(name)
    if path is None:
        return name, None, "'%s' is not on the PATH" % name
    return name, (["sudo", "-n"] if sudo and os.geteuid() != 0 else []) + [path] + options, None


class Stream:
    """One such command that runs: `read()` gives the lines that came, `status` and `message` how it is."""

    def __init__(self, name, argv):
        """Start it, from the thread that lives as long as this process: the kernel takes that one for the parent."""
        self.name, self.status, self.message = name, "ok", ""
        self._held, self._last, self._argv = b"", "", argv
        prctl = _prctl()
        try:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0,
                preexec_fn=prctl,
            )  # fmt: skip
        except OSError as error:
            self._process, self.status = None, "failed"
            self.message = "cannot run %s: %s" % (argv[0], error.strerror)
            return
        os.set_blocking(self._process.stdout.fileno(), False)

    @property
    def pid(self):
        """Its process, None where it could not be started."""
        return self._process.pid if self._process is not None else None

    @property
    def open(self):
        """Whether more may come."""
        return self._process is not None and not self._process.stdout.closed

    def fileno(self):
        return self._process.stdout.fileno()

    def read(self):
        """The whole lines that have come. At the end of its output the command is over, and `message` says how."""
        try:
            data = os.read(self.fileno(), _READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self._over()
        lines = (self._held + data).split(b"\n")
        self._held = lines.pop()
        texts = [line.decode("utf-8", "replace").strip() for line in lines]
        texts = [text for text in texts if text]
        self._last = texts[-1] if texts else self._last
        return texts

    def _over(self):
        self._process.stdout.close()
        try:
            status = self._process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            status = "unknown"
        said = self._held.decode("utf-8", "replace").strip() or self._last
        self.status = "failed"
        self.message = "%s ended with status %s%s" % (self.name, status, ": " + said[:200] if said else "")

    def close(self):
        """End the command; sudo is asked, since it passes a request on and cannot pass on being killed."""
        if self._process is None:
            return
        if self._process.poll() is None:
            with contextlib.suppress(OSError):  # what sudo runs is not ours to end
                self._process.send_signal(signal.SIGTERM)
        self._process.stdout.close()  # whoever still writes dies of it
        try:
            self._process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait(timeout=_END_S)


def _prctl():
    """What the child calls before it becomes the command: looked up now, since a fork may not load libraries."""
    with contextlib.suppress(OSError, AttributeError):
        call = ctypes.CDLL(None).prctl
        return lambda: call(processes.PR_SET_PDEATHSIG, signal.SIGKILL)
    return None
