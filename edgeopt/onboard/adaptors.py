"""The table of runtimes. An adaptor is a module with `MODULE` (imported), `PIP_NAMES` (to install) and

    open_program(folder, candidate, inputs, outputs, op_libraries, threads) -> program

whose program has `records` (flags: see fuser.record), `call(arrays) -> arrays` (numpy, in the order of the
manifest's inputs and outputs) and `close()`. The runtime "python" is for `edgeopt bench` alone, and in no manifest:
its flags "adaptor" and "path" name such a module of the host and where it is imported from.
"""

import importlib
import sys

from . import environment
from .failures import Failure

RUNTIMES = ("onnxruntime", "openvino", "torchscript", "aoti", "tensorrt")


def find(candidate, measuring=False):
    """The adaptor of a candidate. Failure where there is none, or where the device lacks the runtime.

    An engine is measured by trtexec, and run for an application by TensorRT's Python module.
    """
    runtime = candidate["runtime"]
    if runtime == "onnxruntime":
        from . import ort as adaptor
    elif runtime == "openvino":
        from . import ov as adaptor
    elif runtime == "torchscript":
        from . import torchscript as adaptor
    elif runtime == "aoti":
        from . import aoti as adaptor
    elif runtime == "python":
        adaptor = _of_host(candidate["flags"])
    elif runtime == "tensorrt":
        from . import trt, trt_measured

        adaptor = trt_measured if measuring else trt
    else:
        raise Failure("missing-runtime", "this runner has no adaptor for the runtime %r" % runtime)
    for module in (adaptor.MODULE, "numpy"):
        if environment.version(module) is None:
            names = adaptor.PIP_NAMES if module == adaptor.MODULE else "numpy"
            raise Failure("missing-runtime", "the device has no %s: install %s with pip" % (module, names))
    return adaptor


def _of_host(flags):
    if flags["path"] not in sys.path:
        sys.path.append(flags["path"])
    return importlib.import_module(flags["adaptor"])
