"""Two processes that train together over gloo against one with the doubled batch, and how they fail together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from edgeopt.quant.training.batches import Batches
from edgeopt.quant.training.ranks import ALONE, Ranks
from tests.quant.training import Loader, equal, moved, net, trained

SETTINGS = {"optimizer": "sgd", "learning_rate": 0.05, "momentum": 0.9, "epochs": 2}
MEMBER = """
import sys
from pathlib import Path
import torch
from torch import distributed
torch.set_num_threads(1)
from edgeopt.quant.training import ranks
from tests.quant import test_distributed as test
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
store = distributed.FileStore(str(folder / "store"), 2)
with ranks.joined(store, rank, 2) as together:
    torch.save({name: case(together) for name, case in test.CASES.items()}, folder / f"{rank}.pt")
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """What every case gave in the two processes, by rank. Over 5 s: two processes import torch, once for all cases."""
    folder = tmp_path_factory.mktemp("pair")
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-c", MEMBER, str(folder)]
    members = [
        subprocess.Popen([*argv, rank], cwd=Path(__file__).parents[2], env=env, stderr=subprocess.PIPE, text=True)
        for rank in ("0", "1")
    ]
    try:
        errors = [m.communicate(timeout=200)[1] for m in members]
    finally:
        for m in members:
            m.kill()
    assert [m.returncode for m in members] == [0, 0], errors
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


def joined_batches(size: int = 16) -> list:
    """The batches of an epoch in the fixed order in which two processes take them: a pair is one doubled batch."""
    data = Loader()
    parts = [slice(i, i + size) for i in range(0, 96, size)]
    return [({"x": data.pictures[p]}, torch.from_numpy(data.labels[p])) for p in parts]


class Own:
    """A loader that makes each process's batches itself."""

    def __call__(self, rank: int, world_size: int):
        return joined_batches()[rank::world_size]


def _train(ranks: Ranks, loader=None, **changed):
    return trained(net(), loader or joined_batches(), how={"ranks": ranks}, **{**SETTINGS, **changed})[1]


def _dealt(ranks: Ranks):
    training = _train(ranks)
    return {"state": training.state, "details": training.details}


def _own(ranks: Ranks):
    from edgeopt.quant import finetune
    from edgeopt.quant.prepare import prepare
    from edgeopt.spec.project import Qat
    from tests.quant.programs import quantization
    from tests.quant.training import cross_entropy

    prepared = prepare(net(), quantization(), qat=True)
    return {"state": finetune.train(prepared, Own(), cross_entropy, Qat(**SETTINGS), seed=0, ranks=ranks).state}


def _accumulated(ranks: Ranks):
    return {"state": _train(ranks, joined_batches(8), accumulate=2).state}


def _scored(ranks: Ranks):
    """Only the first process evaluates; all keep its best epoch."""
    values = iter([3.0, 1.0] if ranks.first else [])
    training = trained(
        net(), joined_batches(), how={"ranks": ranks, "score": lambda module: {"m": next(values)}},
        **{**SETTINGS, "evaluate_every": 1},
    )[1]  # fmt: skip
    return {"state": training.state, "best": training.details["best_epoch"]}


class Failing(list):
    """Batches of which the second one of a process is bad."""

    def __init__(self, change):
        super().__init__(joined_batches())
        self[3] = change(*self[3])


def _error_of(ranks: Ranks, change):
    from edgeopt.errors import EdgeoptError

    try:
        _train(ranks, Failing(change))
    except EdgeoptError as why:
        return {"kind": type(why).__name__, "message": str(why)}


CASES = {
    "dealt": _dealt,
    "own": _own,
    "accumulated": _accumulated,
    "scored": _scored,
    "shape": lambda ranks: _error_of(ranks, lambda x, t: ({"x": x["x"][:, :, :4]}, t)),
    "labels": lambda ranks: _error_of(ranks, lambda x, t: (x, t + 9)),
    "loss": lambda ranks: _error_of(ranks, lambda x, t: (x, t * 0 - 100)),  # all ignored: 0/0
    "gradient": lambda ranks: _error_of(ranks, lambda x, t: ({"x": x["x"] * 1e30}, t)),
}


@pytest.fixture(scope="module")
def doubled():
    """One process with the doubled batch, and one with only the first half of each."""
    pairs = joined_batches(32)
    torch.set_num_threads(1)
    return net(), _train(ALONE, pairs).state, _train(ALONE, joined_batches()[::2]).state


@pytest.mark.parametrize("case", ["dealt", "own"])
def test_two_processes_train_as_one_with_the_doubled_batch(pair, doubled, case):
    """What differs is the order of sums.

    A value then lands on the other side of a rounding with a probability of about its relative error (2^-24 times the
    square root of a thousand terms, 2e-6) times the 255 steps: 5e-4 of the values change by one step of 1/255 of their
    range, so that a layer's output, and by it a gradient, moves by sqrt(5e-4)/255, 1e-4 of itself. Six steps, of which
    momentum counts each at most ten times, leave less than 6e-3 of the way that the weights went. Half of the data
    leads elsewhere.
    """
    program, whole, half = doubled
    first, second = (results[case]["state"] for results in pair)
    assert equal(first, second)
    way = moved(whole, program)
    assert float((moved(first, program) - way).norm()) <= 6e-3 * float(way.norm())
    assert float((moved(half, program) - way).norm()) > 0.1 * float(way.norm())
    for name, value in whole.items():
        if name.endswith(("min_val", "max_val")):
            torch.testing.assert_close(first[name], value, rtol=6e-3, atol=6e-3 * float(value.abs().max()))


def test_accumulated_gradients_are_averaged_once(pair, doubled):
    program, whole, _ = doubled
    first, second = (results["accumulated"]["state"] for results in pair)
    assert equal(first, second)
    way = moved(whole, program)  # near, not equal: the ranges follow each batch
    assert float((moved(first, program) - way).norm()) <= 0.3 * float(way.norm())


def test_the_first_process_judges_for_all(pair):
    first, second = (results["scored"] for results in pair)
    assert (first["best"], second["best"]) == (1, 1)
    assert equal(first["state"], second["state"])


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("shape", "dimension 2 is 4"),
        ("labels", "labels 9 to 13"),
        ("loss", "the loss is nan; all outputs of the model are finite"),
    ],
)
def test_a_batch_of_one_process_stops_both_with_its_message(pair, case, message):
    first, second = (results[case] for results in pair)
    assert first["kind"] == "StageError" and "process 1 failed" in first["message"]
    assert message in first["message"] and message in second["message"]
    assert "epoch 1, batch 2 of 3" in second["message"]


def test_a_gradient_of_one_process_stops_both_and_names_the_layer(pair):
    messages = [results["gradient"]["message"] for results in pair]
    assert all("the gradients are too large for float32" in message for message in messages)
    assert all("of the weight 'model.head.weight'" in message for message in messages)


def test_batches_are_dealt_in_turns_and_an_incomplete_round_is_left_out():
    batches = list(range(7))

    def of(rank: int) -> list:
        dealt = Batches(lambda: batches, None, Ranks(rank, 3))
        return list(dealt._dealt())

    assert [of(rank) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert np.array_equal(sorted(sum(map(of, range(3)), [])), range(6))
