from __future__ import annotations

import numpy as np
import pytest

from edgeopt.errors import ArtifactError, DataError, SpaceError
from edgeopt.runtime import tensors
from edgeopt.runtime.tensors import PackWriter
from edgeopt.spec.manifest import DTYPE_BYTES, TensorRef


def round_trip(folder, array, **how):
    with PackWriter(folder / "sub" / "pack.bin", "sub/pack.bin") as pack:
        pack.add(np.zeros(3, np.uint8))
        ref = pack.add(array, **how)
    return ref, tensors.read(folder, ref)


@pytest.mark.parametrize("dtype", [d for d in DTYPE_BYTES if d != "bfloat16"])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 0, 3), (2, 3, 4)])
def test_every_dtype_and_shape_comes_back(tmp_path, dtype, shape):
    array = (np.arange(np.prod(shape)).reshape(shape) % 2).astype(dtype)
    ref, got = round_trip(tmp_path, array)
    assert (ref.dtype, ref.shape, ref.file) == (dtype, shape, "sub/pack.bin")
    assert ref.offset % tensors.ALIGNMENT_BYTES == 0 and ref.offset > 0
    assert got.dtype == array.dtype and got.shape == shape and got.flags.writeable
    np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize("array", [
    np.arange(12.0).reshape(3, 4).T, np.arange(12.0)[::2], np.arange(4, dtype=">f8"), np.arange(4, dtype=">i4"),
    np.array([np.nan, np.inf, -np.inf, -0.0]),
], ids=["transposed", "strided", "big-endian float", "big-endian int", "special"])  # fmt: skip
def test_layout_byte_order_and_special_values_do_not_matter(tmp_path, array):
    np.testing.assert_array_equal(round_trip(tmp_path, array)[1], array)


def test_the_bytes_are_little_endian(tmp_path):
    ref, _ = round_trip(tmp_path, np.array([1.0, -2.0], np.float32))
    data = (tmp_path / "sub" / "pack.bin").read_bytes()[ref.offset :]
    assert data == bytes.fromhex("0000803f 000000c0")


def test_bfloat16_is_float32_here_and_two_bytes_there(tmp_path):
    array = np.array([1.0, -2.5, 3.140625, np.inf], np.float32)
    ref, got = round_trip(tmp_path, array, dtype="bfloat16")
    assert ref.dtype == "bfloat16" and ref.size_bytes == 8
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, array)


def test_a_value_that_bfloat16_lacks_is_refused(tmp_path):
    with pytest.raises(DataError, match="bfloat16 does not"):
        round_trip(tmp_path, np.array([1.001], np.float32), dtype="bfloat16")


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([1j]), np.array([{}])])
def test_what_is_no_tensor_is_refused(tmp_path, array):
    with pytest.raises(DataError, match="cannot be stored"):
        round_trip(tmp_path, array)


def test_a_file_that_ends_early_or_is_not_there_is_named(tmp_path):
    (tmp_path / "short.bin").write_bytes(b"1234567")
    with pytest.raises(ArtifactError, match=r"7 of 8 bytes at offset 0\n.*short.bin"):
        tensors.read(tmp_path, TensorRef(file="short.bin", offset=0, dtype="float32", shape=(2,)))
    with pytest.raises(ArtifactError, match=r"No such file.*\n.*gone.bin"):
        tensors.read(tmp_path, TensorRef(file="gone.bin", offset=0, dtype="float32", shape=(2,)))


@pytest.mark.parametrize("count", [1, 1 << 20])
def test_a_full_disk_is_said(tmp_path, count):
    (tmp_path / "pack.bin").symlink_to("/dev/full")
    with pytest.raises(SpaceError, match="disk is full"), PackWriter(tmp_path / "pack.bin", "pack.bin") as pack:
        pack.add(np.zeros(count, np.float32))
