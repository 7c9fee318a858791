"""tensorrt, as an application runs it: the engine through TensorRT's Python module, memory through libcudart.

From 8.5 on tensors have names and addresses (IO tensors, execute_async_v3); before, bindings have numbers
(execute_async_v2). numpy knows every dtype of an engine but bfloat16. Measuring is trt_measured.py's.
"""

import ctypes

from . import cudart, device_facts, engines
from .failures import Failure
from .fuser import record
from .release import read_manifest
from .trt_measured import as_taken

MODULE = "tensorrt"
PIP_NAMES = "tensorrt (on a Jetson: sudo apt install python3-libnvinfer)"


def open_program(folder, candidate, inputs, outputs, op_libraries, threads):
    """Load the engine of `candidate` from a release. Failure where it is not built for this device."""
    import tensorrt

    manifest = read_manifest(folder)
    # a version of the module has a build number behind ('8.5.2.2'), which trtexec's has not
    version = ".".join(tensorrt.__version__.split(".")[:3])
    facts = device_facts.describe(version, getattr(tensorrt, "simulated", None))
    job, engine = engines.ready(folder, manifest, candidate["name"], facts)
    logger = tensorrt.Logger(tensorrt.Logger.ERROR)
    for plugin in job["plugins"]:
        ctypes.CDLL(plugin, mode=ctypes.RTLD_GLOBAL)
    tensorrt.init_libnvinfer_plugins(logger, "")
    runtime = tensorrt.Runtime(logger)
    if job["recipe"].get("dla"):
        runtime.DLA_core = 0
    with open(engine.plan, "rb") as f:
        loaded = runtime.deserialize_cuda_engine(f.read())
    if loaded is None:
        raise Failure("load", "TensorRT does not take the engine: %s" % engines.ASK)
    tensors = _IOTensors if hasattr(loaded, "num_io_tensors") else _Bindings
    records = [record("engine", engine.name, "applied", "TensorRT %s" % tensorrt.__version__)]
    if facts["simulated"]:
        records.append(record("simulated", facts["simulated"], "applied", facts["simulated"]))
    return Program(tensorrt, runtime, tensors(tensorrt, loaded), inputs, outputs, records, cudart.Cudart())


class Program:
    """A loaded engine, called with arrays in the order of the manifest's inputs. Its memory grows, and is kept."""

    def __init__(self, tensorrt, runtime, tensors, inputs, outputs, records, cuda):
        self.records = records
        self._runtime = runtime  # the engine needs it alive
        self._tensors, self._cuda = tensors, cuda
        self._inputs = [(spec["name"], spec["dtype"]) for spec in inputs]
        self._outputs = [(spec["name"], spec["dtype"]) for spec in outputs]
        self._has_int64 = device_facts.version_tuple(tensorrt.__version__) >= (9,)
        self._memory = {}  # name -> (address, bytes)
        self._stream = cuda.stream()

    def call(self, arrays):
        import numpy

        held = []  # copies run on after to_device returns
        for (name, dtype), array in zip(self._inputs, arrays):
            held.append(as_taken(array, dtype, self._has_int64))
            if not self._tensors.set_shape(name, held[-1].shape):
                raise Failure("run", "the engine does not take the sizes %s of input '%s'" % (array.shape, name))
            self._cuda.to_device(self._address(name, held[-1].nbytes), held[-1], self._stream)
        results = []
        for name, _ in self._outputs:
            shape, dtype = self._tensors.output(name)
            if any(size < 0 for size in shape):
                raise Failure(
                    "run", "the sizes of output '%s' hang on the values, which this runner does not take" % name
                )
            results.append(numpy.empty(shape, dtype))
            self._address(name, results[-1].nbytes)
        if not self._tensors.run({name: address for name, (address, _) in self._memory.items()}, self._stream):
            raise Failure("run", "TensorRT did not run the engine: its log says why")
        for (name, _), result in zip(self._outputs, results):
            self._cuda.to_host(result, self._memory[name][0], self._stream)
        self._cuda.synchronize(self._stream)
        return [_as_declared(array, dtype) for array, (_, dtype) in zip(results, self._outputs)]

    def close(self):
        for address, _ in self._memory.values():
            self._cuda.free(address)
        self._memory = {}
        if self._stream is not None:
            self._cuda.destroy(self._stream)
        self._stream = self._tensors = self._runtime = None

    def _address(self, name, size):
        address, held = self._memory.get(name, (None, -1))
        if held < size:
            if address is not None:
                self._cuda.free(self._memory.pop(name)[0])
            address = self._cuda.allocate(size)
            self._memory[name] = (address, size)
        return address


class _IOTensors:
    """An engine of TensorRT 8.5 and later."""

    def __init__(self, tensorrt, engine):
        self._tensorrt, self._engine = tensorrt, engine
        self._context = engine.create_execution_context()

    def set_shape(self, name, shape):
        return self._context.set_input_shape(name, tuple(shape))

    def output(self, name):
        return tuple(self._context.get_tensor_shape(name)), _numpy(self._tensorrt, self._engine.get_tensor_dtype(name))

    def run(self, addresses, stream):
        for name, address in addresses.items():
            self._context.set_tensor_address(name, address)
        return self._context.execute_async_v3(stream)


class _Bindings:
    """An engine of TensorRT 8.0 to 8.4."""

    def __init__(self, tensorrt, engine):
        self._tensorrt, self._engine = tensorrt, engine
        self._context = engine.create_execution_context()

    def set_shape(self, name, shape):
        return self._context.set_binding_shape(self._engine.get_binding_index(name), tuple(shape))

    def output(self, name):
        index = self._engine.get_binding_index(name)
        return tuple(self._context.get_binding_shape(index)), _numpy(
            self._tensorrt, self._engine.get_binding_dtype(index)
        )

    def run(self, addresses, stream):
        ordered = sorted((self._engine.get_binding_index(name), address) for name, address in addresses.items())
        return self._context.execute_async_v2([address for _, address in ordered], stream)


def _numpy(tensorrt, dtype):
    try:
        return tensorrt.nptype(dtype)
    except TypeError:
        raise Failure("run", "numpy has no dtype for the engine's %s" % dtype) from None


def _as_declared(array, dtype):
    """The engine's int32 as the model's int64 where TensorRT has no other; anything else as it is (case O05)."""
    return array.astype(dtype) if dtype == "int64" and array.dtype.name == "int32" else array
