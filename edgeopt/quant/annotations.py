"""What placement rules are made of: questions about a node, and the specifications that they put on its edges."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from edgeopt.program import patterns
from edgeopt.program.patterns import aten_name as operator
from edgeopt.quant import pt2e
from edgeopt.quant.scheme import Scheme

CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "convolution")
TRANSPOSED = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
ACTIVATIONS = ("relu", "relu6", "hardtanh", "clamp", "clamp_min")  # absorbed by the range of what follows them


@dataclass(frozen=True)
class Rule:
    """`place(node, scheme)` annotates a node of one of `operators` and returns None, or why it stays float."""

    name: str
    operators: tuple[str, ...]
    place: Callable[[Node, Scheme], str | None]


def stays_float(reason: str) -> Callable[[Node, Scheme], str]:
    """The `place` of operators that the runtime has no integer kernel for, or none that gains."""
    return lambda node, scheme: reason


def is_float_tensor(node: object) -> bool:
    """Whether `node` yields one float32 tensor."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


def is_weight(node: object) -> bool:
    """Whether `node` is a stored float32 tensor."""
    return isinstance(node, Node) and node.op == "get_attr" and is_float_tensor(node)


def is_quantized(node: Node) -> bool:
    """Whether a rule quantizes the output of `node`."""
    annotation = node.meta.get(pt2e.Q_ANNOTATION_KEY)
    return annotation is not None and annotation.output_qspec is not None


def annotate(node: Node, inputs: dict, output: object = None) -> None:
    """Put the specifications on the edges from `inputs` and on the output of `node`."""
    node.meta[pt2e.Q_ANNOTATION_KEY] = pt2e.QuantizationAnnotation(
        input_qspec_map=inputs, output_qspec=output, _annotated=True
    )


def annotate_output(node: Node, scheme: Scheme) -> None:
    """Quantize after the activation that follows `node`, where there is one, else after `node` itself."""
    end = node
    users = list(node.users)
    if len(users) == 1 and operator(users[0]) in ACTIVATIONS and users[0].args[0] is node:
        end = users[0]
    annotation = end.meta.setdefault(pt2e.Q_ANNOTATION_KEY, pt2e.QuantizationAnnotation(_annotated=True))
    annotation.output_qspec = scheme.activation


_KEPT = "edgeopt_kept_float"


def keep_float(module: GraphModule, wanted: Iterable[str]) -> None:
    """Mark what the project keeps float, before anything is rewritten.

    `wanted`: patterns of module paths ('features.0', which takes what is below it too, or 'layers.*.norm') and of
    operators ('linear'). ProjectError where one matches nothing, since a misspelt one would silently quantize what must
    not be.
    """
    wanted = tuple(wanted)
    patterns.check(wanted, module, key="keep_float")
    for node in module.graph.nodes:
        if any(patterns.matches(pattern, node) for pattern in wanted):
            node.meta[_KEPT] = True


def is_kept_float(node: Node) -> bool:
    """Whether the project keeps `node` float."""
    return bool(node.meta.get(_KEPT))


def argument(node: Node, index: int) -> object:
    return node.args[index] if len(node.args) > index else None
