"""Sensitivity: what a layer costs when it alone is quantized, from one calibration and one float run."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from edgeopt.program.data import calibration_batches
from edgeopt.program.program import Call
from edgeopt.quant import convert, findings, observers, sensitivity
from edgeopt.quant import state as state_dict
from edgeopt.quant.calibrate import calibrate
from edgeopt.quant.partial import partial_state
from edgeopt.quant.prepare import prepare
from edgeopt.quant.training import ranges
from edgeopt.quant.training.ranks import ALONE
from edgeopt.runtime.compare import sqnr_db
from edgeopt.spec.project import project_for_model
from tests.quant.models import Attention, Gated, Net, Residual, Tied
from tests.quant.programs import batches, outputs, program, quantization
from tests.quant.test_off_centre import CHAINS


def prepared(model: nn.Module, *sizes: int, **settings):
    """(float program, prepared, the first batches)."""
    float_program = program(model, *sizes)
    made = prepare(float_program, quantization(**settings))
    return float_program, made, calibrate(made, batches(*sizes), limit=4)


def layers_of(model: nn.Module, *sizes: int, **settings):
    _, made, first = prepared(model, *sizes, **settings)
    return sensitivity.measure(made, first)


MODELS = {
    "residual": (Net, (3, 16, 16)), "twice": (lambda: Residual(4), (4, 8, 8)), "tied": (Tied, (4, 8, 8)),
    "smooth": (lambda: Gated(nn.SiLU()), (3, 8, 8)),
}  # fmt: skip


@pytest.mark.parametrize("model, sizes", MODELS.values(), ids=MODELS)
def test_it_is_what_quantizing_everything_else_not_gives(model, sizes):
    """Against the slow way: every other layer left float, calibrated, converted and run."""
    torch.manual_seed(0)
    float_program, made, first = prepared(model(), *sizes)
    found = {layer.node: layer for layer in sensitivity.measure(made, first)}
    weighted = [d.node for d in made.report.layers if d.quantized and d.macs]
    x = np.concatenate([t[0].numpy() for t in first])
    for node in weighted:
        others = tuple(f"%{layer}" for layer in found if layer != node)
        alone, _ = convert.from_batches(
            float_program, quantization(improve=("biases",)), batches(*sizes), keep_float=others
        )
        exact = sqnr_db(outputs(float_program, x), outputs(alone, x))
        assert found[node].sqnr_db == pytest.approx(exact, abs=1.0)


def test_a_layer_with_one_huge_channel_is_found_per_tensor_and_easy_per_channel():
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(5) for part in (nn.Conv2d(4, 4, 3, padding=1), nn.ReLU6())))
    with torch.no_grad():
        model[4].weight[0].mul_(500)
        model[6].weight[:, 0] = 0
    worst, second, *_ = layers_of(model, 4, 8, 8, per_channel=False)
    assert worst.name == "model.4" and worst.noise > 10 * second.noise
    easy = {layer.name: layer for layer in layers_of(model, 4, 8, 8)}
    assert easy["model.4"].sqnr_db > worst.sqnr_db + 10


def test_an_activation_that_quantizes_badly_shows_in_both_layers_around_it():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(4, 4, 1) for _ in range(4)))
    with torch.no_grad():
        model[1].bias[0] = 3000.0  # the range of what it gives
        model[2].weight[:, 0] = 0.0
    names = [layer.name for layer in layers_of(model, 4, 8, 8)[:2]]
    assert sorted(names) == ["model.1", "model.2"]


def test_the_same_twice_and_the_ranges_stay_as_they_are():
    torch.manual_seed(0)
    _, made, first = prepared(Net(), 3, 16, 16)
    before = {name: value.clone() for name, value in made.module.state_dict().items()}
    found = sensitivity.measure(made, first)
    assert sensitivity.measure(made, first) == found
    after = made.module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_layers_of_attention_and_of_integer_inputs_are_ranked():
    torch.manual_seed(0)
    found = layers_of(Attention(), 6, 16)
    assert {layer.rule for layer in found} == {"linear"}
    assert [layer.noise for layer in found] == sorted((layer.noise for layer in found), reverse=True)
    assert sorted(layer.place for layer in found) == [0, 1, 3, 5]  # 2 and 4 are the products of activations


def test_a_graph_that_writes_into_its_values_is_measured_on_copies():
    class Writing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x):
            y = self.first(x)
            return self.second(y.mul_(2)) + y

    torch.manual_seed(0)
    _, made, first = prepared(Writing(), 3, 4, 4)
    alone = sensitivity.Alone(made)
    exact = alone.exact(first[0])[0]
    for _, (given, *_) in alone.quantized(first[0]):
        assert sqnr_db(exact.numpy(), given.numpy()) > 20


def test_a_pattern_names_one_operator_of_a_module_that_is_called_twice():
    torch.manual_seed(0)
    float_program = program(Tied(), 4, 8, 8)
    _, report = convert.from_batches(float_program, quantization(), batches(4, 8, 8), keep_float=("%conv2d_1",))
    assert [(d.node, d.quantized) for d in report.layers] == [("conv2d", True), ("conv2d_1", False)]


def trained(model: nn.Module, *sizes: int, keep: tuple[str, ...] = ()):
    """The program with a state in which the ranges were learned from the batches."""
    float_program = program(model, *sizes)
    made = prepare(float_program, quantization(), qat=True, keep_float=keep)
    with ranges.following(made.module, ALONE):
        for batch in batches(*sizes):
            made.module(torch.from_numpy(batch["x"]))
    state = {name: value.detach().clone() for name, value in made.module.state_dict().items()}
    return dataclasses.replace(float_program, qat_state=state), made


def pooled() -> nn.Module:
    """One fake-quantizer serves a chain of layout operators, at several places."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(24, 5),
    )  # fmt: skip


