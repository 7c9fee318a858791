"""Capture by TorchScript, frozen: a trace, the user's code as a script, or a TorchScript file.

This file and `backends/torchscript.py` are the only ones that use `torch.jit`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import re
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edgeopt import digest
from edgeopt.capture import guard, script_types, values
from edgeopt.capture.declined import Declined, first_line
from edgeopt.capture.eager import Eager
from edgeopt.capture.flat import flat
from edgeopt.errors import ModelError
from edgeopt.ports.user_code import user_line
from edgeopt.program import ScriptGraph, Signature, devices, graph
from edgeopt.program.tracing import plain_attention

_TEST_LOAD = "import sys, torch; torch.jit.load(sys.argv[1], map_location='cpu')"
_TEST_LOAD_S = 300.0
_MANGLED = re.compile(rb"\.?___torch_mangle_\d+")  # counts the classes that this process has compiled before


def trace(model: Eager, signature: Signature, *, copy_inputs: bool, seed: int) -> ScriptGraph:
    """The model traced at the example sizes and frozen; Declined where a value of the inputs would be frozen in.

    Where a size is, it must equal the model at the largest size of every axis as well: a threshold lies between that
    and the smallest.
    """
    followed = values.Followed(model.folder)
    module = flat(dataclasses.replace(model, arguments=followed.marking(model.arguments)), copy_inputs=copy_inputs)
    example = graph.synthetic(signature, graph.sizes(signature, "example"), seed)
    try:
        with torch.no_grad(), plain_attention(), _deprecations_ignored(), warnings.catch_warnings():
            warnings.simplefilter("ignore", torch.jit.TracerWarning)
            with followed:
                traced = torch.jit.trace(module, tuple(graph.to_tensors(signature, example)), check_trace=False)
            frozen = _final(traced)
    except Exception as why:
        raise Declined(first_line(why), user_line(why, model.folder)) from why
    for where in followed.values:
        raise Declined("it would freeze a value of the inputs, which Python reads", where)
    program = ScriptGraph(signature=signature, reference=(), module=frozen, how="trace")
    for where in followed.sizes:
        why_not = guard.disagreement(partial(graph.run, program), guard.largest(model, signature, seed), 0.0)
        if why_not is not None:
            raise Declined(f"it freezes a size: {why_not}", where)
        break
    return program


def frozen_values(model: Eager, signature: Signature, seed: int) -> str | None:
    """The user's file and line where a trace turns a tensor into a Python value, or None."""
    module = flat(model, copy_inputs=True)
    example = graph.synthetic(signature, graph.sizes(signature, "example"), seed)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught, contextlib.suppress(Exception):
        warnings.simplefilter("always")
        torch.jit.trace(module, tuple(graph.to_tensors(signature, example)), check_trace=False)
    for warning in caught:
        path = Path(warning.filename)
        if issubclass(warning.category, torch.jit.TracerWarning) and model.folder.resolve() in path.parents:
            return f"{path.relative_to(model.folder.resolve())}, line {warning.lineno}"
    return None


def script(model: Eager, signature: Signature, *, copy_inputs: bool, seed: int) -> ScriptGraph:
    """The user's code compiled by TorchScript, control flow included, and frozen."""
    del seed  # scripting calls nothing
    try:
        with _deprecations_ignored():
            inner = model.module if is_script(model.module) else torch.jit.script(model.fresh())
            frozen = _flattened(inner, model, signature, copy_inputs)
    except Exception as why:
        hint = "" if is_script(model.module) else script_types.annotations_to_add(model.module, model.arguments)
        raise Declined(_compiler_line(why) + hint, user_line(why, model.folder)) from why
    how = "file" if is_script(model.module) else "script"
    return ScriptGraph(signature=signature, reference=(), module=frozen, how=how)


def is_script(module: nn.Module | None) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def class_name(module: nn.Module) -> str:
    """The name of the module's class as the user wrote it, which TorchScript keeps."""
    return getattr(module, "original_name", type(module).__name__)


