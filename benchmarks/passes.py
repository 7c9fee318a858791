"""What graph optimization alone is worth, in fp32: against eager PyTorch, batch 1, 2 threads.

    .venv/bin/python benchmarks/passes.py shapes     Conv-BN-ReLU at every distinct convolution of ResNet50
    .venv/bin/python benchmarks/passes.py models     whole models, and the file after each pass   (scripts/fetch-zoo)
    .venv/bin/python benchmarks/passes.py memory     peak activation memory before and after
    .venv/bin/python benchmarks/passes.py training   bf16 autocast against fp32, and fp16 with GradScaler on a GPU
    .venv/bin/python benchmarks/passes.py scaling    the time of the table on 1,000 and 10,000 nodes

Every figure is taken in a process of its own, in turns with what it is compared with. Goals: 40% less time on a
convolution block; 3 to 8 times on a model; under 10 s for 1,000 nodes and no worse than linear to 10,000.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from interleaved import number, python, report

ROOT = Path(__file__).parents[1]
BUILT = ROOT / ".zoo" / "built" / "passes"
IMAGENET = ROOT / "examples" / "imagenet" / "model.py"
OWN = Path(__file__).with_name("models.py")
THREADS = 2

# name -> (file, factory, inputs, axes); the axes' opt are the sizes that are timed
_BATCH = {"n": {"min": 1, "opt": 1, "max": 4}}
_IMAGE = ({"image": {"shape": ["n", 3, 224, 224]}}, _BATCH)
_TEXT = {"shape": ["n", "t"], "dtype": "int64"}
MODELS = {
    "MobileNetV2": (IMAGENET, "mobilenet_v2", *_IMAGE),
    "EfficientNet-Lite0": (IMAGENET, "efficientnet_lite0", {"inputs": {"shape": ["n", 3, 224, 224]}}, _BATCH),
    "ResNet18": (OWN, "resnet18", *_IMAGE),
    "MiniLM": (
        OWN, "minilm",
        {"ids": {**_TEXT, "values": [0, 30521]}, "mask": {**_TEXT, "values": [0, 1]}},
        {"n": {"min": 1, "opt": 1, "max": 4}, "t": {"min": 4, "opt": 64, "max": 128}},
    ),
    "LSTM of varying length": (
        OWN, "speaker_lstm", {"mel": {"shape": ["n", "t", 40]}},
        {"n": {"min": 1, "opt": 1, "max": 4}, "t": {"min": 8, "opt": 160, "max": 400}},
    ),
}  # fmt: skip

_TIME = f"""
import importlib.util, json, statistics, sys, time
def median_ms(call, seconds):
    for _ in range(5): call()
    taken, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken) < 5:
        started = time.perf_counter(); call(); taken.append(time.perf_counter() - started)
    return 1e3 * statistics.median(taken)
def module(path):
    spec = importlib.util.spec_from_file_location("model_under_test", path)
    found = importlib.util.module_from_spec(spec); spec.loader.exec_module(found)
    return found
THREADS = {THREADS}
"""
_EAGER = (
    _TIME
    + """
import torch, numpy
torch.set_num_threads(THREADS)
file, factory, feeds, seconds = sys.argv[1:]
net = getattr(module(file), factory)().eval()
given = {k: torch.from_numpy(v) for k, v in numpy.load(feeds).items()}
with torch.no_grad(): print(median_ms(lambda: net(**given), float(seconds)))
"""
)
_ORT = (
    _TIME
    + """
import onnxruntime, numpy
options = onnxruntime.SessionOptions(); options.intra_op_num_threads = THREADS
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
given = dict(numpy.load(sys.argv[2]))
print(median_ms(lambda: session.run(None, given), float(sys.argv[3])))
"""
)
_SCRIPT = (
    _TIME
    + """
import torch, numpy, warnings; warnings.simplefilter("ignore")
torch.set_num_threads(THREADS)
net = torch.jit.optimize_for_inference(torch.jit.load(sys.argv[1]))
given = [torch.from_numpy(v) for v in numpy.load(sys.argv[2]).values()]
with torch.no_grad(): print(median_ms(lambda: net(*given), float(sys.argv[3])))
"""
)
_RATES = (
    _TIME
    + """
