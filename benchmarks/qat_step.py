"""What a step of quantization-aware training costs beside one of the float program: MobileNetV2, 96 px, batch 16.

    .venv/bin/python benchmarks/qat_step.py [ROUNDS]

Three programs of the same graph, its BatchNorm folded as `optimize` does it: float; ours, while the ranges follow and
after they are frozen; and torchao's fake-quantizers as prepare_qat_pt2e puts them in. A step is forward, loss,
backward and SGD on one thread. Each figure is a process of its own, in turns with the float one; processor time, so
that other work on the machine counts less. Goal: at most 1.6 times the float step.
"""

from __future__ import annotations

import sys
from pathlib import Path

from interleaved import compare, python, report

ROOT = Path(__file__).parents[1]
_STEP = """
import statistics, sys, time
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/examples/imagenet"]
import model, torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from edgeopt.quant import observers, pt2e
from edgeopt.quant.prepare import prepare
from tests.quant.programs import program, quantization

torch.set_num_threads(1)
torch.manual_seed(0)

def folded(module):
    children = list(module.named_children())
    for _, child in children:
        folded(child)
    for (name, conv), (after, norm) in zip(children, children[1:]):
        if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
            setattr(module, name, fuse_conv_bn_eval(conv, norm))
            setattr(module, after, nn.Identity())
    return module

what = sys.argv[2]
class PerChannel(pt2e.FusedMovingAvgObsFakeQuantize):  # torchao gives an axis to classes of such a name only
    pass

if what == "torchao":
    observers.TrainedFakeQuantize = pt2e.FusedMovingAvgObsFakeQuantize
    observers.TrainedPerChannelFakeQuantize = PerChannel
given = program(folded(model.mobilenet_v2().eval()), 3, 96, 96)
module = given.module if what == "float" else prepare(given, quantization(), qat=True).module
fakes = [m for m in module.modules() if isinstance(m, pt2e.FakeQuantizeBase)]
weights = [p.requires_grad_(True) for p in module.parameters()]
optimizer = torch.optim.SGD(weights, lr=1e-6)
x, target = torch.randn(16, 3, 96, 96), torch.randint(0, 1000, (16,))

def step():
    optimizer.zero_grad(set_to_none=True)
    nn.functional.cross_entropy(module(x)[0], target).backward()
    optimizer.step()

for fake in fakes:
    fake.train()
step()
if what == "frozen":
    for fake in fakes:
        fake.disable_observer()
taken = []
for _ in range(10):
    started = time.process_time()
    step()
    taken.append(time.process_time() - started)
print(1e3 * statistics.median(taken))
"""


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    rows: dict[str, object] = {}
    for what in ("following", "frozen", "torchao"):
        found = compare(python(_STEP, str(ROOT), what), python(_STEP, str(ROOT), "float"), rounds=rounds)
        low, high = found.spread
        rows[f"{what} ms"] = [round(value, 1) for value in found.a]
        rows[f"float beside {what} ms"] = [round(value, 1) for value in found.b]
        rows[f"{what} / float"] = f"{found.ratio:.2f} (pairs from {low:.2f} to {high:.2f})"
    report("A step of QAT against a float step", {**rows, "goal": "1.6"})


if __name__ == "__main__":
    main()
