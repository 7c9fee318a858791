"""Int8 without labels: MobileNetV2 and EfficientNet-Lite0, 100 calibration pictures, agreement on 100 others.

    scripts/fetch-zoo
    .venv/bin/python benchmarks/labelless.py build [--model NAME] [--arm NAME] [--nncf PYTHON]
    .venv/bin/python benchmarks/labelless.py table
    .venv/bin/python benchmarks/labelless.py latency

`build` makes an ONNX file an arm in --out (.zoo/built/labelless), each in a process of its own, and keeps what is
there; `table` prints the top-1 agreement with the float model in onnxruntime, the SQNR of the logits, and sizes;
`latency` runs the files in turns, batch 1, 2 threads. Weights are 7-bit in our arms and in the peer's with reduced
range: what a CPU with AVX2 and no VNNI needs; arms with 8 bits are for targets that have VNNI. NNCF runs in an
interpreter of its own that has nncf and onnx; without one it is left out with that reason. Each file is run as its
maker runs it: ours without the optimizer that int8 candidates switch off, the peers' with all.

Goal: at least 95 of 100, at no more latency than the fastest peer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from interleaved import machine, number, python

from edgeopt.backends.integer_kernels import DISABLED_FOR_INT8

ROOT = Path(__file__).parents[1]
PROJECTS = ROOT / "examples" / "imagenet"
MODELS = {"mobilenet_v2": "image", "efficientnet_lite0": "inputs"}


@dataclass(frozen=True)
class Arm:
    """`improve`: methods of `quantization.improve`; `keep`: model -> layers kept float, of models that have the arm."""

    improve: tuple[str, ...] = ("equalize", "rounding")
    keep: dict[str, tuple[str, ...]] | None = None
    weight_bits: int = 7


# Chosen on calibration pictures and on 90 that are neither those nor the 100: where the noise of MobileNetV2's
# activations and weights is. EfficientNet-Lite0 has no block that costs more than others, so there they are left out.
TWO, FOUR = (15, 16), (0, 1, 15, 16)
OURS: dict[str, Arm] = {
    "plain": Arm(()),
    "biases": Arm(("biases",)),
    "equalize": Arm(("equalize",)),
    "rounding": Arm(("rounding",)),
    "equalize+biases": Arm(("equalize", "biases")),
    "equalize+rounding": Arm(),
    "equalize+rounding, 2 float blocks": Arm(keep={"mobilenet_v2": tuple(f"features.{i}" for i in TWO)}),
    "equalize+rounding, 4 float blocks": Arm(keep={"mobilenet_v2": tuple(f"features.{i}" for i in FOUR)}),
    "equalize+rounding, 5 float blocks": Arm(keep={"mobilenet_v2": tuple(f"features.{i}" for i in (*FOUR, 14))}),
    "equalize+rounding, 8-bit weights (VNNI)": Arm(weight_bits=8),
    "equalize+rounding, 8-bit weights (VNNI), 4 float blocks": Arm(
        keep={"mobilenet_v2": tuple(f"features.{i}" for i in FOUR)}, weight_bits=8
    ),
}
PEERS = ("onnxruntime default", "onnxruntime per-channel, reduced range", "nncf default")

_NNCF = """
import sys, numpy, onnx, nncf
model, data, out, name = sys.argv[1:]
pictures = numpy.load(data)
items = nncf.Dataset([{name: pictures[i : i + 1]} for i in range(len(pictures))])
onnx.save(nncf.quantize(onnx.load(model), items, subset_size=len(pictures)), out)
"""

_TIME = """
import statistics, sys, time, numpy, onnxruntime
options = onnxruntime.SessionOptions()
options.intra_op_num_threads, options.log_severity_level = 2, 3
off = sys.argv[3].split()
session = onnxruntime.InferenceSession(
    sys.argv[1], options, providers=["CPUExecutionProvider"], disabled_optimizers=off
)
x = {sys.argv[2]: numpy.random.default_rng(0).standard_normal((1, 3, 224, 224)).astype(numpy.float32)}
for _ in range(20): session.run(None, x)
taken, end = [], time.perf_counter() + 3
while time.perf_counter() < end:
    started = time.perf_counter(); session.run(None, x); taken.append(time.perf_counter() - started)
