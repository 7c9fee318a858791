"""Sensors sampled in a thread while candidates are measured: raw lines with the time at which they were read.

The times are those of time.perf_counter(), which Linux counts from boot for all processes alike, as are those of the
calls: so a sample falls into a candidate's calls or it does not. Nothing is understood here but whether the device
slows itself down, since such a round is measured again; the host parses the rest.

`request["sensors"]`: {"interval_s", "sudo": 0 or 1 for `sudo -n tegrastats`, "root": where /sys is looked for,
"round_s": how long a round lasts at least where power can be read, "idle_s": how long the device is watched before
the first timed call}. In the response:

    {"interval_s", "started_s", "idle_s": [from, to] or null, "cpu_s": what the sampling itself cost,
     "sources": [{"name", "status": "ok", "missing" or "failed", "message"}],
     "columns": see sysfs, of the lines of "sysfs",
     "lines": {"tegrastats", "nvidia-smi", "sysfs", "processes": [[seconds, text], ...]},
     "gpu_memory": {candidate: MiB of its process, by nvidia-smi},
     "power_mode": what `nvpmodel -q` printed before, null where there is none}

A line of "processes" holds "NAME TICKS BYTES" of every candidate that is loaded: the processor's time that it used so
far in 1/100 s, and its resident memory.
"""

import os
import re
import resource
import select
import shutil
import subprocess
import threading
import time

from . import machine, streams, sysfs

DEFAULTS = {"interval_s": 0.1, "sudo": 0, "root": "/", "round_s": 1.0, "idle_s": 1.0}
_POWER = ("rail_mv", "rail_mw", "energy_uj")
# a rail of tegrastats, such as 'VDD_IN 4067/4067' or '5299mW/5299mW'; the second of nvidia-smi's fields
_WATTS = {"tegrastats": re.compile(r"\s[0-9]+(mW)?/[0-9]+(mW)?(/|\s|$)"), "nvidia-smi": re.compile(r"^[0-9]+, *[0-9]")}
_FIRST_LINE_S = 3.0  # how long a command may take for its first line before it counts as no source of power


