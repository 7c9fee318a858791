"""The order of the search, the budget, and the times that it goes by; whole searches are in tests/flows."""

from __future__ import annotations

import dataclasses
import random
import time

import numpy as np
import pytest
import torch

from edgeopt.backends import onnx_export
from edgeopt.backends.layer_times import layer_times
from edgeopt.pipeline import tries
from edgeopt.pipeline.cache import StageCache
from edgeopt.pipeline.gates import GateRow, mendable
from edgeopt.pipeline.job import Job
from edgeopt.pipeline.mixed import Budget, OutOfTime, fewest, most_float, ranked
from edgeopt.pipeline.stages import integer_stages, run_stage
from edgeopt.quant import convert
from edgeopt.quant.sensitivity import Layer
from edgeopt.spec.manifest import Candidate
from edgeopt.spec.profile import load_profile
from edgeopt.spec.project import load_project
from edgeopt.spec.report import CandidateResult, Check
from tests.quant.models import Attention, Net, Tied
from tests.quant.programs import batches, program, quantization
from tests.small_project import write_project


def layer(node: str, noise: float, macs: int = 100) -> Layer:
    return Layer(node, node, "convolution", macs, 0, noise, None)


@pytest.mark.parametrize("seed", range(40))
def test_the_search_finds_a_set_of_which_every_member_is_needed(seed):
    rng = random.Random(seed)
    count = rng.randint(1, 40)
    needed = set(rng.sample(range(count), rng.randint(1, min(4, count))))
    tried: list[tuple[int, ...]] = []

    def passes(chosen):
        tried.append(chosen)
        return needed <= set(chosen)

    assert set(fewest(range(count), passes)) == needed
    assert tried[0] == tuple(range(count))  # something to ship comes first
    assert len(tried) == len(set(tried))  # nothing is built twice
    assert len(tried) <= 2 * count.bit_length() + max(needed) + 2


def test_where_all_of_them_are_not_enough_one_try_tells():
    tried = []
    assert fewest(range(30), lambda chosen: tried.append(chosen)) is None
    assert len(tried) == 1


def test_the_layer_that_gains_least_for_what_it_costs_is_left_float_first():
    layers = (layer("cheap", 0.4), layer("dear", 0.4), layer("worst", 10.0), layer("clean", 1e-6))
    order = [r.layer.node for r in ranked(layers, {"cheap": 1.0, "dear": 9.0, "worst": 30.0, "clean": 0.1})]
    assert order == ["cheap", "worst", "dear", "clean"]
    slower = [r.layer.node for r in ranked(layers, {"cheap": 1.0, "dear": -2.0, "worst": 30.0, "clean": -9.0})]
    assert slower[0] == "dear" and slower[-1] == "clean"  # int8 is slower there; the other costs nothing


def test_of_what_int8_gains_a_part_must_stay():
    layers = tuple(layer(f"l{i}", 1.0 + i) for i in range(10))
    even = ranked(layers, {x.node: 1.0 for x in layers})
    assert most_float(even) == 9
    big = ranked(layers, {x.node: 100.0 if x.node == "l9" else 1.0 for x in layers})
    assert 0 < most_float(big) < 10 and all(r.layer.node != "l9" for r in big[: most_float(big)])
    assert most_float(ranked(layers[:1], {"l0": 1.0})) == 0


def test_a_try_begins_only_where_there_is_time_for_it():
    budget = Budget(1.0)
    budget.need(50)
    with pytest.raises(OutOfTime):
        budget.need(61)
    with pytest.raises(OutOfTime):
        Budget(1.0, started=time.monotonic() - 61).need(0)


def row(*checks: Check, precision: str = "int8", failure: str | None = None) -> GateRow:
    candidate = Candidate(name=f"c-{precision}", runtime="onnxruntime", precision=precision, file="x.onnx")
    result = CandidateResult(name=candidate.name, runtime="onnxruntime", precision=precision, failure=failure)
    return GateRow(candidate, result, checks)


LOST = Check(name="metric accuracy", verdict="fail", value=0.5, limit=0.9)
FINE = Check(name="metric accuracy", verdict="pass", value=0.95, limit=0.9)
FLOAT = Check(name="integer kernels", verdict="fail", value=0, limit=2)
ROWS = {
    "accuracy": ((row(LOST), row(FINE, precision="fp32")), True),
    "a proxy": ((row(Check(name="proxy sqnr_db", verdict="fail", value=5, limit=20)),), True),
    "nothing fails": ((row(FINE),), False),
    "another int8 passes": ((row(LOST), row(FINE)), False),
    "float kernels": ((row(FLOAT),), False),
    "float kernels as well": ((row(LOST, FLOAT),), False),
    "it crashed": ((row(failure="abort: signal 11"),), False),
    "only float candidates": ((row(LOST, precision="fp32"),), False),
}  # fmt: skip


@pytest.mark.parametrize("rows, wanted", ROWS.values(), ids=ROWS)
def test_only_lost_accuracy_is_searched_for(rows, wanted):
    assert mendable(rows) is wanted


TIMED = {"residual": (Net, (3, 16, 16), 3, 1), "tied": (Tied, (4, 8, 8), 2, 0), "attention": (Attention, (6, 16), 0, 6)}


@pytest.mark.parametrize("model, sizes, convolutions, products", TIMED.values(), ids=TIMED)
def test_every_layer_is_timed_in_the_float_and_in_the_int8_file(model, sizes, convolutions, products, tmp_path):
    torch.manual_seed(0)
    float_program = program(model(), *sizes)
    integer, _ = convert.from_batches(float_program, quantization(), batches(*sizes))
    for made in (float_program, integer):
        file = onnx_export.write(made, tmp_path, opset_max=18)
        times = layer_times(tmp_path / file.name, {"x": batches(*sizes)[0]["x"]}, runs=5)
        assert {kind: len(found) for kind, found in times.items()} == {
            "convolution": convolutions, "product": products,
        }  # fmt: skip
        told = [ms for found in times.values() for ms in found if ms is not None]
        assert len(told) >= (convolutions + products) * 0.8 and all(ms > 0 for ms in told)


def test_a_layer_of_a_hundred_times_the_work_takes_the_longest(tmp_path):
    class Uneven(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.small, self.large, self.last = (torch.nn.Conv2d(*s) for s in ((3, 32, 1), (32, 64, 7), (64, 1, 1)))

        def forward(self, x):
            return self.last(torch.relu(self.large(torch.relu(self.small(x)))))

    file = onnx_export.write(program(Uneven(), 3, 32, 32), tmp_path, opset_max=18)
    times = layer_times(tmp_path / file.name, {"x": np.zeros((1, 3, 32, 32), np.float32)}, runs=5)["convolution"]
    assert times.index(max(times)) == 1


def test_a_try_trains_alone_or_not_at_all_where_torchrun_started_the_build(tmp_path, monkeypatch):
    """The other processes train once and leave: a second call would wait for them, or stop them in the middle."""
    job = Job(load_profile("x86-cpu"), load_project(write_project(tmp_path / "p")), tmp_path / "work")
    assert tries.training(job).run is integer_stages(())["qat"].run
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    program_, record = run_stage(tries.training(job), None, job, StageCache(tmp_path / "cache"), "key")
    assert program_ is None and record.skipped.startswith("it takes a training of its own")
    assert "build again in one process" in record.skipped
    own = dataclasses.replace(job, project=load_project(job.project.folder, {"qat.trainer": "data.py:train"}))
    assert tries.training(own).run is integer_stages(())["qat"].run  # by itself in either case
