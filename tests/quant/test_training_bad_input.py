"""What training says of data, losses and metrics that cannot be used, and where NaN and infinity begin."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from edgeopt.errors import DataError, StageError
from edgeopt.quant import convert, finetune
from edgeopt.quant.prepare import prepare
from edgeopt.spec.project import Qat
from tests.quant.programs import outputs, program, quantization, sqnr_db
from tests.quant.training import Loader, cross_entropy, net, trained


@pytest.fixture(scope="module", name="net")
def _net():
    return net()


def failing(at: int, value: float):
    step = iter(range(1, 1000))

    def loss(outputs, target):
        return cross_entropy(outputs, target) * (value if next(step) == at else 1.0)

    return loss


@pytest.mark.parametrize("value, word", [(float("nan"), "nan"), (float("inf"), "inf")])
def test_a_loss_that_is_not_finite_stops_training_at_its_step(net, value, word):
    with pytest.raises(StageError, match=f"the loss is {word}") as refused:
        trained(net, loss=failing(3, value), epochs=1)
    assert refused.value.where == "epoch 1, batch 3 of 6"
    assert "learning_rate" in refused.value.todo


BAD_LOSSES = {
    "no tensor": (lambda outputs, target: 0.5, "a float"),
    "no scalar": (lambda outputs, target: outputs.sum(1), r"a tensor of shape \(16,\)"),
    "no gradient": (lambda outputs, target: outputs.detach().sum(), "without gradient"),
}


@pytest.mark.parametrize("loss, message", BAD_LOSSES.values(), ids=BAD_LOSSES.keys())
def test_a_loss_that_cannot_be_trained_is_refused(net, loss, message):
    with pytest.raises(StageError, match=message):
        trained(net, loss=loss, epochs=1)


BAD_LOADERS = {
    "empty": ([], "the train loader yields no batch"),
    "no target": ([{"x": np.zeros((2, 3, 16, 16), np.float32)}], r"must be \(inputs, target\), not dict"),
    "a wrong shape": ([({"x": np.zeros((2, 3, 8, 8), np.float32)}, torch.zeros(2).long())], "dimension 2 is 8"),
    "NaN": ([({"x": np.full((2, 3, 16, 16), np.nan, np.float32)}, torch.zeros(2).long())], "NaN"),
}


@pytest.mark.parametrize("loader, message", BAD_LOADERS.values(), ids=BAD_LOADERS.keys())
def test_training_data_that_cannot_be_used_is_named(net, loader, message):
    prepared = prepare(net, quantization(), qat=True)
    with pytest.raises(DataError, match=message):
        finetune.train(prepared, lambda: loader, cross_entropy, Qat(), seed=0)


class Broken(nn.Module):
    """NaN outputs, or finite outputs whose gradient is infinite, of the inner module, where a value is 0."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.first, self.inner, self.last = nn.Conv2d(3, 4, 3), inner, nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(self.first(x)).mean((2, 3)))


class Logarithm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(x - 100)


class Root(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(x * 0)


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (Logarithm(), r"the loss is nan; the first that is not finite is the output of 'model.inner' \(log"),
        (
            Root(),
            r"a gradient is not finite.*backwards, the first is the gradient at the output of .model.inner. \(mul",
        ),
    ],
    ids=["output", "gradient"],
)
def test_the_layer_where_a_value_stops_being_finite_is_named(inner, message):
    torch.manual_seed(0)
    with pytest.raises(StageError, match=message) as refused:
        trained(program(Broken(inner), 3, 16, 16), epochs=1)
    assert refused.value.where == "epoch 1, batch 1 of 6"


def test_a_weight_that_is_not_finite_is_named(net):
    prepared = prepare(net, quantization(), qat=True)
    with torch.no_grad():
        dict(prepared.module.named_parameters())["model.block.first.weight"][0, 0, 0, 0] = float("inf")
    with pytest.raises(StageError, match="the weight 'model.block.first.weight'"):
        finetune.train(prepared, Loader, cross_entropy, Qat(), seed=0)


def test_looking_for_the_fault_moves_no_range(net):
    from edgeopt.quant.training import not_finite, ranges
    from edgeopt.quant.training.ranks import ALONE

    prepared, _ = trained(net, max_steps=2, freeze_observers_at=1.0)
    before = {k: v.clone() for k, v in prepared.module.state_dict().items()}
    with ranges.following(prepared.module, ALONE):
        x = [100 * torch.randn(4, 3, 16, 16)]
        assert not_finite.in_outputs(prepared.module, x) is None
        assert not_finite.in_gradients(prepared.module, x, lambda flat: flat[0].square().sum()) is None
        assert all(fake.training for fake in ranges.fakes(prepared.module))
    assert all(torch.equal(before[k], v) for k, v in prepared.module.state_dict().items())


