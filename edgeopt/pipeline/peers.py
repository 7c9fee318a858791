"""What else runs a user's model, at its own defaults: the contenders that `edgeopt bench` measures ours against.

    eager             the model as the user wrote it
    compile           torch.compile with freezing (weights as constants), which is what a user would turn on
    aoti              AOTInductor: torch.export at the sizes of the measured call, compiled and loaded as a package
    onnxruntime       torch.onnx's file of the captured model, none of our passes; a session of default options
    onnxruntime-int8  quantize_static of it after quant_pre_process, on the project's calibration batches
    openvino          the same file, compiled for the CPU
    openvino-int8     nncf.quantize of it, on the same batches

Each is opened in the process that calls it, and converted there too: what a conversion costs or breaks is its own.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from edgeopt.errors import EdgeoptError
from edgeopt.spec.project import Project

Call = Callable[[Sequence[np.ndarray]], list[np.ndarray]]

# contender -> whether it starts from the ONNX file; the others run the user's own code
PEERS = {
    "eager": False, "compile": False, "aoti": False,
    "onnxruntime": True, "onnxruntime-int8": True, "openvino": True, "openvino-int8": True,
}  # fmt: skip
ANYWHERE = ("onnxruntime",)  # need nothing of this machine but the file, so that any device runs them
MODULES = {"openvino": "openvino", "openvino-int8": "nncf"}  # what must be there beside torch and onnxruntime


def open_peer(
    kind: str, project: Project, file: Path | None, example: Sequence[np.ndarray], names: tuple[list[str], list[str]]
) -> Call:
    """The contender `kind` as a function of arrays in the order of the inputs, giving arrays in that of the outputs.

    `file` is the ONNX file where PEERS says so; `example` are arrays of the sizes that will be measured; `names` are
    those of inputs and outputs. Raises whatever the library raises where it cannot.
    """
    if not PEERS[kind]:
        return _of_module(kind, project, example)
    if kind.endswith("-int8"):
        return _quantized(kind, project, file, names)
    return _openvino(_read(file), names) if kind == "openvino" else _session(file, names)


def _of_module(kind: str, project: Project, example: Sequence[np.ndarray]) -> Call:
    import torch

    from edgeopt.capture.capture import unoptimised
    from edgeopt.capture.eager import Eager, flatten

    model = unoptimised(project)
    if not isinstance(model, Eager):
        raise EdgeoptError("an ONNX file has no torch model to run")
    module, arguments = model.fresh(), model.arguments
    if kind == "compile":
        import torch._inductor.config

        torch._inductor.config.freezing = True
        module = torch.compile(module)
    elif kind == "aoti":
        module = _package(module, arguments.of([torch.from_numpy(array.copy()) for array in example]))

    def call(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        with torch.no_grad():
            returned = module(**arguments.of([torch.from_numpy(array) for array in arrays]))
        found = [returned] if isinstance(returned, torch.Tensor) else list(flatten(returned)[0].values())
        return [tensor.numpy() for tensor in found]

    call([array.copy() for array in example])  # compile compiles at the first call
    return call


def _package(module, given):
    import torch

    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        exported = torch.export.export(module, (), given)
        path = torch._inductor.aoti_compile_and_package(exported, package_path=f"{folder}/model.pt2")
        return torch._inductor.aoti_load_package(path)


def _session(file: Path, names: tuple[list[str], list[str]]) -> Call:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    given, wanted = names
    return lambda arrays: session.run(wanted, dict(zip(given, arrays, strict=True)))


def _quantized(kind: str, project: Project, file: Path, names: tuple[list[str], list[str]]) -> Call:
    if project.calibration is None:
        raise EdgeoptError("the project gives no calibration data")
    if kind == "openvino-int8":
        import nncf

        batches = _calibration(project)
        return _openvino(nncf.quantize(_read(file), nncf.Dataset(batches), subset_size=len(batches)), names)
    from onnxruntime.quantization import quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with tempfile.TemporaryDirectory() as folder:
        prepared, quantized = Path(folder, "prepared.onnx"), Path(folder, "int8.onnx")
        quant_pre_process(str(file), str(prepared), skip_symbolic_shape=True)
        quantize_static(str(prepared), str(quantized), _Reader(_calibration(project)))
        return _session(quantized, names)


class _Reader:
    """Batches as quantize_static asks for them, one after the other, then None."""

    def __init__(self, batches: list[dict[str, np.ndarray]]):
        self._batches = itertools.chain(batches, itertools.repeat(None))

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._batches)


def _calibration(project: Project) -> list[dict[str, np.ndarray]]:
    from edgeopt.program.data import calibration_batches

    return [dict(batch) for batch in calibration_batches(project, _signature(project))]


def _signature(project: Project):
    from edgeopt.capture import inputs
    from edgeopt.program import Signature

    return Signature(inputs.input_specs(project), (), project.axes, None, inputs.value_ranges(project))


def _read(file: Path):
    import openvino

    return openvino.Core().read_model(str(file))


def _openvino(model, names: tuple[list[str], list[str]]) -> Call:
    import openvino

    compiled = openvino.Core().compile_model(model, "CPU")
    given, wanted = names
    outputs = [compiled.output(name) for name in wanted]

    def call(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        found = compiled(dict(zip(given, arrays, strict=True)))
        return [found[output] for output in outputs]

    return call
