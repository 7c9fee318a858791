"""Which nodes of an ONNX graph become integers: the placement's rules, for files that have no PyTorch source.

The rules say the same as those of rules.py, on ONNX operators. Where the pairs go around a chosen node is then what
onnxruntime's quantizer does: inputs and outputs, an activation absorbed by the range of what it follows.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import onnx
from onnx import GraphProto, NodeProto, TensorProto

from edgeopt.errors import ProjectError
from edgeopt.quant.quantizer import Decision
from edgeopt.spec.values import did_you_mean

ACTIVATIONS = ("Relu", "Clip")
FLOAT_OUTPUTS = ("Gemm", "MatMul")  # the kernels give float as cheaply; what needs integers asks for them at its input


@dataclass(frozen=True)
class Facts:
    """What rules ask of a graph: stored tensors, element types and shapes by name, and the readers of each value."""

    stored: dict[str, TensorProto]
    types: dict[str, int]
    shapes: dict[str, tuple[int | None, ...]]
    readers: dict[str, list[NodeProto]]
    makers: dict[str, NodeProto]
    quantized: set[str] = field(default_factory=set)  # values that are integers already, as the rules run

    def is_weight(self, name: str) -> bool:
        return name in self.stored and self.stored[name].data_type == TensorProto.FLOAT

    def is_activation(self, name: str) -> bool:
        return name not in self.stored and self.types.get(name) == TensorProto.FLOAT


Place = Callable[[NodeProto, Facts], str | None]


def facts_of(graph: GraphProto) -> Facts:
    """The facts of a graph whose shapes were inferred."""
    types, shapes = {}, {}
    for value in (*graph.input, *graph.value_info, *graph.output):
        kind = value.type.tensor_type
        types[value.name] = kind.elem_type
        if kind.HasField("shape"):
            shapes[value.name] = tuple(d.dim_value if d.HasField("dim_value") else None for d in kind.shape.dim)
    readers: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        for name in dict.fromkeys(node.input):
            readers.setdefault(name, []).append(node)
    makers = {name: node for node in graph.node for name in node.output}
    return Facts({t.name: t for t in graph.initializer}, types, shapes, readers, makers)


def decide(
    graph: GraphProto, placement: str, *, keep_float: Sequence[str], lost: dict[str, str]
) -> tuple[tuple[Decision, ...], tuple[str, ...]]:
    """(decisions in graph order, the names of the nodes to hand to the quantizer).

    `lost`: values that eight bits cannot tell apart -> why; what makes or reads them stays float.
    """
    facts = facts_of(graph)
    table = {operator: rule for rule in TABLES[placement] for operator in rule[1]}
    decisions, chosen = [], []
    for node in graph.node:
        if node.domain not in ("", "ai.onnx") or node.op_type not in table:
            continue
        name, _, place = table[node.op_type]
        why = _kept(node, keep_float, lost, facts) or place(node, facts) or ""
        if not why:
            chosen.append(node.name)
            facts.quantized.update(node.output)
        if name != "activation":
            decisions.append(Decision(node.name, name, node.op_type, node.name, not why, why, macs(node, facts)))
    return tuple(decisions), tuple(chosen)


def matches(pattern: str, node: NodeProto) -> bool:
    """Whether `pattern` is the node's name, a part of its path ('/features/0' or 'features.0'), or its operator."""
    name, path = node.name, pattern.replace(".", "/") if "/" not in pattern else pattern
    return (
        any(fnmatch.fnmatchcase(name, p) for p in (pattern, f"{path}/*", f"/{path}/*"))
        or fnmatch.fnmatchcase(node.op_type, pattern)
        or node.op_type.lower() == pattern.lower()
    )


def check_patterns(patterns: Sequence[str], graph: GraphProto) -> None:
    """ProjectError where a pattern matches no node, since a misspelt one would silently do nothing."""
    for pattern in patterns:
        if not any(matches(pattern, node) for node in graph.node):
            names = [node.name for node in graph.node if node.name]
            near = did_you_mean(pattern, names)
            raise ProjectError(
                f"'{pattern}' matches no node name and no operator of the ONNX file"
                + (f", did you mean '{near}'?" if near else ""),
                where="keep_float", todo="choose a node's name or operator: " + ", ".join(names[:5] or ["Gemm"]),
            )  # fmt: skip


