"""Convolutions of torch in channels_last, by the layout of their weights alone.

torch computes a convolution in channels_last where its input or its weight is laid out so, and element-wise
operators, pools and concatenations keep the layout of what they read. Weights in channels_last therefore convert a
region of convolutions once, at its entrance, and nothing inside; the layout does not hang on the strides of an input
either, which for a batch of one say little. An ONNX file has no strides: it stays the same.

Off unless asked for. Measured on two x86 cores with torch 2.13, a ResNet and a MobileNet of 160 x 160: 1.2 to 1.4 times
as fast as a frozen module, but no gain once `optimize_for_inference` ran after loading, which lays weights out by
itself and which the shipped profiles do. On a GPU it is for fp16 on Tensor Cores; not measured.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from edgeopt.passes import dead_code
from edgeopt.passes.changed import Changed, Context
from edgeopt.passes.connected import connected
from edgeopt.passes.views import BY_STRIDES, make_any_strides, views_below
from edgeopt.program.stored import add_tensor, tensor_of

_aten = torch.ops.aten
MIN_CONVOLUTIONS = 2  # of a region: one alone is not worth the conversion of its input
SETTINGS = {"min_convolutions": MIN_CONVOLUTIONS}
_CONVOLUTIONS = {_aten.conv2d.default, _aten.conv2d.padding, _aten.conv_transpose2d.input}
_KEEPING = {  # of two-dimensional operators, those whose result is laid out as what they read
    _aten.relu, _aten.relu6, _aten.hardtanh, _aten.leaky_relu, _aten.elu, _aten.gelu, _aten.silu, _aten.mish,
    _aten.sigmoid, _aten.hardsigmoid, _aten.hardswish, _aten.tanh, _aten.clamp, _aten.exp, _aten.neg,
    _aten.add, _aten.sub, _aten.mul, _aten.div, _aten.cat, _aten.batch_norm, _aten.max_pool2d, _aten.avg_pool2d,
    _aten.adaptive_avg_pool2d, _aten.upsample_nearest2d, _aten.upsample_bilinear2d, _aten.pad, _aten.constant_pad_nd,
}  # fmt: skip


def run(context: Context) -> Changed:
    if "torchscript" not in context.profile.backends:
        return Changed(0, ("no backend of the profile runs torch, and the other files have no strides",))
    count, declined = 0, []
    for region in _regions(context):
        convolutions = [node for node in region if node.target in _CONVOLUTIONS]
        reason = _reason_against(context, region, convolutions)
        if reason:
            declined.append(f"{convolutions[0].name}: {reason}")
            continue
        for node in convolutions:
            count += _lay_out(context, node)
        for node in region:
            make_any_strides(node)
    if count:
        dead_code.run(context)
    return Changed(count, tuple(declined))


def _regions(context: Context) -> list[list[Node]]:
    """Convolutions connected by operators that keep the layout, in the graph's order; each with those operators."""
    found = connected(filter(_belongs, context.module.graph.nodes), lambda node: node.all_input_nodes)
    return [region for region in found if any(node.target in _CONVOLUTIONS for node in region)]


def _belongs(node: Node) -> bool:
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.dim() != 4:
        return False
    return node.target in _CONVOLUTIONS or getattr(node.target, "overloadpacket", None) in _KEEPING


def _reason_against(context: Context, region: list[Node], convolutions: list[Node]) -> str | None:
    least = context.settings["min_convolutions"]
    if len(convolutions) < least:
        return f"a region of {len(convolutions)} convolutions, fewer than {least}"
    for node in convolutions:
        weight = tensor_of(context.module, node.args[1])
        if weight is None or node.args[1] in context.mutated:
            return f"the weights of {node.name} are computed or written to"
    below = [view for node in region for view in views_below(node)]
    if any(view.target in BY_STRIDES for view in below):
        return "a result is read by its strides"
    if any(node in context.mutated for node in (*region, *below)):
        return "the model writes to a result, perhaps through a view that another layout does not have"
    return None


def _lay_out(context: Context, node: Node) -> int:
    weight = tensor_of(context.module, node.args[1])
    laid = weight.clone(memory_format=torch.channels_last)
    if laid.stride() == weight.stride():
        return 0
    held = node.args[1]
    new = add_tensor(context.module, f"{held.target}_channels_last", laid, held, trained=True)
    held.replace_all_uses_with(new, delete_user_cb=lambda user: user.target in _CONVOLUTIONS)
    return 1
