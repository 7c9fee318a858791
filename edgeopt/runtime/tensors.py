"""numpy arrays as packs of raw little-endian tensors, the form in which artifacts and the runner keep them.

numpy has no bfloat16: such a tensor is a float32 array here, which holds every bfloat16 value exactly.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

import numpy as np

from edgeopt.errors import ArtifactError, DataError, disk_error
from edgeopt.spec.manifest import DTYPE_BYTES, TensorRef

ALIGNMENT_BYTES = 64  # so that a file that is mapped into memory gives tensors that vector units load directly


class PackWriter:
    """A file of raw tensors, one after the other. `file_name` is the name that its TensorRefs carry."""

    def __init__(self, path: Path | str, file_name: str):
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._path, "wb")  # noqa: SIM115  closed by close()
        self._name = file_name

    def add(self, array: np.ndarray, *, dtype: str | None = None) -> TensorRef:
        """Append `array` and say where it lies. `dtype` 'bfloat16' stores a float32 array as bfloat16.

        Raises DataError for a dtype that artifacts do not hold, and for a float32 that is no bfloat16 value.
        """
        array = np.asarray(array)
        data = _encode(array, dtype or array.dtype.name)
        try:
            self._file.write(b"\0" * (-self._file.tell() % ALIGNMENT_BYTES))
            offset = self._file.tell()
            self._file.write(data)
        except OSError as why:
            raise disk_error(why, self._path, error=ArtifactError) from why
        return TensorRef(file=self._name, offset=offset, dtype=dtype or array.dtype.name, shape=array.shape)

    def close(self) -> None:
        """Write what is buffered and close the file. Raises SpaceError where the disk is full."""
        try:
            self._file.close()
        except OSError as why:
            raise disk_error(why, self._path, error=ArtifactError) from why

    def __enter__(self) -> PackWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read(folder: Path | str, ref: TensorRef) -> np.ndarray:
    """The tensor at `ref` below `folder`, as an array of its own (bfloat16 as float32).

    Raises ArtifactError where the file is missing or ends too early.
    """
    path = Path(folder) / ref.file
    try:
        with open(path, "rb") as f:
            f.seek(ref.offset)
            left = max(0, os.fstat(f.fileno()).st_size - ref.offset)
            data = f.read(min(left, ref.size_bytes))  # a size that is only claimed takes no memory
    except OSError as why:
        raise ArtifactError(
            f"cannot read a tensor: {why.strerror}", where=str(path), todo="copy or build the artifact again"
        ) from None
    if len(data) != ref.size_bytes:
        raise ArtifactError(
            f"the file ends inside a tensor: {len(data)} of {ref.size_bytes} bytes at offset {ref.offset}",
            where=str(path), todo="copy or build the artifact again",
        )  # fmt: skip
    return _decode(data, ref.dtype).reshape(ref.shape)


def _encode(array: np.ndarray, dtype: str) -> bytes:
    if dtype not in DTYPE_BYTES:
        raise DataError(f"a tensor of dtype {dtype} cannot be stored", todo="use one of: " + ", ".join(DTYPE_BYTES))
    if dtype != "bfloat16":
        return np.ascontiguousarray(array, dtype=np.dtype(dtype).newbyteorder("<")).tobytes()
    bits = np.ascontiguousarray(array, dtype="<f4").view("<u4")
    if (bits & 0xFFFF).any():
        raise DataError("a float32 tensor holds values that bfloat16 does not", todo="round it to bfloat16 first")
    return (bits >> 16).astype("<u2").tobytes()


def _decode(data: bytes, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").astype(np.float32)
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).astype(dtype)
