"""The user's own operators in ONNX: translated, or written as the node of a foreign domain; and who runs such a node.

A torch operator `ns::op` becomes a node whose inputs are its tensors in order (a list of tensors is flattened) and
whose attributes are its other arguments under their names in the schema. The operator `edgeopt::foreign` becomes the
nodes that it carries.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxscript
import torch
from google.protobuf import text_format

from edgeopt.backends.opset_rewrites import nodes_of
from edgeopt.errors import LoweringError, ModelError, first_line
from edgeopt.ports import op_library, user_code
from edgeopt.program import ExportedGraph, OnnxGraph, Program, foreign, own_operators
from edgeopt.program.custom_ops import CustomOps
from edgeopt.spec.custom_ops import ONNXRUNTIME_DOMAINS, CustomOp, node_of
from edgeopt.spec.profile import Profile


class _Untranslatable(Exception):
    """Why an operator has no place in the file: in a message of ours, found again in the exporter's exception."""


def needs_newer_exporter(program: Program) -> bool:
    """Whether the graph holds operators of the user's own, or a Function's node: the older exporter has no table."""
    return isinstance(program, ExportedGraph) and (_holds_foreign(program) or bool(_own(program)))


def _holds_foreign(program: ExportedGraph) -> bool:
    return any(foreign.is_foreign(node) for node in program.module.graph.nodes)


def _own(program: ExportedGraph) -> dict[torch._ops.OpOverload, str]:
    """The user's own operators in the graph, by their overloads."""
    return {node.target: node.target._schema.name for node in own_operators.own_nodes(program.module)}


def require_forms(program: Program) -> None:
    """LoweringError for an operator of the user's own that has no ONNX form, with the key to add."""
    if not isinstance(program, ExportedGraph):
        return
    for target, name in _own(program).items():
        arguments = target._schema.arguments
        written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        if written:
            raise LoweringError(
                f"the operator {name} writes to its argument '{written[0]}', and ONNX has no such operators: let it "
                "return the new tensor"
            )
        if name not in program.custom_ops.ops:
            raise LoweringError(
                f"the operator {name} has no ONNX form: add to the project custom_ops: {{'{name}': {{onnx: "
                "FILE.py:FUNCTION}}, a translation, or {onnxruntime: LIBRARY.so} where a library has the operator"
            )


def translations(program: ExportedGraph) -> dict[Callable, Callable]:
    """What torch's exporter takes as `custom_translation_table`. LoweringError where a translation does not load."""
    own = program.custom_ops
    table: dict[Callable, Callable] = {
        target: _translation(target, name, own) for target, name in _own(program).items() if name in own.ops
    }
    if _holds_foreign(program):
        table[foreign.operator()] = _carried(program.custom_ops)
    return table


def culprit(why: BaseException) -> str | None:
    """What the translation of an operator said, where an exporter's exception comes from one."""
    at: BaseException | None = why
    while at is not None:
        if isinstance(at, _Untranslatable):
            return str(at)
        at = at.__cause__ or at.__context__
    return None


def _translation(target: torch._ops.OpOverload, name: str, custom: CustomOps) -> Callable:
    op = custom.ops[name]
    if op.onnx is None:
        return _as_node(target, name, op)
    try:
        function = user_code.load_attribute(op.onnx, custom.folder, key=f"custom_ops.{name}.onnx", error=ModelError)
    except ModelError as why:
        raise LoweringError(f"the translation of {name}: {why.what} ({why.where}): {why.todo}") from why
    return _guarded(function, name, custom)