import torch
torch.set_num_threads(THREADS)
a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
x, y = torch.randn(64 << 20), torch.empty(64 << 20)
gemm = 2 * 2048**3 / (median_ms(lambda: torch.mm(a, b), 2.0) * 1e6)
print(json.dumps({"gemm_gflops": gemm, "copy_gb_s": 2 * x.nbytes / (median_ms(lambda: y.copy_(x), 2.0) * 1e6)}))
"""
)


def captured(file: Path, factory: str, inputs: dict, axes: dict):
    """The model as a program."""
    from edgeopt.capture.capture import capture
    from edgeopt.progress import SILENT
    from edgeopt.spec.project import project_for_model

    model = f"{file}:{factory}"
    return capture(project_for_model(model, folder=file.parent, inputs=inputs, axes=axes), progress=SILENT)


def points(program, folder: Path) -> tuple[dict[str, Path], object]:
    """The ONNX file after each pass that changed the graph, the TorchScript file of the last, and the last program."""
    from edgeopt import passes
    from edgeopt.backends import torchscript
    from edgeopt.backends.onnx_export import write_unproved
    from edgeopt.errors import LoweringError
    from edgeopt.program import ExportedGraph
    from edgeopt.spec.profile import load_profile

    profile, files, seen = load_profile("x86-cpu"), {}, {}
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(program, ExportedGraph):
        how = passes.Run(watch=lambda name, changed: seen.setdefault(name, changed))
        passes.optimize(program, profile, {}, how)
    seen = seen or {"as captured": program}
    for i, (name, changed) in enumerate(seen.items()):
        path = folder / f"{i:02d}.onnx"
        try:
            write_unproved(changed, path, opset_max=profile.target.onnx_opset_max)
            files[f"onnxruntime, {'as captured' if name == 'start' else 'after ' + name}"] = path
        except LoweringError as why:
            print(f"  no ONNX file after {name}: {why.what}", file=sys.stderr)
    last = list(seen.values())[-1]
    torchscript.save(last, folder / "last.pt")
    files["torchscript, all passes"] = folder / "last.pt"
    return files, last


def feeds_of(program, path: Path) -> Path:
    """Synthetic inputs of the sizes to tune for, as a file."""
    import numpy as np

    from edgeopt.program import graph

    np.savez(path, **graph.synthetic(program.signature, graph.sizes(program.signature, "opt"), seed=0))
    return path


def rates() -> dict[str, float]:
    """What this machine does at most: fp32 matrix products in GFLOP/s, and a copy in GB/s (read and written)."""
    done = subprocess.run(python(_RATES), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def timed(commands: dict[str, list[str]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each command in each round, the order turned round every second time."""
    found: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(rounds):
        for name in list(commands) if turn % 2 == 0 else reversed(list(commands)):
            found[name].append(number(commands[name]))
    return found


def against(found: dict[str, list[float]], base: str) -> dict[str, str]:
    """Median milliseconds of each, and how many times faster than `base`, with the least and largest pair."""
    out = {}
    for name, values in found.items():
        ratios = [a / b for a, b in zip(found[base], values, strict=True)]
        times = f"{statistics.median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f})"
        out[name] = f"{statistics.median(values):.3f} ms" + ("" if name == base else f", {times}")
    return out


