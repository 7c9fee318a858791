"""Mixed precision: the optimized fp32 program computed in fp16 or bf16, with islands that keep fp32.

Islands come of rules (what an operator is), of ranges measured on real data (what its values are), of the user's
word, and of a search where the result is still too far from fp32. The result is run here, on the reference calls and
the calibration data, and refused where it cannot be made close enough.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch.fx import GraphModule

from edgeopt.passes import half_plan, half_rules, half_search
from edgeopt.passes.half_convert import Converted, convert
from edgeopt.passes.half_plan import Plan
from edgeopt.passes.half_ranges import Ranges, measured
from edgeopt.program import ExportedGraph, graph, patterns
from edgeopt.program.nodes import module_path
from edgeopt.program.patterns import aten_name
from edgeopt.spec.half_formats import FORMATS, HalfFormat, HalfPrecision

JUDGED_BATCHES = 8  # of the calibration data, beside the reference calls; ranges are taken from all of it


@dataclass(frozen=True)
class HalfReport:
    """What became of a program. `refused`: why there is none in the format, with all else as far as it was known.

    `operators`: those that read or make floats, `in_half` of them compute in the format, in the modules
    `half_modules`. `islands`: what keeps fp32, by connected part: modules, operators and reasons. `weights`: stored
    tensors that keep fp32, and why. `searched`: modules that keep fp32 since the outputs were too far off, after
    `tries` tries. Bytes are those of all stored tensors.
    """

    precision: HalfPrecision
    operators: int = 0
    in_half: int = 0
    half_modules: tuple[str, ...] = ()
    islands: tuple[dict[str, list[str]], ...] = ()
    casts: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    sqnr_db: float | None = None
    least_sqnr_db: float = 0.0
    weights: dict[str, str] = field(default_factory=dict)
    searched: tuple[str, ...] = ()
    tries: int = 0
    refused: str | None = None
    warnings: tuple[str, ...] = ()


def half(
    program: ExportedGraph, precision: HalfPrecision, *, keep_fp32: tuple[str, ...] = (),
    batches: Iterable[dict[str, np.ndarray]] = (),
) -> tuple[ExportedGraph, HalfReport]:  # fmt: skip
    """The program in the precision, and the report; the program as it was where the report says `refused`.

    `batches`: calibration data, streamed. `keep_fp32`: patterns of module paths and operators; ProjectError where one
    matches nothing. Inputs, outputs and integers keep their types.
    """
    form = FORMATS[precision]
    patterns.check(keep_fp32, program.module, key="keep_fp32")
    reasons = half_plan.by_rules(program.module, form, keep_fp32)
    calls, ranges, wanted = _Calls(program, batches), Ranges(), []
    for outputs in measured(program.module, program.signature, form, calls, ranges, reasons):
        if len(wanted) < len(calls.judged):
            wanted.append(outputs)
    wanted[: len(program.reference)] = [call.outputs for call in program.reference]
    judge = half_search.Judge(program.signature, calls.judged, wanted, form)
    weights = half_plan.unfit_weights(program.module, form)
    converted, report = _Work(program.module, form, ranges, weights, reasons, judge).settle()
    if converted is None:
        return program, report
    return program.after(precision, module=converted.module, half=precision), report


class _Calls:
    """Reference calls, then one of synthetic values, then the batches; `judged` keeps the inputs of the first."""

    def __init__(self, program: ExportedGraph, batches: Iterable[dict[str, np.ndarray]]):
        self._program, self._batches = program, batches
        self.judged: list[dict[str, np.ndarray]] = []

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        given = itertools.chain((call.inputs for call in self._program.reference), self._synthetic())
        for inputs in given:
            self.judged.append(inputs)
            yield inputs
        for number, inputs in enumerate(self._batches):
            if number < JUDGED_BATCHES:
                self.judged.append(inputs)
            yield inputs

    def _synthetic(self) -> Iterator[dict[str, np.ndarray]]:
        """Values at other sizes, as the written files are compared with; none where the model does not take them."""
        signature = self._program.signature
        inputs = graph.synthetic(signature, graph.sizes(signature, "example"), seed=17)
        try:
            graph.run(self._program, inputs)
        except Exception:  # an index out of a table's range, say: the range is not declared
            return
        yield inputs


@dataclass(frozen=True)
class _Work:
    module: GraphModule
    form: HalfFormat
    ranges: Ranges
    weights: dict[str, str]
    reasons: dict[str, str]
    judge: half_search.Judge

    def settle(self) -> tuple[Converted | None, HalfReport]:
        """The conversion that is close enough, with more modules in fp32 where that is needed; None where refused."""
        plan = self._plan()
        converted = self._convert(plan)
        if nothing := self._nothing_left(plan):
            return None, self._report(plan, converted, None, refused=nothing)
        verdict = self.judge(converted.module)
        if not verdict.reasons:
            return converted, self._report(plan, converted, verdict)
        return self._search(plan, converted, verdict)

    def _search(
        self, first: Plan, converted: Converted, verdict: half_search.Verdict
    ) -> tuple[Converted | None, HalfReport]:
        units, why = self._units(first), "; ".join(verdict.reasons)
        everything = self.judge(self._convert(self._plan(frozenset(units))).module)
        if everything.reasons:  # the fault is not the precision's
            refused = f"{why}; and so it is with everything in fp32"
            return None, self._report(first, converted, verdict, refused=refused)
        kept, tries, ended = half_search.culprits(
            units, lambda some: not self.judge(self._convert(self._plan(some)).module).reasons
        )
        plan = self._plan(kept, f"with it in {self.form.name} {why}")
        converted = self._convert(plan)
        known: dict[str, Any] = {"searched": tuple(unit for unit in units if unit in kept), "tries": tries + 2}
        if nothing := self._nothing_left(plan):
            return None, self._report(plan, converted, verdict, refused=f"{why}; {nothing}", **known)
        more = "" if ended else f", as far as {tries} tries found"
        warning = f"{self.form.name}: {why}: {len(kept)} of {len(units)} modules more keep fp32{more}"
        return converted, self._report(plan, converted, self.judge(converted.module), warnings=(warning,), **known)

    def _plan(self, kept: frozenset[str] = frozenset(), why: str = "") -> Plan:
        reasons = dict(self.reasons)
        for node in half_plan.float_operators(self.module.graph) if kept else ():
            if _unit(node) in kept:
                reasons.setdefault(node.name, why)
        return half_plan.plan(self.module, self.form, self.ranges, self.weights, reasons)

    def _convert(self, plan: Plan) -> Converted:
        return convert(self.module, plan, self.form)

    def _units(self, plan: Plan) -> list[str]:
        """Innermost modules with operators in the format, in order; an operator of no module stands for itself."""
        found = half_plan.float_operators(self.module.graph)
        return list(dict.fromkeys(_unit(node) for node in found if node.name in plan.half))

    def _nothing_left(self, plan: Plan) -> str | None:
        operators = half_plan.float_operators(self.module.graph)
        heavy = [node for node in operators if aten_name(node) in half_rules.HEAVY]
        if any(node.name in plan.half for node in heavy):
            return None
        reasons = list(dict.fromkeys(f"{module_path(n) or n.name}: {plan.reasons[n.name]}" for n in heavy))
        words = "; ".join(reasons[:3]) or "there is none"
        more = f"; and {len(reasons) - 3} more" if len(reasons) > 3 else ""
        return f"no convolution or matrix product can be in {self.form.name} ({words}{more})"

    def _report(
        self, plan: Plan, converted: Converted, verdict: half_search.Verdict | None, **known: Any
    ) -> HalfReport:
        operators = half_plan.float_operators(self.module.graph)
        in_half = [node for node in operators if node.name in plan.half]
        modules = dict.fromkeys(path for node in in_half if (path := module_path(node)))
        return HalfReport(
            precision=self.form.name, operators=len(operators), in_half=len(in_half), half_modules=tuple(modules),
            islands=tuple(half_plan.islands(self.module.graph, plan)), casts=converted.casts,
            bytes_before=_bytes(self.module), bytes_after=_bytes(converted.module),
            sqnr_db=verdict.sqnr_db if verdict else None, least_sqnr_db=self.form.least_sqnr_db,
            weights=dict(plan.weights), **known,
        )  # fmt: skip


def _unit(node) -> str:
    return module_path(node) or f"%{node.name}"


def _bytes(module: GraphModule) -> int:
    """Of the stored tensors, each memory once."""
    sizes = {t.data_ptr(): t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers())}
    return sum(sizes.values())
