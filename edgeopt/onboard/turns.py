"""The measured rounds: candidates take turns, and a round that says little of them is measured again.

Doubtful is a round in which others used the machine, or in which the device slowed itself down (see sample). Where
none may be repeated any more the least doubtful count. A soak (`duration_s`) goes on for its time, and there every
round counts: what a device does when it is hot is what is asked for.
"""

import json
import sys
import time

from . import machine
from .timing import median

# A runtime's threads spin for up to 50 ms after a call (onnxruntime: 2^20 pauses), in the next one's time.
_SETTLE_S = 0.1


def measure(children, results, names, asked, one_round, sampler=None, tell=None):
    """Measure in turns; returns the spans of the rounds that count, and those of all.

    `one_round(name, least_s)` adds a round to a result's "rounds_s" and "windows", or takes the child out of
    `children`. `tell(span, number)` is called after each round.
    """
    wanted, spans, started = asked["rounds"], [], time.perf_counter()
    most = wanted + asked.get("repeats", 0)
    until = started + asked["duration_s"] if asked.get("duration_s") else None
    least_s = sampler.settings["round_s"] if sampler is not None and sampler.has_power() else 0.0
    if until is not None:
        least_s = max(least_s, asked["duration_s"] / 600.0)  # a soak of many hours is no file of many gigabytes

    def more():
        if until is not None:
            return time.perf_counter() < until or not spans
        return len(spans) < most and sum(not doubtful(span) for span in spans) < wanted

    while children and more():
        watched = [child.pid for child in children.values()] + (sampler.pids() if sampler is not None else [])
        load, since = machine.Span(watched), time.perf_counter()
        # every second round in reverse: what follows a hot neighbour is not always the same candidate
        for name in sorted(children, key=names.index, reverse=len(spans) % 2 == 1):
            if len(children) > 1:
                time.sleep(_SETTLE_S)
            one_round(name, least_s)
        span = dict(load.end(), started_s=since, ended_s=time.perf_counter(), counts=True, throttled=[])
        if sampler is not None:
            span["throttled"] = sampler.throttled(since, span["ended_s"])
        spans.append(span)
        if tell is not None:
            tell(span, len(spans))
    count = list(range(len(spans))) if until is not None else _least_doubtful(spans, wanted)
    for result in results.values():
        for key in ("rounds_s", "windows"):
            result[key] = [result[key][i] for i in count if i < len(result[key])]
    for i, span in enumerate(spans):
        span["counts"] = i in count
    return [dict(spans[i], repeated=len(spans) - len(count)) for i in count], spans


def doubtful(span):
    """Whether a round is to be measured again."""
    return bool(span["busy"] or span["throttled"])


def noise(spans):
    """What the rounds that count saw of other work on this machine."""
    found = {"cores": machine.cores(), "load": machine.load(), "busy_rounds": sum(span["busy"] for span in spans)}
    for key in ("others", "steal"):
        known = [span[key] for span in spans if span[key] is not None]
        found[key] = median(known) if known else None
    found["repeated"] = spans[0]["repeated"] if spans else 0
    return found


def teller(results, asked, sampler):
    """What writes a JSON line to stdout after each round, for whoever watches; one who left is not missed."""
    started = time.perf_counter()

    def tell(span, number):
        line = {
            "round": number, "of": None if asked.get("duration_s") else asked["rounds"],
            "at_s": round(span["ended_s"] - started, 3), "duration_s": asked.get("duration_s"),
            "ms": {name: 1e3 * median(r["rounds_s"][-1]) for name, r in results.items() if r["rounds_s"]},
            "busy": span["busy"], "throttled": span["throttled"],
        }  # fmt: skip
        if sampler is not None:
            line.update(sampler.latest())
        try:
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
        except (OSError, ValueError):
            pass

    return tell


def _least_doubtful(spans, wanted):
    order = sorted(
        range(len(spans)), key=lambda i: (len(spans[i]["throttled"]), spans[i]["busy"], spans[i]["others"] or 0)
    )
    return sorted(order[:wanted])
