"""The model in the hands of another trainer: what it is called with, what `finish` takes, and what it refuses."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from edgeopt.errors import DataError, StageError
from edgeopt.quant import convert
from edgeopt.quant.prepare import prepare
from edgeopt.quant.training import hooks
from tests.quant.programs import outputs, quantization, sqnr_db
from tests.quant.training import Loader, cross_entropy, equal, loss_of, net


@pytest.fixture(scope="module", name="net")
def _net():
    return net()


def model(net) -> hooks.FakeQuantized:
    return hooks.FakeQuantized(prepare(net, quantization(), qat=True))


def fit(module: nn.Module, epochs: int = 4) -> None:
    """A loop that knows nothing of quantization."""
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    for _ in range(epochs):
        for batch, target in Loader():
            optimizer.zero_grad()
            cross_entropy(module(torch.from_numpy(batch["x"])), target).backward()
            optimizer.step()


def test_a_plain_loop_trains_it_and_the_integer_program_is_what_it_trained(net, tmp_path):
    np.random.seed(0)
    trained = model(net)
    fit(trained)
    state = hooks.finish(trained, tmp_path / "trained.pt")
    prepared = prepare(net, quantization(), qat=True)
    assert equal(state, hooks.from_file(prepared, tmp_path / "trained.pt"))
    integer, _ = convert.from_state(net, quantization(), state)
    assert loss_of(integer, list(Loader())) < 0.8
    x = torch.randn(16, 3, 16, 16)
    with torch.no_grad():
        simulated = trained(x)
    assert sqnr_db(simulated.numpy(), outputs(integer, x.numpy())) > 40
    assert not list(tmp_path.glob("*.part"))


def test_it_is_called_by_order_by_name_or_with_a_dict(net):
    module, x = model(net).eval(), torch.randn(2, 3, 16, 16)
    expected = module(x)
    assert isinstance(expected, torch.Tensor)  # the model's own structure, not a tuple
    assert torch.equal(module(x=x), expected)
    assert torch.equal(module({"x": x}), expected)


def test_it_is_a_module_that_trainers_can_copy_freeze_and_save(net):
    module = model(net)
    module(torch.randn(4, 3, 16, 16))
    other = copy.deepcopy(module)
    assert equal(module.state_dict(), other.state_dict())
    other.freeze_ranges()
    before = {k: v.clone() for k, v in other.state_dict().items()}
    other(100 * torch.randn(4, 3, 16, 16))
    assert equal(before, other.state_dict())
    assert all(p.requires_grad for p in module.parameters())
    assert {id(p) for p in module.parameters()}.isdisjoint(id(p) for p in net.module.parameters())


def test_what_was_never_run_or_is_nan_is_not_finished(net):
    with pytest.raises(StageError, match="no data went through"):
        hooks.finish(model(net))
    broken = model(net)
    broken(torch.randn(4, 3, 16, 16))
    with torch.no_grad():
        next(broken.parameters())[0] = float("nan")
    with pytest.raises(StageError, match="is NaN"):
        hooks.finish(broken)


def test_another_module_is_refused():
    with pytest.raises(StageError, match="finish was given a Linear"):
        hooks.finish(nn.Linear(2, 2))


FILES = {
    "no file of torch": lambda path, net: path.write_bytes(b"nothing"),
    "empty": lambda path, net: path.write_bytes(b""),
    "no state": lambda path, net: torch.save([1, 2], path),
    "another model": lambda path, net: torch.save(nn.Linear(2, 2).state_dict(), path),
    "the float model": lambda path, net: torch.save(dict(net.module.state_dict()), path),
}


@pytest.mark.parametrize("write", FILES.values(), ids=FILES.keys())
def test_a_file_of_something_else_is_refused(net, tmp_path, write):
    write(tmp_path / "f.pt", net)
    with pytest.raises(DataError, match=r"it is (not a file of edgeopt.qat.finish|of another program)") as refused:
        hooks.from_file(prepare(net, quantization(), qat=True), tmp_path / "f.pt")
    assert "key 'qat.state'" in refused.value.where
