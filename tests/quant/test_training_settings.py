"""Schedules, optimizers, accumulation, precision and early stopping."""

from __future__ import annotations

import contextlib
import math
import re

import numpy as np
import pytest
import torch
from torch import nn

from edgeopt.errors import DataError, StageError
from edgeopt.program import graph
from edgeopt.progress import Progress
from edgeopt.quant import finetune
from edgeopt.quant.prepare import prepare
from edgeopt.quant.training import loop
from edgeopt.quant.training.batches import Batch
from edgeopt.quant.training.optimizers import Optimizer, factor
from edgeopt.quant.training.ranks import ALONE
from edgeopt.quant.training.step import Stepper
from edgeopt.spec.project import Qat
from tests.quant.programs import quantization
from tests.quant.training import Loader, cross_entropy, equal, loss_of, loss_of_module, net, trained


@pytest.fixture(scope="module", name="net")
def _net():
    return net()


def test_schedules():
    def rates(**settings) -> list[float]:
        return [round(factor(step, 8, Qat(**settings)), 4) for step in range(8)]

    assert rates(schedule="constant") == [1.0] * 8
    assert rates(schedule="linear") == [1 - k / 8 for k in range(8)]
    assert rates() == [round((1 + math.cos(math.pi * k / 8)) / 2, 4) for k in range(8)]
    assert rates(schedule="linear", warmup_steps=3)[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates(warmup_steps=100)[-2:] == [0.875, 1.0]  # longer than the training: it only rises
    assert factor(9, 8, Qat()) == 0  # more batches than were counted


def float_training(net, loader, **settings):
    """The float program trained by the same loop: exact, without ranges that depend on how data is batched."""
    module = graph.copied(net.module)
    details = loop.run(
        loop.Task(
            module, net.signature, lambda: loader, cross_entropy, Qat(optimizer="sgd", learning_rate=0.1, **settings), 0
        )
    )
    return module.state_dict(), details


def halves(loader) -> list:
    return [({"x": b["x"][s]}, t[s]) for b, t in loader for s in (slice(0, 8), slice(8, 16))]


def test_accumulated_batches_are_one_larger_batch(net):
    np.random.seed(0)
    data = list(Loader())
    whole, _ = float_training(net, data)
    parts, details = float_training(net, halves(data), accumulate=2)
    assert details["steps"] == 6
    start = net.module.state_dict()
    for name in whole:
        change = (whole[name] - start[name]).abs().max()
        assert float((whole[name] - parts[name]).abs().max()) <= 1e-4 * float(change)


def test_a_last_group_of_fewer_batches_counts_as_a_mean_too(net):
    data = list(Loader())[:3]
    alone, _ = float_training(net, data[2:], schedule="constant")
    state, details = float_training(net, [data[2]] * 3, accumulate=2, schedule="constant", max_steps=1)
    assert details["steps"] == 1
    torch.testing.assert_close(state, alone)
    assert float_training(net, data, accumulate=2)[1]["steps"] == 2


def test_the_norm_of_the_gradients_is_clipped(net):
    state, _ = float_training(net, list(Loader())[:1], clip_norm=0.01)
    start = dict(net.module.named_parameters())
    moved = torch.cat([(state[k] - v.detach()).flatten() for k, v in start.items()])
    assert float(moved.norm()) == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_bf16_trains_and_keeps_weights_in_32_bits(net):
    prepared, training = trained(net, precision="bf16")
    assert training.details["last_loss"] < 0.5 * training.details["first_loss"]
    assert training.details["precision"] == "bf16"
    assert {v.dtype for k, v in training.state.items() if k.endswith("weight")} == {torch.float32}
    _, plain = trained(net)
    assert not equal(training.state, plain.state)


def stepper(net, scaler=None):
    module = graph.copied(net.module)
    weights = [p.requires_grad_(True) for p in module.parameters()]
    settings = Qat(optimizer="sgd", learning_rate=0.1)
    optimizer = Optimizer(weights, settings, 10, None)
    return module, Stepper(module, net.signature, cross_entropy, optimizer, settings, ALONE, scaler)


def batch_of(item) -> Batch:
    return Batch([torch.from_numpy(item[0]["x"])], item[1], "epoch 1, batch 1 of 1")


def test_scaled_gradients_give_the_same_step(net):
    """The scale is a power of 2, so that nothing is rounded; on the CPU, where torch's scaler works too."""
    item = batch_of(list(Loader())[0])
    (plain, first), (scaled, second) = stepper(net), stepper(net, torch.amp.GradScaler("cpu"))
    first.step([item], 0), second.step([item], 0)
    assert equal(plain.state_dict(), scaled.state_dict())


def test_a_step_whose_scaled_gradient_overflows_is_left_out(net):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)
    module, by = stepper(net, scaler)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    item = batch_of(({"x": 1e4 * list(Loader())[0][0]["x"]}, list(Loader())[0][1]))
    by.step([item], 0)
    assert equal(before, module.state_dict())
    assert scaler.get_scale() == 2.0**125


