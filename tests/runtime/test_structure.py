from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict, namedtuple

import numpy as np
import pytest

from edgeopt.digest import canonical_json
from edgeopt.errors import CaptureError
from edgeopt.runtime.structure import flatten, restore

A, B = np.array([1.0]), np.array([2.0])
Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Out:
    y: np.ndarray
    z: object = None


def is_array(value) -> bool:
    return isinstance(value, np.ndarray)


CASES = {
    "tensor": (A, ["output"], A),
    "nested dict": ({"a": {"t": A}}, ["a.t"], {"a": {"t": A}}),
    "tuple with None": ((A, None), ["output.0"], (A, None)),
    "dataclass": (Out(A), ["y"], {"y": A, "z": None}),
    "dataclass in a list": ([Out(A, B), None], ["output.0.y", "output.0.z"], [{"y": A, "z": B}, None]),
    "named tuple": (Pair(A, B), ["output.0", "output.1"], (A, B)),
    "dict in order": (OrderedDict(z=A, a=B), ["z", "a"], {"z": A, "a": B}),
    "constants": ([3, "x", 0.5, True, A], ["output.4"], [3, "x", 0.5, True, A]),
    "the same tensor twice": ((A, A), ["output.0", "output.1"], (A, A)),
    "names that read alike": ({"a.b": A, "a": {"b": B}}, ["a.b", "a.b_2"], {"a.b": A, "a": {"b": B}}),
    "empty containers": ({"t": A, "e": [], "d": {}}, ["t"], {"t": A, "e": [], "d": {}}),
}  # fmt: skip


@pytest.mark.parametrize("output, names, restored", CASES.values(), ids=CASES)
def test_flattened_and_restored(output, names, restored):
    flat = flatten(output, is_array)
    assert flat.names == names
    structure = json.loads(canonical_json(flat.structure))  # as it lives in the manifest
    got = restore(structure, flat.tensors)
    assert type(got) is type(restored)
    if isinstance(restored, dict):
        assert list(got) == list(restored)
    assert got is restored if is_array(restored) else got == restored  # numpy compares `is` first in containers


@pytest.mark.parametrize("output, said", [
    (None, "returns no tensor"), ((), "returns no tensor"), ({"a": 1}, "returns no tensor"),
    ({1: A}, "dict with the key 1"), ({"a": {3, 4}, "t": A}, "returns a set"), ((A, float("nan")), "returns a float"),
    ((A, object()), "returns a object"), (Out, "returns a type"),
])  # fmt: skip
def test_what_no_device_can_give_back_is_refused(output, said):
    with pytest.raises(CaptureError, match=said):
        flatten(output, is_array)
