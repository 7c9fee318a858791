"""Q/DQ that says the same twice. What the quantizer decided stays: only what changes no value is ever merged.

- Q of what was just dequantized with the same parameters is the integers themselves.
- Q - DQ of what was just dequantized with a scale that is a whole multiple of the new one, all of whose values the
  new range holds, gives every value back as it was: the first pair is enough.
- An activation whose bounds the range of the Q after it holds already, as ReLU before a zero point at the lowest
  code, is absorbed by that Q, and so by the layer before it, which the runtime fuses with the Q.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from edgeopt.passes.changed import Changed, Context
from edgeopt.program.qdq import is_dequantize, is_quantize

_aten = torch.ops.aten
_LAYERS = {
    _aten.conv1d.default, _aten.conv2d.default, _aten.conv3d.default, _aten.conv1d.padding, _aten.conv2d.padding,
    _aten.conv3d.padding, _aten.linear.default,
}  # fmt: skip
# activation -> its bounds, None where it has none; for those with arguments (position, name, default) of each
_FIXED_BOUNDS = {_aten.relu.default: (0.0, None), _aten.relu6.default: (0.0, 6.0)}
_GIVEN_BOUNDS = {
    _aten.hardtanh.default: ((1, "min_val", -1.0), (2, "max_val", 1.0)),
    _aten.clamp.default: ((1, "min", None), (2, "max", None)),
    _aten.clamp_min.default: ((1, "min", None), None),
}


def requantize(context: Context) -> Changed:
    """dequantize -> quantize that changes no value: the integers themselves, or the first pair alone."""
    module, count, declined = context.module, 0, []
    for node in list(module.graph.nodes):
        source = node.args[0] if node.args else None
        if node._erased or not is_quantize(node) or not is_dequantize(source):
            continue
        if parameters(node) == parameters(source):
            node.replace_all_uses_with(source.args[0])
            module.graph.erase_node(node)
            count += 1
        elif _keeps_every_value(source, node) and not _has_integer_bias(node):
            count += _read_the_first(source, node)
        else:
            declined.append(f"{node.name}: its parameters differ from those of {source.name}")
    return Changed(count, tuple(declined))


def absorb_activation(context: Context) -> Changed:
    """An activation between a layer and Qs that bound the values already goes."""
    module, count, declined = context.module, 0, []
    for node in list(module.graph.nodes):
        bounds = _bounds(node)
        if bounds is None or not node.users or not all(is_quantize(user) for user in node.users):
            continue
        if node in context.mutated or node.args[0] in context.mutated:
            declined.append(f"{node.name}: the model writes to its memory")
        elif all(_holds(user, *bounds) for user in node.users):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
            count += 1
        else:
            declined.append(f"{node.name}: the range of the quantize after it is wider than its bounds")
    return Changed(count, tuple(declined))


def parameters(node: Node) -> tuple:
    """Granularity, scale, zero point, axis, range and dtype, as text where they are values: 1 and 1.0 differ."""
    granularity = node.target._schema.name.partition("_per_")[2]
    named = dict(zip([a.name for a in node.target._schema.arguments[1:]], node.args[1:], strict=False))
    named.pop("out_dtype", None)
    return (granularity, *((k, v if isinstance(v, Node) else repr(v)) for k, v in sorted(named.items())))


def _keeps_every_value(first: Node, second: Node) -> bool:
    """Whether each value that `first` dequantizes is one that the quantize `second` gives back unchanged."""
    if not all(len(node.args) >= 6 and isinstance(node.args[1], float) for node in (first, second)):
        return False
    if any("_per_tensor" not in node.target._schema.name for node in (first, second)):
        return False
    (scale, zero, low, high), (fine, fine_zero, least, most) = first.args[1:5], second.args[1:5]
    times = round(scale / fine)
    if times < 1 or times * fine != scale:
        return False
    return least <= times * (low - zero) + fine_zero and times * (high - zero) + fine_zero <= most


def _has_integer_bias(quantize: Node) -> bool:
    """Whether a layer reads the integers beside a bias that was stored at their scale times the weight's."""
    readers = [reader for dequantize in quantize.users for reader in dequantize.users]
    return any(node.target in _LAYERS and len(node.args) > 2 and is_dequantize(node.args[2]) for node in readers)


def _read_the_first(first: Node, second: Node) -> int:
    """Let what reads the second pair read the first one; each dequantize stays by itself, as it was."""
    count = 0
    for dequantize in [user for user in second.users if is_dequantize(user)]:
        dequantize.target = first.target
        dequantize.args = first.args
        count += 1
    if not second.users:
        second.graph.erase_node(second)
    return count


def _bounds(node: Node) -> tuple[float | None, float | None] | None:
    if node.op != "call_function":
        return None
    if node.target in _FIXED_BOUNDS:
        return _FIXED_BOUNDS[node.target]
    places = _GIVEN_BOUNDS.get(node.target)
    if places is None:
        return None
    low, high = (None if place is None else _given(node, *place) for place in places)
    return (low, high) if all(b is None or isinstance(b, int | float) for b in (low, high)) else None


def _given(node: Node, position: int, name: str, default: float | None) -> object:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _holds(quantize: Node, low: float | None, high: float | None) -> bool:
    """Whether the quantize gives its lowest code to `low` and its highest to `high`, and so to all beyond."""
    if "_per_tensor" not in quantize.target._schema.name or not isinstance(quantize.args[1], float):
        return False
    codes = {
        bound: int(quantize.target(torch.tensor([float(bound)]), *quantize.args[1:]).item())
        for bound in (low, high) if bound is not None
    }  # fmt: skip
    least, most = quantize.args[3:5]
    return (low is None or codes[low] == least) and (high is None or codes[high] == most)
