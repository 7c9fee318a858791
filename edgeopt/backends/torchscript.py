"""TorchScript: `float.pt`, frozen, re-loaded in a process of its own, and shipped with the profile's fuser flags.

The output of `torch.jit.optimize_for_inference` is never the file: saved, it cannot be loaded again (measured with
torch 1.10.2, 2.1.2 and 2.13). The runner optimises after it has loaded.
"""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path

import torch

from edgeopt.backends import script_file, script_reload, script_source
from edgeopt.backends.backend import Lowered, is_integer, refusal
from edgeopt.backends.onnx_file import first_line
from edgeopt.errors import LoweringError
from edgeopt.program import ExportedGraph, OnnxGraph, Program, ScriptGraph
from edgeopt.spec.manifest import Candidate
from edgeopt.spec.profile import Profile

runtime = "torchscript"
CANDIDATE = "torchscript-fp32"
FILE_NAME = "float.pt"


def refusals(program: Program, profile: Profile) -> tuple[str, ...]:
    """TorchScript is the float program's form: integer programs and ONNX models have none."""
    if is_integer(program):
        return ("integer programs ship as ONNX with Q/DQ; torch's own quantized operators are not written",)
    if isinstance(program, OnnxGraph):
        return ("the model was given as ONNX, which torch does not run",)
    return ()


def lower(program: Program, profile: Profile, out: Path, *, target_python: str | None = None) -> Lowered:
    """The candidate 'torchscript-fp32', once its file loaded in another process and gave the program's outputs.

    For a target whose torch is not this one that process is `target_python`'s; without it the file is refused,
    since a newer torch writes operators that an older one does not know, and an abort is the answer to some.
    """
    name = "torchscript-int8" if is_integer(program) else CANDIDATE
    reasons = (*refusals(program, profile), *_untested(profile, target_python))
    if reasons:
        return refusal(name, reasons[0])
    path = out / FILE_NAME
    try:
        save(program, path)
        script_reload.check(program, path, python=target_python or sys.executable)
    except LoweringError as why:
        path.unlink(missing_ok=True)
        return refusal(name, why)
    candidate = Candidate(
        name=name, runtime=runtime, precision="fp32", file=FILE_NAME, flags=profile.fuser_flags
    )
    return Lowered(files=(FILE_NAME,), candidates=(candidate,))


def save(program: ExportedGraph | ScriptGraph, path: Path) -> None:
    """Write the frozen program: no path of this machine in it, the same bytes in every process.

    Raises LoweringError where the program has no TorchScript form or holds names that torch cannot load.
    """
    with _deprecated():
        module = frozen(program) if isinstance(program, ExportedGraph) else _ascii(program.module)
        torch.jit.save(module, str(path))
    script_file.normalise(path)


def frozen(program: ExportedGraph) -> torch.jit.ScriptModule:
    """The program as a frozen TorchScript module, sizes of dynamic axes kept as expressions."""
    with _deprecated():
        return torch.jit.freeze(scripted(program.module))


def scripted(module: torch.fx.GraphModule) -> torch.jit.ScriptModule:
    """A graph of aten operators as a TorchScript module, its weights contiguous."""
    written = script_source.source(module)
    with _deprecated():
        # A class of its own: TorchScript shares one type, and so one `forward`, between modules of a class.
        weights = type("Program", (torch.nn.Module,), {})().eval()
        for name, tensor in written.tensors.items():
            weights.register_buffer(name, _contiguous(tensor.detach()))
        script = torch.jit.script(weights)
        try:
            script.define(written.code)
        except RuntimeError as why:
            raise LoweringError(f"TorchScript does not take the graph: {_reason(why)}") from why
        return script


def _untested(profile: Profile, target_python: str | None) -> tuple[str, ...]:
    """Why the file would ship without ever having been loaded by the target's torch."""
    target = profile.target.torch
    if target_python is not None or target is None or _within(torch.__version__, target.min, target.max):
        return ()
    versions = " to ".join(dict.fromkeys(v for v in (target.min, target.max) if v))
    return (
        f"not test-loaded: the target runs torch {versions}, this machine {torch.__version__.split('+')[0]}; give "
        "an interpreter that has the target's torch as --target-python",
    )


def _within(version: str, low: str | None, high: str | None) -> bool:
    here = _numbers(version)
    return (low is None or _numbers(low) <= here) and (high is None or here[:2] <= _numbers(high)[:2])


def _numbers(version: str) -> tuple[int, ...]:
    plain = version.split("+")[0].split("a")[0]
    return tuple(int(part) for part in plain.split(".") if part.isdigit())


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Strided views give wrong results on aarch64 in some torch (pytorch issue 55781); channels_last is a choice."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor
    return tensor.contiguous()


def _ascii(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    """The module, or a copy in which values of other names than ASCII are called v0, v1 ..."""
    if module.graph.findNode("prim::CallMethod") is not None:
        return module
    module = copy.deepcopy(module)
    _rename(module.graph, 0)
    return module


def _rename(block: torch._C.Graph | torch._C.Block, count: int) -> int:
    values = [*block.inputs()]
    for node in block.nodes():
        values += node.outputs()
        for inner in node.blocks():
            count = _rename(inner, count)
    for value in values:
        if not value.debugName().isascii():
            value.setDebugName(f"value_{count}")
            count += 1
    return count


def _reason(why: RuntimeError) -> str:
    """The line of a TorchScript compiler's message that says most."""
    return first_line(why)


class _deprecated(warnings.catch_warnings):
    """TorchScript as a whole is deprecated in torch 2.13; the devices that need it have nothing else."""

    def __enter__(self):
        entered = super().__enter__()
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", message=".*torch.jit.*")
        return entered