def test_an_optimizer_and_a_scheduler_of_ones_own(net):
    seen = {}

    def make(parameters):
        seen["parameters"] = len(parameters)
        optimizer = torch.optim.RMSprop(parameters, lr=1e-3)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)

    def kept(parameters):
        seen["made"] = make(parameters)
        return seen["made"]

    _, training = trained(net, epochs=1, how={"make_optimizer": kept}, optimizer="mine.py:make")
    assert seen["parameters"] == len(list(net.module.parameters()))
    assert seen["made"][0].param_groups[0]["lr"] == pytest.approx(1e-6)  # six steps of the user's schedule
    assert training.details["last_loss"] < training.details["first_loss"]


def test_an_optimizer_of_ones_own_alone_follows_the_projects_schedule(net):
    made = []

    def make(parameters):
        made.append(torch.optim.SGD([{"params": parameters[:2], "lr": 0.02}, {"params": parameters[2:]}], lr=0.01))
        return made[0]

    trained(net, epochs=1, how={"make_optimizer": make}, schedule="linear")
    rates = [group["lr"] for group in made[0].param_groups]
    assert rates == pytest.approx([0.02 / 6, 0.01 / 6])


BAD_OPTIMIZERS = {
    "nothing": (lambda parameters: None, "gave a NoneType"),
    "three": (lambda parameters: (1, 2, 3), r"gave \(int, int, int\)"),
    "no scheduler": (lambda parameters: (torch.optim.SGD(parameters, lr=1), 1), r"gave \(SGD, int\)"),
    "others": (lambda parameters: torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1), "not the model's"),
}


@pytest.mark.parametrize(("make", "message"), BAD_OPTIMIZERS.values(), ids=BAD_OPTIMIZERS.keys())
def test_an_optimizer_function_that_gives_something_else_is_refused(net, make, message):
    with pytest.raises(StageError, match=message):
        trained(net, epochs=1, how={"make_optimizer": make})


def scoring(*values: float):
    """A score that gives these values, whatever the module is; it draws random numbers and large inputs."""
    left = iter(values)

    def score(module):
        np.random.rand(3), torch.rand(3)
        with torch.no_grad():
            module(1000 * torch.randn(4, 3, 16, 16))
        return {"accuracy": next(left), "other": 0.0}

    return score


STEADY = {"schedule": "constant", "freeze_observers_at": 1.0, "evaluate_every": 1}


def test_training_stops_early_and_the_best_epoch_is_kept(net):
    _, training = trained(net, how={"score": scoring(1, 3, 2, 2.5, 9)}, patience=2, **STEADY)
    details = training.details
    assert (details["epochs"], details["best_epoch"], details["stopped_early"]) == (4, 2, True)
    assert [m["value"] for m in details["metrics"]] == [1, 3, 2, 2.5]
    _, shorter = trained(net, how={"score": scoring(1, 3)}, **{**STEADY, "epochs": 2})
    assert equal(training.state, shorter.state)


def test_evaluation_changes_nothing_of_the_training(net):
    _, watched = trained(net, how={"score": scoring(*range(6))}, **STEADY)
    _, alone = trained(net, **{**STEADY, "evaluate_every": None})
    assert equal(watched.state, alone.state)


