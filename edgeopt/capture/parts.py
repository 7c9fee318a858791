"""Capture by `torch.export` with parts: what export cannot take stays TorchScript inside the exported graph.

The smallest modules are sought that keep export from being faithful: torch's recurrent layers whose time axis
varies, since export fixes it, and modules in whose forward export fails or freezes an axis, as it does for control
flow that depends on data. Each is scripted and called as one operator (see program/parts). Where a module cannot be a
part, the one that calls it is tried.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from edgeopt.capture import guard, parts_make, script
from edgeopt.capture.declined import Declined
from edgeopt.capture.eager import Eager
from edgeopt.capture.export import lost_axis, of_module, time_axis
from edgeopt.capture.flat import flat
from edgeopt.capture.parts_calls import Key, Recorded, flatten, rebuild, record, replace_forward
from edgeopt.program import ExportedGraph, Signature, graph
from edgeopt.program.node_words import is_item
from edgeopt.program.parts import Part, part_of, register

_MOST_EXPORTS = 32  # each finds one more module that export cannot take


@dataclass(frozen=True)
class Kept:
    """A module that becomes a part, why, and its part and returned structure for each form in which it is called."""

    kind: str
    why: str
    forms: dict[Key, tuple[Part, Key]]


@dataclass
class _Search:
    model: Eager
    tried: list[dict[str, np.ndarray]]
    kept: dict[str, Kept] = field(default_factory=dict)

    def keep(self, path: str, why: str, calls: list[Recorded] | None = None) -> None:
        """Make the module at `path` a part, or the nearest above it that can be one; Declined where none can.

        `calls` of the module at `path`, where they are recorded already.
        """
        said = []
        at = path
        while at:
            try:
                if at in self.kept:
                    raise Declined("it is called in a form that was not seen at other sizes")
                self._keep(at, why, calls if calls and at == path else record(self.model, [at], self.tried)[at])
                return
            except Declined as reason:
                said.append(f"'{at}' cannot be a scripted part: {reason.reason}")
            at = at.rpartition(".")[0]
        said = said or ["it is in the model's own forward, of which no part can be made"]
        raise Declined(f"{why}; {'; '.join(said)}")

    def _keep(self, path: str, why: str, calls: list[Recorded]) -> None:
        module = self.model.fresh().get_submodule(path)
        kept = Kept(script.class_name(module), why, parts_make.forms(path, module, calls))
        below = [other for other in self.kept if other.startswith(f"{path}.")]
        for other in below:
            del self.kept[other]
        self.kept[path] = kept


def export_with_parts(model: Eager, signature: Signature, *, copy_inputs: bool, seed: int) -> ExportedGraph:
    """The model as an ExportedGraph in which some modules are parts; its notes name them. Declined where none help."""
    search = _Search(model, guard.inputs_to_try(signature, seed))
    _keep_known(search)
    for _ in range(_MOST_EXPORTS):
        module = flat(model, copy_inputs=copy_inputs)
        for path, kept in search.kept.items():
            replace_forward(module, path, lambda forward, kept=kept: _as_operator(kept))
        watch = _Watch(module, signature, set(search.kept))
        try:
            program = of_module(module, model, signature, seed)
        except Declined as why:
            if watch.at is None:
                raise
            try:
                search.keep(watch.at, watch.lost or why.reason)
            except Declined as none:
                raise Declined(none.reason, why.where) from why
        else:
            return _checked(program, search.kept)
    raise Declined(f"more than {_MOST_EXPORTS} modules would have to be scripted")


def _keep_known(search: _Search) -> None:
    """Keep what export is known not to take: recurrent layers over an axis that varies, and modules scripted before."""
    named = dict(search.model.module.named_modules())
    recurrent = [path for path, module in named.items() if path and isinstance(module, nn.RNNBase)]
    calls = record(search.model, recurrent, search.tried) if recurrent else {}
    for path in recurrent:
        if any(call.declined for call in calls[path]) or len({_time(named[path], c) for c in calls[path]}) > 1:
            search.keep(path, "its time axis varies, which torch.export would freeze", calls[path])
    for path, module in named.items():
        inside = any(path.startswith(f"{other}.") for other in search.kept)
        if path and script.is_script(module) and not inside and not script.is_script(_parent(named, path)):
            search.keep(path, "it is TorchScript already")


def _time(layer: nn.RNNBase, call: Recorded) -> int:
    return call.inputs[0].shape[time_axis(layer, call.inputs[0])]


def _parent(named: dict[str, nn.Module], path: str) -> nn.Module | None:
    return named.get(path.rpartition(".")[0])


def _as_operator(kept: Kept) -> Callable[..., Any]:
    """A forward that calls the operator of the form in which it is called."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        takes, tensors = flatten((args, kwargs))
        if takes not in kept.forms:
            raise Declined("it is called in a form that was not seen at other sizes")
        part, gives = kept.forms[takes]
        given = register(part)(*tensors)
        return rebuild(gives, [given] if isinstance(given, torch.Tensor) else given)

    return forward


class _Watch:
    """Finds the innermost module in which export fails, or takes an axis for a number: `at`, '' for the model's own."""

    def __init__(self, module: nn.Module, signature: Signature, parts: set[str]):
        self._signature = signature
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._failed: str | None = None
        self._lost: tuple[str, str] | None = None  # where, why
        for path, sub in list(module.named_modules()):
            inside = any(path.startswith(f"{part}.") for part in parts)
            if not inside and not script.is_script(sub) and not _is_container(sub):
                sub.forward = types.MethodType(self._watched(path, sub.forward), sub)

    @property
    def at(self) -> str | None:
        return self._lost[0] if self._lost else self._failed

    @property
    def lost(self) -> str | None:
        return self._lost[1] if self._lost else None

    def _watched(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not path:
                self._inputs = args
            try:
                returned = forward(*args, **kwargs)
            except Exception:
                if self._failed is None:
                    self._failed = path
                raise
            finally:
                reason = None if self._lost else lost_axis(self._inputs, self._signature)
                if reason:
                    self._lost = (path, reason)
            self._failed = None  # what failed inside was caught by the model
            return returned

        return watched


def _is_container(module: nn.Module) -> bool:
    """Whether the module has no forward of its own, as nn.ModuleList."""
    return type(module).forward is nn.Module.forward


def _checked(program: ExportedGraph, kept: dict[str, Kept]) -> ExportedGraph:
    """The program without what only its parts read, and with notes; Declined where nothing but parts is left."""
    calls = [node for node in program.module.graph.nodes if node.op == "call_function"]
    if not any(part_of(node) for node in calls):
        raise Declined("no module was found that export cannot take")
    if all(part_of(node) or is_item(node) for node in calls):
        raise Declined("the scripted part would be the whole model")
    _drop_unread(program.module)
    notes = [f"kept as TorchScript in the graph: '{path}' ({each.kind}): {each.why}" for path, each in kept.items()]
    return dataclasses.replace(program, notes=tuple(notes))


def _drop_unread(module: torch.fx.GraphModule) -> None:
    """Drop the stored tensors that no node uses: the weights of parts, which have their own."""
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and not node.users:
            module.graph.erase_node(node)
    module.recompile()
    graph.remove_unused(module)