class Sampler:
    """Samples from `start` to `stop`; `processes` maps a candidate's name to its pid and may change meanwhile."""

    def __init__(self, settings, processes=None):
        self.settings = dict(DEFAULTS, **settings)
        self.processes = {} if processes is None else processes
        self._lines = {}
        self._sources, self._streams, self._columns, self._reader = [], [], [], None
        self._thread, self._idle, self._cpu_s, self._gpu_memory = None, None, 0.0, {}
        self._started = None

    def start(self):
        """Find what there is, start it, and watch the idle device for `idle_s`. Twice does nothing."""
        if self._thread is not None:
            return
        self._mode = _said(["nvpmodel", "-q"])
        self._started = time.perf_counter()
        self._wake = os.pipe()
        self._start_sysfs()
        for name, argv, missing in streams.commands(self.settings["interval_s"], self.settings["sudo"]):
            if argv is None:
                self._sources.append({"name": name, "status": "missing", "message": missing})
            else:
                self._streams.append(streams.Stream(name, argv))
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        self._await_streams()
        if self.has_power():
            since = time.perf_counter()
            time.sleep(self.settings["idle_s"])
            self._idle = [since, time.perf_counter()]

    def has_power(self):
        """Whether anything here says what the device draws; of a command by its first line."""
        if any(column["kind"] in _POWER for column in self._columns):
            return True
        first = [(name, lines[0][1]) for name, lines in list(self._lines.items()) if name in _WATTS]
        return any(_WATTS[name].search(line) for name, line in first)

    def pids(self):
        """The commands' processes: their work is ours, and no other's."""
        return [stream.pid for stream in self._streams if stream.pid is not None]

    def throttled(self, since, until):
        """Names of what showed from `since` to `until` that the device slows itself down."""
        every, first = self._lines.get("sysfs", []), 0
        for index in range(len(every) - 1, -1, -1):  # a soak has many, and the last ones are meant
            if every[index][0] < since:
                first = index
                break
        return sysfs.throttled(self._columns, every[first:], since, until)

    def look_at_gpu(self):
        """Note how much GPU memory each candidate's process holds, where nvidia-smi tells."""
        said = _said(["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"])
        names = {str(pid): name for name, pid in self.processes.items()}
        for line in (said or "").splitlines():
            pid, _, used = [word.strip() for word in line.partition(",")]
            if pid in names and used.isdigit():
                self._gpu_memory[names[pid]] = self._gpu_memory.get(names[pid], 0) + int(used)

    def latest(self):
        """The last line of each source, with the columns that it takes to read them."""
        return {"columns": self._columns, "lines": {name: lines[-1] for name, lines in self._lines.items() if lines}}

    def stop(self):
        """End the thread and the commands; the response's `sensors`, None where nothing was started."""
        if self._thread is None:
            return None
        os.write(self._wake[1], b".")
        self._thread.join()
        for handle in self._wake:
            os.close(handle)
        for stream in self._streams:
            stream.close()
            status, message = stream.status, stream.message
            if status == "ok" and not self._lines.get(stream.name):
                status, message = "failed", "%s printed nothing" % stream.name
            self._sources.append({"name": stream.name, "status": status, "message": message})
        if self._reader is not None:
            self._reader.close()
        return {
            "interval_s": self.settings["interval_s"], "started_s": self._started, "idle_s": self._idle,
            "cpu_s": round(self._cpu_s, 6), "sources": self._sources, "columns": self._columns,
            "lines": self._lines, "gpu_memory": self._gpu_memory, "power_mode": self._mode,
        }  # fmt: skip

    def _start_sysfs(self):
        self._columns, refused = sysfs.find(self.settings["root"])
        if self._columns:
            self._reader = sysfs.Reader(self._columns)
            self._take_files()
        status = "ok" if self._columns else "failed" if refused else "missing"
        said = "; ".join("%s: %s" % pair for pair in sorted(refused.items())[:3])
        self._sources.append({"name": "sysfs", "status": status, "message": said or ("" if self._columns else "none")})

    def _await_streams(self):
        """Until each command has printed a line or ended: what the first round lacks could not be told from idle."""
        until = time.perf_counter() + _FIRST_LINE_S + self.settings["interval_s"]
        waiting = [stream for stream in self._streams if stream.open]
        while waiting and time.perf_counter() < until:
            waiting = [s for s in waiting if s.open and not self._lines.get(s.name)]
            time.sleep(0.01)

    def _sample(self):
        """The thread: files every `interval_s`, commands' lines as they come, until woken."""
        due = time.perf_counter()
        while True:
            wait_s = max(0.0, due - time.perf_counter())
            ready, _, _ = select.select([self._wake[0]] + [s for s in self._streams if s.open], [], [], wait_s)
            now = time.perf_counter()
            for stream in ready:
                if stream == self._wake[0]:
                    self._cpu_s = _thread_cpu_s()
                    return
                for line in stream.read():
                    self._lines.setdefault(stream.name, []).append([round(now, 6), line])
            if now >= due:
                self._take_files()
                due = max(due + self.settings["interval_s"], time.perf_counter())

    def _take_files(self):
        # the middle of the reading, which takes milliseconds where sensors answer over I2C
        before = time.perf_counter()
        line = self._reader.line() if self._reader is not None else None
        at = round((before + time.perf_counter()) / 2, 6)
        if line is not None:
            self._lines.setdefault("sysfs", []).append([at, line])
        used = [_process(name, pid) for name, pid in list(self.processes.items())]
        if any(used):
            self._lines.setdefault("processes", []).append([at, " ".join(word for word in used if word)])


def _said(argv):
    """What a command prints; None where it is not there, or does not end."""
    path = shutil.which(argv[0]) or shutil.which(argv[0], path="/usr/sbin:/sbin")
    if path is None:
        return None
    try:
        done = subprocess.run(
            [path] + argv[1:], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace")


def _process(name, pid):
    ticks, held = machine.ticks(pid), machine.resident_bytes(pid)
    return "%s %d %d" % (name, ticks, held) if ticks is not None and held else None


def _thread_cpu_s():
    used = resource.getrusage(resource.RUSAGE_THREAD)
    return used.ru_utime + used.ru_stime
