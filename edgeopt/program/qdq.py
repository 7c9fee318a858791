"""Quantize and dequantize in a graph: the operators of torch's namespace for them."""

from __future__ import annotations

NAMESPACE = "quantized_decomposed"


def is_quantize(node: object) -> bool:
    """Whether `node` makes integers of floats."""
    return _is(node, "quantize_per_")


def is_dequantize(node: object) -> bool:
    """Whether `node` makes floats of integers."""
    return _is(node, "dequantize_per_")


def _is(node: object, start: str) -> bool:
    target = getattr(node, "target", None)
    return getattr(target, "namespace", None) == NAMESPACE and target._schema.name.split("::")[1].startswith(start)
