"""Which channels of a graph can be scaled together: the groups that cross-layer equalization works on.

A group is a set of tensors joined by operators that pass a positive scale of each channel through (ReLU, pooling,
addition of two members, layout that keeps the channels). It is written by convolutions and linears, whose output
channels can be scaled, and read by others, whose input channels can be scaled back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from edgeopt.program import stored
from edgeopt.quant import rules

LAYERS = (*rules.CONVOLUTIONS, "linear")
_CLAMPS = ("relu6", "hardtanh", "clamp")
_HOMOGENEOUS = (
    "relu", "leaky_relu", "dropout", "clone", "contiguous", "alias",
    *(name for name in (*rules.MAX_POOLING, *rules.AVERAGE_POOLING) if name != "mean"),
)  # fmt: skip


@dataclass
class Group:
    """Tensors whose channels share a scale. `clamps`: (node before a clamp, lowest, highest value it lets through)."""

    channels: int
    members: list[Node] = field(default_factory=list)
    writers: list[Node] = field(default_factory=list)
    readers: list[Node] = field(default_factory=list)
    clamps: list[tuple[Node, float, float]] = field(default_factory=list)

    @property
    def free(self) -> bool:
        """Whether scaling costs the readers nothing: a depthwise weight has one scale for each input channel."""
        return bool(self.readers) and all(is_depthwise(node) for node in self.readers)

    @property
    def quantized(self) -> list[Node]:
        """The members that quantization rounds: those that no activation alone reads."""
        activations = (*rules.ACTIVATIONS, "leaky_relu")
        return [
            node for node in self.members
            if not (len(node.users) == 1 and rules.operator(next(iter(node.users))) in activations)
        ]  # fmt: skip


def groups(module: GraphModule) -> tuple[Group, ...]:
    """The groups that may be scaled, in graph order: written and read only by layers whose weights are their own."""
    joined = _Joined()
    for node in module.graph.nodes:
        _place(node, joined)
    return tuple(group for group in joined.groups() if group.writers and group.readers)


def is_depthwise(node: Node) -> bool:
    """Whether each output channel is of one input channel, and the other way round."""
    if rules.operator(node) not in rules.CONVOLUTIONS or not isinstance(node.args[1], Node):
        return False
    weight = node.args[1].meta["val"]
    return groups_of(node) == weight.shape[0] and weight.shape[1] == 1


def groups_of(node: Node) -> int:
    """The groups of a convolution; 1 for a linear."""
    if rules.operator(node) == "linear":
        return 1
    index = 8 if rules.operator(node) == "convolution" else 6
    return int(node.args[index]) if len(node.args) > index else int(node.kwargs.get("groups", 1))


def axis_of(node: Node) -> int:
    """The axis of channels in what a layer reads and writes."""
    return node.meta["val"].ndim - 1 if rules.operator(node) == "linear" else 1


def batched(node: Node) -> bool:
    """Whether a convolution has an axis of samples before that of its channels; a linear has any."""
    return rules.operator(node) == "linear" or node.meta["val"].ndim == node.args[1].meta["val"].ndim


def own_weight(node: Node) -> bool:
    """Whether weight and bias are stored, used nowhere else, and the layer reads and writes a batch of samples."""
    if len(node.args) < 2 or not batched(node) or (rules.operator(node) == "convolution" and node.args[6]):
        return False
    tensors = [node.args[1], *([node.args[2]] if len(node.args) > 2 and node.args[2] is not None else [])]
    bound = {str(n.target): 0 for n in node.graph.nodes if n.op == "get_attr"}
    for other in node.graph.nodes:
        if other.op == "get_attr":
            bound[str(other.target)] += len(other.users)
    return all(rules.is_weight(t) and bound[str(t.target)] == 1 for t in tensors)


def scale(module: GraphModule, group: Group, scales: torch.Tensor) -> bool:
    """Multiply the channels of a group by `scales`, positive [channels]; whether any changed. The function does not."""
    if bool((scales == 1.0).all()):
        return False
    for node in group.writers:
        weight = stored.tensor(module, node.args[1])
        weight.mul_(scales.reshape(-1, *[1] * (weight.ndim - 1)))
        if len(node.args) > 2 and node.args[2] is not None:
            stored.tensor(module, node.args[2]).mul_(scales)
    for node in group.readers:
        weight = stored.tensor(module, node.args[1])
        # a weight is [out, in / groups, ...]: the inputs of output channel o are those of its group
        split = scales.reshape(groups_of(node), 1, weight.shape[1])
        by_row = split.expand(-1, weight.shape[0] // split.shape[0], -1).reshape(weight.shape[0], weight.shape[1])
        weight.div_(by_row.reshape(*weight.shape[:2], *[1] * (weight.ndim - 2)))
    return True


class _Joined:
    """Union of tensors into groups; what cannot be scaled is fixed, and all that is joined with it."""

    def __init__(self) -> None:
        self._parent: dict[Node, Node] = {}
        self._axis: dict[Node, int] = {}
        self._fixed: set[Node] = set()
        self._writers: list[Node] = []
        self._readers: list[tuple[Node, Node]] = []
        self._clamps: list[tuple[Node, float, float]] = []

    def add(self, node: Node, axis: int) -> None:
        self._parent[node], self._axis[node] = node, axis

    def axis(self, node: object) -> int | None:
        return self._axis.get(node)

    def join(self, node: Node, source: Node) -> None:
        self._parent[self._root(node)] = self._root(source)

    def fix(self, node: object) -> None:
        if node in self._parent:
            self._fixed.add(node)

    def writes(self, node: Node) -> None:
        self._writers.append(node)

    def reads(self, node: Node, source: Node) -> None:
        self._readers.append((node, source))

    def clamps(self, node: Node, low: float, high: float) -> None:
        self._clamps.append((node, low, high))

    def _root(self, node: Node) -> Node:
        while self._parent[node] is not node:
            node = self._parent[node]
        return node

    def groups(self) -> Iterator[Group]:
        fixed = {self._root(node) for node in self._fixed}
        made: dict[Node, Group] = {}
        for node, axis in self._axis.items():
            root = self._root(node)
            if root not in fixed:
                group = made.setdefault(root, Group(int(node.meta["val"].shape[axis])))
                group.members.append(node)
        for node in self._writers:
            if (group := made.get(self._root(node))) is not None:
                group.writers.append(node)
        for node, source in self._readers:
            if (group := made.get(self._root(source))) is not None:
                group.readers.append(node)
        for node, low, high in self._clamps:
            if (group := made.get(self._root(node))) is not None:
                group.clamps.append((node, low, high))
        return iter(made.values())


def _place(node: Node, joined: _Joined) -> None:
    name = rules.operator(node)
    if name in LAYERS and rules.is_float_tensor(node):
        _layer(node, joined)
    elif name in _CLAMPS and _limits(node) is not None and joined.axis(node.args[0]) is not None:
        low, high = _limits(node)
        _joins(node, node.args[0], joined)
        if high != float("inf") or low not in (0.0, -float("inf")):
            joined.clamps(node.args[0], low, high)
    elif _passes_scales(node, name, joined):
        _joins(node, node.args[0], joined)
    elif name == "add" and _same(node, joined):
        _joins(node, node.args[0], joined)
        joined.join(node.args[1], node.args[0])
    elif node.op != "get_attr":
        for source in node.all_input_nodes:
            joined.fix(source)


def _passes_scales(node: Node, name: str, joined: _Joined) -> bool:
    """Whether a positive scale of a channel of the first operand is one of the result."""
    if name in ("pad", "constant_pad_nd"):
        return _pads_zero(node, joined)
    if name == "mean":
        return _keeps_channels(node, joined)
    if name in ("flatten", "view", "reshape", "squeeze"):
        return _only_channels(node, joined)
    return name in _HOMOGENEOUS or (name == "clamp_min" and node.args[1] == 0)


def _layer(node: Node, joined: _Joined) -> None:
    source, own = node.args[0], own_weight(node)
    joined.add(node, axis_of(node))
    if own:
        joined.writes(node)
    else:
        joined.fix(node)
    if own and joined.axis(source) == axis_of(node):
        joined.reads(node, source)
    else:
        joined.fix(source)


def _joins(node: Node, source: object, joined: _Joined) -> None:
    axis = joined.axis(source)
    if axis is None:
        return
    if not rules.is_float_tensor(node):
        joined.fix(source)
        return
    joined.add(node, axis)
    joined.join(node, source)


def _limits(node: Node) -> tuple[float, float] | None:
    """What a clamp lets through, as numbers; None where a limit is a tensor or excludes 0."""
    defaults = {"relu6": (0.0, 6.0), "hardtanh": (-1.0, 1.0), "clamp": (None, None)}[rules.operator(node)]
    given = [node.args[i] if len(node.args) > i else defaults[i - 1] for i in (1, 2)]
    low, high = (node.kwargs.get(key, value) for key, value in zip(("min", "max"), given, strict=True))
    if isinstance(low, Node) or isinstance(high, Node):
        return None
    low, high = -float("inf") if low is None else float(low), float("inf") if high is None else float(high)
    return (low, high) if low <= 0.0 < high else None


def _keeps_channels(node: Node, joined: _Joined) -> bool:
    axis, source = joined.axis(node.args[0]), node.args[0]
    if axis != 1 or len(node.args) < 2 or not node.args[1]:
        return False
    dims = [node.args[1]] if isinstance(node.args[1], int) else node.args[1]
    return all(dim % source.meta["val"].ndim > 1 for dim in dims)


def _pads_zero(node: Node, joined: _Joined) -> bool:
    """Zeros around the axes after that of the channels."""
    mode = node.args[2] if len(node.args) > 2 and rules.operator(node) == "pad" else "constant"
    value = node.args[-1] if len(node.args) > (3 if rules.operator(node) == "pad" else 2) else 0
    source = node.args[0]
    axes = len(node.args[1]) // 2
    return joined.axis(source) == 1 and mode == "constant" and not value and axes <= source.meta["val"].ndim - 2


def _only_channels(node: Node, joined: _Joined) -> bool:
    """[n, channels, 1, ...] becomes [n, channels]."""
    if joined.axis(node.args[0]) != 1 or not rules.is_float_tensor(node):
        return False
    before, after = node.args[0].meta["val"].shape, node.meta["val"].shape
    return all(size == 1 for size in before[2:]) and len(after) == 2 and after[1] == before[1]


def _same(node: Node, joined: _Joined) -> bool:
    if len(node.args) != 2 or node.kwargs.get("alpha", 1) != 1:
        return False
    left, right = node.args
    axis = joined.axis(left)
    if axis is None or axis != joined.axis(right):
        return False
    return (
        left.meta["val"].ndim == right.meta["val"].ndim
        and left.meta["val"].shape[axis:] == (right.meta["val"].shape[axis:])
    )
