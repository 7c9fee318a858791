"""An ONNX model rewritten for an older opset.

onnx's own converter has no way down from 18 for the operators that models use most (Reduce, Pad, Split, Resize), and
leaves what it cannot convert as it is. Here the operators whose form changed are rewritten by `opset_rewrites`,
those that an older opset lacks are replaced by the function body that onnx defines for them, and what remains is
refused by name. The result is for a checker and a runtime to prove: see `onnx_export`.
"""

from __future__ import annotations

import onnx
from onnx import inliner, version_converter

from edgeopt.backends.onnx_file import opset_of
from edgeopt.backends.opset_rewrites import REWRITES, Context, constants_of, drop_unused, nodes_of
from edgeopt.errors import LoweringError, first_line

OLDEST = 13  # what TensorRT 8.0 to 8.2 parse; a target that reads less has no backend here
_REWRITTEN_FROM = 18
_DOMAINS = ("", "ai.onnx")


def lowered(model: onnx.ModelProto, opset_max: int) -> onnx.ModelProto:
    """`model` where its opset is at most `opset_max`, else a copy written in that opset.

    Raises LoweringError that names the operator and the opset where it cannot be.
    """
    if opset_of(model) <= opset_max:
        return model
    if opset_max < OLDEST:
        raise LoweringError(f"opset {opset_max} is older than {OLDEST}, the oldest that is written")
    model = _inlined(model, opset_max)
    if opset_of(model) > _REWRITTEN_FROM:
        model = _converted(model, max(opset_max, _REWRITTEN_FROM))
    if opset_of(model) > opset_max:
        model = _rewritten(model, opset_max)
    return model


def _inlined(model: onnx.ModelProto, opset_max: int) -> onnx.ModelProto:
    """The model's own functions, and operators that the older opset lacks, replaced by their bodies."""
    if model.functions:
        model = inliner.inline_local_functions(model)
    while bodies := _with_bodies(model, opset_max):  # a body may hold operators that are missing too
        try:
            model = inliner.inline_selected_functions(
                _typed(model), [("", op) for op in bodies], inline_schema_functions=True
            )
        except RuntimeError as why:  # the inliner's C++ assertions
            raise LoweringError(
                f"the operator '{bodies[0]}' came after opset {opset_max} and cannot be written by others: "
                f"{first_line(why)}"
            ) from why
    return model


def _typed(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the types of its values, weights included, on which some bodies depend."""
    model = onnx.shape_inference.infer_shapes(model)
    known = {value.name for value in (*model.graph.value_info, *model.graph.input)}
    for tensor in model.graph.initializer:
        if tensor.name not in known:
            kind = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            model.graph.value_info.append(kind)
    return model


def _with_bodies(model: onnx.ModelProto, opset_max: int) -> list[str]:
    """The operators in `model` that the older opset lacks and that onnx defines by others."""
    missing = {
        node.op_type
        for node in nodes_of(model.graph)
        if node.domain in _DOMAINS and node.op_type not in REWRITES and _lacks(node.op_type, opset_max)
    }
    version = opset_of(model)
    return sorted(op for op in missing if _has_body(op, version))


def _converted(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
    try:
        return version_converter.convert_version(model, version)
    except Exception as why:  # the converter's C++ assertions come as RuntimeError, its refusals as ConvertError
        raise LoweringError(
            f"onnx cannot convert the model from opset {opset_of(model)} to {version}: {first_line(why)}"
        ) from why


def _rewritten(model: onnx.ModelProto, opset_max: int) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    _rewrite(copy.graph, Context.of(copy, opset_max))
    drop_unused(copy.graph)
    for entry in copy.opset_import:
        if entry.domain in _DOMAINS:
            entry.version = opset_max
    return copy


def _rewrite(graph: onnx.GraphProto, context: Context) -> None:
    context = context.within(constants_of(graph))
    nodes = []
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _rewrite(attribute.g, context)
        nodes += _replacement(node, context)
    del graph.node[:]
    graph.node.extend(nodes)


def _replacement(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    if node.domain not in _DOMAINS:
        return [node]
    changed_in, rewrite = REWRITES.get(node.op_type, (0, None))
    if rewrite is not None and context.opset < changed_in:
        return rewrite(node, context)
    if _lacks(node.op_type, context.opset):
        raise LoweringError(f"the operator '{node.op_type}' came after opset {context.opset} (node '{node.name}')")
    return [node]


def _lacks(op: str, version: int) -> bool:
    try:
        onnx.defs.get_schema(op, version, "")
    except onnx.defs.SchemaError:
        return True
    return False


def _has_body(op: str, version: int) -> bool:
    schema = onnx.defs.get_schema(op, version, "")
    return schema.has_function or schema.has_context_dependent_function