print(1e3 * statistics.median(taken))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["build", "one", "table", "latency"])
    parser.add_argument("--model", choices=list(MODELS))
    parser.add_argument("--arm")
    parser.add_argument("--out", type=Path, default=ROOT / ".zoo" / "built" / "labelless", help="where the files lie")
    parser.add_argument("--nncf", metavar="PYTHON", help="an interpreter that has nncf")
    args = parser.parse_args()
    models = [args.model] if args.model else list(MODELS)
    arms = [args.arm] if args.arm else ["float", *OURS, *PEERS]
    if args.what == "one":
        one(args.model, args.arm, args.out / args.model, args.nncf)
    elif args.what == "build":
        build(models, arms, args.out, args.nncf)
    elif args.what == "table":
        table(models, args.out)
    else:
        latency(models, args.out)


def build(models: list[str], arms: list[str], out: Path, nncf: str | None) -> None:
    for model in models:
        for arm in ["float", *(arm for arm in arms if arm != "float")]:
            left_out = arm in OURS and OURS[arm].keep is not None and model not in OURS[arm].keep
            if not left_out and not (out / model / f"{arm}.json").exists():
                argv = [sys.executable, __file__, "one", "--model", model, "--arm", arm, "--out", str(out)]
                print(f"{model}: {arm}", file=sys.stderr)
                subprocess.run([*argv, *(["--nncf", nncf] if nncf else [])], check=False)


