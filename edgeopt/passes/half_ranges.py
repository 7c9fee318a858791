"""What the values of an fp32 program are on real data: where they do not fit a 16-bit format, and what has no kernel.

Measured in one run a call over the unchanged program, a few numbers a node. An operator without a 16-bit kernel is
found by trying it on the values of the first call; that is this machine's torch, whose answer is the strictest: what
it cannot run can be proved here by nobody.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule, Interpreter, Node

from edgeopt.passes import half_rules as rules
from edgeopt.program import Signature, graph
from edgeopt.program.patterns import aten_name
from edgeopt.spec.half_formats import HalfFormat

HEADROOM = 4.0  # data to come may have values so many times larger than those that were measured
LEAST_ROUNDING_DB = 50.0  # of values rounded once: 73 dB for normal numbers of fp16; 50 is where half of the bits go


@dataclass
class Range:
    """Figures of one value over all calls; `noise` and `signal` are energies, of rounding and of the value.

    A call with values so large that rounding cannot hurt adds no noise, and of the signal its largest value.
    """

    largest: float = 0.0
    least: float = math.inf  # the smallest magnitude above 0, where it divides
    signal: float = 0.0
    noise: float = 0.0

    @property
    def rounding_db(self) -> float:
        if self.noise == 0 or self.signal == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise)


@dataclass
class Attention:
    """Of one scaled_dot_product_attention: the largest score, and whether a row was masked with nothing left."""

    largest_score: float = 0.0
    empty_row: bool = False


@dataclass
class Ranges:
    """Node name -> what was measured. `missing`: why the operator cannot run in the 16-bit format."""

    values: dict[str, Range] = field(default_factory=dict)
    attention: dict[str, Attention] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def unfit(self, node: Node, form: HalfFormat) -> str | None:
        """Why the value of `node` must not be rounded to the format; None where it may."""
        found = self.values.get(node.name)
        if found is None:
            return None
        if found.largest > form.largest / HEADROOM:
            return f"values reach {found.largest:.4g}; {form.name} ends at {form.largest:g}"
        if found.rounding_db < LEAST_ROUNDING_DB and form.name == "fp16":
            return (
                f"values are as small as {found.largest:.2g} at most: rounded to {form.name} they keep "
                f"{found.rounding_db:.0f} dB"
            )
        if found.least < form.smallest_normal:
            return f"it divides by values as small as {found.least:.2g}, where {form.name} has few bits left"
        return None


def measured(
    module: GraphModule, signature: Signature, form: HalfFormat, calls: Iterable[dict[str, np.ndarray]],
    ranges: Ranges, untried: Mapping[str, str],
) -> Iterator[dict[str, np.ndarray]]:  # fmt: skip
    """The fp32 outputs of each call, while `ranges` is filled. `untried`: operators that need no try."""
    for number, inputs in enumerate(calls):
        run = _Run(module, form, ranges, untried if number == 0 else None)
        with torch.no_grad():
            yield graph.to_arrays(signature, run.run(*graph.to_tensors(signature, inputs)))


def unfit_weight(tensor: torch.Tensor, form: HalfFormat) -> str | None:
    """Why a stored tensor must not be rounded to the format."""
    found = Range()
    _add(found, tensor.detach(), form)
    if found.largest > form.largest:
        return f"its values reach {found.largest:.4g}; {form.name} ends at {form.largest:g}"
    if found.rounding_db < LEAST_ROUNDING_DB and form.name == "fp16":
        return f"its values, at most {found.largest:.2g}, keep {found.rounding_db:.0f} dB when rounded to {form.name}"
    return None


class _Run(Interpreter):
    def __init__(self, module: GraphModule, form: HalfFormat, ranges: Ranges, untried: Mapping[str, str] | None):
        super().__init__(module)
        self._form, self._ranges, self._untried = form, ranges, untried
        self._tried: dict[tuple, str | None] = {}

    def run_node(self, n: Node) -> Any:
        if n.op == "call_function" and rules.reads_float(n):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            self._look(n, args, kwargs)
        value = super().run_node(n)
        if (
            isinstance(value, torch.Tensor)
            and value.dtype == torch.float32
            and n.op in ("placeholder", "call_function")
        ):
            _add(self._ranges.values.setdefault(n.name, Range()), value.detach(), self._form)
        return value

    def _look(self, node: Node, args: tuple, kwargs: dict) -> None:
        name = aten_name(node)
        if name == rules.ATTENTION:
            found = self._ranges.attention.setdefault(node.name, Attention())
            _see_attention(found, node, args, kwargs, self._form)
        if name in ("div", "true_divide") and isinstance(node.args[1], Node) and isinstance(args[1], torch.Tensor):
            found = self._ranges.values.setdefault(node.args[1].name, Range())
            found.least = min(found.least, _least(args[1]))
        if self._untried is not None and node.name not in self._untried and not rules.is_part(node):
            missing = self._try(node, args, kwargs)
            if missing:
                self._ranges.missing[node.name] = missing

    def _try(self, node: Node, args: tuple, kwargs: dict) -> str | None:
        """Why the operator does not run in the format; tried once for arguments of one kind."""
        if not isinstance(node.target, torch._ops.OpOverload):
            return None
        key = (node.target, str(torch.utils._pytree.tree_map(_kind, (args, kwargs))))
        if key not in self._tried:
            self._tried[key] = _failure(node, args, kwargs, self._form)
        return self._tried[key]


def _kind(value: Any) -> Any:
    return (value.ndim, value.dtype) if isinstance(value, torch.Tensor) else value


def _failure(node: Node, args: tuple, kwargs: dict, form: HalfFormat) -> str | None:
    dtype = rules.dtype_of(form)
    given = torch.utils._pytree.tree_map(
        lambda v: v.to(dtype) if isinstance(v, torch.Tensor) and v.dtype == torch.float32 else v, (args, kwargs)
    )
    try:
        result = node.target(*given[0], **given[1])
    except Exception as why:  # kernels raise what they like
        lines = str(why).strip().splitlines() or [type(why).__name__]
        return f"torch cannot run {aten_name(node)} in {form.name}: {lines[0][:120]}"
    wide = [v for v in torch.utils._pytree.tree_leaves(result) if isinstance(v, torch.Tensor)]
    return f"{aten_name(node)} answers {form.name} in float32" if any(v.dtype == torch.float32 for v in wide) else None


def _add(found: Range, value: torch.Tensor, form: HalfFormat) -> None:
    largest = _largest(value)
    if not math.isfinite(largest):
        value = value[torch.isfinite(value)]
        largest = _largest(value)
    found.largest = max(found.largest, largest)
    if largest > form.largest or largest > _never_lost(value.numel(), form):
        found.signal += largest**2  # of one element: no more is needed where the noise is none that counts
        return
    found.signal += _energy(value)
    found.noise += _energy(value - value.to(rules.dtype_of(form)).to(torch.float32))


def _largest(value: torch.Tensor) -> float:
    if not value.numel():
        return 0.0
    low, high = torch.aminmax(value)  # one pass over the memory; NaN where there is one
    return max(-float(low), float(high))


def _never_lost(count: int, form: HalfFormat) -> float:
    """The largest of `count` values from which on rounding keeps more than LEAST_ROUNDING_DB whatever the others are.

    What is below the normal numbers errs by half of the smallest number at most, each; the rest by 73 dB or less.
    """
    return 2 * math.sqrt(count * 10 ** (LEAST_ROUNDING_DB / 10)) * form.smallest / 2


def _energy(value: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(value, dtype=torch.float64)) ** 2


def _least(value: torch.Tensor) -> float:
    above = value.abs()
    above = above[above > 0]
    return float(above.min()) if above.numel() else math.inf


def _see_attention(found: Attention, node: Node, args: tuple, kwargs: dict, form: HalfFormat) -> None:
    """The scores that the operator computes inside, which are in no node's value, and the rows of its mask."""
    names = [a.name for a in node.target._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, mask = given["query"], given["key"], given.get("attn_mask")
    if given.get("enable_gqa"):
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    scale = given.get("scale") or 1 / math.sqrt(query.shape[-1])
    scores = (query @ key.transpose(-2, -1)) * scale
    if scores.numel():
        found.largest_score = max(found.largest_score, float(scores.abs().max()))
    if isinstance(mask, torch.Tensor) and mask.is_floating_point() and mask.numel():
        found.empty_row |= bool((mask.amax(-1) < -form.largest / HEADROOM).any())