def read(path: Path) -> torch.jit.ScriptModule:
    """The TorchScript module of a file, in eval mode on the CPU. Raises ModelError.

    It is loaded in a process of its own first, since a file of a newer torch may abort the one that loads it.
    """
    why = None if _is_archive(path) else "it is damaged, or no TorchScript file"
    why = why or _test_load(path)
    if why:
        raise ModelError(
            f"the TorchScript file cannot be loaded by torch {torch.__version__}: {why}", where=f"key 'model': {path}",
            todo="a file of weights goes under 'weights' with a Python factory as 'model'; else save it again "
            "with torch.jit.save in a torch that is not newer",
        )  # fmt: skip
    return read_trusted(path)


def _is_archive(path: Path) -> bool:
    """Whether the file is a zip with code, as torch.jit.save writes; weights of torch.save are a zip without."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any("/code/" in name for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def _test_load(path: Path) -> str | None:
    """Why a process of its own cannot load the file, or None."""
    try:
        tried = subprocess.run(
            [sys.executable, "-c", _TEST_LOAD, str(path)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TEST_LOAD_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it takes longer than {_TEST_LOAD_S:.0f} s"
    if tried.returncode < 0:
        return f"it ends the process that loads it (signal {-tried.returncode})"
    lines = [line.strip() for line in tried.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["no message"])[-1] if tried.returncode else None


def parameters(module: torch.jit.ScriptModule) -> list[inspect.Parameter]:
    """The parameters of a TorchScript module's forward, as `inspect` gives them for Python."""
    arguments = module.forward.schema.arguments[1:]  # the first is self
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [
        inspect.Parameter(a.name, kind, default=a.default_value if a.has_default_value() else inspect.Parameter.empty)
        for a in arguments
    ]


def annotations_of(module: torch.jit.ScriptModule) -> Callable[[str], Any]:
    """The type of a parameter of a TorchScript module's forward as a Python annotation."""
    kinds = {argument.name: argument.type for argument in module.forward.schema.arguments}
    return lambda name: script_types.annotation(kinds[name], module)


@contextlib.contextmanager
def _deprecations_ignored() -> Iterator[None]:
    """torch says that TorchScript is deprecated at each call; the devices of JetPack 4 and 5 run nothing else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _holder(modules: dict[str, nn.Module]) -> nn.Module:
    """An empty module that holds `modules`, of a class of its own: TorchScript gives a class's modules one forward."""
    holder = type("Holder", (nn.Module,), {})()
    for name, module in modules.items():
        holder.add_module(name, module)
    return holder.eval()


def _flattened(inner: Any, model: Eager, signature: Signature, copy_inputs: bool) -> torch.jit.ScriptModule:
    """`inner` with a forward of positional tensors and a flat tuple of tensors, frozen."""
    given = [f"x{i}" for i in range(len(signature.inputs))]
    tensors = [f"{x}.clone()" if copy_inputs else x for x in given]
    frames = {}
    for i, spec in enumerate(model.inputs):
        if spec.name in model.cameras:
            frames[f"frames_{i}"] = model.cameras[spec.name].module()
            tensors[i] = f"self.frames_{i}({tensors[i]})"
    made, passed = script_types.call_source(model.arguments, tensors, inner.forward.schema)
    # `made` is read by the compiler: the source calls the classes by it
    paths = _paths(signature.output_structure, "out")
    returned = "".join(f"{paths[i]}, " for i in range(len(paths)))
    holder = torch.jit.script(_holder({"inner": inner, **frames}))
    holder.define(f"def forward(self, {', '.join(given)}):\n    out = self.inner({passed})\n    return ({returned})\n")
    return _final(holder)


