"""The machine while something is measured on it: its cores, and how busy others keep them.

All from /proc and /sys of Linux; what cannot be read is None, and nothing is then called busy.
Fields of /proc/stat and /proc/PID/stat: proc(5).
"""

import os
import time

# Of the time of the cores that we may use: what others may take, and a hypervisor, before a round counts as busy.
MOST_OTHERS = 0.10
MOST_STEAL = 0.05
_TICKS_OF_CHANCE = 4  # time is counted in ticks of 10 ms; a short round sees a few too many or too few


def cores():
    """{"all": CPUs that this process may use, a container's quota included, "physical": cores that they lie on}."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    siblings = set()
    for cpu in usable:
        text = _read("/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list" % cpu)
        siblings.add(text.strip() if text else str(cpu))
    most = min(len(usable), _quota() or len(usable))
    return {"all": most, "physical": min(most, len(siblings))}


def memory_available():
    """Bytes that programs can still take without swapping (MemAvailable), and all bytes; (None, None) elsewhere."""
    facts = {}
    for line in (_read("/proc/meminfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key in ("MemAvailable", "MemTotal"):
            facts[key] = int(value.split()[0]) * 1024
    return facts.get("MemAvailable"), facts.get("MemTotal")


def resident_bytes(pid):
    """Memory that a process holds, None where it is gone."""
    text = _read("/proc/%d/statm" % pid)
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE") if text else None


def ticks(pid):
    """Ticks of processor time, 1/100 s, that a process has used; None where it is gone."""
    text = _read("/proc/%d/stat" % pid)
    words = text.rpartition(")")[2].split() if text else []
    return int(words[11]) + int(words[12]) if len(words) > 12 else None  # utime, stime: fields 14 and 15


class Span:
    """A span of time in which our processes `pids` work: `end()` says what others did meanwhile."""

    def __init__(self, pids):
        self._pids = list(pids)
        self._started = time.perf_counter()
        self._before = _ticks()
        self._own = _own_ticks(self._pids)

    def end(self):
        """{"seconds", "others", "steal": shares of the cores' time or None, "busy": whether times are doubtful}."""
        span = {"seconds": time.perf_counter() - self._started, "others": None, "steal": None, "busy": False}
        after, own = _ticks(), _own_ticks(self._pids)
        if self._before is None or after is None:
            return span
        total, used, steal = [b - a for a, b in zip(self._before, after)]
        others = max(0, used - (own - self._own))
        if total <= 0:
            return span
        span["others"], span["steal"] = round(float(others) / total, 4), round(float(steal) / total, 4)
        span["busy"] = bool(
            others - _TICKS_OF_CHANCE > MOST_OTHERS * total or steal - _TICKS_OF_CHANCE > MOST_STEAL * total
        )
        return span


def load():
    """The load average of the last minute, None where there is none."""
    try:
        return round(os.getloadavg()[0], 2)
    except (OSError, AttributeError):
        return None


def _ticks():
    """(all, used, stolen) ticks of the CPUs that we may use, or None."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    total = used = stolen = 0
    for line in (_read("/proc/stat") or "").splitlines():
        words = line.split()
        if words and words[0].startswith("cpu") and words[0][3:].isdigit() and int(words[0][3:]) in usable:
            user, nice, system, idle, iowait, irq, softirq, steal = [int(word) for word in words[1:9]]
            busy = user + nice + system + irq + softirq
            total, used, stolen = total + busy + idle + iowait + steal, used + busy, stolen + steal
    return (total, used, stolen) if total else None


def _own_ticks(pids):
    """Ticks that this process and `pids` have used."""
    return sum(ticks(pid) or 0 for pid in [os.getpid()] + list(pids))


def _quota():
    """CPUs that the control group grants, rounded up; None where it grants all."""
    words = (_read("/sys/fs/cgroup/cpu.max") or "").split()  # version 2
    if len(words) != 2:
        words = [
            (_read("/sys/fs/cgroup/cpu/cpu.cfs_%s_us" % name) or "").strip() for name in ("quota", "period")
        ]  # version 1
    try:
        quota, period = int(words[0]), int(words[1])
    except ValueError:
        return None
    return max(1, -(-quota // period)) if quota > 0 and period > 0 else None


def _read(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            return f.read()
    except (OSError, ValueError):
        return None
