"""Models of which torch.export takes all but a module or two, and the eager answers to compare with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn

from edgeopt.ports.user_code import load_attribute
from edgeopt.program import ExportedGraph, Program, graph
from tests.capture.support import captured

N = {"N": {"min": 1, "opt": 2, "max": 9}}
NW = {**N, "W": {"min": 4, "opt": 12, "max": 64}}
NT = {**N, "T": {"min": 1, "opt": 5, "max": 40}}

ROWS = """
class Rows(nn.Module):
    def forward(self, seq):
        out = []
        for i in range(seq.size(0)):
            if seq[i].sum() > 0.5:
                out.append(2 * seq[i])
            else:
                out.append(seq[i] / 2)
        return torch.stack(out)
"""
BRANCH = """
class Branch(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x * 2
        return x - 1
"""
BACKBONE = """
def seeded(make, *args, **kwargs):
    torch.manual_seed(3)
    made = make(*args, **kwargs)
    for name, value in made.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            value.uniform_(0.5, 1.5)
    return made

def backbone():
    return seeded(lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)))
"""


@dataclass(frozen=True)
class Model:
    """`kept`: the paths of the modules that must stay TorchScript, and those only."""

    code: str
    inputs: dict
    axes: dict
    kept: tuple[str, ...]
    values: dict = field(default_factory=dict)


IMAGE = {"x": {"shape": ["N", 3, 8, 8]}}
STEPS = {"x": {"shape": ["T", "N", 6]}}
FIRST = {"x": {"shape": ["N", "T", 6]}}

MODELS = {
    "rows": Model(
        ROWS + BACKBONE + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.rows = backbone(), Rows()
    def forward(self, x):
        return self.rows(self.backbone(x).mean((2, 3)))
""", IMAGE, N, ("rows",)),
    "branch": Model(
        BRANCH + BACKBONE + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.branch = backbone(), Branch()
    def forward(self, x):
        return self.branch(self.backbone(x)).relu()
""", IMAGE, N, ("branch",)),
    "crnn": Model(
        BACKBONE + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = seeded(lambda: nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()))
        self.rnn = seeded(nn.LSTM, 8 * 4, 10, bidirectional=True)
        self.head = seeded(nn.Linear, 20, 7)
    def forward(self, x):
        y = self.backbone(x).flatten(1, 2).permute(2, 0, 1)
        return self.head(self.rnn(y)[0])
""", {"x": {"shape": ["N", 1, 8, "W"]}}, NW, ("rnn",)),
    "gru, batch first": Model(
        BACKBONE + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = seeded(nn.GRU, 6, 5, 2, batch_first=True)
        self.head = seeded(nn.Linear, 5, 3)
    def forward(self, x):
        y, last = self.rnn(x.tanh())
        return {"all": self.head(y), "last": last}
""", FIRST, NT, ("rnn",)),
    "lstm with states": Model(
        BACKBONE + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = seeded(nn.LSTM, 6, 5, 3, dropout=0.5)
    def forward(self, x, h, c):
        y, (h, c) = self.rnn(x * 2, (h, c))
        return y.relu(), h, c
""", {**STEPS, "h": {"shape": [3, "N", 5]}, "c": {"shape": [3, "N", 5]}}, NT, ("rnn",)),
    "lstm, projected, batch first": Model(
        BACKBONE + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = seeded(nn.LSTM, 6, 5, 2, batch_first=True, bidirectional=True, proj_size=4, bias=False)
    def forward(self, x):
        return self.rnn(x.sin())[0].mean(1)
""", FIRST, NT, ("rnn",)),
    "plain rnn": Model(
        BACKBONE + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = seeded(nn.RNN, 6, 5, nonlinearity="relu")
    def forward(self, x):
        return self.rnn(x + 1)[0] - 1
""", STEPS, NT, ("rnn",)),
    "shared, called in two forms": Model(
        BACKBONE + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = seeded(nn.LSTM, 6, 6)
        self.again = self.rnn
    def forward(self, x):
        y, state = self.rnn(x.tanh())
        z, _ = self.again(y, state)
        return self.rnn(z)[0] + x
""", STEPS, NT, ("rnn",)),
    "two": Model(
        ROWS + BACKBONE + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.rows, self.head = seeded(nn.GRU, 6, 5), Rows(), seeded(nn.Linear, 5, 4)
    def forward(self, x):
        return self.rows(self.head(self.rnn(x)[0]))
""", STEPS, NT, ("rnn", "rows")),
    "integers": Model(
        BACKBONE + """
class Count(nn.Module):
    def forward(self, x):
        count = torch.zeros(x.size(0), dtype=torch.int64)
        for i in range(x.size(0)):
            if x[i].sum() > 0:
                count[i] = 1 + i
        return count, (x > 0, x * 2)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.count = backbone(), Count()
    def forward(self, x):
        count, (positive, rows) = self.count(self.backbone(x).mean((2, 3)))
        return count + 1, positive, rows
""", IMAGE, N, ("count",)),
    "the smallest of nested ones": Model(
        BRANCH + BACKBONE + """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.branch = seeded(nn.Conv2d, 4, 4, 1), Branch()
    def forward(self, x):
        return self.branch(self.conv(x))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.blocks = backbone(), nn.Sequential(Block(), Block())
    def forward(self, x):
        return self.blocks(self.backbone(x))
""", IMAGE, N, ("blocks.0.branch", "blocks.1.branch")),
    "the caller, where the smallest takes a size": Model(
        BACKBONE + """
class Repeat(nn.Module):
    def forward(self, x, n: int):
        for i in range(n):
            if x[i].sum() > 0:
                x = x + 1
        return x
class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.repeat = Repeat()
    def forward(self, x):
        return self.repeat(x, x.size(0))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.around = backbone(), Around()
    def forward(self, x):
        return self.around(self.backbone(x))
""", IMAGE, N, ("around",)),
    "a loop over a size computed of an axis": Model(
        BACKBONE + """
class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = seeded(nn.LSTMCell, 8, 3)
    def forward(self, x):
        h = torch.zeros(x.shape[1], 3)
        c = h
        out = []
        for i in range(x.shape[0]):
            h, c = self.cell(x[i], (h, c))
            out.append(h)
        return torch.stack(out), [h, c]
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.steps = seeded(nn.Conv2d, 1, 8, (8, 3), stride=(1, 2), padding=(0, 1)), Steps()
    def forward(self, x):
        y, (h, c) = self.steps(self.conv(x).squeeze(2).permute(2, 0, 1))
        return y, h + c
""", {"x": {"shape": ["N", 1, 8, "W"]}}, NW, ("steps",)),
    "twice as long and one more": Model(
        BACKBONE + """
class Longer(nn.Module):
    def forward(self, x):
        out = [x[0]]
        for i in range(x.size(0)):
            out.append(x[i])
            if x[i].sum() > 0:
                out.append(x[i] * 2)
            else:
                out.append(x[i] - 1)
        return torch.stack(out)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.longer = seeded(nn.Linear, 6, 4), Longer()
    def forward(self, x):
        y = self.longer(self.head(x))
        return y.reshape(y.shape[0], -1)
""", STEPS, NT, ("longer",)),
    "gives what it takes": Model(
        BACKBONE + """
class Maybe(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return x - 1
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.maybe = backbone(), Maybe()
    def forward(self, x):
        y = self.backbone(x)
        z = self.maybe(y)
        return y + 10, z
""", IMAGE, N, ("maybe",)),
    "a module that is TorchScript already": Model(
        ROWS + BACKBONE + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.rows = backbone(), torch.jit.script(Rows())
    def forward(self, x):
        return self.rows(self.backbone(x).mean((2, 3)))
""", IMAGE, N, ("rows",)),
    "arguments by name, lists and constants": Model(
        BACKBONE + """
from typing import List, Optional
class Pick(nn.Module):
    def forward(self, xs: List[torch.Tensor], scale: float, mask: Optional[torch.Tensor] = None, flip: bool = False):
        x = xs[0]
        if flip and bool(xs[1].sum() > 0):
            x = -x
        if mask is not None:
            x = x * mask
        return x * scale
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.pick = backbone(), Pick()
    def forward(self, x):
        y = self.backbone(x)
        return self.pick([y, y - 1], 0.5, flip=True), self.pick(scale=2.0, xs=[y, y], mask=y)
""", IMAGE, N, ("pick",)),
}  # fmt: skip


class Captured:
    """Each model captured once, in a folder of its own."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._programs: dict[str, Program] = {}

    def folder(self, name: str) -> Path:
        return self._folder / str(list(MODELS).index(name))

    def program(self, name: str) -> Program:
        if name not in self._programs:
            model = MODELS[name]
            self._programs[name] = captured(self.folder(name), model.code, model.inputs, model.axes)
        return self._programs[name]

    def eager(self, name: str) -> nn.Module:
        return eager(self.folder(name))


def eager(folder: Path) -> nn.Module:
    """The user's model in the folder as it is, in eval mode."""
    return load_attribute("model.py:Model", folder, key="model")().eval()


def feeds(program: Program) -> list[dict[str, np.ndarray]]:
    """Inputs that capture did not try: other sizes together, small and large, of both signs."""
    rng = np.random.default_rng(11)
    axes = program.signature.axes
    found = []
    for pick in ("min", "max", "between"):
        sizes = {n: getattr(a, pick, (a.min + a.max) // 2 + i) for i, (n, a) in enumerate(axes.items())}
        for shift in (-1.0, 0.0, 1.0):
            inputs = graph.synthetic(program.signature, sizes, seed=5)
            found.append({k: rng.normal(shift, 1, v.shape).astype(v.dtype) for k, v in inputs.items()})
    return found


def answers(module: nn.Module, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The module's tensors in order."""
    with torch.no_grad():
        given = module(**{k: torch.from_numpy(v.copy()) for k, v in inputs.items()})
    values = given.values() if isinstance(given, dict) else given if isinstance(given, tuple) else (given,)
    return [value.numpy() for value in values]


def assert_equal_to_eager(run, program: Program, module: nn.Module, atol: float = 1e-5) -> None:
    """`run(inputs)` gives the named outputs; the feeds must take both branches of what the model decides."""
    for inputs in feeds(program):
        got = run(inputs)
        for (name, value), wanted in zip(got.items(), answers(module, inputs), strict=True):
            assert value.dtype == wanted.dtype and value.shape == wanted.shape, name
            np.testing.assert_allclose(value, wanted, atol=atol, rtol=1e-4, err_msg=f"{name} {inputs.keys()}")


def run_graph(program: ExportedGraph):
    return lambda inputs: graph.run(program, inputs)
