"""An FX graph of aten operators as TorchScript source.

torch.jit.trace would freeze the sizes of such a graph: its operators are called as `torch.ops.aten.*`, whose integer
arguments the tracer does not follow. Written out as source, a size stays an expression, and names are ours: plain
ASCII, and the same in every process.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from edgeopt.errors import LoweringError
from edgeopt.program import foreign
from edgeopt.program.parts import part_of

_INFIX = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.floordiv: "//", operator.truediv: "/",
    operator.mod: "%", operator.pow: "**", operator.eq: "==", operator.ne: "!=", operator.lt: "<",
    operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.and_: "&", operator.or_: "|",
}  # fmt: skip
_CALLS = {
    torch.sym_max: "max", torch.sym_min: "min", torch.sym_float: "float", torch.sym_int: "int",
    torch.sym_not: "not ", max: "max", min: "min", math.ceil: "math.ceil", math.floor: "math.floor",
    round: "round", operator.neg: "-", abs: "abs",
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """`code` is the text of `forward`; `tensors` and `modules` are the attributes of self that it names."""

    code: str
    tensors: dict[str, torch.Tensor]
    modules: dict[str, torch.jit.ScriptModule]


def source(module: GraphModule) -> Source:
    """The graph as the source of `forward`, positional tensors in, a flat tuple of tensors out.

    Raises LoweringError that names the node where the graph holds what TorchScript has no form for.
    """
    names: dict[Node, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    modules: dict[str, torch.jit.ScriptModule] = {}
    arguments, lines = [], []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            names[node] = f"a{len(arguments)}"
            arguments.append(f"{names[node]}: Tensor")
        elif node.op == "get_attr":
            names[node] = _attribute(module, node, tensors)
        elif node.op == "output":
            values = ", ".join(_text(v, "Tensor", names) for v in node.args[0])
            lines.append(f"return ({values},)")
        elif part_of(node) is not None:
            names[node] = f"v{len(lines)}"
            lines.append(f"{names[node]} = {_part(node, names, modules)}")
        elif not _is_assertion(node):
            names[node] = f"v{len(lines)}"
            lines.append(f"{names[node]} = {_call(node, names)}")
    head = f"def forward({', '.join(['self', *arguments])}):"
    return Source("\n    ".join([head, *lines]) + "\n", tensors, modules)


def _attribute(module: GraphModule, node: Node, tensors: dict[str, torch.Tensor]) -> str:
    value = operator.attrgetter(node.target)(module)
    if not isinstance(value, torch.Tensor):
        raise LoweringError(f"the control flow '{node.target}' has no TorchScript form from an exported graph")
    known = next((name for name, tensor in tensors.items() if tensor is value), None)
    if known is None:
        known = f"w{len(tensors)}"
        tensors[known] = value
    return f"self.{known}"


def _part(node: Node, names: dict[Node, str], modules: dict[str, torch.jit.ScriptModule]) -> str:
    """The call of a scripted part, which gives a tuple, as the operator gives it: a lone tensor by itself."""
    part = part_of(node)
    known = next((name for name, module in modules.items() if module is part.module), f"part{len(modules)}")
    modules[known] = part.module
    called = f"self.{known}({', '.join(names[a] for a in node.args)})"
    return called if len(part.outputs) > 1 else f"{called}[0]"


def _is_assertion(node: Node) -> bool:
    """Checks that export leaves behind; the sizes that they guard are the axes' ranges, which the manifest holds."""
    if node.op == "call_module":
        return node.target == "_guards_fn"
    name = getattr(node.target, "__name__", "")
    return name.startswith(("_assert", "sym_constrain_range"))


def _call(node: Node, names: dict[Node, str]) -> str:
    target = node.target
    if foreign.is_foreign(node):
        return _text(node.args[0], "List[Tensor]", names)
    if isinstance(target, torch._ops.OpOverload):
        return _operator(node, target, names)
    args = [_text(a, "Any", names) for a in node.args]
    if target is operator.getitem:
        return f"{args[0]}[{args[1]}]"
    if target in _INFIX:
        return f"({args[0]} {_INFIX[target]} {args[1]})"
    if target in _CALLS:
        return f"({_CALLS[target]}({', '.join(args)}))"
    raise LoweringError(f"the operator '{target}' of node '{node.name}' has no TorchScript form")


def _operator(node: Node, target: torch._ops.OpOverload, names: dict[Node, str]) -> str:
    if target is torch.ops.aten.sym_size.int:
        return f"{names[node.args[0]]}.size({node.args[1]})"
    if target is torch.ops.aten.sym_numel.default:
        return f"{names[node.args[0]]}.numel()"
    schema = target._schema
    types = {a.name: str(a.type) for a in schema.arguments}
    positional = [_text(v, str(a.type), names) for v, a in zip(node.args, schema.arguments, strict=False)]
    named = [f"{k}={_text(v, types[k], names)}" for k, v in node.kwargs.items()]
    namespace, name = schema.name.split("::")
    return f"torch.ops.{namespace}.{name}({', '.join(positional + named)})"


def _text(value: Any, kind: str, names: dict[Node, str]) -> str:
    """`value` as source, where the operator's schema asks for `kind`."""
    if isinstance(value, Node):
        return names[value]
    if isinstance(value, list | tuple):
        inner = kind[kind.find("List[") + 5 : -1].rstrip("]") if "List[" in kind else "Any"
        items = f"[{', '.join(_text(v, inner, names) for v in value)}]"
        plain = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind
        needs_type = "List[" in kind and (not value or None in value)
        return f"torch.jit.annotate({plain}, {items})" if needs_type else items
    if isinstance(value, float) or (kind in ("float", "Optional[float]") and isinstance(value, int)):
        value = float(value)
        return repr(value) if math.isfinite(value) else f"float('{value}')"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, bool | int | str | torch.dtype | torch.layout | torch.memory_format) or value is None:
        return str(value) if not isinstance(value, str) else repr(value)
    raise LoweringError(f"the constant {value!r} has no TorchScript form")
