"""Which kernels OpenVINO really runs for an ONNX file, read from its executed graph, in a process of its own.

Each node of `CompiledModel.get_runtime_model()` says its layer type and the precision that it computes in
(rt_info `layerType`, `runtimePrecision`: OpenVINO's ov::exec_model_info). OpenVINO's low-precision transformations
take Q/DQ pairs apart themselves; what they could not use runs in float.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import edgeopt
from edgeopt.errors import LoweringError

# The layer types of the CPU plugin that multiply (src/plugins/intel_cpu/src/cpu_types.cpp).
PRODUCTS = {
    "Convolution", "Deconvolution", "FullyConnected", "GatherMatmul", "MatMul", "MHA", "RNNCell", "RNNSeq",
    "ScaledDotProductAttention",
}  # fmt: skip
_INTEGERS = ("u8", "i8")
_CONVERSIONS = ("FakeQuantize", "Convert", "Reorder")
_NO_KERNELS = ("Const", "Input", "Output", "Reshape", "ShapeOf")  # they compute nothing, or sizes only
_TIMEOUT_S = 300
# sys.path[0] would be the working directory, where any json.py would be imported in place of the library's
_START = (
    "import sys; sys.path[0] = sys.argv[1];"
    " from edgeopt.backends import openvino_kernels; openvino_kernels.main(sys.argv[2])"
)


@dataclass(frozen=True)
class Kernels:
    """Layer type -> how many run on 8-bit integers, in float, and convert between the two."""

    integer: dict[str, int]
    floats: dict[str, int]
    conversions: dict[str, int]

    @property
    def integer_products(self) -> int:
        """Convolutions and matrix products on integers."""
        return sum(count for name, count in self.integer.items() if name in PRODUCTS)

    @property
    def float_products(self) -> int:
        """Convolutions and matrix products in float."""
        return sum(count for name, count in self.floats.items() if name in PRODUCTS)


def kernels(file: Path) -> Kernels:
    """The kernels that OpenVINO runs on this machine's CPU for the ONNX file.

    LoweringError where it is not installed, cannot compile the file, or dies of it.
    """
    root = str(Path(edgeopt.__file__).resolve().parents[1])
    argv = [sys.executable, "-c", _START, root, str(file.resolve())]
    with tempfile.TemporaryDirectory() as empty:
        try:
            done = subprocess.run(
                argv, cwd=empty, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired as why:
            raise LoweringError(f"OpenVINO took more than {_TIMEOUT_S} s to compile it", where=file.name) from why
    if done.returncode != 0:
        said = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "it said nothing")
        raise LoweringError(f"OpenVINO cannot compile the file: {said.strip()}", where=file.name)
    return Kernels(**json.loads(done.stdout.splitlines()[-1]))


def main(path: str) -> None:
    """The child's side: prints the counts as one line of JSON."""
    import openvino

    compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    layers = [node.get_rt_info() for node in compiled.get_runtime_model().get_ordered_ops()]
    found = counted((info["layerType"].astype(str), info["runtimePrecision"].astype(str)) for info in layers)
    print(json.dumps(found))


def counted(layers) -> dict[str, dict[str, int]]:
    """(layer type, precision) of each node -> the counts that `Kernels` holds."""
    groups: dict[str, Counter] = {"integer": Counter(), "floats": Counter(), "conversions": Counter()}
    for kind, precision in layers:
        if kind in _CONVERSIONS:
            groups["conversions"][kind] += 1
        elif kind not in _NO_KERNELS:
            groups["integer" if precision in _INTEGERS else "floats"][kind] += 1
    return {name: dict(sorted(group.items())) for name, group in groups.items()}
