"""A stand-in for TensorRT's Python module and for CUDA's runtime, for an engine that recorded_trtexec.py wrote.

The module has the classes and methods of TensorRT's Python API that the runner calls (of 8.5 and later, or of 8.2 with
bindings), and takes memory by its address as the real one does; the library is compiled C with cudart's functions.
"""

from __future__ import annotations

import functools
from pathlib import Path

from tests import native

CUDART = r"""
#include <stdlib.h>
#include <string.h>
static long held = 0;
long held_blocks(void) { return held; }
int cudaMalloc(void** to, size_t size) {
  if (size > 1u << 30) return 2;
  *to = malloc(size); held++; return 0;
}
int cudaFree(void* at) { free(at); held--; return 0; }
int cudaStreamCreate(void** stream) { *stream = malloc(1); return 0; }
int cudaStreamDestroy(void* stream) { free(stream); return 0; }
int cudaStreamSynchronize(void* stream) { return stream ? 0 : 400; }
int cudaMemcpyAsync(void* to, const void* from, size_t size, int kind, void* stream) {
  if (!stream || kind < 1 || kind > 2) return 21;
  memcpy(to, from, size); return 0;
}
const char* cudaGetErrorString(int code) { return code == 2 ? "out of memory" : "an error"; }
"""

MODULE = """
import ctypes, json
import numpy as np
import onnxruntime as ort

__version__ = {version!r}
simulated = {mark!r}
HAS_NAMES = {has_names!r}
HAS_INT64 = {has_int64!r}


class Logger:
    ERROR = 1
    def __init__(self, level): pass


def init_libnvinfer_plugins(logger, namespace):
    return True


def nptype(dtype):
    return np.dtype(dtype)


class Runtime:
    def __init__(self, logger): self.DLA_core = -1
    def deserialize_cuda_engine(self, data):
        engine = json.loads(data.decode())
        if not __version__.startswith(".".join(map(str, engine["version"]))):
            return None
        return (NamedEngine if HAS_NAMES else NumberedEngine)(engine["given"]["onnx"])


class Engine:
    def __init__(self, onnx):
        self.session = ort.InferenceSession(onnx, providers=["CPUExecutionProvider"])
        self.names = [v.name for v in self.session.get_inputs()] + [v.name for v in self.session.get_outputs()]
        self.types = {{v.name: self.dtype(v.type) for v in self.session.get_inputs() + self.session.get_outputs()}}

    @staticmethod
    def dtype(text):
        found = {{"tensor(float)": "float32", "tensor(int64)": "int64"}}[text]
        return "int32" if found == "int64" and not HAS_INT64 else found

    def create_execution_context(self):
        return Context(self)


class NamedEngine(Engine):
    @property
    def num_io_tensors(self): return len(self.names)
    def get_tensor_dtype(self, name): return self.types[name]


class NumberedEngine(Engine):
    def get_binding_index(self, name): return self.names.index(name)
    def get_binding_dtype(self, index): return self.types[self.names[index]]


class Context:
    def __init__(self, engine):
        self.engine, self.shapes, self.addresses = engine, {{}}, {{}}

    def set_input_shape(self, name, shape):
        declared = {{v.name: v.shape for v in self.engine.session.get_inputs()}}[name]
        if len(shape) != len(declared) or any(isinstance(d, int) and d != s for d, s in zip(declared, shape)):
            return False
        self.shapes[name] = shape
        return True

    def get_tensor_shape(self, name):
        feeds = {{n: np.zeros(s, self.engine.types[n]) for n, s in self.shapes.items()}}
        return self.run(feeds)[name].shape

    def set_tensor_address(self, name, address): self.addresses[name] = address
    def set_binding_shape(self, index, shape): return self.set_input_shape(self.engine.names[index], shape)
    def get_binding_shape(self, index): return self.get_tensor_shape(self.engine.names[index])

    def run(self, feeds):
        session = self.engine.session
        wide = {{v.name: "int64" if v.type == "tensor(int64)" else "float32" for v in session.get_inputs()}}
        names = [v.name for v in session.get_outputs()]
        return dict(zip(names, session.run(names, {{n: a.astype(wide[n]) for n, a in feeds.items()}})))

    def execute_async_v3(self, stream):
        feeds = {{}}
        for name, shape in self.shapes.items():
            dtype = np.dtype(self.engine.types[name])
            data = ctypes.string_at(self.addresses[name], int(np.prod(shape)) * dtype.itemsize)
            feeds[name] = np.frombuffer(data, dtype).reshape(shape)
        for name, array in self.run(feeds).items():
            data = np.ascontiguousarray(array, self.engine.types[name]).tobytes()
            ctypes.memmove(self.addresses[name], data, len(data))
        return bool(stream)

    def execute_async_v2(self, bindings, stream):
        self.addresses = dict(zip(self.engine.names, bindings))
        return self.execute_async_v3(stream)
"""


@functools.cache
def cudart() -> Path:
    """The compiled library."""
    folder = native._folder()
    return native.compiled(CUDART, folder / "libcudart-stand-in.so", [native.compiler(native.platform.machine(), "c")])


def write(folder: Path, version: str, mark: str) -> Path:
    """A folder for sys.path with the module `tensorrt` of that version."""
    (folder / "tensorrt").mkdir(parents=True)
    text = MODULE.format(
        version=version,
        mark=mark,
        has_names=version >= "8.5" or version.startswith("1"),
        has_int64=version.startswith("1"),
    )
    (folder / "tensorrt" / "__init__.py").write_text(text)
    return folder
