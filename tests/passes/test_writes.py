"""In-place work is never lost or moved, by any pass (case G03)."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edgeopt.program import graph
from tests.passes.support import assert_equal, optimized, program, targets


def model(forward) -> nn.Module:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.relu = nn.ReLU(inplace=True)
            self.register_buffer("table", torch.arange(3.0))

        def forward(self, x):
            return forward(self, x)

    return Model()


def result_unused(change):
    def forward(self, x):
        y = x.clone()
        change(self, x, y)
        return y

    return forward


UNUSED = {
    "mul_": lambda self, x, y: y.mul_(0),
    "add_ to a view": lambda self, x, y: y[0].add_(1),
    "functional relu": lambda self, x, y: F.relu(y, inplace=True),
    "module relu": lambda self, x, y: self.relu(y),
    "copy_": lambda self, x, y: y.copy_(3 * x),
    "out=": lambda self, x, y: torch.mul(x, 2, out=y),
    "view of a view": lambda self, x, y: y.view(-1)[1:].view(-1).fill_(4),
    "slice": lambda self, x, y: y.__setitem__((slice(None), 1), 7.0),
    "dropout of it": lambda self, x, y: F.dropout(y, 0.5, training=False).add_(1),
    "detach of it": lambda self, x, y: y.detach().add_(1),
    "chunk of it": lambda self, x, y: y.chunk(3, 1)[1].zero_(),
    "same dtype": lambda self, x, y: y.to(torch.float32).add_(1),
    "twice": lambda self, x, y: (y.add_(1), y.mul_(2)),
    "index_put": lambda self, x, y: y.__setitem__(x > 0, 5.0),
}


@pytest.mark.parametrize("kind", UNUSED)
def test_the_write_stays(kind):
    given = program(model(result_unused(UNUSED[kind])), ("N", 3))
    result, _ = optimized(given)
    assert_equal(result, given, atol=0)


def reads_between(self, x):
    y = x.clone()
    before = y + 1
    y.add_(1)
    return before, y + 1  # equal expressions, with a write between them


def equal_copies(self, x):
    a, b = x.clone(), x.clone()
    a.add_(1)
    return a, b


def writes_a_constant(self, x):
    t = self.table.clone()
    t.add_(1)
    return x + t, self.table * 2


def view_before(self, x):
    y = x.clone()
    row = y[0]
    y.mul_(2)
    return row, y


def view_after(self, x):
    y = x.clone()
    y.mul_(2)
    row = y[0]
    row.add_(1)
    return y


def alias_of_an_input(self, x):
    y = F.dropout(x.relu(), 0.5, training=False)
    z = y.view(-1)
    y.add_(1)
    return y, z


@pytest.mark.parametrize(
    "forward", [reads_between, equal_copies, writes_a_constant, view_before, view_after, alias_of_an_input]
)  # fmt: skip
def test_order_and_sharing_stay(forward):
    given = program(model(forward), ("N", 3))
    result, _ = optimized(given)
    assert_equal(result, given, atol=0)


def test_a_plain_in_place_operator_becomes_functional():
    given = program(nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.ReLU6(inplace=True)), ("N", 3))
    result, records = optimized(given)
    assert records["out_of_place"].changed == 2
    assert not any("_.default" in target for target in targets(result))
    assert_equal(result, given)


def test_an_in_place_operator_keeps_the_dtype_of_what_it_writes_to():
    def forward(self, x):
        y = x.half() * 2
        y.add_(x)  # half.add_(float) is half, half.add(float) is float
        return y

    given = program(model(forward), ("N", 3))
    result, records = optimized(given)
    assert any("dtype" in reason for reason in records["out_of_place"].declined)
    assert_equal(result, given, atol=0)


def test_what_nothing_reads_goes():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            self.unused(x)
            return self.used(x)

    result, _ = optimized(program(Model(), ("N", 3)))
    assert targets(result) == ["aten.linear.default"]
    assert list(dict(result.module.named_parameters())) == ["inner.used.weight", "inner.used.bias"]


def writes_to_an_input(self, x):
    x.add_(1)
    y = x.relu_()
    return y * 2


def test_a_write_to_an_input_stays():
    given = program(model(writes_to_an_input), (2, 3))
    result, records = optimized(given)
    assert len(records["out_of_place"].declined) == 2
    for module in (given.module, result.module):
        x = torch.tensor([[-3.0, -1.0, 0.0], [1.0, 2.0, 3.0]])
        with torch.no_grad():
            (got,) = module(x)
        assert x.tolist() == [[0, 0, 1], [2, 3, 4]]
        assert got.tolist() == [[0, 0, 2], [4, 6, 8]]


_MAKE = (
    "{a} + 1", "{a} * 2", "{a}.clone()", "{a}.relu()", "F.dropout({a}, 0.5, False)", "{a}.detach()", "{a}[:]",
    "{a}.view(-1).view(4, 3)", "{a}.to(torch.float32)", "{a}.t().t()", "{a} - {b}", "{a}.add_({b})", "{a}.mul_(0.5)",
    "{a}.sub_({b}).relu_()", "{a}.expand(4, 3)", "{a}.type_as({b})", "{a}.chunk(1)[0]", "self.table.sum() + {a}",
    "{a}.select(0, 0).expand(4, 3).clone()",
)  # fmt: skip
_WRITE = ("{a}.add_(1)", "{a}[0].mul_(2)", "{a}[:, 1] = 5.0", "{a}.copy_({b} * 3)", "F.relu({a}, inplace=True)",
          "torch.mul({b}, 2, out={a})")  # fmt: skip


def random_forward(seed: int):
    """A forward of two (4, 3) inputs that makes, views and writes to tensors at random."""
    choose = random.Random(seed)
    names, lines = ["x", "y"], ["x = x.clone()", "y = y * 1"] if seed % 3 else []
    for i in range(choose.randint(3, 9)):
        a, b = choose.choice(names), choose.choice(names)
        if choose.random() < 0.3:
            lines.append(choose.choice(_WRITE).format(a=a, b=b))
        else:
            lines.append(f"t{i} = " + choose.choice(_MAKE).format(a=a, b=b))
            names.append(f"t{i}")
    returned = ", ".join(choose.sample(names, min(3, len(names))))
    scope = {"F": F, "torch": torch}
    exec("def forward(self, x, y):\n    " + "\n    ".join([*lines, f"return ({returned},)"]), scope)
    return scope["forward"]


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_of_views_and_writes(seed):
    forward = random_forward(seed)
    module = model(lambda self, x: x)
    type(module).forward = forward
    given = program(module, (4, 3), (4, 3))
    result, records = optimized(given)
    assert [r.name for r in records.values() if r.status == "dropped"] == []
    inputs = graph.synthetic(given.signature, {}, seed)
    before, after = (graph.to_tensors(given.signature, inputs) for _ in range(2))
    with torch.no_grad():
        want, got = given.module(*before), result.module(*after)
    for a, b in zip((*want, *before), (*got, *after), strict=True):
        np.testing.assert_array_equal(a, b)
