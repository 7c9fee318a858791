"""Validate against the truth: does the runner time what a plain loop times, what does validate cost besides, and how
often does its interval hold the long-run median?

    python benchmarks/validate.py agreement [--rounds 9] [--calls 200]     # (a) the runner's p50 and an in-process loop
    python benchmarks/validate.py overhead [--times 5]                     # (b) validate besides its calls, on loopback
    python benchmarks/validate.py coverage [--times 20]                    # (c) the same artifact validated again

All take --json and leave by status 1 where the goal is missed. The artifact is a convolutional ONNX model of about a
millisecond a call, made from a fixed seed, with one candidate and one thread, so that nothing is tuned. On a machine
that does other work the figures mean nothing; validate then says so itself ('uncertain'), and it is printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts"), str(REPOSITORY / "benchmarks")]

import loopback_sshd  # noqa: E402
from interleaved import machine  # noqa: E402

from edgeopt.device import intervals  # noqa: E402
from edgeopt.flows.place import locked  # noqa: E402
from edgeopt.flows.validate import How, validate_at, validate_here  # noqa: E402
from edgeopt.ports.connect import connect  # noqa: E402
from edgeopt.runtime.artifact import Artifact, publish  # noqa: E402
from edgeopt.runtime.tensors import PackWriter  # noqa: E402
from edgeopt.runtime.zipapp import write_zipapp  # noqa: E402
from edgeopt.spec.manifest import Candidate, Feed, Manifest, TensorSpec  # noqa: E402
from edgeopt.spec.report import CandidateResult  # noqa: E402
from tests.tiny import hash_files  # noqa: E402

GOAL_AGREEMENT = 0.02
GOAL_OVERHEAD_S = 3.0
GOAL_COVERED = 18 / 20
SHAPE = (1, 16, 48, 48)
WARM_UP = 50


def model(layers: int = 6) -> onnx.ModelProto:
    """`layers` 3x3 convolutions with ReLU on 16 channels, weights from a fixed seed."""
    draw = np.random.default_rng(0)
    nodes, weights, name = [], [], "x"
    for i in range(layers):
        weights.append(numpy_helper.from_array((draw.normal(size=(16, 16, 3, 3)) / 12).astype(np.float32), f"w{i}"))
        nodes += [
            helper.make_node("Conv", [name, f"w{i}"], [f"c{i}"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", [f"c{i}"], [f"r{i}"]),
        ]
        name = f"r{i}"
    value = [helper.make_tensor_value_info(n, TensorProto.FLOAT, SHAPE) for n in ("x", name)]
    graph = helper.make_graph(nodes, "bench", value[:1], value[1:], weights)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=7)
    onnx.checker.check_model(made, full_check=True)
    return made


def make_artifact(folder: Path) -> Artifact:
    """The model as an artifact with one candidate, its reference computed by onnxruntime."""
    staging = folder / "staging"
    staging.mkdir(parents=True)
    made = model()
    onnx.save(made, staging / "float.onnx")
    write_zipapp(staging)
    x = np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)
    (answer,) = session(staging / "float.onnx").run(None, {"x": x})
    output = made.graph.output[0].name
    with PackWriter(staging / "reference" / "tensors.bin", "reference/tensors.bin") as pack:
        reference = (Feed(inputs={"x": pack.add(x)}, outputs={output: pack.add(answer)}),)
    manifest = Manifest(
        name="bench", profile="x86-cpu", target={}, files=hash_files(staging), reference=reference,
        inputs=(TensorSpec(name="x", dtype="float32", shape=SHAPE),),
        outputs=(TensorSpec(name=output, dtype="float32", shape=SHAPE),),
        output_structure={"kind": "tensor", "index": 0},
        candidates=(Candidate(name="only", runtime="onnxruntime", precision="fp32", file="float.onnx", opset=13),),
    )  # fmt: skip
    return publish(staging, folder / "bench.edgeopt", manifest)


def session(path: Path, options=None):
    """onnxruntime as the runner sets it up for the setting that validate found."""
    import onnxruntime

    if options is None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def loop_rounds_ms(path: Path, setting: dict, rounds: int, calls: int) -> list[float]:
    """Medians in ms of rounds of a plain loop in this process, with the threads and options of `setting`."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = setting.get("threads") or 1
    for key, value in (setting.get("flags") or {}).items():
        if key.startswith("session."):
            options.add_session_config_entry(key, str(value))
    run = session(path, options).run
    x = np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)
    for _ in range(WARM_UP):
        run(None, {"x": x})
    out = []
    for _ in range(rounds):
        taken = []
        for _ in range(calls):
            started = time.perf_counter()
            run(None, {"x": x})
            taken.append(1e3 * (time.perf_counter() - started))
        out.append(statistics.median(taken))
    return out


