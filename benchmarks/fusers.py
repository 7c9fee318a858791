"""TorchScript's fuser flags on this machine: every combination that can be a candidate, against the profile's own.

    scripts/fetch-zoo && .venv/bin/python benchmarks/mobilenet.py     # builds the artifacts
    .venv/bin/python benchmarks/fusers.py [--rounds 5]

Each combination runs in a process of its own, in turns, by the runner's own adaptor; the figure is the median of a
round, the ratio that to the profile's flags in the same round. Flags that this torch lacks or refuses are listed.
"""

from __future__ import annotations

import argparse
import json
import statistics

from interleaved import number, python, report

from edgeopt.backends import fuser
from edgeopt.onboard import fuser as onboard_fuser
from edgeopt.spec.profile import load_profile

ARTIFACTS = ("mobilenet-v2", "efficientnet-lite0")
ROOT = __file__.rpartition("/benchmarks/")[0] or "."
_TIME = """
import json, statistics, sys, time
import numpy
from edgeopt.onboard import torchscript
folder, flags = sys.argv[1], json.loads(sys.argv[2])
manifest = json.load(open(folder + "/manifest.json"))
(spec,) = manifest["inputs"]
axes = manifest["axes"]
shape = [axes[s]["opt"] if isinstance(s, str) else s for s in spec["shape"]]
x = numpy.random.default_rng(0).standard_normal(shape, dtype=numpy.float32)
one = {"file": "float.pt", "flags": flags}
program = torchscript.open_program(folder, one, manifest["inputs"], manifest["outputs"], [], 1)
for _ in range(10): program.call([x])
taken, end = [], time.perf_counter() + 3
while time.perf_counter() < end:
    started = time.perf_counter(); program.call([x]); taken.append(time.perf_counter() - started)
print(1e3 * statistics.median(taken))
"""
# what a profile may set beside the combinations: one flag alone, and depths
_SINGLE = {
    "no optimize_for_inference": {"optimize_for_inference": None},
    "texpr_fuser alone": {"texpr_fuser": True},
    "STATIC 1": {"fusion_strategy": [["STATIC", 1]]},
    "DYNAMIC 10": {"fusion_strategy": [["DYNAMIC", 10]]},
}


def combinations() -> dict[str, dict]:
    """Name -> flags: the profile's own first, then the variants that this machine can try, then single flags."""
    profile = load_profile("x86-cpu", {"fuser.trials": "on"})
    own = profile.fuser_flags
    named = load_profile("x86-cpu", {"fuser.trials": "[unprofiled]"})
    tried = {**fuser.trials(profile)[0], **fuser.trials(named)[0]}
    single = {name: {k: v for k, v in {**own, **more}.items() if v is not None} for name, more in _SINGLE.items()}
    return {"profile": own, **tried, **single}


def flags_of_this_torch() -> dict[str, str]:
    """Flag -> what this torch answers when it is switched on."""
    import torch

    values = {flag: True for flag in fuser.FLAGS} | {"fusion_strategy": [["STATIC", 2]]}
    records, undo = onboard_fuser.apply(torch, values)
    undo()
    return {r["flag"]: f"{r['status']} {r['message']}".strip() for r in records}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    every = combinations()
    for name in ARTIFACTS:
        folder = f"{ROOT}/.zoo/built/{name}.edgeopt"
        taken: dict[str, list[float]] = {one: [] for one in every}
        for turn in range(rounds):
            for one in list(every) if turn % 2 == 0 else reversed(list(every)):
                taken[one].append(number(python(_TIME, folder, json.dumps(every[one]))))
        rows = {}
        for one, figures in taken.items():
            ratios = [a / b for a, b in zip(figures, taken["profile"], strict=True)]
            rows[one] = (
                f"{statistics.median(figures):.2f} ms, {statistics.median(ratios):.2f} of the profile's flags "
                f"({min(ratios):.2f} to {max(ratios):.2f})"
            )
        report(f"fuser flags, {name}", rows)
    report("flags of this torch, switched on", flags_of_this_torch())


if __name__ == "__main__":
    main()