def macs(node: NodeProto, facts: Facts) -> int:
    """Multiply-accumulates of one call, with axes that vary counted as 1; 0 for other operators."""
    shape = facts.shapes.get
    if node.op_type in ("Conv", "ConvTranspose"):
        weight, at = shape_of(node.input[1], facts), node.input if node.op_type == "ConvTranspose" else node.output
        return _product(shape(at[0], ())) * _product(weight[1:])
    if node.op_type in ("MatMul", "Gemm"):
        left = shape(node.input[0], ())
        return _product(shape(node.output[0], ())) * ((left[-1] or 1) if left else 1)
    return 0


def shape_of(name: str, facts: Facts) -> tuple[int | None, ...]:
    return tuple(facts.stored[name].dims) if name in facts.stored else facts.shapes.get(name, ())


def _kept(node: NodeProto, keep_float: Sequence[str], lost: dict[str, str], facts: Facts) -> str | None:
    if any(matches(pattern, node) for pattern in keep_float):
        return "kept float by the project"
    ends = [value for output in node.output for value in (output, *_activated(output, facts))]
    return next((lost[value] for value in (*node.input, *ends) if value in lost), None)


def _activated(value: str, facts: Facts) -> list[str]:
    readers = facts.readers.get(value, [])
    return list(readers[0].output) if len(readers) == 1 and readers[0].op_type in ACTIVATIONS else []


def _weighted(node: NodeProto, facts: Facts) -> str | None:
    if not facts.is_activation(node.input[0]):
        return "its input is not float32"
    return None if facts.is_weight(node.input[1]) else "its weight is computed in the graph"


def _gemm(node: NodeProto, facts: Facts) -> str | None:
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    if attributes.get("transA", 0) or attributes.get("alpha", 1.0) != 1.0:
        return "it transposes or scales its input"
    if refused := _weighted(node, facts):
        return refused
    if len(node.input) > 2 and node.input[2]:
        if not facts.is_weight(node.input[2]):
            return "its bias is computed in the graph"
        channels = facts.stored[node.input[1]].dims[0 if attributes.get("transB", 0) else 1]
        if list(facts.stored[node.input[2]].dims) != [channels]:
            return "its bias has not one value a channel"
    return None


def _matmul(node: NodeProto, facts: Facts) -> str | None:
    left, right = node.input
    if not facts.is_activation(left) or not (facts.is_activation(right) or facts.is_weight(right)):
        return "its operands are not float32 activations times activations or a weight"
    if facts.is_weight(right) and len(facts.stored[right].dims) != 2:
        return "its weight is no matrix"
    return None


def _some_integer(node: NodeProto, facts: Facts) -> str | None:
    if not all(facts.is_activation(name) for name in node.input):
        return "it is not of float32 activations only"
    return None if any(name in facts.quantized for name in node.input) else "no operand is an integer already"


def _first_integer(node: NodeProto, facts: Facts) -> str | None:
    return None if node.input[0] in facts.quantized else "its operand is no integer"


def _activation(node: NodeProto, facts: Facts) -> str | None:
    maker = facts.makers.get(node.input[0])
    absorbed = maker is not None and maker.op_type not in FLOAT_OUTPUTS and maker.output[0] in facts.quantized
    return None if absorbed and len(facts.readers[node.input[0]]) == 1 else "it follows no integer"


def _no_kernel(node: NodeProto, facts: Facts) -> str:
    return "the runtime has no integer kernel for it"


def _product(sizes: Sequence[int | None]) -> int:
    total = 1
    for size in sizes:
        total *= size or 1
    return total


ONNXRUNTIME: tuple[tuple[str, tuple[str, ...], Place], ...] = (
    ("convolution", ("Conv",), _weighted),
    ("transposed convolution", ("ConvTranspose",), _no_kernel),
    ("linear", ("Gemm",), _gemm),
    ("matmul", ("MatMul",), _matmul),
    ("activation", ACTIVATIONS, _activation),
    ("add", ("Add",), _some_integer),
    ("concat", ("Concat",), _some_integer),
    ("average pooling", ("AveragePool", "GlobalAveragePool"), _first_integer),
    (
        "layout",
        ("MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Split"),
        _first_integer,
    ),
)
TENSORRT: tuple[tuple[str, tuple[str, ...], Place], ...] = (
    ("convolution", ("Conv",), _weighted),
    ("transposed convolution", ("ConvTranspose",), _weighted),
    ("linear", ("Gemm",), _gemm),
    ("matmul", ("MatMul",), _matmul),
)
TABLES = {
    "onnxruntime-x86": ONNXRUNTIME, "onnxruntime-arm": ONNXRUNTIME, "openvino": ONNXRUNTIME, "tensorrt": TENSORRT,
}  # fmt: skip
