"""Sizes, synthetic inputs, and the export that is made once a program."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from edgeopt.program import Signature, graph
from edgeopt.spec.manifest import Axis, TensorSpec
from tests.passes.support import program


def signature(**axes: Axis) -> Signature:
    specs = (
        TensorSpec(name="x", dtype="float32", shape=(*axes, 3)),
        TensorSpec(name="ids", dtype="int64", shape=(next(iter(axes)),)),
        TensorSpec(name="mask", dtype="bool", shape=(2,)),
    )
    return Signature(specs, (), axes, None, {"x": (-1.0, 1.0), "ids": (0, 5)})


def test_example_sizes_avoid_what_export_specialises_and_differ():
    axes = {"n": Axis(min=1, opt=1, max=8), "t": Axis(min=1, opt=1, max=8), "fixed": Axis(min=1, opt=1, max=1)}
    assert graph.sizes(signature(**axes), "example") == {"n": 2, "t": 3, "fixed": 1}


def test_synthetic_inputs_keep_dtype_shape_and_range_and_repeat_by_seed():
    s = signature(n=Axis(min=1, opt=2, max=400))
    made = graph.synthetic(s, {"n": 400}, seed=1)
    assert {k: (v.dtype.name, v.shape) for k, v in made.items()} == {
        "x": ("float32", (400, 3)), "ids": ("int64", (400,)), "mask": ("bool", (2,)),
    }  # fmt: skip
    assert -1 <= made["x"].min() < -0.9 and 0.9 < made["x"].max() <= 1
    assert set(made["ids"]) == set(range(6))
    for name, array in graph.synthetic(s, {"n": 400}, seed=1).items():
        np.testing.assert_array_equal(array, made[name])
    assert (graph.synthetic(s, {"n": 400}, seed=2)["x"] != made["x"]).any()


def test_a_programs_own_arrays_are_never_written_to():
    array = np.zeros((2, 3), np.float32)
    s = Signature((TensorSpec(name="x", dtype="float32", shape=(2, 3)),), (), {}, None, {})
    graph.to_tensors(s, {"x": array})[0].add_(1)
    assert not array.any()


def test_an_export_is_made_once_and_a_changed_program_is_exported_anew():
    given = program(nn.Linear(3, 3), ("N", 3))
    assert graph.export(given) is graph.export(given)
    changed = graph.copied(given.module)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.zero_()
    other = given.after("zeroed", module=changed)
    x = torch.ones(2, 3)
    assert not graph.export(other).module()(x)[0].any()
    assert graph.export(given).module()(x)[0].any()


def test_a_copy_has_each_tensor_once_a_name():
    """A weight under two names, as `.data` and detached buffers make it: scaling one for its layer leaves the other."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = nn.Parameter(self.a.weight.data)
            self.register_buffer("c", self.a.weight.detach()[:2])
            self.register_buffer("count", torch.zeros(3))
            self.register_buffer("same", self.count)

        def forward(self, x):
            self.count.add_(1)
            return nn.functional.linear(self.b(self.a(x)), self.c) + self.same.sum()

    given = program(Tied(), ("N", 3))
    made = graph.copied(given.module)
    x = torch.randn(2, 3)
    assert torch.equal(given.module(x)[0], made(x)[0])
    values = {name: value for name, value in [*made.named_parameters(), *made.named_buffers()]}
    places = [values[n].untyped_storage().data_ptr() for n in values if n.endswith(("a.weight", "b.weight", ".c"))]
    assert len(places) == 3 == len(set(places))
    assert all(isinstance(values[n], nn.Parameter) for n in values if n.endswith("weight"))
    counts = [value for name, value in values.items() if name.endswith(("count", "same"))]
    assert len({value.untyped_storage().data_ptr() for value in counts}) == 1  # what the graph writes to stays shared
