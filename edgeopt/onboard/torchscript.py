"""torchscript: a TorchScript file, with its fuser flags set in this process while the program is open.

Beside the flags of `fuser.py`: "freeze" and "optimize_for_inference" change the module after it is loaded.
The optimised module is never the file itself: saved, it cannot be loaded again (torch 1.10.2 and 2.13).
"""

import importlib.util
import os
import warnings

from . import fuser, ort
from .failures import Failure

MODULE = "torch"
PIP_NAMES = "torch (on a Jetson: NVIDIA's wheel for its JetPack)"

_AFTER_LOADING = ("freeze", "optimize_for_inference")


def open_program(folder, candidate, inputs, outputs, op_libraries, threads):
    """Load the op libraries in their order, set the flags, load the file. Raises what torch raises."""
    for library in op_libraries:
        _load_library(os.path.join(folder, library))
    import torch

    before = torch.get_num_threads()
    flags = candidate.get("flags") or {}
    records, undo_flags = fuser.apply(torch, {k: v for k, v in flags.items() if k not in _AFTER_LOADING})

    def undo():
        undo_flags()
        torch.set_num_threads(before)  # the whole process's, as the flags are

    if threads:
        torch.set_num_threads(threads)
    path = os.path.join(folder, candidate["file"])
    try:
        module, changes = _load(torch, path, flags)
    except BaseException:
        undo()
        raise
    return Program(torch, module, inputs, outputs, records + changes, undo, (path, flags))


def _load(torch, path, flags):
    with warnings.catch_warnings():  # torch 2.13 calls TorchScript deprecated; there is nothing else to load here
        warnings.simplefilter("ignore")
        module = torch.jit.load(path, map_location="cpu")
        if hasattr(module, "training"):  # a frozen module has no such attribute, and its eval() would set it
            module.eval()
        return _change(torch, module, flags)


class Program:
    """A module that is called with arrays in the order of the manifest's inputs."""

    def __init__(self, torch, module, inputs, outputs, records, undo, again):
        self.records = records
        self._again, self._specs = again, (inputs, outputs)
        self.size_bytes = os.path.getsize(again[0])
        self._torch = torch
        self._module = module
        self._undo = undo
        self._inputs = [spec["dtype"] for spec in inputs]
        self._outputs = [spec["name"] for spec in outputs]

    def at(self, sizes):
        """The same file once more, whose executor will see one size of every axis only; the flags hold already.

        TorchScript's executor optimises for the first sizes that it sees (2 by default, case V02), and fusions of
        oneDNN graph hold for one size.
        """
        module, records = _load(self._torch, *self._again)
        return Program(self._torch, module, self._specs[0], self._specs[1], records, _nothing, self._again)

    def call(self, arrays):
        torch = self._torch
        with torch.no_grad():
            tensors = [_tensor(torch, array, dtype) for array, dtype in zip(arrays, self._inputs)]
            found = []
            _flatten(torch, self._module(*tensors), found)
        if len(found) != len(self._outputs):
            raise Failure(
                "run", "the module gives %d tensors, the manifest names %d" % (len(found), len(self._outputs))
            )
        return [_array(torch, tensor) for tensor in found]

    def set_threads(self, threads):
        """Another number of threads for the calls to come."""
        self._torch.set_num_threads(threads)

    def close(self):
        self._module = None
        self._undo()


def _nothing():
    """What undoes nothing: the flags are those of the program that was opened first."""


def _change(torch, module, flags):
    """Freeze and optimise the module where the flags say so; a module that refuses stays as it was loaded."""
    records = []
    for flag in _AFTER_LOADING:
        if flag not in flags:
            continue
        function = getattr(torch.jit, flag, None)
        status, message = "applied", ""
        if function is None:
            status, message = "missing", "torch %s has no torch.jit.%s" % (torch.__version__, flag)
        elif flags[flag] and flag == "optimize_for_inference" and flags.get("onednn_fusion"):
            status, message = "refused", "with onednn_fusion the first call fails (torch 2.13)"
        elif flags[flag]:
            try:
                module = function(module)
            except Exception as error:  # which modules a version takes is known only by trying
                status, message = (
                    "refused",
                    "%s: %s" % (type(error).__name__, str(error).strip().split("\n")[0]),
                )
        records.append(fuser.record(flag, flags[flag], status, message))
    return module, records


def _tensor(torch, array, dtype):
    if not array.flags.writeable:
        array = array.copy()  # torch warns about memory that it may not write to
    tensor = torch.from_numpy(array)
    return tensor.to(torch.bfloat16) if dtype == "bfloat16" else tensor


def _array(torch, tensor):
    tensor = tensor.detach().cpu()
    if hasattr(tensor, "resolve_neg"):  # the imaginary part of a conjugate is a view that numpy does not take
        tensor = tensor.resolve_neg()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _flatten(torch, value, found):
    """The tensors of the module's output in depth-first order, as the manifest's outputs are numbered."""
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, dict):
        for item in value.values():
            _flatten(torch, item, found)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _flatten(torch, item, found)


def _load_library(path):
    """Load one op library, unless it is onnxruntime's."""
    if path.endswith(".py"):
        _run_file(path)
    elif not ort.is_ort_library(path):
        import torch

        torch.ops.load_library(path)


def _run_file(path):
    """Execute a Python op library, which registers its operators with torch when it runs."""
    name = "edgeopt_op_library_" + os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(name, path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
