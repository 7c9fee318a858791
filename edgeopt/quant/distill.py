"""The quantized program learns from the float one: no labels, the float model's outputs are the target.

Hinton et al., "Distilling the Knowledge in a Neural Network", 2015, with the squared error of the outputs in the place
of soft labels, so that it serves any model: weights, biases and scales of the whole calibrated program move together,
a little, to lower it (what learns and how: `learned`). A fifth of the samples takes no part; the state that is nearest
to the float program on those is kept, which may be the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from edgeopt.errors import StageError
from edgeopt.program import ExportedGraph, Signature, graph
from edgeopt.progress import SILENT, Progress
from edgeopt.quant import gradients, learned, samples, variations
from edgeopt.quant.prepare import Prepared
from edgeopt.quant.samples import Batch
from edgeopt.quant.training import randomness

ROUNDS = 300  # optimizer steps at most
ROWS = 8  # samples a step
WARM_UP = 10
CHECK_EVERY = 25
PATIENCE = 4  # checks without a gain that end it
HELD_OUT = 5  # every so many-th sample judges
LEAST_SAMPLES = 20
# Learning rates of Adam: steps of the weights' scales, parts of a layer's mean bias, logarithms of scales.
RATES = {learned.STEPS: 4e-3, learned.BIASES: 5e-4, learned.SCALES: 3e-4, learned.RANGES: 1e-3}


@dataclass(frozen=True)
class Distilled:
    """`rounds` of training up to the state that was kept; `before` and `after`: squared error of the outputs on
    held-out samples as part of their power. `reason`: why nothing was done.
    """

    rounds: int = 0
    before: float = 0.0
    after: float = 0.0
    reason: str = ""

    def in_words(self) -> str:
        """One line for the report."""
        if self.reason:
            return f"not done: {self.reason}"
        if not self.rounds:
            return f"no gain on held-out samples ({_decibels(self.before)}), so nothing was changed"
        return f"{self.rounds} steps, {_decibels(self.before)} to {_decibels(self.after)} on held-out samples"


def parts(kept: Sequence[Batch], signature: Signature) -> tuple[list[Batch], list[Batch]]:
    """(what is learnt from, what judges): the second is for no other method to look at, or it judges wrongly."""
    return _split(kept, _most_rows(signature))


def distill(
    prepared: Prepared,
    float_program: ExportedGraph,
    learn: Sequence[Batch],
    judge: Sequence[Batch],
    *,
    progress: Progress = SILENT,
) -> Distilled:
    """Train weights, biases and scales of a calibrated program in place; its observers get the scales.

    `learn` and `judge`: `parts` of positional tensors. `float_program` gives the outputs to be met; those that are not
    floating point are passed over. Deterministic on one machine and number of threads. What is not a layer's own stays,
    and all does where an operator of the user's has no gradient.
    """
    signature = prepared.program.signature
    rows = sum(samples.count(batch) for batch in (*learn, *judge))
    if rows < LEAST_SAMPLES or not judge:
        return Distilled(reason=f"{rows} samples say too little, it takes {LEAST_SAMPLES}, in one batch or {HELD_OUT}")
    try:
        gradients.require(float_program)
    except StageError as why:
        return Distilled(reason=why.what)
    with randomness.reproducible(0):
        student = _Student(prepared.module, float_program.module)
        return student.learn(list(learn), list(judge), _most_rows(signature), progress)


class _Student:
    """A copy of the calibrated module in which observers are replaced by what learns."""

    def __init__(self, calibrated: GraphModule, teacher: GraphModule):
        self._calibrated, self._teacher = calibrated, teacher
        self._module = graph.copied(calibrated)
        self._parts: dict[str, torch.nn.Module] = {}
        made: dict[int, torch.nn.Module] = {}
        for node in calibrated.graph.nodes:
            if node.op == "call_module":
                observer = calibrated.get_submodule(node.target)
                part = made.setdefault(id(observer), None) or learned.of(calibrated, node)
                made[id(observer)] = self._parts[node.target] = part
                learned.put(self._module, node.target, part)
        self._module.recompile()
        for name, parameter in self._module.named_parameters():
            parameter.requires_grad_(any(name.startswith(f"{target}.") for target in self._parts))

    def learn(self, pools: list[Batch], judges: list[Batch], most: int | None, progress: Progress) -> Distilled:
        generator = torch.Generator().manual_seed(0)
        batches = _batches(pools, most, generator)
        targets = [self._wanted(batch) for batch in judges]
        optimizer = torch.optim.Adam(self._groups(), betas=(0.9, 0.99))
        before = least = self._error(judges, targets)
        best, state, waited = 0, self._state(), 0
        with progress.bar("distilling", ROUNDS) as advance:
            for turn in range(1, ROUNDS + 1):
                if not self._step(variations.vary(next(batches), generator), optimizer, _share(turn)):
                    break
                advance(1)
                if turn % CHECK_EVERY == 0:
                    error = self._error(judges, targets)
                    waited = 0 if error < least else waited + 1
                    if error < least:
                        best, least, state = turn, error, self._state()
                    if waited >= PATIENCE:
                        break
        if best:
            self._take(state)
        return Distilled(best, before, least)

    def _groups(self) -> list[dict]:
        found: dict[str, list[torch.nn.Parameter]] = {kind: [] for kind in RATES}
        for part in dict.fromkeys(self._parts.values()):
            for kind, parameter in part.parameters_by_kind().items():
                found[kind].append(parameter)
        return [{"params": ps, "lr": RATES[kind], "full": RATES[kind]} for kind, ps in found.items() if ps]

    def _step(self, batch: Batch, optimizer: torch.optim.Optimizer, share: float) -> bool:
        """Whether the loss was finite; parameters move only then."""
        for group in optimizer.param_groups:
            group["lr"] = group["full"] * share
        loss = _apart(self._floats(self._module, batch), self._wanted(batch))
        if not bool(torch.isfinite(loss)):
            return False
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return True

    def _wanted(self, batch: Batch) -> list[torch.Tensor]:
        with torch.no_grad():
            return self._floats(self._teacher, batch)

    def _error(self, judges: list[Batch], targets: list[list[torch.Tensor]]) -> float:
        with torch.no_grad():
            errors = [
                float(_apart(self._floats(self._module, batch), wanted))
                for batch, wanted in zip(judges, targets, strict=True)
            ]
        return sum(errors) / len(errors)

    @staticmethod
    def _floats(module: GraphModule, batch: Batch) -> list[torch.Tensor]:
        outputs = torch.utils._pytree.tree_leaves(module(*batch))
        return [y for y in outputs if isinstance(y, torch.Tensor) and y.is_floating_point()]

    def _state(self) -> dict[str, list[torch.Tensor]]:
        return {
            target: [p.detach().clone() for p in part.parameters_by_kind().values()]
            for target, part in self._parts.items()
        }

    def _take(self, state: dict[str, list[torch.Tensor]]) -> None:
        with torch.no_grad():
            for target, part in self._parts.items():
                for parameter, value in zip(part.parameters_by_kind().values(), state[target], strict=True):
                    parameter.copy_(value)
                part.settle(self._calibrated.get_submodule(target))


def _apart(outputs: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean over outputs of their squared error as part of their power."""
    parts = [
        (y - t).square().sum() / t.square().sum().clamp_min(1e-30) for y, t in zip(outputs, wanted, strict=True)
    ]  # fmt: skip
    return torch.stack(parts).mean()


