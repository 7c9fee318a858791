"""TorchScript: `float.pt`, `float16.pt` or `bfloat16.pt`, frozen, re-loaded in a process of its own, and shipped with
the profile's fuser flags.

The output of `torch.jit.optimize_for_inference` is never the file: saved, it cannot be loaded again (measured with
torch 1.10.2, 2.1.2 and 2.13). The runner optimises after it has loaded.
"""

from __future__ import annotations

import errno
import io
import platform
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from edgeopt.backends import custom_ops, fuser, script_file, script_reload, script_source
from edgeopt.backends.backend import Lowered, disk_full, precision_of, refusal
from edgeopt.errors import LoweringError, first_line
from edgeopt.program import ExportedGraph, OnnxGraph, Program, ScriptGraph, devices
from edgeopt.spec.jetpack import version_tuple
from edgeopt.spec.manifest import Candidate, Refusal
from edgeopt.spec.profile import Profile
from edgeopt.spec.profile_checks import refusal as cannot
from edgeopt.spec.profile_values import TorchRange

runtime = "torchscript"
_CALLS_UNTIL_FUSED = 3  # the executor records sizes in the first calls, and then compiles what it fuses
_FILE_NAMES = {"fp32": "float.pt", "fp16": "float16.pt", "bf16": "bfloat16.pt"}


def refusals(program: Program, profile: Profile) -> tuple[str, ...]:
    """TorchScript is the float program's form: integer programs and ONNX models have none."""
    if precision_of(program) == "int8":
        return ("integer programs ship as ONNX with Q/DQ; torch's own quantized operators are not written",)
    if isinstance(program, OnnxGraph):
        return ("the model was given as ONNX, which torch does not run",)
    reason = cannot(precision_of(program), runtime, profile.target)
    return (reason,) if reason else ()


def lower(program: Program, profile: Profile, out: Path, *, target_python: str | None = None) -> Lowered:
    """The candidate 'torchscript-fp32', -fp16 or -bf16, once its file gave the program's outputs in another process.

    Beside the one with the profile's fuser flags there is one for each combination of flags that the profile tries
    (`fuser.trials`), of the same file.

    For a target whose torch is not this one that process is `target_python`'s; without it the file is refused,
    since a newer torch writes operators that an older one does not know, and an abort is the answer to some.
    """
    precision = precision_of(program)
    name = f"{runtime}-{precision}"
    reasons = (
        *refusals(program, profile),
        *custom_ops.missing_in_torch(program, profile),
        *_fixed_devices(program, profile),
        *untested(profile, target_python),
    )
    if reasons:
        return refusal(name, reasons[0])
    path = out / _FILE_NAMES[precision]
    try:
        save(program, path)
        _test_load(program, path, profile, target_python)
    except LoweringError as why:
        path.unlink(missing_ok=True)
        return refusal(name, why)
    candidate = Candidate(name=name, runtime=runtime, precision=precision, file=path.name, flags=profile.fuser_flags)
    variants, refused = _variants(candidate, program, path, profile, target_python) if precision == "fp32" else ((), ())
    return Lowered(files=(path.name,), candidates=(candidate, *variants), refused=refused)


def _variants(
    candidate: Candidate, program: ExportedGraph | ScriptGraph, path: Path, profile: Profile, target_python: str | None
) -> tuple[tuple[Candidate, ...], tuple[Refusal, ...]]:
    """The candidates of the same file under other fuser flags, each once it gave the program's outputs with them."""
    tried, declined = fuser.trials(profile)
    made = []
    for variant, flags in tried.items():
        try:
            _test_load(program, path, profile, target_python, flags=flags, calls=_CALLS_UNTIL_FUSED)
        except LoweringError as why:
            declined[variant] = why.what
        else:
            made.append(candidate.model_copy(update={"name": f"{candidate.name}-{variant}", "flags": flags}))
    refused = (Refusal(candidate=f"{candidate.name}-{v}", reason=reason) for v, reason in declined.items())
    return tuple(made), tuple(refused)


def save(program: ExportedGraph | ScriptGraph, path: Path) -> None:
    """Write the frozen program: no path of this machine in it, the same bytes in every process.

    Raises LoweringError where the program has no TorchScript form or holds names that torch cannot load, and
    SpaceError where the disk is full; no file is left then.
    """
    try:
        path.write_bytes(encode(program))
    except OSError as why:
        path.unlink(missing_ok=True)
        if why.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(path) from why
        raise


def encode(program: ExportedGraph | ScriptGraph) -> bytes:
    """The bytes of the file that `save` writes.

    torch writes to memory: its own writer of files ends the process where the disk is full.
    """
    module = frozen(program) if isinstance(program, ExportedGraph) else program.module
    written = io.BytesIO()
    try:
        with _deprecated():
            torch.jit.save(module, written)
    except RuntimeError as why:
        where = _FILE_NAMES[precision_of(program)]
        raise LoweringError(f"torch cannot save the program: {first_line(why)}", where=where) from why
    return script_file.normalised(written.getvalue())


def frozen(program: ExportedGraph) -> torch.jit.ScriptModule:
    """The program as a frozen TorchScript module, sizes of dynamic axes kept as expressions."""
    script = scripted(program.module)
    try:
        with _deprecated():
            module = torch.jit.freeze(script)
    except RuntimeError as why:
        raise LoweringError(f"TorchScript cannot freeze the program: {first_line(why)}") from why
    devices.follow_inputs(module.graph)
    return module


def scripted(module: torch.fx.GraphModule) -> torch.jit.ScriptModule:
    """A graph of aten operators as a TorchScript module, its weights contiguous."""
    written = script_source.source(module)
    with _deprecated():
        # A class of its own: TorchScript shares one type, and so one `forward`, between modules of a class.
        weights = type("Program", (torch.nn.Module,), {})().eval()
        for name, tensor in written.tensors.items():
            weights.register_buffer(name, _contiguous(tensor.detach()))
        for name, part in written.modules.items():
            weights.add_module(name, part)
        script = torch.jit.script(weights)
        try:
            script.define(written.code)
        except RuntimeError as why:
            raise LoweringError(f"TorchScript does not take the graph: {first_line(why)}") from why
        return script


def _fixed_devices(program: Program, profile: Profile) -> tuple[str, ...]:
    """Why the file would fail where inputs lie on a GPU; capture makes devices follow the inputs."""
    if profile.target.sm is None or not isinstance(program, ScriptGraph):
        return ()
    left = devices.literals(program.module.graph)
    return tuple(f"it holds a literal device, and the target has a GPU: {at}" for at in left)


def untested(profile: Profile, target_python: str | None) -> tuple[str, ...]:
    """Why the file would ship without ever having been loaded by the target's torch."""
    target = profile.target.torch
    if target_python is not None or target is None or _within(torch.__version__, target.min, target.max):
        return ()
    return (
        f"not test-loaded: the target runs torch {_versions(target)}, this machine "
        f"{torch.__version__.split('+')[0]}; --target-python names an interpreter here that has the target's",
    )


def _test_load(
    program: ExportedGraph | ScriptGraph, path: Path, profile: Profile, target_python: str | None, **how: Any
) -> None:
    arch = profile.target.arch if target_python else platform.machine()
    libraries = program.custom_ops.for_torch(arch)
    version = script_reload.check(program, path, python=target_python or sys.executable, libraries=libraries, **how)
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