def one(model: str, arm: str, folder: Path, nncf: str | None) -> None:
    """Make the file of one arm, measure it, and write the result beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{arm}.onnx"
    if arm == "float":
        made = save_float(model, folder)
    elif arm in OURS:
        made = ours(model, arm, file)
    elif arm.startswith("nncf"):
        made = by_nncf(model, file, nncf)
    else:
        made = by_onnxruntime(model, file, per_channel="per-channel" in arm)
    made["cpu_s"] = round(sum(os.times()[:4]), 1)
    if file.exists():
        made |= agreement(model, file, switched_off(arm))
    if "left_out" not in made:
        (folder / f"{arm}.json").write_text(json.dumps(made, indent=1))
    print(json.dumps(made))


def save_float(model: str, folder: Path) -> dict[str, object]:
    from edgeopt.backends import onnx_export
    from edgeopt.capture import serialise
    from edgeopt.pipeline import stages
    from edgeopt.pipeline.job import Job
    from edgeopt.spec.profile import load_profile
    from edgeopt.spec.project import load_project

    with tempfile.TemporaryDirectory() as work:
        job = Job(load_profile("x86-cpu"), load_project(PROJECTS / f"{model}.yaml"), Path(work))
        program, _ = stages._capture(None, job)
        program, _ = stages._optimize(program, job)
    serialise.save(program, folder / "program")
    onnx_export.write(program, folder, opset_max=18)
    return {}


def ours(model: str, arm: str, file: Path) -> dict[str, object]:
    from edgeopt.backends import onnx_export
    from edgeopt.capture import serialise
    from edgeopt.quant import convert
    from edgeopt.spec.profile import load_profile

    how = OURS[arm]
    changed = {"improve": how.improve, "weight_bits": how.weight_bits}
    quantization = load_profile("x86-cpu").quantization.model_copy(update=changed)
    program = serialise.load(file.parent / "program")
    integer, report = convert.from_batches(
        program, quantization, calibration(model), limit=10, keep_float=(how.keep or {}).get(model, ())
    )
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        written = onnx_export.write(integer, Path(scratch), opset_max=18)
        (Path(scratch) / written.name).replace(file)
    return {"improved": report.improved, "integer_macs": round(report.coverage, 3)}


def by_onnxruntime(model: str, file: Path, *, per_channel: bool) -> dict[str, object]:
    from onnxruntime import quantization as q

    class Reader(q.CalibrationDataReader):
        def __init__(self) -> None:
            self._batches = calibration(model)

        def get_next(self):
            return next(self._batches, None)

    with tempfile.TemporaryDirectory() as scratch:
        prepared = Path(scratch) / "prepared.onnx"
        q.shape_inference.quant_pre_process(str(file.parent / "float.onnx"), str(prepared), skip_symbolic_shape=True)
        settings = {"per_channel": True, "reduce_range": True} if per_channel else {}
        q.quantize_static(str(prepared), str(file), Reader(), **settings)
    return {}


def by_nncf(model: str, file: Path, interpreter: str | None) -> dict[str, object]:
    if interpreter is None:
        return {"left_out": "no interpreter with nncf: python -m venv VENV; VENV/bin/pip install nncf; --nncf PYTHON"}
    with tempfile.TemporaryDirectory() as scratch:
        pictures = Path(scratch) / "pictures.npy"
        np.save(pictures, np.concatenate([next(iter(b.values())) for b in calibration(model)]))
        argv = [interpreter, "-c", _NNCF, str(file.parent / "float.onnx"), str(pictures), str(file), MODELS[model]]
        done = subprocess.run(argv, capture_output=True, text=True)
    return {} if done.returncode == 0 else {"left_out": done.stderr.strip().splitlines()[-1]}


def switched_off(arm: str) -> list[str]:
    """The optimizers of onnxruntime that a file is run without."""
    return list(DISABLED_FOR_INT8) if arm in OURS else []


def agreement(model: str, file: Path, off: list[str]) -> dict[str, object]:
    """Against the float file in onnxruntime, on the 100 pictures that nothing was chosen by."""
    wanted, found = logits(model, file.parent / "float.onnx", []), logits(model, file, off)
    noise = ((wanted - found) ** 2).sum()
    return {
        "agree": int((wanted.argmax(1) == found.argmax(1)).sum()),
        "sqnr_db": round(float(10 * np.log10((wanted**2).sum() / noise)), 2) if noise else None,
        "size_mb": round(file.stat().st_size / 1e6, 2),
    }


def logits(model: str, file: Path, off: list[str]) -> np.ndarray:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    session = onnxruntime.InferenceSession(
        str(file), options, providers=["CPUExecutionProvider"], disabled_optimizers=off
    )
    images = prepared(model, data().other_pictures())
    parts = [session.run(None, {MODELS[model]: images[i : i + 1]})[0] for i in range(len(images))]
    return np.concatenate(parts).astype(np.float64)


def calibration(model: str) -> Iterator[dict[str, np.ndarray]]:
    pictures = data().calibration_pictures()
    return ({MODELS[model]: prepared(model, pictures[i : i + 10])} for i in range(0, len(pictures), 10))


def prepared(model: str, pictures: np.ndarray) -> np.ndarray:
    return data().for_mobilenet(pictures) if model == "mobilenet_v2" else data().for_efficientnet(pictures)


def data():
    sys.path.insert(0, str(PROJECTS))
    import data

    return data


def results(folder: Path) -> dict[str, dict]:
    files = {arm: folder / f"{arm}.json" for arm in ("float", *OURS, *PEERS)}
    return {arm: json.loads(file.read_text()) for arm, file in files.items() if file.exists()}


def table(models: list[str], out: Path) -> None:
    print("| model | arm | agrees, of 100 | SQNR dB | MB | CPU s to make |\n|---|---|---|---|---|---|")
    for model in models:
        for arm, r in results(out / model).items():
            print(f"| {model} | {arm} | {r['agree']} | {r['sqnr_db'] or ''} | {r['size_mb']} | {r['cpu_s']} |")


def latency(models: list[str], out: Path, rounds: int = 7) -> None:
    for model in models:
        taken: dict[str, list[float]] = {arm: [] for arm in results(out / model)}
        for turn in range(rounds):
            for arm in list(taken) if turn % 2 == 0 else reversed(list(taken)):
                file, off = out / model / f"{arm}.onnx", " ".join(switched_off(arm))
                taken[arm].append(number(python(_TIME, str(file), MODELS[model], off)))
        print(f"{model}, {machine()}: median ms (least, largest), and of float in the same round")
        for arm, ms in taken.items():
            ratio = statistics.median(a / b for a, b in zip(ms, taken["float"], strict=True))
            print(f"  {arm}: {statistics.median(ms):.2f} ({min(ms):.2f}, {max(ms):.2f}), {ratio:.2f}")


if __name__ == "__main__":
    main()
