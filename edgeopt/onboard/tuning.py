"""Settings of a runtime that are found by trial on the device: threads, spinning, and streams for throughput.

A setting is {"threads": int or None, "streams": int, "flags": {flag: value}}; `flags` are laid over the candidate's.
None leaves the number to the runtime. What the profile or the request fixes is not varied. The settings that were
chosen stand in selection.json with the number of cores that they were found on, and hold for no other number.
"""

import json
import os

DEFAULT = {"threads": None, "streams": 1, "flags": {}}
EQUAL = 1.03  # a setting that is slower by no more than this and takes less of the machine is taken
_SPINS = ("onnxruntime",)
_FIXED = ("tensorrt", "python")  # runtimes that have nothing to choose here
SETTINGS_KEY = "settings"  # of selection.json


def settings(candidate, mode, cores, threads=None, streams=None):
    """The settings to try, those that take least of the machine first; one where nothing is to be chosen.

    `cores`: see machine.cores; `threads` and `streams` of the request are kept.
    """
    flags = candidate.get("flags") or {}
    if candidate["runtime"] in _FIXED or any(name != "CPUExecutionProvider" for name in flags.get("providers") or ()):
        return [dict(DEFAULT, threads=threads, streams=streams or 1)]
    if mode == "throughput":
        counts = [streams] if streams else _counts(cores)
        return [
            {
                "threads": threads or flags.get("intra_op_threads") or max(1, cores["all"] // count),
                "streams": count,
                # a stream's threads that spin take the cores of the others
                "flags": _spinning(candidate, False) if count > 1 else {},
            }
            for count in counts
        ]
    fixed = threads or flags.get("intra_op_threads")
    found = [
        {"threads": count, "streams": 1, "flags": _spinning(candidate, spin) if count > 1 else {}}
        for count in ([fixed] if fixed else _counts(cores))
        for spin in (False, True)
    ]
    return _distinct(found)


def best(tried):
    """The index of the setting to take of `tried`: ms in the order of `settings`, None where it failed.

    Where all failed it is the first, and its failure that of the candidate.
    """
    measured = [ms for ms in tried if ms is not None]
    return [ms is not None and ms <= min(measured) * EQUAL for ms in tried].index(True) if measured else 0


def chosen_for(release, candidate, threads):
    """(candidate, threads) with the settings that selection.json holds for this candidate and this number of cores.

    `threads` of the caller stays. Nothing changes where there are no settings, or they are of another machine.
    """
    from . import machine

    try:
        with open(os.path.join(release, "selection.json"), encoding="utf-8") as f:
            selection = json.load(f)
        found = selection[SETTINGS_KEY]
        applies = selection["candidate"] == candidate["name"] and found["cores"] == machine.cores()["all"]
    except (OSError, ValueError, KeyError, TypeError):
        return candidate, threads
    if not applies or threads:
        return candidate, threads
    return dict(candidate, flags=dict(candidate.get("flags") or {}, **found["flags"])), found["threads"]


def _counts(cores):
    return sorted({n for n in (1, 2, 4, cores["physical"], cores["all"]) if n <= cores["all"]})


def _spinning(candidate, value):
    if candidate["runtime"] not in _SPINS or "allow_spinning" in (candidate.get("flags") or {}):
        return {}
    return {"allow_spinning": value}


def _distinct(found):
    return [setting for i, setting in enumerate(found) if setting not in found[:i]]
