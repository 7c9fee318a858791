"""Where rules and ranges are not enough: modules that keep fp32 are searched for, and a hopeless model is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from edgeopt.passes.half import half
from edgeopt.passes.half_search import MOST_TRIES, culprits
from edgeopt.program import Call, graph
from edgeopt.spec.half_formats import FORMATS
from tests.passes.half_support import converted, sqnr_db, types_of
from tests.passes.support import program


class Fragile(nn.Module):
    """x plus a large number, and the same number away again: each step is harmless, the two are not."""

    def forward(self, x):
        return ((x / 16 + 2000) - 2000) * 16


class Layer(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class Net(nn.Module):
    def __init__(self, fragile: int):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(Layer(16, 16) for _ in range(12)))
        self.fragile = nn.ModuleList(Fragile() for _ in range(fragile))

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i in (4, 9) and i // 5 < len(self.fragile):
                x = self.fragile[i // 5](x)
        return x


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("count", [1, 2])
def test_the_modules_that_spoil_the_answer_are_found_and_named(count, precision):
    float32, result, report = converted(Net(count), ("N", 16), precision=precision)
    assert report.refused is None
    assert {path for path in report.searched if "fragile" in path} == {f"inner.fragile.{i}" for i in range(count)}
    assert len(report.searched) <= 2 * count and report.tries <= MOST_TRIES + 2
    inputs = float32.reference[0].inputs
    assert sqnr_db(graph.run(float32, inputs), graph.run(result, inputs)) >= FORMATS[precision].least_sqnr_db
    assert "modules more keep fp32" in report.warnings[0] and "SQNR" in report.warnings[0]
    assert "float16" in str(types_of(result)["linear"]) or "bfloat16" in str(types_of(result)["linear"])


def test_a_model_that_is_nothing_in_16_bits_is_refused_with_figures():
    class Difference(nn.Module):
        """Two products that differ in the last digits: what is left of them is all rounding."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)
            self.other.load_state_dict({k: v * (1 + 1e-5) for k, v in self.one.state_dict().items()})

        def forward(self, x):
            return self.one(x) - self.other(x)

    float32, result, report = converted(Difference(), ("N", 16))
    assert result is float32 and result.half is None
    assert "SQNR" in report.refused and "no convolution or matrix product" in report.refused


def test_where_the_reference_itself_is_another_the_precision_is_not_blamed():
    float32 = program(Net(0), ("N", 16))
    call = float32.reference[0]
    wrong = Call(call.inputs, {"y0": call.outputs["y0"] * 1.5})
    result, report = half(dataclasses.replace(float32, reference=(wrong,)), "fp16")
    assert result.half is None and "and so it is with everything in fp32" in report.refused
    assert report.tries == 0


def test_an_integer_that_flips_is_a_fault():
    class Place(nn.Module):
        """Which of two nearly equal scores is larger: a matter of the last digits."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.before, self.score = nn.Linear(16, 16), nn.Linear(16, 1)

        def forward(self, x):
            score = self.score(self.before(x).tanh())
            return torch.cat([score, score * (1 + 1e-5)], -1).argmax(-1)

    float32, result, report = converted(Place(), ("N", 64, 16))
    inputs = float32.reference[0].inputs
    assert report.refused is None and report.searched
    np.testing.assert_array_equal(graph.run(result, inputs)["y0"], graph.run(float32, inputs)["y0"])


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1, max_size=4)))
)
def test_the_search_finds_what_is_needed_and_always_ends_with_what_passes(given_units):
    count, needed = given_units
    units = [f"m{i}" for i in range(count)]
    wanted = {f"m{i}" for i in needed}
    calls = []

    def passes(kept: frozenset[str]) -> bool:
        calls.append(kept)
        return wanted <= kept

    kept, tries, ended = culprits(units, passes)
    assert wanted <= kept and tries == len(calls) <= MOST_TRIES
    assert kept == wanted if ended else tries == MOST_TRIES
