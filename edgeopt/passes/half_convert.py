"""A graph rewritten after a plan: operators in the 16-bit format, weights stored in it, casts where the type changes.

Inputs and outputs keep their types: the casts at the boundary are inside. Integers and booleans are never cast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node, map_arg

from edgeopt.passes import half_rules
from edgeopt.passes.half_plan import Plan, owner
from edgeopt.passes.rewrite import remove_dead
from edgeopt.program import graph
from edgeopt.program.stored import add_tensor, tensor_of
from edgeopt.spec.half_formats import HalfFormat

_CAST = torch.ops.aten.to.dtype
_CLAMP = torch.ops.aten.clamp.default
_OPERATORS = ("call_function", "call_module")


@dataclass(frozen=True)
class Converted:
    """The module, and how many casts were put into it."""

    module: GraphModule
    casts: int


def convert(module: GraphModule, plan: Plan, form: HalfFormat) -> Converted:
    """A module after the plan over the tensors of `module`, which stays as it is."""
    copied = graph.shared(module)
    rewriting = _Rewriting(copied, plan, form)
    for node in list(copied.graph.nodes):
        rewriting.rewrite(node)
    remove_dead(copied.graph)
    graph.remove_unused(copied)
    copied.graph.lint()
    copied.recompile()
    return Converted(copied, sum(1 for node in rewriting.casts if not node._erased))


class _Rewriting:
    """The state of one rewriting: which nodes gave float32 at first, and the casts and weights made so far."""

    def __init__(self, module: GraphModule, plan: Plan, form: HalfFormat):
        self._module, self._plan, self._form = module, plan, form
        self._dtype = half_rules.dtype_of(form)
        self._floats = {node for node in module.graph.nodes if half_rules.makes_float(node)}
        self._cast: dict[tuple[Node, torch.dtype], Node] = {}
        self._weights: dict[tuple, str] = {}  # a stored tensor's memory and layout -> the name of its 16-bit twin
        self.casts: list[Node] = []

    def rewrite(self, node: Node) -> None:
        if node.op == "output":
            node.args = map_arg(node.args, lambda source: self._as(source, torch.float32, node))
        elif node.op in _OPERATORS and self._is_half(node):
            if not half_rules.is_part(node):
                self._to_half(node)
            node.meta["val"] = _halved(node.meta.get("val"), self._dtype)
        elif node.op in _OPERATORS and not half_rules.is_part(node) and not half_rules.reads_sizes(node):
            changed = map_arg((node.args, node.kwargs), lambda source: self._as(source, torch.float32, node))
            node.args, node.kwargs = changed

    def _is_half(self, node: Node) -> bool:
        return owner(node).name in self._plan.half

    def _to_half(self, node: Node) -> None:
        if node.name in self._plan.clamped:
            self._clamp_mask(node)
        args, kwargs = map_arg((node.args, node.kwargs), lambda source: self._as(source, self._dtype, node))
        node.args, node.kwargs = args, kwargs

    def _as(self, source: Node, dtype: torch.dtype, reader: Node) -> Node:
        """The node that holds the value of `source` in `dtype` for `reader`; itself where it is no float32."""
        if source not in self._floats:
            return source
        if source.op == "get_attr" and source.name not in self._plan.mutated:
            return source if dtype == torch.float32 else self._weight(source, reader)
        has = self._dtype if source.op in _OPERATORS and self._is_half(source) else torch.float32
        if has == dtype:
            return source
        if source.name in self._plan.mutated:  # read when the reader runs: it may be written to until then
            return self._new_cast(source, dtype, reader)
        if (source, dtype) not in self._cast:
            self._cast[source, dtype] = self._new_cast(source, dtype, reader)
        return self._cast[source, dtype]

    def _new_cast(self, source: Node, dtype: torch.dtype, reader: Node) -> Node:
        with reader.graph.inserting_before(reader):
            cast = reader.graph.call_function(_CAST, (source, dtype))
        cast.meta = _origin(source if reader.op == "output" else reader)
        cast.meta["val"] = _converted(source.meta["val"], dtype)
        self.casts.append(cast)
        return cast

    def _weight(self, source: Node, reader: Node) -> Node:
        tensor = tensor_of(self._module, source)
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if (source, self._dtype) in self._cast:
            return self._cast[source, self._dtype]
        if place in self._weights:
            with reader.graph.inserting_before(reader):
                node = reader.graph.get_attr(self._weights[place])
            node.meta["val"] = _converted(source.meta["val"], self._dtype)
        else:
            trained = isinstance(_stored(self._module, source.target), torch.nn.Parameter)
            twin = tensor.to(self._dtype)
            node = add_tensor(self._module, f"{source.target}_{self._form.name}", twin, reader, trained=trained)
            self._weights[place] = node.target
        self._cast[source, self._dtype] = node
        return node

    def _clamp_mask(self, node: Node) -> None:
        """Cut the mask at half of the range: a score that is added to it must not overflow again."""
        mask = half_rules.argument(node, "attn_mask")
        bound = self._form.largest / 2
        with node.graph.inserting_before(node):
            wide = self._as(mask, torch.float32, node)
            cut = node.graph.call_function(_CLAMP, (wide, -bound, bound))
        cut.meta = _origin(node)
        cut.meta["val"] = mask.meta["val"]
        self._floats.add(cut)
        node.replace_input_with(mask, cut)


def _stored(module: GraphModule, target: str) -> object:
    value: object = module
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _origin(node: Node) -> dict[str, Any]:
    """Where a new node comes from: the module and the line of the node that it is made for."""
    return {key: node.meta[key] for key in ("nn_module_stack", "stack_trace", "source_fn_stack") if key in node.meta}


def _halved(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return _converted(value, dtype) if value.dtype == torch.float32 else value
    if isinstance(value, list | tuple):
        return type(value)(_halved(item, dtype) for item in value)
    return value


def _converted(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    mode = getattr(value, "fake_mode", None)
    if mode is None:
        return value.to(dtype)
    with mode:
        return value.to(dtype)
