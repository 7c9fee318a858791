"""aoti: a package of AOTInductor, machine code that was compiled for one torch and one CPU.

Candidate flag: "compiled_for" ({"torch", "arch", "cpu_flags"}). It is compared with this device before anything is
loaded: another torch's package fails by symbols that are missing or are called wrongly, another CPU's by an illegal
instruction. The compiled code itself checks neither types nor sizes; who calls it has done so.
"""

import os
import platform

from . import environment
from .failures import Failure
from .fuser import record

MODULE = "torch"
PIP_NAMES = "torch"

_NAMED_FLAGS = 4  # CPU flags that a message lists


def open_program(folder, candidate, inputs, outputs, op_libraries, threads):
    """Load the package. Raises Failure where this is not the machine it was compiled for, and what torch raises."""
    flags = candidate.get("flags") or {}
    compiled_for = flags.get("compiled_for")
    if not isinstance(compiled_for, dict):
        raise Failure("load", "the manifest does not say which torch and CPU the package was compiled for")
    reason = mismatch(compiled_for)
    if reason:
        raise Failure("load", reason)
    for spec in list(inputs) + list(outputs):
        if spec["dtype"] == "bfloat16":
            raise Failure("load", "numpy arrays have no bfloat16: " + spec["name"])
    import torch

    if threads:
        torch.set_num_threads(threads)
    # the class that torch._inductor.aoti_load_package wraps, without the compiler's import of some seconds
    loader = torch._C._aoti.AOTIModelPackageLoader(os.path.join(folder, candidate["file"]), "model", False, 1, -1)
    records = [record("compiled_for", compiled_for, "applied")]
    records += [
        record(k, v, "missing", "the runner does not know this flag") for k, v in flags.items() if k != "compiled_for"
    ]
    return Program(torch, loader, outputs, records)


def mismatch(compiled_for):
    """Why a package for that machine must not be loaded on this one, as a sentence; None where it may."""
    machine, torch = platform.machine(), environment.version("torch")
    if compiled_for.get("arch") != machine:
        return "it was compiled for %s and this machine is %s: build it for this one" % (
            compiled_for.get("arch"),
            machine,
        )
    if compiled_for.get("torch") != torch:
        return "it was compiled for torch %s and this machine has torch %s: build it again with that" % (
            compiled_for.get("torch"), torch,
        )  # fmt: skip
    lacking = sorted(set(compiled_for.get("cpu_flags") or ()) - set(environment.describe()["cpu_flags"]))
    if lacking:
        more = " and %d more" % (len(lacking) - _NAMED_FLAGS) if len(lacking) > _NAMED_FLAGS else ""
        return "it was compiled for a CPU with instructions that this one lacks (%s%s): build it on this machine" % (
            ", ".join(lacking[:_NAMED_FLAGS]), more,
        )  # fmt: skip
    return None


class Program:
    """A package that is called with arrays in the order of the manifest's inputs."""

    def __init__(self, torch, loader, outputs, records):
        self.records = records
        self._torch = torch
        self._loader = loader
        self._outputs = [spec["name"] for spec in outputs]

    def call(self, arrays):
        torch = self._torch
        tensors = [torch.from_numpy(array if array.flags.writeable else array.copy()) for array in arrays]
        with torch.no_grad():
            found = self._loader.boxed_run(tensors)
        if len(found) != len(self._outputs):
            raise Failure(
                "run", "the package gives %d tensors, the manifest names %d" % (len(found), len(self._outputs))
            )
        return [tensor.detach().numpy() for tensor in found]

    def close(self):
        self._loader = None
