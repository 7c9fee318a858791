"""What the machine is and what else it does, from files of /proc as the kernel writes them."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from edgeopt.onboard import machine, turns

STAT = "cpu  9 9 9 9 0 0 0 9 0 0\ncpu{cpu} {user} 0 0 {idle} 0 0 0 {steal} 0 0\nintr 1\n"
PROCESS = "{pid} (a name) with) S 1 1 1 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 0 1 0 1 1 1"


class Files:
    """/proc and /sys as given; what is not given is not there."""

    def __init__(self, monkeypatch):
        self.texts: dict[str, str] = {}
        monkeypatch.setattr(machine, "_read", self.texts.get)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)

    def ticks(self, user, idle, steal=0, own=0, child=0):
        self.texts["/proc/stat"] = (
            STAT.format(cpu=2, user=user, idle=1000 + idle, steal=steal) + "cpu7 999 0 0 0 0 0 0 0 0 0"
        )
        self.texts[f"/proc/{os.getpid()}/stat"] = PROCESS.format(pid=os.getpid(), ticks=own)
        self.texts["/proc/77/stat"] = PROCESS.format(pid=77, ticks=child)


@pytest.fixture
def files(monkeypatch):
    return Files(monkeypatch)


SPANS = {
    "ours alone": (dict(user=1100, idle=900, own=100, child=1000), (0.0, 0.0, False)),
    "half of it is others'": (dict(user=1000, idle=1000, own=0, child=500), (0.25, 0.0, True)),
    "a little of others'": (dict(user=1100, idle=900, own=0, child=1000), (0.05, 0.0, False)),
    "the hypervisor's": (dict(user=1000, idle=800, steal=200, child=1000), (0.0, 0.1, True)),
}


@pytest.mark.parametrize("after, found", SPANS.values(), ids=SPANS)
def test_time_that_neither_we_nor_nobody_used_is_others(files, after, found):
    files.ticks(user=0, idle=0)
    span = machine.Span([77])
    files.ticks(**after)
    ended = span.end()
    assert (ended["others"], ended["steal"], ended["busy"]) == found


def test_a_short_span_is_not_busy_for_a_few_ticks(files):
    files.ticks(user=0, idle=0)
    span = machine.Span([])
    files.ticks(user=4, idle=6)
    assert span.end() | {"seconds": 0} == {"seconds": 0, "others": 0.4, "steal": 0.0, "busy": False}


def test_where_nothing_can_be_read_nothing_is_busy(files):
    span = machine.Span([77]).end()
    assert (span["others"], span["steal"], span["busy"]) == (None, None, False)


CORES = {
    "every CPU a core": ({}, {"all": 4, "physical": 4}),
    "two threads a core": (
        {f"/sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": f"{i % 2},{i % 2 + 2}\n" for i in range(4)},
        {"all": 4, "physical": 2},
    ),
    "a container's quota": ({"/sys/fs/cgroup/cpu.max": "150000 100000\n"}, {"all": 2, "physical": 2}),
    "no quota": ({"/sys/fs/cgroup/cpu.max": "max 100000\n"}, {"all": 4, "physical": 4}),
    "a quota of version 1": (
        {"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"},
        {"all": 1, "physical": 1},
    ),
    "no quota of version 1": (
        {"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"},
        {"all": 4, "physical": 4},
    ),
}  # fmt: skip


@pytest.mark.parametrize("texts, found", CORES.values(), ids=CORES)
def test_the_cores_that_a_process_may_use(files, texts, found):
    files.texts.update(texts)
    assert machine.cores() == found


def test_another_process_that_works_is_seen():
    """The real /proc: a busy loop of another process, for as long as it takes to be seen."""
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        for _ in range(100):
            span = machine.Span([])
            time.sleep(0.2)
            if span.end()["others"] > 0.5 / machine.cores()["all"]:
                return
        pytest.fail("100 spans of 0.2 s and none saw the other process")
    finally:
        other.kill()
        other.wait()


class Rounds:
    """Children whose rounds are as busy as told; each round's call takes its number in seconds."""

    pid = 1

    def __init__(self, busy):
        self.busy, self.asked = busy, 0

    def round(self, result):
        self.asked += 1
        result["rounds_s"].append([float(self.asked)])
        result["windows"].append(None)


REPEATED = {
    "quiet": ([0, 0, 0], [1, 2, 3], 0),
    "the first is repeated": ([1, 0, 0, 0], [2, 3, 4], 0),
    "the quietest of a busy machine": ([0.5, 0.9, 0, 0.3, 0.8], [1, 3, 4], 2),
    "all": ([0.9, 0.8, 0.7, 0.6, 0.5], [3, 4, 5], 3),
}


@pytest.mark.parametrize("others, kept, busy", REPEATED.values(), ids=REPEATED)
def test_a_round_of_a_busy_machine_is_done_again_and_the_quietest_count(monkeypatch, others, kept, busy):
    shares = iter(others)

    class Span:
        def __init__(self, pids):
            assert pids == [1]

        def end(self):
            share = next(shares)
            return {"seconds": 1, "others": share, "steal": 0.0, "busy": share > 0.1}

    monkeypatch.setattr(machine, "Span", Span)
    child, results = Rounds(others), {"a": {"rounds_s": [], "windows": []}}
    spans, every = turns.measure(
        {"a": child}, results, ["a"], {"rounds": 3, "repeats": 2}, lambda name, _: child.round(results[name])
    )
    assert results["a"]["rounds_s"] == [[float(number)] for number in kept]
    assert [i + 1 for i, span in enumerate(every) if span["counts"]] == kept
    noise = turns.noise(spans)
    assert noise["busy_rounds"] == busy and noise["repeated"] == len(others) - 3
