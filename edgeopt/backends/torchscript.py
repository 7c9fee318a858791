"""TorchScript: `float.pt`, frozen, re-loaded in a process of its own, and shipped with the profile's fuser flags.

The output of `torch.jit.optimize_for_inference` is never the file: saved, it cannot be loaded again (measured with
torch 1.10.2, 2.1.2 and 2.13). The runner optimises after it has loaded.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

import torch

from edgeopt import digest
from edgeopt.backends import script_file, script_reload, script_source
from edgeopt.backends.backend import Lowered, precision_of, refusal
from edgeopt.backends.onnx_file import first_line
from edgeopt.errors import LoweringError
from edgeopt.program import ExportedGraph, OnnxGraph, Program, ScriptGraph
from edgeopt.spec.jetpack import version_tuple
from edgeopt.spec.manifest import Candidate
from edgeopt.spec.profile import Profile
from edgeopt.spec.profile_values import TorchRange

runtime = "torchscript"
FILE_NAME = "float.pt"


def refusals(program: Program, profile: Profile) -> tuple[str, ...]:
    """TorchScript is the float program's form: integer programs and ONNX models have none."""
    if precision_of(program) == "int8":
        return ("integer programs ship as ONNX with Q/DQ; torch's own quantized operators are not written",)
    if isinstance(program, OnnxGraph):
        return ("the model was given as ONNX, which torch does not run",)
    return ()


def lower(program: Program, profile: Profile, out: Path, *, target_python: str | None = None) -> Lowered:
    """The candidate 'torchscript-fp32', once its file loaded in another process and gave the program's outputs.

    For a target whose torch is not this one that process is `target_python`'s; without it the file is refused,
    since a newer torch writes operators that an older one does not know, and an abort is the answer to some.
    """
    name = f"{runtime}-{precision_of(program)}"
    reasons = (*refusals(program, profile), *_untested(profile, target_python))
    if reasons:
        return refusal(name, reasons[0])
    path = out / FILE_NAME
    try:
        save(program, path)
        _test_load(program, path, profile, target_python)
    except LoweringError as why:
        path.unlink(missing_ok=True)
        return refusal(name, why)
    candidate = Candidate(name=name, runtime=runtime, precision="fp32", file=FILE_NAME, flags=profile.fuser_flags)
    return Lowered(files=(FILE_NAME,), candidates=(candidate,))


def save(program: ExportedGraph | ScriptGraph, path: Path) -> None:
    """Write the frozen program: no path of this machine in it, the same bytes in every process.

    Raises LoweringError where the program has no TorchScript form or holds names that torch cannot load.
    """
    with _deprecated():
        module = frozen(program) if isinstance(program, ExportedGraph) else program.module
        torch.jit.save(module, str(path))
    try:
        script_file.normalise(path)
    except LoweringError:
        path.unlink()
        raise


def digest_of(program: ScriptGraph) -> str:
    """sha256 of the file that `save` writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / FILE_NAME
        save(program, path)
        return digest.of_file(path)


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
            raise LoweringError(f"TorchScript does not take the graph: {first_line(why)}") from why
        return script


def _untested(profile: Profile, target_python: str | None) -> tuple[str, ...]:
    """Why the file would ship without ever having been loaded by the target's torch."""
    target = profile.target.torch
    if target_python is not None or target is None or _within(torch.__version__, target.min, target.max):
        return ()
    return (
        f"not test-loaded: the target runs torch {_versions(target)}, this machine "
        f"{torch.__version__.split('+')[0]}; give an interpreter that has the target's torch as --target-python",
    )


def _test_load(program: ExportedGraph | ScriptGraph, path: Path, profile: Profile, target_python: str | None) -> None:
    version = script_reload.check(program, path, python=target_python or sys.executable)
    target = profile.target.torch
    if target_python is not None and target is not None and not _within(version, target.min, target.max):
        raise LoweringError(
            f"not test-loaded: {target_python} has torch {version}, the target runs {_versions(target)}"
        )


def _versions(target: TorchRange) -> str:
    return " to ".join(dict.fromkeys(v for v in (target.min, target.max) if v))


def _within(version: str, low: str | None, high: str | None) -> bool:
    """Whether the versions' first two numbers lie in the range; TorchScript's operators change with those."""
    here = version_tuple(version)[:2]
    return (low is None or version_tuple(low)[:2] <= here) and (high is None or here <= version_tuple(high)[:2])


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Strided views give wrong results on aarch64 in some torch (pytorch issue 55781); channels_last is a choice."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor
    return tensor.contiguous()


class _deprecated(warnings.catch_warnings):
    """TorchScript as a whole is deprecated in torch 2.13; the devices that need it have nothing else."""

    def __enter__(self):
        entered = super().__enter__()
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", message=".*torch.jit.*")
        return entered
