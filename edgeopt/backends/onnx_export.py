"""A program as an ONNX file at an opset that the target reads, proved equal before it counts.

There are two ways, and the first that gives a right file is taken: torch's exporter of today, which writes opset 18
and later, lowered by `opset.lowered`; then the older one, which traces and writes the old opsets itself. Each file
is read back, checked, and run in onnxruntime against the program.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path

import onnx
import torch

from edgeopt import digest
from edgeopt.backends import custom_ops, onnx_check, onnx_file, onnx_legacy, opset, parts, torchscript
from edgeopt.backends.backend import disk_full, precision_of
from edgeopt.backends.onnx_file import OnnxFile
from edgeopt.errors import LoweringError, first_line
from edgeopt.program import ExportedGraph, OnnxGraph, Program, ScriptGraph, Signature, graph, written_out
from edgeopt.program.tracing import quiet
from edgeopt.progress import log

# torch 2.11 to 2.13: its operators are written for 18, and 20 is what it gives when it is not asked.
EXPORTER_OLDEST, EXPORTER_NEWEST = 18, 20
_LOGGERS = ("torch.onnx", "onnx_ir")  # they tell of absent torchvision, deprecations, versions to convert
_FILE_NAMES = {"fp32": "float.onnx", "fp16": "float16.onnx", "bf16": "bfloat16.onnx", "int8": "int8.onnx"}


def write(
    program: Program,
    out: Path,
    *,
    opset_max: int,
    inline_limit_bytes: int = onnx_file.INLINE_LIMIT_BYTES,
) -> OnnxFile:
    """Write `float.onnx`, `float16.onnx` or `int8.onnx` into `out`, or find it there written from the same program.

    The file's opset is at most `opset_max`, its inputs and outputs are the signature's, its bytes depend on nothing
    but the program, and onnxruntime gives the program's outputs with it. Weights beyond `inline_limit_bytes` lie in
    a second file. Raises LoweringError, and leaves no file, where no way leads there.
    """
    path = out / _FILE_NAMES[precision_of(program)]
    custom_ops.require_forms(program)
    source = digest.of_value([_digest(program), opset_max, inline_limit_bytes])
    if onnx_file.source_of(path) == source:
        return onnx_file.read_back(path)
    reasons = []
    for way in _ways(program):
        try:
            model = onnx_file.clean(way(program, opset_max), program.signature)
            onnx_file.save(model, path, inline_limit_bytes=inline_limit_bytes)
            file = _proved(program, path, opset_max)
            onnx_file.note_source(path, source)
            return file
        except LoweringError as why:
            onnx_file.remove(path)
            log.info("%s: %s: %s", path.name, way.__name__.strip("_"), why.what)
            reasons.append(why.what)
        except BaseException as why:
            onnx_file.remove(path)
            if isinstance(why, OSError) and why.errno in (errno.ENOSPC, errno.EDQUOT):
                raise disk_full(path) from why
            raise
    raise LoweringError(
        "; then: ".join(dict.fromkeys(reasons)),
        where=f"{path.name}, opset {opset_max}",
        todo="change the operator in the model, or choose a profile whose runtime reads a newer opset",
    )


def write_unproved(program: Program, path: Path, *, opset_max: int) -> None:
    """Write the program to `path` without comparing the two, for finding out where they part. Raises LoweringError."""
    reasons = []
    for way in _ways(program):
        try:
            onnx_file.save(onnx_file.clean(way(program, opset_max), program.signature), path)
            return
        except LoweringError as why:
            reasons.append(why.what)
    raise LoweringError("; then: ".join(dict.fromkeys(reasons)), where=path.name)


def _proved(program: Program, path: Path, opset_max: int) -> OnnxFile:
    file = onnx_file.read_back(path)
    if file.opset > opset_max:
        raise LoweringError(f"the file has opset {file.opset}, the target reads {opset_max}", where=path.name)
    if file.ir_version > (newest := onnx_file.ir_version_of(file.opset)):
        raise LoweringError(
            f"the file has IR version {file.ir_version}, opset {file.opset} takes {newest}", where=path.name
        )
    onnx_file.check_interface(file, program.signature)
    if isinstance(program, ExportedGraph) and program.integer:
        onnx_check.require_integer_weights(path)
    custom_ops.require_runnable(custom_ops.nodes_in(path), program.custom_ops, path.name)
    onnx_check.compare(program, path)
    return file


def _ways(program: Program) -> tuple[Callable[..., onnx.ModelProto], ...]:
    if isinstance(program, OnnxGraph):
        return (_as_given,)
    if isinstance(program, ScriptGraph):
        return (_by_legacy_exporter,)
    return (_by_exporter,) if custom_ops.needs_newer_exporter(program) else (_by_exporter, _by_legacy_exporter)


def _as_given(program: OnnxGraph, opset_max: int) -> onnx.ModelProto:
    return opset.lowered(program.model, opset_max)


def _by_exporter(program: ExportedGraph, opset_max: int) -> onnx.ModelProto:
    program = written_out.for_onnx(program, opset_max)
    exported = _exported(program)
    table = custom_ops.translations(program) | parts.translations(program)
    # names that no value inside has: it names those after their operators, as people may name an output
    inputs = {f"edgeopt_input_{i}": name for i, name in enumerate(program.signature.input_names)}
    outputs = {f"edgeopt_output_{i}": name for i, name in enumerate(program.signature.output_names)}
    with quiet(*_LOGGERS):
        try:
            written = torch.onnx.export(
                exported,
                dynamo=True,
                opset_version=max(EXPORTER_OLDEST, min(EXPORTER_NEWEST, opset_max)),
                input_names=list(inputs),
                output_names=list(outputs),
                custom_translation_table=table,
                verbose=False,
            )
        except Exception as why:  # the exporter raises whatever its translations raise
            raise LoweringError(f"torch's ONNX exporter cannot write {_culprit(why)}") from why
    model = parts.placed(opset.lowered(written.model_proto, opset_max), program)
    return onnx_file.renamed(model, {**inputs, **outputs})


def _by_legacy_exporter(program: ExportedGraph | ScriptGraph, opset_max: int) -> onnx.ModelProto:
    version = min(opset_max, onnx_legacy.NEWEST)
    program = written_out.for_onnx(program, version) if isinstance(program, ExportedGraph) else program
    with quiet(*_LOGGERS):
        try:
            return onnx_legacy.exported(program, version)
        except LoweringError:
            raise
        except Exception as why:
            raise LoweringError(f"torch's older ONNX exporter cannot write {_culprit(why)}") from why


def _exported(program: ExportedGraph) -> torch.export.ExportedProgram:
    try:
        with quiet(*_LOGGERS):
            return graph.export(program)
    except Exception as why:
        raise LoweringError(f"the graph cannot be exported again with its dynamic axes: {first_line(why)}") from why


def _culprit(why: BaseException) -> str:
    """The operator that an exporter's exception names, else what it says."""
    if said := custom_ops.culprit(why):
        return said
    chain: list[str] = []
    at: BaseException | None = why
    while at is not None:
        chain.append(str(at))
        at = at.__cause__ or at.__context__
    for text in reversed(chain):
        found = re.search(r"op='([\w.:]+)'|operator '([\w.:]+)'", text)
        if found:
            return f"the operator '{found.group(1) or found.group(2)}'"
    return f"this graph: {first_line(why)}"


def _digest(program: Program) -> str:
    """sha256 of what the file depends on: graph, weights and signature."""
    signature = _signature_text(program.signature)
    if isinstance(program, OnnxGraph):
        return digest.of_value([signature, onnx_file.digest_of(program.model)])
    if isinstance(program, ScriptGraph):
        return digest.of_value([signature, digest.of_bytes(torchscript.encode(program))])
    parts = [signature]
    for name, module in program.module.named_modules():
        if isinstance(module, torch.fx.GraphModule):
            parts.append(f"{name}: {module.graph}")
    for name, tensor in sorted((*program.module.named_parameters(), *program.module.named_buffers())):
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        parts.append(f"{name} {tensor.dtype} {tuple(tensor.shape)} {digest.of_bytes(memoryview(data))}")
    return digest.of_value(parts)


def _signature_text(signature: Signature) -> str:
    return repr((signature.inputs, signature.outputs, sorted(signature.axes.items())))