def shapes() -> None:
    """Conv-BN-ReLU at every distinct shape of ResNet50."""
    import models

    from edgeopt.program.costs import costs

    known, rows = rates(), {}
    rows["rates"] = {k: round(v, 1) for k, v in known.items()}
    reached = []
    for shape in models.conv_shapes(models.resnet50()):
        inputs, outputs, kernel, stride, size = shape
        name = f"{inputs}->{outputs} {kernel}x{kernel}/{stride} at {size}"
        source = BUILT / "shapes" / f"{'-'.join(map(str, shape))}"
        source.mkdir(parents=True, exist_ok=True)
        (source / "model.py").write_text(
            f"import sys\nsys.path.insert(0, {str(OWN.parent)!r})\nimport models\n\n"
            f"def build():\n    return models.conv_bn_relu({shape!r})\n"
        )
        program = captured(
            source / "model.py", "build", {"image": {"shape": ["n", inputs, size, size]}},
            {"n": {"min": 1, "opt": 1, "max": 4}},
        )  # fmt: skip
        files, last = points(program, source)
        feeds = str(feeds_of(program, source / "feeds.npz"))
        final = list(files)[-2]
        commands = {
            "eager": python(_EAGER, str(source / "model.py"), "build", feeds, "0.3"),
            "onnxruntime": python(_ORT, str(files[final]), feeds, "0.3"),
            "torchscript": python(_SCRIPT, str(files["torchscript, all passes"]), feeds, "0.3"),
        }
        found = timed(commands, rounds=3)
        cost = costs(last)
        limit = max(cost.flops / known["gemm_gflops"] / 1e6, _least_bytes(cost, program) / known["copy_gb_s"] / 1e6)
        eager = statistics.median(found["eager"])
        least = {
            k: 1 - statistics.median(a / b for a, b in zip(v, found["eager"], strict=True)) for k, v in found.items()
        }
        best = max(("onnxruntime", "torchscript"), key=least.get)
        reached += [name] if least[best] >= 0.4 else []
        rows[name] = (
            f"eager {eager:.3f} ms; {best} {100 * least[best]:.0f}% less "
            f"(onnxruntime {100 * least['onnxruntime']:.0f}%, torchscript {100 * least['torchscript']:.0f}%); "
            f"at its GEMM rate or bandwidth it would take {limit:.3f} ms"
        )
        print(f"  {name}: {rows[name]}", file=sys.stderr)
    report(
        "Conv-BN-ReLU at the shapes of ResNet50, fused against eager",
        {**rows, "shapes with at least 40% less": f"{len(reached)}: {reached}", "goal": "40% less time"},
    )


def _least_bytes(cost, program) -> int:
    """Weights, inputs and outputs once: what no fusion can spare."""
    sizes = {k: v.nbytes for call in program.reference[:1] for k, v in (*call.inputs.items(), *call.outputs.items())}
    return cost.weight_bytes + sum(sizes.values())


def models() -> None:
    """Whole models against eager, after each pass."""
    from edgeopt.program.costs import costs

    known, rows = rates(), {}
    rows["rates"] = {k: round(v, 1) for k, v in known.items()}
    for name, (file, factory, inputs, axes) in MODELS.items():
        if file == IMAGENET and not (ROOT / ".zoo" / "site").is_dir():
            rows[name] = "left out: run scripts/fetch-zoo"
            continue
        folder = BUILT / factory
        program = captured(file, factory, inputs, axes)
        files, last = points(program, folder)
        feeds = str(feeds_of(program, folder / "feeds.npz"))
        commands = {"eager": python(_EAGER, str(file), factory, feeds, "1.5")}
        for label, path in files.items():
            commands[label] = python(_ORT if path.suffix == ".onnx" else _SCRIPT, str(path), feeds, "1.5")
        found = against(timed(commands, rounds=3), "eager")
        rows[name] = {**found, "captured by": program.notes[0] if program.notes else "", **_limit(last, costs, known)}
        print(f"  {name}: {json.dumps(rows[name], indent=2)}", file=sys.stderr)
    report("fp32 graph optimization alone against eager", {**rows, "goal": "3 to 8 times"})


def _limit(program, costs, known: dict[str, float]) -> dict[str, str]:
    try:
        cost = costs(program)
    except Exception as why:
        return {"limit": f"not known: {why}"}
    compute, memory = cost.flops / known["gemm_gflops"] / 1e6, cost.weight_bytes / known["copy_gb_s"] / 1e6
    return {"limit": f"{compute:.2f} ms at the GEMM rate, {memory:.2f} ms to read the weights once"}


