"""Layers that stay float because no range of eight bits serves their values: those far from 0, or not finite.

Every range holds 0, so that padding is exact; values in 1000 to 1001 then share one step of 3.9. No calibrator mends
that (pytorch issue 173075), nor an infinity, as masks add. The operators that read or make such values are left float.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.fx import GraphModule, Node

from edgeopt.quant import findings, pt2e, rules
from edgeopt.quant.prepare import Prepared
from edgeopt.quant.report import report_of

FEWEST_STEPS = 16  # four bits; of 32 steps and fewer there is a warning


def kept_float(prepared: Prepared) -> Prepared:
    """`prepared`, calibrated, without observers around values that use fewer than FEWEST_STEPS steps.

    Changes its module in place. The report gives the layers as float with the reason, and a warning for each range.
    """
    module, reasons, warnings = prepared.module, {}, []
    for node, observer in list(findings.observed(module)):
        if node.op == "get_attr" or isinstance(observer, pt2e.DerivedObserverOrFakeQuantize):
            continue
        where = lost(observer)
        if where is None:
            continue
        places = [n for n in module.graph.nodes if n.op == "call_module" and module.get_submodule(n.target) is observer]
        for operator in _around(places):
            reasons[operator.name] = where
            _without_observers(module, operator)
        for place in places:
            place.replace_all_uses_with(place.args[0])
        name = findings.layer_name(node, prepared.program.signature.input_names)
        warnings.append(f"{name}: kept float: {where}")
    if not warnings:
        return prepared
    _forget_unused_observers(module)
    layers = tuple(
        dataclasses.replace(d, quantized=False, reason=reasons[d.node]) if d.node in reasons and d.quantized else d
        for d in prepared.report.layers
    )
    folded = prepared.report.batch_norms_folded
    report = report_of(prepared.report.scheme, layers, batch_norms_folded=folded)
    report = dataclasses.replace(report, warnings=tuple(warnings))
    return dataclasses.replace(prepared, report=report)


def lost(observer: torch.nn.Module) -> str | None:
    """Why the values of an activation's observer must stay float; None where eight bits tell them apart."""
    if not bool(torch.isfinite(observer.max_val - observer.min_val)) and bool(observer.max_val != -float("inf")):
        return "values are infinite or NaN on the calibration data"
    where = findings.off_centre(observer)
    if where is None or findings.steps_used(observer) >= FEWEST_STEPS:
        return None
    return f"{where}; subtract the offset in the model"


def _around(places: list[Node]) -> list[Node]:
    """The operators that read what is observed at `places`, and those that make it, through their activation."""
    found = [user for place in places for user in place.users if user.op == "call_function"]
    for place in places:
        maker = place.args[0]
        if maker.op == "call_function" and rules.operator(maker) in rules.ACTIVATIONS:
            maker = maker.args[0]
        if maker.op == "call_function":
            found.append(maker)
    return list(dict.fromkeys(found))


def _without_observers(module: GraphModule, operator: Node) -> None:
    """Let `operator` read its operands as they are."""

    def bare(node: Node) -> Node:
        while _is_observer(module, node):
            node = node.args[0]
        return node

    operator.args = torch.fx.node.map_arg(operator.args, bare)


def _forget_unused_observers(module: GraphModule) -> None:
    for node in reversed(module.graph.nodes):
        if not node.users and _is_observer(module, node):
            module.graph.erase_node(node)
    module.delete_all_unused_submodules()
    module.recompile()


def _is_observer(module: GraphModule, node: Node) -> bool:
    if node.op != "call_module":
        return False
    return isinstance(module.get_submodule(node.target), pt2e.ObserverBase | pt2e.FakeQuantizeBase)
