"""The table of runtimes. An adaptor is a module with `MODULE` (imported), `PIP_NAMES` (to install) and

    open_program(folder, candidate, inputs, outputs, op_libraries, threads) -> program

whose program has `records` (flags: see fuser.record), `call(arrays) -> arrays` (numpy, in the order of the
manifest's inputs and outputs) and `close()`.
"""

from . import environment
from .failures import Failure

RUNTIMES = ("onnxruntime", "openvino", "torchscript", "aoti")


def find(candidate):
    """The adaptor of a candidate. Failure where there is none, or where the device lacks the runtime."""
    runtime = candidate["runtime"]
    if runtime == "onnxruntime":
        from . import ort as adaptor
    elif runtime == "openvino":
        from . import ov as adaptor
    elif runtime == "torchscript":
        from . import torchscript as adaptor
    elif runtime == "aoti":
        from . import aoti as adaptor
    elif runtime == "tensorrt":
        raise Failure("missing-runtime", "its TensorRT engine is built on the device by a later step")
    else:
        raise Failure("missing-runtime", "this runner has no adaptor for the runtime %r" % runtime)
    for module in (adaptor.MODULE, "numpy"):
        if environment.version(module) is None:
            names = adaptor.PIP_NAMES if module == adaptor.MODULE else "numpy"
            raise Failure("missing-runtime", "the device has no %s: install %s with pip" % (module, names))
    return adaptor