def memory() -> None:
    """Peak activation memory: by liveness, before and after."""
    from edgeopt import passes
    from edgeopt.program import ExportedGraph
    from edgeopt.program.liveness import peak_activation_bytes
    from edgeopt.spec.profile import load_profile

    rows = {}
    for name, (file, factory, inputs, axes) in MODELS.items():
        program = captured(file, factory, inputs, axes)
        if not isinstance(program, ExportedGraph):
            rows[name] = "no exported graph"
            continue
        optimized, _ = passes.optimize(program, load_profile("x86-cpu"), {})
        before, after = peak_activation_bytes(program), peak_activation_bytes(optimized)
        rows[name] = f"{before / 2**20:.2f} MiB as captured, {after / 2**20:.2f} MiB after the passes"
    report("Peak activation memory by liveness", rows)


_TRAIN = (
    _TIME
    + """
import contextlib, torch
sys.path.insert(0, sys.argv[1]); import models
mode, device = sys.argv[2], "cuda" if torch.cuda.is_available() else "cpu"
torch.set_num_threads(THREADS)
net = models.resnet18().train().to(device)
x, y = torch.randn(16, 3, 112, 112, device=device), torch.randint(0, 1000, (16,), device=device)
optimizer = torch.optim.SGD(net.parameters(), 0.01)
dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mode)
scaler = torch.amp.GradScaler(device, enabled=mode == "fp16")
def step():
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(device, dtype=dtype) if dtype else contextlib.nullcontext():
        loss = torch.nn.functional.cross_entropy(net(x), y)
    scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()
    if device == "cuda": torch.cuda.synchronize()
print(median_ms(step, 6.0))
"""
)


def training() -> None:
    """One step of ResNet18, batch 16 at 112 x 112: autocast against fp32."""
    import torch

    modes = ["fp32", "bf16"] + (["fp16"] if torch.cuda.is_available() else [])
    found = timed({mode: python(_TRAIN, str(OWN.parent), mode) for mode in modes}, rounds=5)
    note = {} if torch.cuda.is_available() else {"fp16 with GradScaler": "not measured: no GPU here"}
    report("A training step with autocast against fp32", {**against(found, "fp32"), **note, "claim": "about 2 times"})


def scaling() -> None:
    """CPU seconds of the whole table on a chain of 1,000 and of 10,000 nodes."""
    from edgeopt import passes
    from edgeopt.spec.profile import load_profile

    rows, seconds = {}, {}
    for blocks in (50, 500):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.py"
            path.write_text(_CHAIN.format(blocks=blocks))
            program = captured(path, "build", {"x": {"shape": ["n", 32]}}, {"n": {"min": 1, "opt": 2, "max": 4}})
        started = time.process_time()
        _, records = passes.optimize(program, load_profile("x86-cpu"), {})
        seconds[blocks] = time.process_time() - started
        nodes = len(program.module.graph.nodes)
        slowest = sorted(records, key=lambda r: -r.seconds)[:3]
        rows[f"{nodes} nodes"] = f"{seconds[blocks]:.1f} s; slowest " + ", ".join(
            f"{r.name} {r.seconds:.1f} s" for r in slowest
        )
    rows["ten times the nodes take"] = f"{seconds[500] / seconds[50]:.1f} times as long"
    report("The pass table on long graphs, CPU time", {**rows, "goal": "1,000 nodes under 10 s, at most 10 times"})


_CHAIN = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(32, 32), nn.Linear(32, 32), nn.LayerNorm(32)
        self.register_buffer("scale", torch.full((32,), 0.1))

    def forward(self, x):
        h = self.up(x)
        h = h * 0.5 * (1.0 + torch.erf(h / 2 ** 0.5))
        return self.norm(x + torch.dropout(self.down(h).transpose(0, 1).transpose(0, 1), 0.1, False) * (self.scale + 0))

class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range({blocks}))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def build():
    torch.manual_seed(0)
    return Chain()
"""


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    steps = {"shapes": shapes, "models": models, "memory": memory, "training": training, "scaling": scaling}
    chosen = sys.argv[1:] or list(steps)
    if unknown := [name for name in chosen if name not in steps]:
        sys.exit(f"there is no part '{unknown[0]}'; the parts are: {', '.join(steps)}")
    for part in chosen:
        steps[part]()
