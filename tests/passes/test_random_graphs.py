"""Random small models, all operators that the passes look at mixed, before and after the passes.

A model is a number and a length: `check(source(number, length), number)` runs one, and thousands where a pass changed.
"""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import nn

from edgeopt.program import graph
from tests.passes.support import optimized, program

C, S = 4, 4  # every value is (N, 4, 4, 4), so that any may be combined with any

_LAYERS = {
    "conv": lambda: nn.Conv2d(C, C, 3, padding=1),
    "pointwise": lambda: nn.Conv2d(C, C, 1, bias=False),
    "grouped": lambda: nn.Conv2d(C, C, 3, padding=1, groups=2),
    "linear": lambda: nn.Linear(S, S),
    "norm": lambda: nn.BatchNorm2d(C),
    "layer_norm": lambda: nn.LayerNorm(S),
}
_ONE = (
    "F.relu({a})", "F.relu6({a})", "torch.sin({a})", "torch.tanh({a})", "{a} * 1", "{a} + 0", "{a} * 2.0 * 0.75",
    "{a} + 0.5 + 0.25", "-(-{a})", "{a}.clamp(-1, 1).clamp(-0.5, 2)", "F.dropout({a}, 0.5, False)", "{a}.abs().abs()",
    "{a} * torch.sigmoid({a})", "0.5 * {a} * (1 + torch.erf({a} / 2**0.5))", "{a} * F.relu6({a} + 3) / 6",
    "{a} * torch.tanh(F.softplus({a}))", "({a} - {a}.mean(-1, True)) / ({a}.var(-1, False, True) + 1e-3).sqrt()",
    "{a} * torch.rsqrt({a}.pow(2).mean(-1, keepdim=True) + 1e-3)", "{a} * {a}.mean((2, 3), True)",
    "{a}.transpose(1, 2)", "{a}.transpose(2, 3)", "{a}.permute(0, 2, 3, 1)", "{a}.permute(0, 3, 1, 2).contiguous()",
    "{a}.reshape(-1, 16, 4).reshape(-1, 4, 4, 4)", "{a}.flatten(1).unflatten(1, (4, 4, 4))", "{a}.unsqueeze(1)[:, 0]",
    "{a}.contiguous().view(-1, 8, 8).view(-1, 4, 4, 4)", "{a}.flip(1).flip(1)", "{a}.double().float()",
    "{a}.half().float()", "torch.cat({a}.chunk(2, 1), 1)", "torch.cat({a}.split([1, 3], 2)[::-1], 2)", "{a}.clone()",
    "torch.stack({a}.unbind(1), 1)", "F.pad({a}, (1, 1))[..., 1:-1]", "F.pad({a}, (1, 0, 0, 1))[:, :, :-1, 1:]",
    "self.pad_conv(F.pad({a}, (1, 1, 1, 1)))", "{a}[:, :2].repeat(1, 2, 1, 1)", "{a} * self.scale + self.shift",
    "{a}[:, :, :1].expand(-1, -1, 4, -1)", "torch.softmax({a}, -1)", "{a} - {a}.amax(-1, True)", "{a}.mT.mT",
)  # fmt: skip
_TWO = (
    "{a} + {b}", "{a} - {b}", "{a} * {b}", "{a} @ {b}", "torch.softmax({a} @ {b}.mT / 2, -1) @ {a}", "{a} + 2 * {b}",
    "torch.cat([{a}[:, :2], {b}[:, 2:]], 1)", "torch.where({a} > 0, {a}, {b})", "torch.maximum({a}, {b})",
    "{a} @ self.weight + {b} @ self.weight", "torch.softmax({a} @ {b}.transpose(-1, -2) + self.mask, -1) @ {b}",
)  # fmt: skip
_WRITES = (
    "{a}.add_(0.5)",
    "{a}.mul_({b})",
    "F.relu({a}, inplace=True)",
    "{a}[:, 1] = 0.25",
    "{a}.transpose(1, 2).add_(1)",
)


def source(number: int, length: int) -> str:
    """The body of a forward of `length` random lines."""
    choose = random.Random(number)
    names, lines = ["x"], ["x = x * 1.5"]
    for i in range(length):
        a, b = (choose.choice(names[-3:] + names[:1]) for _ in range(2))
        kind = choose.random()
        if kind < 0.1:
            lines.append(choose.choice(_WRITES).format(a=a, b=b))
            continue
        if kind < 0.35:
            text = f"self.{choose.choice(list(_LAYERS))}{choose.randint(1, 2)}({a})"  # two of each: some are shared
        else:
            text = choose.choice(_TWO if kind > 0.75 else _ONE).format(a=a, b=b)
        lines.append(f"t{i} = {text}")
        names.append(f"t{i}")
    outputs = ", ".join(dict.fromkeys([names[-1], choose.choice(names)]))
    return "\n    ".join([*lines, f"return ({outputs},)"])


def model(body: str, number: int = 0) -> nn.Module:
    scope = {"F": F, "torch": torch}
    exec(f"def forward(self, x):\n    {body}", scope)
    torch.manual_seed(number)
    made = type("Random", (nn.Module,), {"forward": scope["forward"]})()
    for name, layer in _LAYERS.items():
        for copy in (1, 2):
            setattr(made, f"{name}{copy}", layer())
    made.pad_conv = nn.Conv2d(C, C, 3)
    for module in made.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor, low in ((module.running_mean, -1), (module.running_var, 0.5), (module.weight.data, 0.5)):
                nn.init.uniform_(tensor, low, 1.5)
    made.register_buffer("scale", torch.rand(C, 1, 1) + 0.5)
    made.register_buffer("shift", torch.rand(C, 1, 1))
    made.register_buffer("weight", torch.randn(S, S))
    made.register_buffer("mask", torch.full((S, S), -torch.inf).triu(1))
    return made


def check(body: str, number: int = 0) -> None:
    """The passes keep the answer at other batch sizes, and none of them is dropped for moving it."""
    start = program(model(body, number), ("N", C, S, S))
    result, records = optimized(start)
    assert [(r.name, r.reason) for r in records.values() if r.status == "dropped"] == []
    for size in (1, 5):
        inputs = graph.synthetic(start.signature, {"N": size}, seed=size)
        want, got = graph.run(start, inputs), graph.run(result, inputs)
        for name in want:
            bound = 1e-4 * max(1.0, float(np.abs(want[name]).max(initial=0)))
            np.testing.assert_allclose(got[name], want[name], atol=bound, rtol=1e-3, err_msg=body)


@seed(3)
@settings(max_examples=12, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(number=st.integers(0, 2**32 - 1), length=st.integers(2, 14))
def test_random_models_keep_their_answer(number, length):
    check(source(number, length), number)
