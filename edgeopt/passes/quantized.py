"""Q/DQ that says the same twice. What the quantizer decided stays: only equal parameters are ever merged."""

from __future__ import annotations

from torch.fx import Node

from edgeopt.passes.changed import Changed, Context

_NAMESPACE = "quantized_decomposed"


def requantize(context: Context) -> Changed:
    """dequantize -> quantize with equal parameters: the integers themselves."""
    module, count, declined = context.module, 0, []
    for node in list(module.graph.nodes):
        source = node.args[0] if node.args else None
        if not _is(node, "quantize") or not _is(source, "dequantize"):
            continue
        if _parameters(node) == _parameters(source):
            node.replace_all_uses_with(source.args[0])
            module.graph.erase_node(node)
            count += 1
        else:
            declined.append(f"{node.name}: its parameters differ from those of {source.name}")
    return Changed(count, tuple(declined))


def _is(node: object, kind: str) -> bool:
    target = getattr(node, "target", None)
    return getattr(target, "namespace", None) == _NAMESPACE and target._schema.name.split("::")[1].startswith(
        kind + "_per"
    )


def _parameters(node: Node) -> tuple:
    """Granularity, scale, zero point, axis, range and dtype, as text where they are values: 1 and 1.0 differ."""
    granularity = node.target._schema.name.partition("_per_")[2]
    named = dict(zip([a.name for a in node.target._schema.arguments[1:]], node.args[1:], strict=False))
    named.pop("out_dtype", None)
    return (granularity, *((k, v if isinstance(v, Node) else repr(v)) for k, v in sorted(named.items())))
