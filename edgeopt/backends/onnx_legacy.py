"""torch's older ONNX exporter: the second way, for what the newer one or the rewrites cannot write.

It takes TorchScript, so the graph goes there first; and it knows no quantize and dequantize operators, but writes
fake-quantize operators as Q/DQ with integer weights, so each pair is replaced by its fake-quantize operator.
"""

from __future__ import annotations

import contextlib
import copy
import io
import operator
import os
from collections.abc import Iterator, Sequence

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch.fx import GraphModule, Node

from edgeopt.backends import torchscript
from edgeopt.backends.opset_rewrites import constants_of, drop_unused
from edgeopt.errors import LoweringError
from edgeopt.program import ExportedGraph, ScriptGraph, Signature, graph

NEWEST = 17  # it goes on to 20, and for those the newer exporter is the one that is kept up


def exported(program: ExportedGraph | ScriptGraph, opset_version: int) -> onnx.ModelProto:
    """The program at `opset_version`, 7 to 20. Raises what the exporter raises, and LoweringError."""
    signature = program.signature
    example = graph.synthetic(signature, graph.sizes(signature, "example"), seed=0)
    axes = {
        spec.name: {i: size for i, size in enumerate(spec.shape) if isinstance(size, str)}
        for spec in (*signature.inputs, *signature.outputs)
    }
    given = graph.to_tensors(signature, example)
    model = written(_script(program), given, opset_version, signature.input_names, signature.output_names, axes)
    _keep_unused_inputs(model.graph, signature)
    _store_integers(model.graph)
    return model


def written(
    script: torch.jit.ScriptModule, example: Sequence[torch.Tensor], opset_version: int,
    input_names: Sequence[str], output_names: Sequence[str], dynamic_axes: dict[str, dict[int, str]],
) -> onnx.ModelProto:  # fmt: skip
    """What the exporter writes of a script; inputs that it does not read are left out. Raises what it raises."""
    file = io.BytesIO()
    with _no_dump():
        torch.onnx.export(
            script,
            tuple(example),
            file,
            dynamo=False,
            opset_version=opset_version,
            input_names=input_names,
            output_names=output_names,
            dynamic_axes=dynamic_axes,
        )
    return onnx.load_from_string(file.getvalue())


@contextlib.contextmanager
def _no_dump() -> Iterator[None]:
    """The graph that the exporter prints when it fails goes nowhere.

    It is printed by C++ whatever 'verbose' says (the exporter takes a function for its result), past sys.stdout.
    """
    torch._C._jit_set_onnx_log_output_stream("stderr")
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        torch._C._jit_set_onnx_log_output_stream("stdout")


def _script(program: ExportedGraph | ScriptGraph) -> torch.jit.ScriptModule:
    if isinstance(program, ScriptGraph):
        return program.module
    return torchscript.scripted(fake_quantized(program.module) if program.integer else program.module)


def _keep_unused_inputs(graph: onnx.GraphProto, signature: Signature) -> None:
    """The exporter drops inputs that nothing reads; a caller passes them all the same."""
    there = {value.name: value for value in graph.input}
    inputs = [
        there.get(spec.name)
        or helper.make_tensor_value_info(
            spec.name, helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype)), list(spec.shape)
        )
        for spec in signature.inputs
    ]
    del graph.input[:]
    graph.input.extend(inputs)


def _store_integers(graph: onnx.GraphProto) -> None:
    """QuantizeLinear of a stored weight is computed now, as ONNX defines it, and the float weight goes."""
    stored = {t.name: t for t in graph.initializer}
    values = {**{k: numpy_helper.to_array(t) for k, t in stored.items()}, **constants_of(graph)}
    for node in graph.node:
        if node.op_type == "Identity" and node.input[0] in values:  # of equal zero points one is kept
            values[node.output[0]] = values[node.input[0]]
    for node in [n for n in graph.node if n.op_type == "QuantizeLinear" and n.input[0] in stored]:
        weight, scale, zero = (values[name] for name in node.input)
        axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
        if scale.ndim:
            along = [-1 if i == axis else 1 for i in range(weight.ndim)]
            scale, zero = scale.reshape(along), zero.reshape(along)
        limits = np.iinfo(zero.dtype)
        integers = np.clip(np.rint(weight / scale) + zero, limits.min, limits.max).astype(zero.dtype)
        graph.initializer.append(numpy_helper.from_array(integers, node.output[0]))
        graph.node.remove(node)
    drop_unused(graph)


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
            if dtype == torch.int32:  # a bias: the exporter knows no 32-bit fake-quantize, and its floats are exact
                dequantize.replace_all_uses_with(value)
                module.graph.erase_node(dequantize)
                return
        elif source.op == "call_function" and _is(dequantize, "dequantize_per_tensor"):
            value = _moved_back(module, dequantize, source, target)
        else:
            raise LoweringError(f"integers of '{source.name}' are used other than by dequantize")
        if _is(dequantize, "dequantize_per_channel"):
            scales, zero_points, axis = middle
            middle = [scales, module.graph.call_function(torch.ops.aten.to.dtype, (zero_points, torch.int32)), axis]
        fake = module.graph.call_function(target, (value, *middle, low, high))
    dequantize.replace_all_uses_with(fake)
    module.graph.erase_node(dequantize)


def _moved_back(module: GraphModule, dequantize: Node, source: Node, target: torch._ops.OpOverload) -> Node:
    """What moves integers (passes/dequantize_later) moves their floats: all on the grid that they are quantized to."""
    floats = module.graph.call_function(dequantize.target, (source.args[0], *dequantize.args[1:]))
    value = module.graph.call_function(source.target, (floats, *source.args[1:]), source.kwargs)
    _replace(module, floats, target)
    return value


def _float_weight(module: GraphModule, dequantize: Node, source: Node) -> Node:
    """The weight's float values as an attribute of their own."""

    def value(argument):
        if isinstance(argument, Node):
            if argument.op != "get_attr":
                raise LoweringError(f"the scale of the weight '{source.target}' is computed by '{argument.name}'")
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