def test_evaluations_come_every_so_many_epochs_and_at_the_end(net):
    _, training = trained(net, how={"score": scoring(1, 2, 3)}, **{**STEADY, "evaluate_every": 4})
    assert [m["epoch"] for m in training.details["metrics"]] == [4, 6]


def test_a_metric_that_is_not_there_is_named(net):
    with pytest.raises(DataError, match="evaluate gives no metric 'f1'") as refused:
        trained(net, how={"score": scoring(1)}, metric="f1", **STEADY)
    assert "accuracy, other" in refused.value.todo


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_said(net):
    with pytest.raises(StageError, match="torch finds no GPU here"):
        trained(net, device="cuda", precision="fp16")


def test_a_line_now_and_then_has_loss_metric_and_time_left(net, caplog, monkeypatch):
    monkeypatch.setattr(loop, "LOG_EVERY_S", 0.0)
    with caplog.at_level("INFO", logger="edgeopt"):
        trained(net, how={"score": scoring(0.5, 0.75)}, **{**STEADY, "epochs": 2})
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 11  # not at the last of 12 steps
    assert re.fullmatch(r"qat: step 1 of 12, loss [\d.]+, about \d+ s left", lines[0])
    assert re.fullmatch(r"qat: step 7 of 12, loss [\d.]+, metric 0.5, about \d+ s left", lines[6])


def test_the_bar_has_loss_and_metric(net):
    class Shown(Progress):
        def __init__(self):
            super().__init__(quiet=True)
            self.labels, self.done = [], 0

        @contextlib.contextmanager
        def bar(self, label, total, *, unit=""):
            def advance(amount, label=None):
                self.done += amount
                self.labels.append(label)

            self.total = total
            yield advance

    shown = Shown()
    trained(net, how={"score": scoring(0.5, 0.75), "progress": shown}, **{**STEADY, "epochs": 2}, metric="accuracy")
    assert (shown.done, shown.total) == (12, 12)
    assert re.fullmatch(r"qat, loss [\d.]+, accuracy 0.5", shown.labels[-1])


def test_the_float_control_trains_the_float_program_on_the_same_data(net):
    seen = []

    def loss(outputs, target):
        seen.append(target.clone())
        return cross_entropy(outputs, target)

    settings = Qat(learning_rate=1e-2, epochs=2)
    prepared = prepare(net, quantization(), qat=True)
    finetune.train(prepared, Loader, loss, settings, seed=0)
    weights = {k: v.clone() for k, v in net.module.state_dict().items()}

    def score(module):
        return {"loss": -loss_of_module(module)}

    details = finetune.control(prepared, Loader, loss, settings, seed=0, score=score)
    assert details["steps"] == 12
    assert details["metrics_after"]["loss"] > details["metrics_before"]["loss"]
    assert all(torch.equal(a, b) for a, b in zip(seen[:12], seen[12:], strict=True))
    assert equal(weights, net.module.state_dict())


def test_a_tied_weight_is_trained_as_one(net):
    from edgeopt.quant import convert
    from tests.quant.programs import outputs, program, sqnr_db

    class TiedTwice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
            self.second.weight = self.first.weight
            self.last = nn.Linear(3, 5)

        def forward(self, x):
            return self.last(self.second(torch.relu(self.first(x))).mean((2, 3)))

    tied = program(TiedTwice(), 3, 16, 16)
    prepared, training = trained(tied, epochs=2, learning_rate=1e-2)
    names = [k for k in training.state if k.endswith(("first.weight", "second.weight"))]
    assert all(torch.equal(training.state[names[0]], training.state[k]) for k in names)
    integer, _ = convert.from_state(tied, quantization(), training.state)
    x = torch.randn(8, 3, 16, 16)
    with torch.no_grad():
        simulated = prepared.module(x)[0]
    assert sqnr_db(simulated.numpy(), outputs(integer, x.numpy())) > 40
    assert loss_of(integer, list(Loader())) < 1.7