def _guarded(function: Any, name: str, custom: CustomOps) -> Callable:
    """The user's translation, what it raises told with their own line."""

    def translate(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as why:
            at = user_code.user_line(why, custom.folder)
            said = f"{type(why).__name__}: {first_line(why)}" + (f" ({at})" if at else "")
            raise _Untranslatable(f"the operator '{name}': its translation fails: {said}") from why

    return translate


def _as_node(target: torch._ops.OpOverload, name: str, op: CustomOp) -> Callable:
    domain, _, kind = node_of(name, op).rpartition("::")
    schema = target._schema

    def translate(*args: Any, **kwargs: Any) -> Any:
        named = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        inputs: list[Any] = []
        attributes: dict[str, Any] = {}
        for argument in schema.arguments:
            value = named.get(argument.name, argument.default_value if argument.has_default_value() else None)
            if "Tensor" in str(argument.type):
                inputs += value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
            elif value is not None:
                attributes[argument.name] = _attribute(name, argument.name, value)
        if op.plugin_version is not None:
            attributes["plugin_version"] = op.plugin_version
        return _node(domain, kind, op.node_version, inputs, attributes, len(schema.returns))

    return translate


def _attribute(name: str, argument: str, value: Any) -> Any:
    plain = [int(v) if isinstance(v, bool) else v for v in (value if isinstance(value, list | tuple) else [value])]
    if any(not isinstance(v, int | float | str) for v in plain):
        raise _Untranslatable(
            f"the operator '{name}': its argument '{argument}' changes with the inputs' sizes, and a node's attributes "
            "are fixed"
        )
    return plain if isinstance(value, list | tuple) else plain[0]


def _node(domain: str, kind: str, version: int, inputs: list, attributes: dict[str, Any], outputs: int) -> Any:
    """The value or values of a new node in the graph that the exporter is writing."""
    while inputs and inputs[-1] is None:
        inputs = inputs[:-1]
    schema = onnx.defs.OpSchema
    optional = schema.FormalParameterOption.Optional
    formal = onnx.defs.OpSchema(
        kind, domain, version,
        inputs=[schema.FormalParameter(f"i{k}", f"I{k}", param_option=optional) for k in range(len(inputs))],
        outputs=[schema.FormalParameter(f"o{k}", f"O{k}") for k in range(outputs)],
        type_constraints=[(f"I{k}", _TENSORS, "") for k in range(len(inputs))]
        + [(f"O{k}", _TENSORS, "") for k in range(outputs)],
        attributes=[schema.Attribute(k, onnx.helper.make_attribute(k, v), "") for k, v in attributes.items()],
    )  # fmt: skip
    return onnxscript.values.Op(onnxscript.values.Opset(domain, version), kind, formal)(*inputs, **attributes)


_TENSORS = [
    f"tensor({name})"
    for name in ("float", "double", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
]


def _carried(custom: CustomOps) -> Callable:
    """The translation of edgeopt::foreign: the nodes that it carries."""

    def translate(outputs: Sequence[Any], inputs: Sequence[Any], node: str) -> Any:
        graph = text_format.Parse(node, onnx.GraphProto())
        values: dict[str, Any] = dict(zip((value.name for value in graph.input), inputs, strict=True))
        values[""] = None
        for part in graph.node:
            op = custom.op_of_node(f"{part.domain}::{part.op_type}")
            attributes = {a.name: _plain(onnx.helper.get_attribute_value(a)) for a in part.attribute}
            if op is not None and op.plugin_version is not None:
                attributes["plugin_version"] = op.plugin_version
            version = op.node_version if op else 13  # of Constant
            found = _node(
                part.domain, part.op_type, version, [values[n] for n in part.input], attributes, len(part.output)
            )
            several = found if isinstance(found, Sequence) else [found]
            values.update(zip(part.output, several, strict=True))
        return [values[value.name] for value in graph.output]

    return translate


def _plain(value: Any) -> Any:
    """An attribute's value as Python's, text for bytes."""
    if isinstance(value, bytes):
        return value.decode()
    return [_plain(v) for v in value] if isinstance(value, list) else value


def nodes_in(path: Path) -> tuple[str, ...]:
    """`foreign_nodes` of a file."""
    return foreign_nodes(onnx.load(path, load_external_data=False))


def foreign_nodes(model: onnx.ModelProto) -> tuple[str, ...]:
    """domain::Type of every node that is neither ONNX's own nor a function of the model, sorted."""
    functions = {(f.domain, f.name) for f in model.functions}
    every = [*nodes_of(model.graph), *(node for f in model.functions for node in f.node)]
    return tuple(
        sorted(
            {
                f"{node.domain}::{node.op_type}"
                for node in every
                if node.domain not in ("", "ai.onnx") and (node.domain, node.op_type) not in functions
            }
        )
    )


def require_runnable(nodes: Iterable[str], custom: CustomOps, name: str) -> None:
    """LoweringError where this machine's onnxruntime has no library for a node, so that the file cannot be judged."""
    if reason := missing_in_onnxruntime(nodes, custom, platform.machine()):
        raise LoweringError(f"the file cannot be judged on this machine: {reason}", where=name)


def missing_in_onnxruntime(nodes: Iterable[str], custom: CustomOps, arch: str) -> str | None:
    """Why onnxruntime on a machine of `arch` cannot run a node, and the key to add; None where it can."""
    general = [o for o in custom.libraries if o.kind == "onnxruntime"]
    for node in nodes:
        libraries = [*custom.onnxruntime.get(node, ()), *general]
        if node.rpartition("::")[0] in ONNXRUNTIME_DOMAINS:
            continue
        if not libraries:
            return (
                f"onnxruntime has no operator {node}: add to the project custom_ops: {{'{node}': {{onnxruntime: "
                f"LIBRARY.so}}}}, a library for {arch} that registers it"
            )
        if reason := op_library.missing_for(libraries, arch):
            return f"{node}: {reason}; build it for {arch} too and add it to custom_ops"
    return None


def missing_in_tensorrt(nodes: Iterable[str], custom: CustomOps, arch: str) -> str | None:
    """Why TensorRT on a machine of `arch` has no plugin for a node, and the key to add; None where it has."""
    for node in nodes:
        op = custom.op_of_node(node)
        if op is None or not op.has_plugin:
            return (
                f"TensorRT has no operator {node}: add to the project custom_ops: {{'{node}': {{tensorrt: PLUGIN.so}}}}"
                ", or plugin: NAME where TensorRT has the plugin itself"
            )
        if reason := op_library.missing_for(custom.tensorrt.get(node, ()), arch):
            return f"{node}: {reason}; build it for {arch} too and add it to custom_ops"
    return None


def missing_in_torch(program: Program, profile: Profile) -> tuple[str, ...]:
    """Why the target's torch cannot load the user's operators, or ()."""
    if isinstance(program, OnnxGraph):
        return ()
    reason = program.custom_ops.missing_in_torch(profile.target.arch)
    if reason:
        return (f"{reason}; build it for {profile.target.arch} too and add it to op_libraries",)
    if isinstance(program, ExportedGraph) and not program.custom_ops.libraries:
        for name in own_operators.own_names(program.module):
            return (f"the device has no operator {name}: name the file that defines it in the key op_libraries",)
    for library in program.custom_ops.libraries:
        if library.kind == "python":
            for module, line in op_library.foreign_imports(library.path):
                return (
                    f"{library.given}, line {line} imports '{module}', which a device does not have: import it inside "
                    "of the function that needs it, or put that in a file of its own",
                )
    return ()
