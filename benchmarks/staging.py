"""What the staged order is worth: optimize, qat, quantize, reoptimize against quantizing first and optimizing after.

    scripts/fetch-zoo && .venv/bin/python benchmarks/staging.py run [--setting easy] [--quick]
    .venv/bin/python benchmarks/staging.py table

Fashion-MNIST, at least 3 seeds. Every arm gets the same training: `EPOCHS` of float training that all arms of a seed
share, then `MORE_EPOCHS`, which the QAT arms spend on fake-quantized steps and all others on float steps of the same
optimizer, rate and batches (the float control). Accuracy is that of the lowered file in onnxruntime on the 10,000 test
images. Each arm of each seed is a file of its own in `--work`, and a run again does what is missing; two processes may
share the work by `--setting`. Each takes one thread.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent / "fashion"))
import data as fashion  # noqa: E402

ROOT = Path(__file__).parents[1]
WORK = ROOT / ".zoo" / "built" / "staging"
SEEDS, EPOCHS, MORE_EPOCHS = 3, 3, 1
RATE, MORE_RATE = 2e-3, 5e-4  # AdamW; each falls along a cosine to 0
QUICK_STEPS = 40


@dataclass(frozen=True)
class Setting:
    """A network and the profile's quantization, as overrides of the profile x86-cpu.

    `octaves`: the base network is that of the setting `base_of`, its channels rescaled by up to so many octaves.
    """

    network: str
    profile: dict[str, str]
    base_of: str | None = None
    octaves: float = 0.0


@dataclass(frozen=True)
class Arm:
    """`weights`: 'base', or 'control', which had the additional float steps. `stages`: of the pipeline, in this order.

    Quantizing directly means here: the graph as captured gets its Q/DQ. BatchNorm is then an operator of its own in
    float, the convolution before it gives integers to it, and each ReLU stands behind that. Afterwards all passes
    run, those for float graphs and those for integer ones, and onnxruntime optimizes the file as it does any other.
    No setting asks for that, since preparing for quantization folds a BatchNorm that is left: KEPT hides the
    BatchNorms of the graph from it, and BACK puts them back.
    """

    weights: str
    stages: tuple[str, ...]


_HARD = {"quantization.per_channel": "false", "quantization.weight_bits": "7"}
SETTINGS = {
    "easy": Setting("plain", {"quantization.per_channel": "true", "quantization.weight_bits": "8"}),
    "hard": Setting("depthwise", _HARD),
    "uneven": Setting("depthwise", _HARD, base_of="hard", octaves=2.0),
}
KEPT, BACK = "BatchNorm kept", "BatchNorm back"
ARMS = {
    "float": Arm("control", ("capture", "optimize")),
    "direct": Arm("control", ("capture", KEPT, "quantize", BACK, "optimize", "reoptimize")),
    "PTQ staged": Arm("control", ("capture", "optimize", "quantize", "reoptimize")),
    "QAT direct": Arm("base", ("capture", KEPT, "qat", "quantize", BACK, "optimize", "reoptimize")),
    "QAT staged": Arm("base", ("capture", "optimize", "qat", "quantize", "reoptimize")),
}


# ---- training in float


def weights(kind: str, setting: str, seed: int, work: Path, steps: int | None) -> Path:
    """The state_dict of the network after float training; 'base', or 'control' that goes on from it."""
    import model

    path = work / f"{setting}-{seed}-{kind}.pt"
    if path.exists():
        return path
    torch.manual_seed(seed)
    network = getattr(model, SETTINGS[setting].network)()
    chosen = SETTINGS[setting]
    if kind == "base" and chosen.base_of:
        network.load_state_dict(torch.load(weights("base", chosen.base_of, seed, work, steps), weights_only=True))
        model.rescale(network, chosen.octaves, seed)
    elif kind == "base":
        train(network, epochs=EPOCHS, rate=RATE, seed=seed, steps=steps, frozen=False)
    else:
        network.load_state_dict(torch.load(weights("base", setting, seed, work, steps), weights_only=True))
        train(network, epochs=MORE_EPOCHS, rate=MORE_RATE, seed=seed, steps=steps, frozen=True)
    part = path.with_suffix(".part")
    torch.save({name: value.contiguous() for name, value in network.state_dict().items()}, part)
    part.replace(path)
    return path


def train(network, *, epochs: int, rate: float, seed: int, steps: int | None, frozen: bool) -> None:
    """Float training in place, with the optimizer, schedule and order of batches of edgeopt's QAT.

    `frozen`: BatchNorm keeps its statistics, as in QAT, where it is folded or frozen.
    """
    network.to(memory_format=torch.channels_last).train(not frozen)
    np.random.seed(seed)  # noqa: NPY002  the loader draws from it
    loader = fashion.train()
    total = min(len(loader) * epochs, steps or sys.maxsize)
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=0.0)
    batches = (item for _ in range(epochs) for item in loader)
    for step, (inputs, target) in zip(range(total), batches, strict=False):
        optimizer.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * step / total)) / 2
        loss = fashion.loss(network(torch.from_numpy(inputs["input"])), target)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


# ---- one arm, through the product's stages


def run_arm(name: str, setting: str, seed: int, work: Path, steps: int | None) -> dict:
    """Build the arm's program, lower it, run the file in onnxruntime; figures, and each image's class."""
    from edgeopt.backends import onnxruntime as backend
    from edgeopt.pipeline.stages import STAGES

    arm, started = ARMS[name], time.perf_counter()
    job = job_for(name, setting, seed, work, steps)
    steps_of = {stage.name: stage.run for stage in STAGES} | {KEPT: norms_kept, BACK: norms_back}
    program, details = None, {}
    for stage in arm.stages:
        program, details[stage] = steps_of[stage](program, job)
    with tempfile.TemporaryDirectory() as folder:
        lowered = backend.lower(program, job.profile, Path(folder))
        if not lowered.candidates:
            sys.exit(f"{name}: not lowered: {lowered.refused}")
        file = Path(folder) / lowered.candidates[0].file
        predict, operators = session(file)
        found = fashion.predictions(predict)
        size = file.stat().st_size
    return {
        "arm": name, "setting": setting, "seed": seed,
        "top1": 100 * float((found == fashion.labels("t10k")).mean()),
        "simulated": 100 * simulated(program),
        "operators": dict(operators), "size_bytes": size, "cpu_s": round(time.process_time(), 1),
        "seconds": round(time.perf_counter() - started, 1),
        "passes": {stage: applied(details[stage]) for stage in arm.stages if "passes" in details[stage]},
        "warnings": list(details.get("quantize", {}).get("warnings", ())),
        "predictions": found.tolist(),
    }  # fmt: skip


def job_for(name: str, setting: str, seed: int, work: Path, steps: int | None):
    """The project (written as a file, as a user has it) and the profile with the setting's overrides."""
    from edgeopt.pipeline.job import Job
    from edgeopt.spec.profile import load_profile
    from edgeopt.spec.project import load_project

    limit = {} if steps is None else {"max_steps": steps}
    file = _result(work, setting, seed, name, ".yaml")
    code = Path(fashion.__file__).parent
    values = {
        "name": f"fashion-{setting}",
        "model": f"{code / 'model.py'}:{SETTINGS[setting].network}",
        "weights": str(weights(ARMS[name].weights, setting, seed, work, steps)),
        "inputs": {"input": {"shape": ["n", 1, 28, 28], "values": [-0.8, 2.0]}},
        "axes": {"n": {"min": 1, "opt": 128, "max": 250}},
        **{key: f"{code / 'data.py'}:{key}" for key in ("calibration", "train", "loss", "evaluate")},
        "calibration_batches": 16,
        "qat": {"epochs": MORE_EPOCHS, "learning_rate": MORE_RATE, **limit},
        "classifier": True,
        "seed": seed,
    }
    file.write_text(json.dumps(values))  # JSON is YAML
    profile = load_profile("x86-cpu", SETTINGS[setting].profile)
    return Job(profile=profile, project=load_project(file), workdir=file.with_suffix(""))


