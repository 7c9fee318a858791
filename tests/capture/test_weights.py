"""Factories and weights: what fits loads, what does not is named (the issue's 'Bad input')."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from edgeopt.capture.load import load_module
from edgeopt.errors import EdgeoptError, ModelError
from tests.capture.support import project

CODE = """
class Model(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4))

def build():
    return Model()

def broken():
    raise ValueError("no such backbone")

def lazy():
    return nn.LazyLinear(3)

number = 3

def text():
    return "model"
"""


def state(**changes) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    made = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).state_dict()
    return {**made, **changes}


def loaded(folder, data, name="w.pth", **keys) -> nn.Module:
    folder.mkdir(exist_ok=True)
    torch.save(data, folder / name)
    return load_module(project(folder, CODE, {"input": {"shape": [2, 3]}}, weights=name, **keys))


def message(folder, data) -> str:
    with pytest.raises(ModelError) as error:
        loaded(folder, data)
    assert error.value.todo and "w.pth" in error.value.where
    return error.value.what


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: s,
        lambda s: {"state_dict": s, "epoch": 3},
        lambda s: {"model": s, "optimizer": {"lr": 1.0}},
        lambda s: {f"module.{k}": v for k, v in s.items()},
        lambda s: {"state_dict": {f"module.{k}": v for k, v in s.items()}},
        lambda s: {f"_orig_mod.{k}": v for k, v in s.items()},
        lambda s: {k: v for k, v in s.items() if not k.endswith("num_batches_tracked")},
    ],
    ids=["plain", "lightning", "with optimizer", "DataParallel", "both", "torch.compile", "older BatchNorm"],
)
def test_weights_arrive(tmp_path, wrap):
    module = loaded(tmp_path, wrap(state()))
    assert torch.equal(module[0].weight, state()["0.weight"])
    assert not module.training


def test_the_prefix_module_stays_where_the_model_has_it(tmp_path):
    code = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(1, 1)
    """
    weights = {"module.weight": torch.full((1, 1), 5.0), "module.bias": torch.zeros(1)}
    torch.save(weights, tmp_path / "w.pth")
    module = load_module(project(tmp_path, code, {"input": {"shape": [1, 1]}}, weights="w.pth"))
    assert module.module.weight.item() == 5.0


def test_misspelt_missing_and_misshapen_keys_are_named(tmp_path):
    bad = state(**{"0.wieght": torch.zeros(4, 3), "0.bias": torch.zeros(7)})
    del bad["0.weight"]
    what = message(tmp_path, bad)
    assert "missing from the file: '0.weight'" in what
    assert "'0.wieght' (did you mean '0.weight'?)" in what
    assert "'0.bias' is [7] in the file and [4] in the model" in what


def test_many_wrong_keys_are_counted(tmp_path):
    assert "and 4 more" in message(tmp_path, {f"features.{i}.w": torch.zeros(1) for i in range(7)})


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(tmp_path, bad):
    assert "'0.bias'" in message(tmp_path, state(**{"0.bias": torch.full((4,), bad)}))


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_pickle_never_runs(tmp_path):
    (tmp_path / "w.pth").write_bytes(pickle.dumps(Evil(str(tmp_path / "ran"))))
    with pytest.raises(ModelError, match="not a state_dict"):
        load_module(project(tmp_path, CODE, {"input": {"shape": [2, 3]}}, weights="w.pth"))
    with pytest.raises(ModelError, match="not a state_dict"):
        loaded(tmp_path, Evil(str(tmp_path / "ran")))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "data", [nn.Linear(3, 4), [torch.zeros(3)], torch.zeros(3), {"epoch": 3}, {}, "text"],
    ids=["a module", "a list", "a tensor", "numbers", "nothing", "text"],
)  # fmt: skip
def test_what_is_no_state_dict_is_refused(tmp_path, data):
    assert "not a state_dict" in message(tmp_path, data)


@pytest.mark.parametrize("content", [b"", b"hello", None], ids=["empty", "text", "cut"])
def test_a_damaged_file_is_refused(tmp_path, content):
    torch.save(state(), tmp_path / "w.pth")
    whole = (tmp_path / "w.pth").read_bytes()
    (tmp_path / "w.pth").write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(ModelError) as error:
        load_module(project(tmp_path, CODE, {"input": {"shape": [2, 3]}}, weights="w.pth"))
    assert error.value.todo and "\n" not in error.value.what


def test_safetensors(tmp_path):
    given = project(tmp_path, CODE, {"input": {"shape": [2, 3]}})
    try:
        from safetensors.torch import save_file
    except ModuleNotFoundError:
        (tmp_path / "w.safetensors").write_bytes(b"x")
        with pytest.raises(ModelError, match="safetensors") as error:
            load_module(given.model_copy(update={"weights": "w.safetensors"}))
        assert error.value.todo == "pip install safetensors"
        return
    save_file(state(), tmp_path / "w.safetensors")
    module = load_module(given.model_copy(update={"weights": "w.safetensors"}))
    assert torch.equal(module[0].weight, state()["0.weight"])


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("model.py:Modle", "did you mean 'Model'"),
        ("model.py:broken", "no such backbone"),
        ("model.py:number", "gives a int, not a torch.nn.Module"),
        ("model.py:text", "gives a str, not a torch.nn.Module"),
        ("model.py:lazy", "has no values"),
        ("no_such_package_here:Model", "cannot import 'no_such_package_here'"),
    ],
)
def test_factories_that_give_no_model(tmp_path, model, says):
    given = project(tmp_path, CODE, {"input": {"shape": [2, 3]}}, model=model)
    with pytest.raises(EdgeoptError) as error:
        load_module(given)
    assert says in str(error.value)
    assert error.value.todo


@pytest.mark.parametrize("wrapped", ["torch.compile(Model())", "nn.DataParallel(Model())"])
def test_wrappers_of_torch_are_taken_off(tmp_path, wrapped):
    code = CODE + f"\nmade = {wrapped}\n"
    module = load_module(project(tmp_path, code, {"input": {"shape": [2, 3]}}, model="model.py:made"))
    assert list(module.state_dict())[0] == "0.weight"


def test_a_factory_may_be_a_class_a_function_or_a_module(tmp_path):
    for model in ("model.py:Model", "model.py:build"):
        module = load_module(project(tmp_path / "a", CODE, {"input": {"shape": [2, 3]}}, model=model))
        assert module(torch.zeros(2, 3)).shape == (2, 4)
    ready = CODE + "\nready = Model()\n"
    module = load_module(project(tmp_path / "b", ready, {"input": {"shape": [2, 3]}}, model="model.py:ready"))
    assert np.isfinite(module(torch.zeros(2, 3)).detach().numpy()).all()
