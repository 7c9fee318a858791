"""Calls on a clock: warm-up until stable, single calls one after the other, and several streams at once.

The rule of "stable": calls come in windows of five; the warm-up ends with the first window whose median is at least
0.97 of the median before it, so that a program which still gets faster by more than 3 % is called on. It ends in any
case after `MOST_WARM_UP` calls or the seconds that it is given.
"""

import gc
import threading
import time

WINDOW = 5
MOST_WARM_UP = 200
STABLE = 0.97


def warm_up(call, limit_s, clock=time.perf_counter):
    """Call until stable; returns {"calls", "seconds", "stable"}."""
    started, calls, before = clock(), 0, None
    while calls < MOST_WARM_UP and clock() - started < limit_s:
        times = _calls(call, WINDOW, limit_s - (clock() - started), clock)
        calls += len(times)
        now = median(times)
        if before is not None and now >= STABLE * before:
            return {"calls": calls, "seconds": clock() - started, "stable": True}
        before = now
    return {"calls": calls, "seconds": clock() - started, "stable": False}


def timed_calls(call, count, limit_s):
    """Seconds of each of `count` calls; fewer, but at least one, where `limit_s` is used up."""
    gc.collect()
    gc.disable()  # as timeit does: a collection is not the model's time
    try:
        return _calls(call, count, limit_s, time.perf_counter)
    finally:
        gc.enable()


def call_until(call, end):
    """Call without timing until perf_counter() is `end`; how many calls that were."""
    count = 0
    while time.perf_counter() < end:
        call()
        count += 1
    return count


def _calls(call, count, limit_s, clock):
    times, end = [], clock() + limit_s
    while len(times) < count and (not times or clock() < end):
        started = clock()
        call()
        times.append(clock() - started)
    return times


def seconds_a_call(calls, count, limit_s):
    """Throughput: seconds / answers of all `calls`, one a stream, each called `count` times in a thread of its own.

    A stream that is done early goes on until all are, so that the machine is as full at the end as at the start; only
    answers that came before the first stream had its `count`, or the time was up, are counted.
    """
    if len(calls) == 1:
        times = timed_calls(calls[0], count, limit_s)
        return sum(times) / len(times)
    ends, errors, over, ready = [[] for _ in calls], [], threading.Event(), threading.Barrier(len(calls) + 1)

    def stream(call, times):
        try:
            ready.wait()
            while not over.is_set():
                call()
                times.append(time.perf_counter())
                if len(times) >= count:
                    over.set()
        except BaseException as error:  # handed to the thread that waits
            errors.append(error)
            over.set()

    threads = [threading.Thread(target=stream, args=pair, daemon=True) for pair in zip(calls, ends)]
    for thread in threads:
        thread.start()
    ready.wait()
    started = time.perf_counter()
    over.wait(limit_s)
    over.set()
    ended = time.perf_counter()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    answered = sum(1 for times in ends for end in times if end <= ended)
    return (ended - started) / answered if answered else max(max(times) for times in ends) - started


def median(values):
    """The middle of `values`, the mean of the two in the middle where their number is even."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2.0
