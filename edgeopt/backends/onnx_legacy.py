"""torch's older ONNX exporter: the second way, for what the newer one or the rewrites cannot write.

It takes TorchScript, so the graph goes there first; and it knows no quantize and dequantize operators, but writes
fake-quantize operators as Q/DQ with integer weights, so each pair is replaced by its fake-quantize operator.
"""

from __future__ import annotations

import copy
import io
import operator

import onnx
import torch
from torch.fx import GraphModule, Node

from edgeopt.backends import torchscript
from edgeopt.errors import LoweringError
from edgeopt.program import ExportedGraph, graph

NEWEST = 17  # it goes on to 20, and for those the newer exporter is the one that is kept up


def exported(program: ExportedGraph, opset_version: int) -> onnx.ModelProto:
    """The program at `opset_version`, 7 to 20. Raises what the exporter raises, and LoweringError."""
    module = fake_quantized(program.module) if program.integer else program.module
    signature = program.signature
    example = graph.synthetic(signature, graph.sizes(signature, "example"), seed=0)
    written = io.BytesIO()
    torch.onnx.export(
        torchscript.scripted(module),
        tuple(graph.to_tensors(signature, example)),
        written,
        dynamo=False,
        opset_version=opset_version,
        input_names=signature.input_names,
        output_names=signature.output_names,
        dynamic_axes={
            spec.name: {i: size for i, size in enumerate(spec.shape) if isinstance(size, str)}
            for spec in (*signature.inputs, *signature.outputs)
        },
    )
    return onnx.load_from_string(written.getvalue())


def fake_quantized(module: GraphModule) -> GraphModule:
    """A copy in which every dequantize(quantize(x)) and dequantize(weight) is a fake-quantize of the float value.

    The values stay the same: a dequantized weight lies on the grid that it is quantized to again.
    """
    module = copy.deepcopy(module)
    for node in list(module.graph.nodes):
        if _is(node, "dequantize_per_tensor"):
            _replace(module, node, torch.ops.aten.fake_quantize_per_tensor_affine.default)
        elif _is(node, "dequantize_per_channel"):
            _replace(module, node, torch.ops.aten.fake_quantize_per_channel_affine.default)
    module.graph.eliminate_dead_code()
    left = next((n for n in module.graph.nodes if _is(n, "quantize", "dequantize")), None)
    if left is not None:
        raise LoweringError(f"the operator '{left.target}' of node '{left.name}' stands in no Q/DQ pair")
    module.recompile()
    return module


def _replace(module: GraphModule, dequantize: Node, target: torch._ops.OpOverload) -> None:
    source, *middle, low, high, dtype = dequantize.args
    low, high = _range(dtype)  # a narrower range was applied when the integers were made
    with module.graph.inserting_before(dequantize):
        if _is(source, "quantize_per_tensor", "quantize_per_channel"):
            value = source.args[0]
        elif source.op == "get_attr":
            value = _float_weight(module, dequantize, source)
        else:
            raise LoweringError(f"integers of '{source.name}' are used other than by dequantize")
        if _is(dequantize, "dequantize_per_channel"):
            scales, zero_points, axis = middle
            middle = [scales, module.graph.call_function(torch.ops.aten.to.dtype, (zero_points, torch.int32)), axis]
        fake = module.graph.call_function(target, (value, *middle, low, high))
    dequantize.replace_all_uses_with(fake)
    module.graph.erase_node(dequantize)


def _float_weight(module: GraphModule, dequantize: Node, source: Node) -> Node:
    """The weight's float values as an attribute of their own."""

    def value(argument):
        if isinstance(argument, Node):
            return operator.attrgetter(argument.target)(module)
        return argument

    name = f"_float_{len(list(module.buffers()))}"
    module.register_buffer(name, dequantize.target(*[value(a) for a in dequantize.args]))
    return module.graph.get_attr(name)


def _range(dtype: torch.dtype) -> tuple[int, int]:
    limits = torch.iinfo(dtype)
    return limits.min, limits.max


def _is(node: object, *names: str) -> bool:
    """Whether the node calls an operator of quantized_decomposed whose name starts with one of `names`."""
    target = getattr(node, "target", None)
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "quantized_decomposed":
        return False
    return target._schema.name.split("::")[1].startswith(names)
