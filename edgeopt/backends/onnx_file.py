"""An ONNX file on disk: made clean and deterministic, written whole, and its facts read back from it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import TensorProto

from edgeopt import digest
from edgeopt.errors import LoweringError, first_line
from edgeopt.program import Signature
from edgeopt.program.onnx_walk import name_axes
from edgeopt.spec.manifest import TensorSpec

# Protobuf refuses messages of 2 GiB and more; the margin is for the graph around the weights.
INLINE_LIMIT_BYTES = (1 << 31) - (1 << 24)

_DTYPES = {
    TensorProto.DOUBLE: "float64", TensorProto.FLOAT: "float32", TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16", TensorProto.INT64: "int64", TensorProto.INT32: "int32",
    TensorProto.INT16: "int16", TensorProto.INT8: "int8", TensorProto.UINT8: "uint8", TensorProto.BOOL: "bool",
}  # fmt: skip


@dataclass(frozen=True)
class OnnxFile:
    """What was read back from a written file. `files`: its name, and its external data where there is any."""

    name: str
    files: tuple[str, ...]
    opset: int
    ir_version: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def opset_of(model: onnx.ModelProto) -> int:
    """The version of the default operator set that `model` is written in."""
    return next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)


def ir_version_of(opset: int) -> int:
    """The oldest IR version that holds the opset: readers of the opset read it."""
    return onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)])


def clean(model: onnx.ModelProto, signature: Signature) -> onnx.ModelProto:
    """`model` without traces of this machine, its axes under the user's names, its IR the oldest that fits.

    Exporters note stack traces, file paths and symbols such as `s77`; none of them belongs in a file that is
    shipped and hashed. An older IR version is read by more runtimes and means the same.
    """
    model = _copy(model)
    _forget(model)
    _drop_inputs_with_values(model.graph)
    _require_names(model.graph, signature)
    _name_axes(model.graph, signature)
    model.ir_version = onnx.helper.find_min_ir_version_for(model.opset_import, ignore_unknown=True)
    return model


def renamed(model: onnx.ModelProto, names: Mapping[str, str]) -> onnx.ModelProto:
    """`model` with values of `names` called by the new ones; what had such a name inside gets another."""
    graph = model.graph
    taken = {name for part in graphs_of(graph) for name in _names_in(part)}
    new = dict(names)
    for name in sorted(taken & set(names.values()) - set(names)):
        new[name] = next(other for i in itertools.count() if (other := f"{name}_{i}") not in {*taken, *new.values()})
    for part in graphs_of(graph):
        for value in (*part.input, *part.output, *part.value_info, *part.initializer):
            value.name = new.get(value.name, value.name)
        for node in part.node:
            node.input[:] = [new.get(name, name) for name in node.input]
            node.output[:] = [new.get(name, name) for name in node.output]
    return model


def graphs_of(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and those in its nodes' attributes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs) if attribute.type in _GRAPHS else ():
                yield from graphs_of(inner)


def _names_in(graph: onnx.GraphProto) -> Iterator[str]:
    yield from (value.name for value in (*graph.input, *graph.output, *graph.initializer))
    for node in graph.node:
        yield from (*node.input, *node.output)


def save(model: onnx.ModelProto, path: Path, *, inline_limit_bytes: int = INLINE_LIMIT_BYTES) -> None:
    """Write `model`; weights go to `NAME.data` beside it where they do not fit one protobuf message."""
    data = path.with_name(path.name + ".data")
    data.unlink(missing_ok=True)
    if model.ByteSize() < inline_limit_bytes:
        path.write_bytes(model.SerializeToString(deterministic=True))
        return
    onnx.save_model(_copy(model), path, save_as_external_data=True, location=data.name, size_threshold=1024)


def read_back(path: Path) -> OnnxFile:
    """The facts of the file at `path`, after onnx's full check. LoweringError where the checker refuses it."""
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as why:
        raise LoweringError(f"the ONNX checker refuses the file: {first_line(why)}", where=path.name) from why
    model = onnx.load(path, load_external_data=False)
    external = sorted({e.value for t in model.graph.initializer for e in t.external_data if e.key == "location"})
    return OnnxFile(
        name=path.name,
        files=(path.name, *external),
        opset=opset_of(model),
        ir_version=model.ir_version,
        inputs=tuple(_spec(v) for v in model.graph.input),
        outputs=tuple(_spec(v) for v in model.graph.output),
    )


def source_of(path: Path) -> str | None:
    """The digest of the program that the file at `path` was written from, where `note_source` noted it."""
    note = _note(path)
    return note.read_text() if note.is_file() and path.is_file() else None