def agreement(asked: argparse.Namespace, artifact: Artifact) -> dict:
    """(a) In turns, loop and runner by half of the rounds each, twice: a drift of the machine meets both."""
    how = How(python=sys.executable, rounds=asked.rounds, calls=asked.calls, threads=1)
    theirs: list[float] = []
    ours: list[float] = []
    uncertain = None
    for _ in range(2):
        result = _only(validate_here(artifact, how).report.candidates)
        uncertain = uncertain or result.uncertain
        measured = loop_rounds_ms(
            artifact.path("float.onnx"), result.setting or {"threads": 1}, asked.rounds, asked.calls
        )
        ours += result.rounds_ms
        theirs += measured
    ratio = intervals.ratio_of_medians(ours, theirs)
    width = max(GOAL_AGREEMENT, (ratio.high - ratio.low) / 2)
    return {
        "runner_ms": statistics.median(ours), "loop_ms": statistics.median(theirs), "ratio": ratio.value,
        "interval": [ratio.low, ratio.high], "allowed": width, "uncertain": uncertain,
        "met": abs(ratio.value - 1) <= width,
    }  # fmt: skip


def overhead(asked: argparse.Namespace, artifact: Artifact) -> dict:
    """(b) Seconds of validate over SSH on loopback that are not calls: login, Python, loading, answers, judging.

    Settings that are tried count as overhead, too.
    """
    besides = []
    with tempfile.TemporaryDirectory() as scratch:
        sshd = loopback_sshd.up(Path(scratch))
        try:
            for _ in range(asked.times):
                with (
                    connect(loopback_sshd.ALIAS, config=sshd.config) as connection,
                    locked(connection, str(sshd.home / "root"), artifact.manifest.name) as place,
                ):
                    started = time.perf_counter()
                    how = How(python=sys.executable, rounds=asked.rounds, calls=asked.calls, threads=1)
                    report = validate_at(place, artifact, how).report
                    seconds = time.perf_counter() - started
                besides.append(seconds - _in_calls_s(_only(report.candidates)))
        finally:
            loopback_sshd.down(Path(scratch))
    # the first one pushes, too
    worst = max(besides[1:] or besides)
    return {
        "besides_s": besides,
        "median_s": statistics.median(besides),
        "worst_s": worst,
        "met": worst < GOAL_OVERHEAD_S,
    }


def _in_calls_s(result: CandidateResult) -> float:
    """Seconds in calls that were asked for: those that were measured, and the warm-up."""
    warm_up = (result.warm_up or {}).get("seconds") or 0.0
    return (result.p50_ms or 0.0) * result.calls / 1e3 + warm_up


def coverage(asked: argparse.Namespace, artifact: Artifact) -> dict:
    """(c) The artifact validated again and again: how p50 spreads, how many intervals hold the long-run median."""
    how = How(python=sys.executable, rounds=asked.rounds, calls=asked.calls, threads=1)
    results = []
    for _ in range(asked.times):
        results.append(_only(validate_here(artifact, how).report.candidates))
    rounds = [value for result in results for value in result.rounds_ms]
    long_run = statistics.median(rounds)
    held = sum(low <= long_run <= high for low, high in (result.interval_ms for result in results))
    p50 = [result.p50_ms for result in results]
    return {
        "long_run_ms": long_run, "p50_ms": p50, "spread": (max(p50) - min(p50)) / long_run,
        "deviation": statistics.pstdev(p50) / long_run, "covered": held, "times": len(results),
        "uncertain": sum(result.uncertain is not None for result in results),
        "met": held >= GOAL_COVERED * len(results),
    }  # fmt: skip


def _only(candidates: tuple[CandidateResult, ...]) -> CandidateResult:
    (result,) = candidates
    if result.failure:
        raise SystemExit(f"the candidate did not run: {result.failure}")
    return result


MEASURES: dict[str, Callable[[argparse.Namespace, Artifact], dict]] = {
    "agreement": agreement,
    "overhead": overhead,
    "coverage": coverage,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=MEASURES)
    parser.add_argument("--times", type=int, help="validations [20; overhead 5]")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    asked.times = asked.times or (5 if asked.what == "overhead" else 20)
    with tempfile.TemporaryDirectory() as scratch:
        found = MEASURES[asked.what](asked, make_artifact(Path(scratch)))
    found = {"benchmark": f"validate {asked.what}", "machine": machine(), **found}
    if asked.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:12} {value}")
    return 0 if found["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
