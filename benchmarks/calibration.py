"""Calibration over 500 images of 224 x 224 against plain inference over them: MobileNetV2, 2 threads.

    scripts/fetch-zoo && .venv/bin/python benchmarks/calibration.py

Both run the same optimized graph on the same batches of 10, each in a process of its own, in turns; what is timed is
the loop over the batches, and for the histogram methods the search for the ranges as well. Goal: the min-max method at
most 1.3 of plain inference; the others as measured.
"""

from __future__ import annotations

import sys
from pathlib import Path

from interleaved import compare, python, report

PROJECT = Path(__file__).parents[1] / "examples" / "imagenet" / "mobilenet_v2.yaml"
RANGES = ("minmax", "moving-average", "percentile", "mse", "entropy")
IMAGES, BATCH = 500, 10

_SET_UP = f"""
import sys, time
import numpy as np, torch
from edgeopt import passes
from edgeopt.capture import capture
from edgeopt.program import batches
from edgeopt.progress import SILENT
from edgeopt.quant import calibrate, findings, prepare
from edgeopt.spec.profile import load_profile
from edgeopt.spec.project import load_project
torch.set_num_threads(2)
profile = load_profile("x86-cpu")
captured = capture(load_project(sys.argv[1], overrides={{"calibration": "null"}}), progress=SILENT)
program, _ = passes.optimize(captured, profile, {{}}, passes.Run())
image = np.random.default_rng(0).standard_normal(({BATCH}, 3, 224, 224), dtype=np.float32)
given = batches.Checked([torch.from_numpy(image)], program.signature)
data = [given] * {IMAGES // BATCH}
"""
_PLAIN = (
    _SET_UP
    + """
with torch.no_grad():
    program.module(given.tensors[0])
    started = time.perf_counter()
    for batch in data: program.module(*batch.tensors)
    print(time.perf_counter() - started)
"""
)
_CALIBRATION = (
    _SET_UP
    + """
quantization = profile.quantization.model_copy(update={"ranges": sys.argv[2]})
prepared = prepare.prepare(program, quantization)
with torch.no_grad(): program.module(given.tensors[0])
started = time.perf_counter()
calibrate.calibrate(prepared, data, limit=len(data))
for _, observer in findings.observed(prepared.module): observer.calculate_qparams()
print(time.perf_counter() - started)
"""
)


def main(rounds: int = 5) -> None:
    rows = {}
    for ranges in RANGES:
        result = compare(python(_CALIBRATION, str(PROJECT), ranges), python(_PLAIN, str(PROJECT)), rounds=rounds)
        low, high = result.spread
        rows[ranges] = f"{result.ratio:.2f} of plain inference ({low:.2f} to {high:.2f})"
    report(f"calibration over {IMAGES} images, MobileNetV2", rows)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
