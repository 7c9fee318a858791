"""Raw little-endian tensors in files, through numpy. numpy is imported late: it comes with every runtime.

numpy has no bfloat16: such a tensor is a float32 array here, which holds every bfloat16 value exactly.
"""

import os

ALIGNMENT_BYTES = 64


def read(folder, ref):
    """The tensor at `ref` ({"file", "offset", "dtype", "shape"}) below `folder`; ValueError where cut off."""
    import numpy

    stored = numpy.dtype("uint16" if ref["dtype"] == "bfloat16" else ref["dtype"]).newbyteorder("<")
    count = 1
    for size in ref["shape"]:
        count *= size
    with open(os.path.join(folder, ref["file"]), "rb") as f:
        f.seek(ref["offset"])
        data = f.read(count * stored.itemsize)
    if len(data) != count * stored.itemsize:
        raise ValueError("the file %s ends inside a tensor" % ref["file"])
    array = numpy.frombuffer(data, stored)
    if ref["dtype"] == "bfloat16":
        array = (array.astype("<u4") << 16).view("<f4")
    return array.astype(array.dtype.newbyteorder("=")).reshape(ref["shape"])


class Writer:
    """A file of raw tensors, one after the other; `add` says where each lies."""

    def __init__(self, folder, file_name):
        self._name = file_name
        self._file = open(os.path.join(folder, file_name), "wb")  # noqa: SIM115  closed by close()

    def add(self, array, dtype):
        import numpy

        if dtype == "bfloat16":
            array = (numpy.ascontiguousarray(array, "<f4").view("<u4") >> 16).astype("<u2")
        data = numpy.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
        self._file.write(b"\0" * (-self._file.tell() % ALIGNMENT_BYTES))
        offset = self._file.tell()
        self._file.write(data)
        return {"file": self._name, "offset": offset, "dtype": dtype, "shape": list(array.shape)}

    def close(self):
        self._file.close()