@pytest.mark.parametrize("label", [7, -1, 2**40])
@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_a_label_out_of_range_is_named_with_its_batch(net, label, kind):
    good = list(Loader())[0]
    labels = good[1].clone()
    labels[3] = label

    def loss(outputs, target):
        return cross_entropy(outputs, torch.as_tensor(target))

    with pytest.raises(DataError, match="out of bounds") as refused:
        trained(net, [(good[0], kind(good[1].numpy())), (good[0], kind(labels.numpy()))], loss=loss, epochs=1)
    assert "epoch 1, batch 2 of 2" in refused.value.where
    assert f"labels {min(label, 0)} to {max(label, 4)}" in refused.value.what
    assert "room 5" in refused.value.what


def test_a_loss_that_raises_is_named_with_its_batch(net):
    with pytest.raises(DataError, match="'loss' failed: KeyError: 'scores'") as refused:
        trained(net, loss=lambda outputs, target: {}["scores"], epochs=1)
    assert refused.value.where == "epoch 1, batch 1 of 6"


class Varying:
    """`counts[k]` batches in its k-th epoch; says that it has `length`, where one is given."""

    def __init__(self, *counts: int, length: int | None = None, change=lambda k, item: item):
        self.counts, self.epoch, self.change = list(counts), -1, change
        if length is not None:
            self.__class__ = type("Sized", (Varying,), {"__len__": lambda _: length})

    def __iter__(self):
        self.epoch += 1
        items = list(Loader())
        for k in range(self.counts[min(self.epoch, len(self.counts) - 1)]):
            yield self.change(k, items[k % len(items)])


@pytest.mark.parametrize(
    ("loader", "steps", "warnings"),
    [
        (Varying(4, 4, length=6), 8, [(1, 4, 6), (2, 4, 6)]),
        (Varying(6, 3, length=6), 9, [(2, 3, 6)]),
        (Varying(6, 9, length=6), 15, [(2, 9, 6)]),
        (Varying(6, 6, 5), 11, [(2, 5, 6)]),  # without a length, the first time is for counting
    ],
    ids=["ends early", "fewer later", "more later", "fewer, uncounted"],
)
def test_an_epoch_of_another_length_is_trained_and_said(net, loader, steps, warnings):
    _, training = trained(net, loader, epochs=2)
    assert training.details["steps"] == steps
    said = [f"epoch {epoch} had {seen} batches where {expected} were expected" for epoch, seen, expected in warnings]
    assert training.details["warnings"] == said


def test_a_generator_that_is_used_up_is_told_from_an_empty_loader(net):
    used = iter(Loader())
    with pytest.raises(DataError, match="epoch 1 yields no batch") as refused:
        trained(net, used, epochs=2)  # counted, and then empty
    assert "new iterable" in refused.value.todo


CHANGES = {
    "dtype": (lambda t: t.double(), "the target is a float64 tensor of 1 dimensions, and was a int64 tensor of 1"),
    "rank": (lambda t: t[:, None], "the target is a int64 tensor of 2 dimensions"),
    "type": (lambda t: t.numpy(), "the target is a int64 array"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES.keys())
def test_targets_that_change_their_kind_are_refused(net, change, message):
    loader = Varying(6, change=lambda k, item: (item[0], change(item[1])) if k == 2 else item)
    with pytest.raises(DataError, match=message) as refused:
        trained(net, loader, epochs=1)
    assert refused.value.where == "epoch 1, batch 3 of 6"


def test_inputs_that_change_their_shape_are_refused(net):
    loader = Varying(6, change=lambda k, item: ({"x": item[0]["x"][:, :, :8]}, item[1]) if k == 2 else item)
    with pytest.raises(DataError, match="dimension 2 is 8 where 16 is declared") as refused:
        trained(net, loader, epochs=1)
    assert "epoch 1, batch 3 of 6" in refused.value.where


def test_a_smaller_last_batch_is_no_change(net):
    items = list(Loader())
    items[-1] = ({"x": items[-1][0]["x"][:3]}, items[-1][1][:3])
    assert trained(net, items, epochs=2)[1].details["steps"] == 12


class Zeroed(nn.Module):
    """A BatchNorm whose gamma is 0 in one channel, as zero-initialised residual branches have it."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 5)
        with torch.no_grad():
            self.norm.weight[1] = 0.0
            self.conv.weight[2] = 0.0
            self.last.weight[3] = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


@pytest.mark.parametrize("folded", [True, False], ids=["folded", "left in the graph"])
def test_channels_of_zeros_train_and_convert(folded):
    torch.manual_seed(0)
    model = Zeroed().eval()
    if folded:
        model.conv = torch.nn.utils.fusion.fuse_conv_bn_eval(model.conv, model.norm)
        model.norm = nn.Identity()
    zeroed = program(model, 3, 16, 16)
    prepared, training = trained(zeroed, epochs=2)
    assert all(bool(torch.isfinite(v).all()) for k, v in training.state.items() if "_val" not in k)
    integer, _ = convert.from_state(zeroed, quantization(), training.state)
    x = torch.randn(16, 3, 16, 16)
    with torch.no_grad():
        simulated = prepared.module(x)[0].numpy()
    assert sqnr_db(simulated, outputs(integer, x.numpy())) > 40
