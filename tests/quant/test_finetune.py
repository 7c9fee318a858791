"""Quantization-aware training: what it learns, what it leaves alone, and what it says of bad training."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from edgeopt.quant import convert, pt2e
from edgeopt.quant import state as state_dict
from edgeopt.quant.prepare import prepare
from tests.quant.programs import outputs, quantization
from tests.quant.training import Loader, cross_entropy, equal, loss_of, net, trained


@pytest.fixture(scope="module", name="net")
def _net():
    return net()


@pytest.mark.parametrize("placement", ["onnxruntime-x86", "tensorrt"])
def test_training_lowers_the_loss_of_the_integer_program(net, placement):
    data = list(Loader())
    settings = quantization(placement)
    before, _ = convert.from_batches(net, settings, [batch for batch, _ in data])
    _, training = trained(net, placement=placement)
    after, report = convert.from_state(net, settings, training.state)
    assert loss_of(after, data) < 0.7 * loss_of(before, data)
    assert training.details["steps"] == 36
    assert training.details["last_loss"] < training.details["first_loss"]
    assert report.counts["convolution"]["quantized"] == 3
    assert all(v.device.type == "cpu" for v in training.state.values())


def test_the_same_seed_gives_the_same_state_bit_for_bit_and_another_does_not(net):
    (_, first), (_, second), (_, other) = (trained(net, epochs=2, seed=seed) for seed in (3, 3, 4))
    assert first.state.keys() == second.state.keys()
    assert all(torch.equal(first.state[k], second.state[k]) for k in first.state)
    assert not all(torch.equal(first.state[k], other.state[k]) for k in first.state)


def test_training_leaves_random_states_switches_and_the_program_as_they_were(net):
    weights = {k: v.clone() for k, v in net.module.state_dict().items()}
    torch.manual_seed(7), np.random.seed(7), random.seed(7)
    trained(net, epochs=1)
    drawn = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(7), np.random.seed(7), random.seed(7)
    assert drawn == (torch.rand(1).item(), np.random.rand(), random.random())
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert all(torch.equal(weights[k], v) for k, v in net.module.state_dict().items())
    assert not any(p.grad is not None for p in net.module.parameters())


def test_a_state_is_replayed_into_a_fresh_preparation(net):
    prepared, training = trained(net, epochs=1)
    again = prepare(net, quantization(), qat=True)
    state_dict.load(again.module, training.state)
    assert equal(again.module.state_dict(), training.state)  # the least scale too, which torchao would reset
    x = torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(prepared.module(x)[0], again.module(x)[0])


def test_the_integer_program_is_what_was_trained(net):
    """Q10: the stored scales are those of the fake-quantizers that the loss saw."""
    prepared, training = trained(net, epochs=2)
    integer, _ = convert.from_state(net, quantization(), training.state)
    x = torch.randn(16, 3, 16, 16)
    with torch.no_grad():
        fake = prepared.module(x)[0]
    assert float((fake - torch.from_numpy(outputs(integer, x.numpy()))).abs().max()) < 0.02 * float(fake.abs().max())


def test_ranges_do_not_move_in_evaluation(net):
    """Q08: a hundred times larger input in eval must not change a scale."""
    prepared, training = trained(net, epochs=1, freeze_observers_at=1.0)
    with torch.no_grad():
        prepared.module(100 * torch.randn(4, 3, 16, 16))
    after = prepared.module.state_dict()
    assert all(torch.equal(training.state[k], after[k]) for k in training.state)


def test_ranges_stay_after_the_fraction_of_steps_that_freezes_them(net):
    states = {}
    data = list(Loader())[:4]
    grown = [(({"x": batch["x"] * 10 ** (k // 2)}), target) for k, (batch, target) in enumerate(data)]
    for fraction in (0.5, 1.0):
        _, training = trained(net, grown, epochs=1, freeze_observers_at=fraction, learning_rate=1e-6)
        states[fraction] = float(training.state["activation_post_process_0.activation_post_process.max_val"])
    assert states[1.0] > 1.05 * states[0.5]


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_every_optimizer_changes_every_weight(net, optimizer):
    _, training = trained(net, epochs=1, optimizer=optimizer, momentum=0.5, weight_decay=1e-4)
    changed = [k for k, v in net.module.named_parameters() if not torch.equal(training.state[k], v)]
    assert changed == [k for k, _ in net.module.named_parameters()]


def test_steps_end_at_max_steps_and_a_loader_without_length_is_counted(net):
    class Stream:
        def __iter__(self):
            return iter(Loader())

    _, training = trained(net, Stream(), epochs=2)
    assert training.details["steps"] == 12
    _, training = trained(net, Stream(), epochs=2, max_steps=3)
    assert training.details["steps"] == 3


def test_the_loss_gets_the_users_structure(net):
    import dataclasses

    items = {"logits": {"kind": "tensor", "index": 0}, "aux": {"kind": "none"}}
    structure = {"kind": "dict", "items": items, "order": ["logits", "aux"]}
    wrapped = dataclasses.replace(net, signature=dataclasses.replace(net.signature, output_structure=structure))
    seen = []

    def loss(outputs, target):
        seen.append(sorted(outputs))
        return cross_entropy(outputs["logits"], target)

    trained(wrapped, loss=loss, max_steps=1)
    assert seen == [["aux", "logits"]]


def test_evaluation_is_the_state_outside_training(net):
    prepared, _ = trained(net, max_steps=1)
    assert not any(m.training for m in prepared.module.modules() if isinstance(m, pt2e.FakeQuantizeBase))