def _share(turn: int) -> float:
    """Of the full learning rate: a short warm-up, then half a cosine."""
    return min(1.0, turn / WARM_UP) * (0.5 + 0.5 * math.cos(math.pi * turn / (ROUNDS + 1)))


def _pools(kept: Sequence[Batch]) -> list[Batch]:
    """Samples of one and the same size in one batch each."""
    pools: dict[tuple, list[Batch]] = {}
    for batch in kept:
        pools.setdefault(tuple(tensor.shape[1:] for tensor in batch), []).append(batch)
    return [[torch.cat(tensors) for tensors in zip(*alike, strict=True)] for alike in pools.values()]


def _split(kept: Sequence[Batch], most: int | None) -> tuple[list[Batch], list[Batch]]:
    """(what is learnt from, what judges) in batches of at most `most` samples; None takes batches as they are."""
    pools = list(kept) if most is None else _pools(kept)
    if most is None or any(samples.count(pool) < HELD_OUT for pool in pools):
        learn = [pool for i, pool in enumerate(pools) if i % HELD_OUT != HELD_OUT - 1]
        return learn, list(pools[HELD_OUT - 1 :: HELD_OUT])
    learn, judge = [], []
    for pool in pools:
        held = torch.arange(samples.count(pool)) % HELD_OUT == HELD_OUT - 1
        learn.append([tensor[~held] for tensor in pool])
        judge += [list(part) for part in zip(*(tensor[held].split(most) for tensor in pool), strict=True)]
    return learn, judge


def _batches(pools: list[Batch], most: int | None, generator: torch.Generator) -> Iterator[Batch]:
    """Without end, one pass over all samples after the other, each in a random order."""
    while True:
        parts: list[Batch] = []
        for pool in pools:
            rows = torch.randperm(samples.count(pool), generator=generator)
            parts += [pool] if most is None else [[tensor[part] for tensor in pool] for part in rows.split(most)]
        for i in torch.randperm(len(parts), generator=generator).tolist():
            yield parts[i]


def _most_rows(signature: Signature) -> int | None:
    """Samples a batch where the first axis of every input is free and that of the samples; None where it is not."""
    if not samples.by_rows(signature):
        return None
    return min(ROWS, *(signature.axes[spec.shape[0]].max for spec in signature.inputs))


def _decibels(error: float) -> str:
    return f"{-10 * math.log10(max(error, 1e-12)):.1f} dB"
