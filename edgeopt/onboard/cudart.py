"""CUDA's runtime by ctypes: memory on the GPU, copies and a stream; no pycuda. Functions as in cuda_runtime_api.h."""

import ctypes
import ctypes.util

from .failures import Failure

_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2  # cudaMemcpyKind
_NO_MEMORY = 2  # cudaErrorMemoryAllocation
# of JetPack 4 (10.2), 5 (11), 6 (12) and 7 (13), newest first
_NAMES = ("libcudart.so", "libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so.10.2")


class Cudart:
    """The library, every call checked. Failure of kind 'missing-runtime' where it is not there."""

    def __init__(self):
        self._library = _first(list(_NAMES) + [ctypes.util.find_library("cudart")])
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        self._library.cudaMalloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]
        self._library.cudaFree.argtypes = [ctypes.c_void_p]
        self._library.cudaMemcpyAsync.argtypes = [
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p,
        ]  # fmt: skip
        for name in ("cudaStreamSynchronize", "cudaStreamDestroy"):
            getattr(self._library, name).argtypes = [ctypes.c_void_p]

    def allocate(self, size):
        """The address of `size` bytes on the GPU."""
        pointer = ctypes.c_void_p()
        self._check("cudaMalloc", self._library.cudaMalloc(ctypes.byref(pointer), max(size, 1)))
        return pointer.value

    def free(self, address):
        self._check("cudaFree", self._library.cudaFree(address))

    def stream(self):
        pointer = ctypes.c_void_p()
        self._check("cudaStreamCreate", self._library.cudaStreamCreate(ctypes.byref(pointer)))
        return pointer.value

    def destroy(self, stream):
        self._check("cudaStreamDestroy", self._library.cudaStreamDestroy(stream))

    def to_device(self, address, array, stream):
        """Copy a contiguous array there."""
        self._copy(address, array.ctypes.data, array.nbytes, _HOST_TO_DEVICE, stream)

    def to_host(self, array, address, stream):
        """Copy into a contiguous array; complete only after `synchronize`."""
        self._copy(array.ctypes.data, address, array.nbytes, _DEVICE_TO_HOST, stream)

    def synchronize(self, stream):
        self._check("cudaStreamSynchronize", self._library.cudaStreamSynchronize(stream))

    def _copy(self, to, source, size, kind, stream):
        self._check("cudaMemcpyAsync", self._library.cudaMemcpyAsync(to, source, size, kind, stream))

    def _check(self, name, code):
        if code:
            words = (self._library.cudaGetErrorString(code) or b"").decode("utf-8", "replace")
            raise Failure("memory" if code == _NO_MEMORY else "run", "%s failed: %s (%d)" % (name, words, code))


def _first(names):
    for name in names:
        if name:
            try:
                return ctypes.CDLL(name)
            except OSError:
                continue
    raise Failure("missing-runtime", "the device has no CUDA runtime (libcudart): install CUDA's runtime library")