def norms_kept(program, job) -> tuple:
    """The program with each BatchNorm called through a function that no folding knows."""
    return _retargeted(program, torch.ops.aten.batch_norm.default, _batch_norm), {}


def norms_back(program, job) -> tuple:
    """The program with its BatchNorms as operators again."""
    return _retargeted(program, _batch_norm, torch.ops.aten.batch_norm.default), {}


def _batch_norm(*args):
    return torch.ops.aten.batch_norm.default(*args)


def _retargeted(program, old, new):
    module = program.module
    for node in module.graph.nodes:
        if node.target is old:
            node.target = new
    module.recompile()
    return program


def session(file: Path) -> tuple[Callable, Counter]:
    """`predict` of an ONNX file, and the operators that onnxruntime runs, from its own optimized graph."""
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.optimized_model_filepath = str(file.with_suffix(".optimized"))
    opened = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    graph = onnx.load(options.optimized_model_filepath).graph
    name = opened.get_outputs()[0].name
    return lambda inputs: {name: opened.run([name], inputs)[0]}, Counter(node.op_type for node in graph.node)


def simulated(program) -> float:
    """Accuracy of the program in PyTorch, before it is lowered."""
    from edgeopt.program.predict import predictor

    return fashion.evaluate(predictor(program))["top1"]


def applied(details: dict) -> list[str]:
    return [f"{record['name']} ({record['changed']})" for record in details["passes"] if record["status"] == "applied"]


# ---- the work, and the table of it