def _final(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    """The module frozen, and its tensors made where its inputs lie."""
    frozen = torch.jit.freeze(module.eval())
    devices.follow_inputs(frozen.graph)
    return frozen


def extended(module: torch.jit.ScriptModule, signature: Signature, outputs: list[str]) -> torch.jit.ScriptModule:
    """A frozen module with `outputs`, expressions over its own outputs y0, y1, ..., in their place; frozen."""
    given = ", ".join(f"x{i}" for i in range(len(signature.inputs)))
    lone = next(module.graph.outputs()).type().kind() == "TensorType"
    taken = ["y = self.inner({given})", "y0 = y"] if lone else ["y = self.inner({given})"]
    taken += [] if lone else [f"y{i} = y[{i}]" for i in range(len(signature.outputs))]
    lines = "".join(f"    {line.format(given=given)}\n" for line in taken)
    written = io.BytesIO()
    with _deprecations_ignored():
        torch.jit.save(module, written)  # a frozen module can be part of another one only when it was loaded
        written.seek(0)
        holder = torch.jit.script(_holder({"inner": torch.jit.load(written, map_location="cpu")}))
        holder.define(f"def forward(self, {given}):\n{lines}    return ({', '.join(outputs)},)\n")
        return _final(holder)


def _paths(node: Any, path: str) -> dict[int, str]:
    """Output index -> the TorchScript expression that reaches it below `path`."""
    kind = node["kind"]
    if kind == "tensor":
        return {node["index"]: path}
    if kind in ("tuple", "list"):
        below = [(item, f"{path}[{i}]") for i, item in enumerate(node["items"])]
    elif kind == "dict":
        below = [(item, f"{path}[{key!r}]") for key, item in node["items"].items()]
    elif kind == "dataclass":
        below = [(item, f"{path}.{key}") for key, item in node["items"].items()]
    else:
        below = []
    return {index: found for item, where in below for index, found in _paths(item, where).items()}


def _compiler_line(why: BaseException) -> str:
    """The compiler's message with the user's line, which it prints after the message."""
    message = first_line(why)
    for line in str(why).splitlines():
        if line.strip().startswith('File "'):
            return f"{message} ({line.strip()})"
    return message


def write(module: torch.jit.ScriptModule, path: Path) -> None:
    with _deprecations_ignored():
        torch.jit.save(module, str(path))


def read_trusted(path: Path) -> torch.jit.ScriptModule:
    """The module of a file that edgeopt wrote with this torch."""
    with _deprecations_ignored():
        return torch.jit.load(str(path), map_location="cpu").eval()


def part(inner: nn.Module, forward: str) -> torch.jit.ScriptModule:
    """A module of the user's as TorchScript, called by the source `forward` as `self.inner`; Declined.

    Not frozen: its weights stay parameters, which can be counted and converted.
    """
    try:
        with _deprecations_ignored():
            scripted = torch.jit.script(_holder({"inner": inner}))
            scripted.define(forward)
    except Exception as why:
        raise Declined(f"TorchScript does not take it: {_compiler_line(why)}") from why
    return scripted


def writes_to_inputs(frozen: torch.jit.ScriptModule) -> bool:
    """Whether `forward` may write to a tensor that it is given, on any of its branches."""
    compiled = frozen.inlined_graph
    aliases = compiled.alias_db()
    return any(aliases.has_writers(value) for value in list(compiled.inputs())[1:])  # the first is self


def frozen(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    """The module with its weights as constants; Declined."""
    try:
        with _deprecations_ignored():
            return torch.jit.freeze(module)
    except Exception as why:
        raise Declined(f"TorchScript cannot freeze it: {first_line(why)}") from why


def digest_of(frozen: torch.jit.ScriptModule) -> str:
    """sha256 of a frozen module's code and weights, the same in every process.

    Of another one it would not be: TorchScript writes a class's constants in the order of a set.
    """
    written = io.BytesIO()
    with _deprecations_ignored():
        torch.jit.save(frozen, written)
    reader = torch._C.PyTorchFileReader(io.BytesIO(written.getvalue()))
    names = sorted(n for n in reader.get_all_records() if n.startswith(("code/", "data", "constants")))
    parts = []
    for name in names:
        if not name.endswith(".debug_pkl"):  # stack traces
            record = reader.get_record(name)
            text = name.startswith("code/") or name.endswith(".pkl")
            content = digest.of_bytes(_MANGLED.sub(b"", record) if text else record)
            parts.append([_MANGLED.sub(b"", name.encode()).decode(), content])
    return digest.of_value(parts)