def note_source(path: Path, source: str) -> None:
    """Note beside the file which program it was written from; not in it, since names in a graph are no content."""
    _note(path).write_text(source)


def _note(path: Path) -> Path:
    return path.with_name(f".{path.name}.source")


def remove(path: Path) -> None:
    """Delete the file, its external data and the note of its source."""
    for file in (path, path.with_name(path.name + ".data"), _note(path)):
        file.unlink(missing_ok=True)


def check_interface(file: OnnxFile, signature: Signature) -> None:
    """LoweringError unless the file's inputs and outputs are the signature's: names, dtypes, shapes."""
    for what, found, wanted in (
        ("inputs", file.inputs, signature.inputs),
        ("outputs", file.outputs, signature.outputs),
    ):
        expected = tuple(_fixed(spec, signature) for spec in wanted)
        if sorted(found, key=_name) != sorted(expected, key=_name):
            raise LoweringError(
                f"the ONNX file's {what} are {_text(found)} where the model's are {_text(expected)}", where=file.name
            )


def digest_of(model: onnx.ModelProto) -> str:
    """sha256 of a model in memory."""
    return digest.of_bytes(model.SerializeToString(deterministic=True))


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def _forget(model: onnx.ModelProto) -> None:
    model.doc_string = ""
    del model.metadata_props[:]
    for function in model.functions:
        function.doc_string = ""
        del function.metadata_props[:]
        del function.value_info[:]
        _forget_nodes(function.node)
    _forget_graph(model.graph)


def _forget_graph(graph: onnx.GraphProto) -> None:
    graph.doc_string = ""
    del graph.metadata_props[:]
    del graph.value_info[:]  # holds the exporter's symbols; every reader infers the shapes itself
    for value in (*graph.input, *graph.output):
        value.doc_string = ""
        del value.metadata_props[:]
    for tensor in graph.initializer:
        tensor.doc_string = ""
        del tensor.metadata_props[:]
    _forget_nodes(graph.node)


def _forget_nodes(nodes) -> None:
    for node in nodes:
        node.doc_string = ""
        del node.metadata_props[:]
        for attribute in node.attribute:
            attribute.doc_string = ""
            for graph in (attribute.g, *attribute.graphs) if attribute.type in _GRAPHS else ():
                _forget_graph(graph)


_GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


def _drop_inputs_with_values(graph: onnx.GraphProto) -> None:
    """Files of IR 3 list weights among their inputs."""
    weights = {t.name for t in graph.initializer}
    inputs = [value for value in graph.input if value.name not in weights]
    del graph.input[:]
    graph.input.extend(inputs)


def _require_names(graph: onnx.GraphProto, signature: Signature) -> None:
    for what, values, names in (
        ("inputs", graph.input, signature.input_names),
        ("outputs", graph.output, signature.output_names),
    ):
        found = [value.name for value in values]
        if sorted(found) != sorted(names):
            raise LoweringError(f"the ONNX graph's {what} are {', '.join(found)}, the model's are {', '.join(names)}")


def _name_axes(graph: onnx.GraphProto, signature: Signature) -> None:
    """Write the signature's names and its fixed sizes over the axes that the file leaves open.

    The shapes of outputs are the signature's: files of other people declare wrong ones or none, and the comparison of
    values finds what is untrue.
    """
    name_axes(graph, [_fixed(spec, signature) for spec in signature.inputs])
    outputs = {spec.name: _fixed(spec, signature) for spec in signature.outputs}
    for value in graph.output:
        kind = value.type.tensor_type.elem_type
        value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, kind, outputs[value.name].shape))


def _fixed(spec: TensorSpec, signature: Signature) -> TensorSpec:
    """The spec with axes of one possible size as that size, as exporters write them."""
    axes = signature.axes
    shape = tuple(axes[s].min if s in axes and axes[s].min == axes[s].max else s for s in spec.shape)
    return TensorSpec(name=spec.name, dtype=spec.dtype, shape=shape)


def _spec(value: onnx.ValueInfoProto) -> TensorSpec:
    kind = value.type.tensor_type
    shape = tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in kind.shape.dim)
    if kind.elem_type not in _DTYPES:
        raise LoweringError(
            f"'{value.name}' has the type {TensorProto.DataType.Name(kind.elem_type)}, which no runtime here takes",
            todo="cast it in the model",
        )
    return TensorSpec(name=value.name, dtype=_DTYPES[kind.elem_type], shape=shape)


def _name(spec: TensorSpec) -> str:
    return spec.name


def _text(specs: tuple[TensorSpec, ...]) -> str:
    return ", ".join(f"{s.name}: {s.dtype}[{', '.join(map(str, s.shape))}]" for s in specs) or "none"