def run(settings: list[str], arms: list[str], seeds: int, work: Path, steps: int | None) -> None:
    """Do what is missing in `work`, seed after seed, so that what is there at any moment can be read."""
    torch.set_num_threads(1)
    work.mkdir(parents=True, exist_ok=True)
    for seed in range(seeds):
        for setting in settings:
            for name in arms:
                file = _result(work, setting, seed, name)
                if not file.exists():
                    line = run_arm(name, setting, seed, work, steps)
                    file.with_suffix(".part").write_text(json.dumps(line) + "\n")
                    file.with_suffix(".part").replace(file)
                    print(f"{setting}, seed {seed}, {name}: {line['top1']:.2f} ({line['seconds']:.0f} s)", flush=True)


def _result(work: Path, setting: str, seed: int, arm: str, ending: str = ".json") -> Path:
    return work / f"{setting}-{seed}-{arm.replace(' ', '-')}{ending}"


def table(work: Path) -> str:
    """The results in `work` as markdown; only seeds that every arm of a setting has."""
    found: dict[str, dict[str, dict[int, dict]]] = {}
    for file in work.glob("*.json"):
        line = json.loads(file.read_text())
        found.setdefault(line["setting"], {}).setdefault(line["arm"], {})[line["seed"]] = line
    lines = []
    for setting in (name for name in SETTINGS if name in found):
        arms = {name: found[setting][name] for name in ARMS if name in found[setting]}
        seeds = sorted(set.intersection(*map(set, arms.values())))
        rows = {name: [by_seed[seed] for seed in seeds] for name, by_seed in arms.items()}
        lines += [f"{setting}, seeds {', '.join(map(str, seeds))}", "", *(_rows(rows) if seeds else ()), ""]
    return "\n".join(lines)


def _rows(rows: dict[str, list[dict]]) -> Iterator[str]:
    yield "| arm | top-1, % | against float | against direct | simulated | operators in onnxruntime | KB |"
    yield "|---|---|---|---|---|---|---|"
    for name, lines in rows.items():
        top1 = [line["top1"] for line in lines]
        off = statistics.mean(line["simulated"] - line["top1"] for line in lines)
        cells = (
            name,
            f"{statistics.mean(top1):.2f} ({min(top1):.2f} to {max(top1):.2f})",
            *(_against(lines, rows.get(other), name == other) for other in ("float", "direct")),
            f"{off:+.2f}",
            ", ".join(f"{n} {kind}" for kind, n in sorted(lines[0]["operators"].items(), key=lambda item: -item[1])),
            f"{lines[0]['size_bytes'] / 1000:.0f}",
        )
        yield "| " + " | ".join(cells) + " |"


def _against(lines: list[dict], others: list[dict] | None, same: bool) -> str:
    """Mean difference in points, its 95% interval from the test images, and least and largest of the seeds."""
    if same or others is None:
        return ""
    mean, half, each = difference([right(line) for line in lines], [right(line) for line in others])
    return f"{mean:+.2f} ± {half:.2f} ({min(each):+.2f} to {max(each):+.2f})"


def difference(a: list[np.ndarray], b: list[np.ndarray]) -> tuple[float, float, list[float]]:
    """Paired difference of accuracies in points: mean over seeds, half the 95% interval, and each seed's own.

    `a` and `b`: per seed [images] of 0 or 1. The interval takes the images as the sample: the standard error of an
    image's mean difference over the seeds, as in McNemar's test, whose statistic it is the square root of for one
    seed and many images (McNemar, "Note on the sampling error of the difference between correlated proportions or
    percentages", Psychometrika 12, 1947).
    """
    by_image = np.mean([x.astype(float) - y for x, y in zip(a, b, strict=True)], axis=0)
    half = 1.96 * by_image.std(ddof=1) / math.sqrt(len(by_image))
    each = [100 * float(x.mean() - y.mean()) for x, y in zip(a, b, strict=True)]
    return 100 * float(by_image.mean()), 100 * float(half), each


def right(line: dict) -> np.ndarray:
    """[images] of 0 or 1: whether the class is right."""
    return (np.array(line["predictions"]) == fashion.labels("t10k")).astype(int)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("verb", choices=("run", "table"))
    parser.add_argument("--work", type=Path, default=WORK, help="folder of the weights and results")
    parser.add_argument("--setting", choices=list(SETTINGS), action="append", help="default: all")
    parser.add_argument("--arm", choices=list(ARMS), action="append", help="default: all")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps a training, one seed, other folder")
    given = parser.parse_args()
    work = given.work / "quick" if given.quick else given.work
    if given.verb == "run":
        steps, seeds = (QUICK_STEPS, 1) if given.quick else (None, given.seeds)
        run(given.setting or list(SETTINGS), given.arm or list(ARMS), seeds, work, steps)
    print(table(work))


if __name__ == "__main__":
    main()