PARTS = {
    "residual": (Net, (3, 16, 16)),
    "pooled": (pooled, (3, 14, 14)),
    "tied": (Tied, (4, 8, 8)),
    "attention": (Attention, (6, 16)),
}


@pytest.mark.parametrize("model, sizes", PARTS.values(), ids=PARTS)
def test_a_trained_state_serves_a_preparation_with_fewer_layers(model, sizes):
    torch.manual_seed(0)
    float_program, made = trained(model(), *sizes)
    q = quantization()
    same = partial_state(float_program, q, trained_with=(), keep_float=())
    assert all(torch.equal(same[name], value) for name, value in float_program.qat_state.items())
    learned = {n.name: f.state_dict() for n, f in findings.observations(made.module) if n.op != "get_attr"}
    for decision in made.report.layers:
        if not decision.quantized or not decision.macs:
            continue
        keep = (f"%{decision.node}",)
        state = partial_state(float_program, q, trained_with=(), keep_float=keep)
        part = prepare(float_program, q, qat=True, keep_float=keep)
        state_dict.load(part.module, state)
        for node, fake in findings.observed(part.module):
            if node.op != "get_attr":
                assert all(torch.equal(v, learned[node.name][k]) for k, v in fake.state_dict().items())
        integer, report = convert.from_state(float_program, q, state, keep_float=keep)
        x = batches(*sizes)[0]["x"]
        assert list(report.left_float.values()).count("kept float by the project") == 1
        assert sqnr_db(outputs(float_program, x), outputs(integer, x)) > 25


def test_a_trained_state_keeps_the_least_scale_of_dead_channels():
    """torchao resets it to 1.2e-7 where a state has lost its versions: the int32 bias beside it could overflow."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1))
    with torch.no_grad():
        model[0].weight[0] = model[0].bias[0] = 0
    float_program, _ = trained(model, 3, 8, 8)
    integer, _ = convert.from_state(float_program, quantization(), float_program.qat_state)
    stored = [value for value in integer.module.buffers() if value.dtype == torch.float32]
    assert any(float(value.min()) == pytest.approx(observers.LEAST_SCALE) for value in stored)


def own_project(folder, code: str, **keys):
    """A project whose calibration is that code."""
    folder.mkdir(exist_ok=True)
    (folder / "model.py").touch()
    (folder / "data.py").write_text("import numpy as np\n" + code)
    keys = {"calibration": "data.py:calibration", **keys}
    return project_for_model("model.py:net", folder=folder, inputs={"x": {"shape": [2, 3]}}, overrides=keys)


@pytest.mark.parametrize("model, sizes", MODELS.values(), ids=MODELS)
def test_sensitivity_of_a_trained_program_is_that_of_its_state(model, sizes, tmp_path):
    """Against the slow way: every other layer left float, the trained state replayed for it."""
    torch.manual_seed(0)
    float_program, made = trained(model(), *sizes)
    x = batches(*sizes)[0]["x"]
    float_program = dataclasses.replace(float_program, reference=(Call({"x": x}, {}),))
    found, first = sensitivity.calibrated(float_program, quantization(), own_project(tmp_path, ""))
    assert torch.equal(first[0][0], torch.from_numpy(x))
    layers = {layer.node: layer for layer in sensitivity.measure(found, first)}
    for node in [d.node for d in made.report.layers if d.quantized and d.macs]:
        others = tuple(f"%{layer}" for layer in layers if layer != node)
        state = partial_state(float_program, quantization(), trained_with=(), keep_float=others)
        alone, _ = convert.from_state(float_program, quantization(), state, keep_float=others)
        exact = sqnr_db(outputs(float_program, x), outputs(alone, x))
        assert layers[node].sqnr_db == pytest.approx(exact, abs=1.0)


def test_the_program_that_is_measured_is_the_one_that_the_build_rounds(tmp_path):
    """Equalized, so that what equalizing mends does not rank first; layers that stay float anyway are not ranked."""
    torch.manual_seed(0)
    uneven = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
    with torch.no_grad():
        spread = torch.logspace(-1.5, 1.5, 8)
        uneven[0].weight.mul_(spread[:, None, None, None]), uneven[0].bias.mul_(spread)
        uneven[2].weight.div_(spread[None, :, None, None])
    far = CHAINS["with an activation"]()
    code = (
        "def calibration():\n    rng = np.random.default_rng(0)\n    for _ in range(4):\n"
        "        yield {'x': rng.standard_normal((8, 3, 8, 8)).astype(np.float32) * SCALE + MEAN}\n"
    )
    for model, scale, mean in ((uneven, 1, 0), (far, 0.1, 1000)):
        float_program = program(model, 3, 8, 8)
        numbers = code.replace("SCALE", f"np.float32({scale})").replace("MEAN", f"np.float32({mean})")
        given = own_project(tmp_path / f"mean_{mean}", numbers)
        found, first = sensitivity.calibrated(float_program, quantization(), given)
        _, report = convert.from_batches(
            float_program, quantization(), calibration_batches(given, float_program.signature)
        )
        assert {d.node: d.quantized for d in found.report.layers} == {d.node: d.quantized for d in report.layers}
        ranked = {layer.name: layer for layer in sensitivity.measure(found, first)}
        assert ranked.keys() == {d.path for d in report.layers if d.quantized and d.macs}
        if model is uneven:
            plain = prepare(float_program, quantization())
            calibrate(plain, calibration_batches(given, float_program.signature), limit=4)
            before = {layer.name: layer for layer in sensitivity.measure(plain, first)}
            assert ranked["model.0"].sqnr_db > before["model.0"].sqnr_db + 3
        else:
            assert "model.0" not in ranked
