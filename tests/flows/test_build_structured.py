"""A build of a model whose forward takes a dict, a pair and a dataclass: nested from the data to the device."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import edgeopt
from edgeopt import onboard
from edgeopt.ports.user_code import load_attribute
from edgeopt.runtime.artifact import Artifact
from tests.pythons import require
from tests.small_project import run_edgeopt

MODEL = '''
import dataclasses
import torch
from torch import nn

@dataclasses.dataclass
class Scale:
    by: torch.Tensor
    power: float = 1.0

class Net(nn.Module):
    """batch {"left", "right"} [n, 8], pair ([n, 4], [n, 4]), scale.by [4] -> scores [n, 3]"""
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 16), nn.Linear(8, 16)
        self.head = nn.Linear(24, 3)
    def forward(self, batch: dict, pair, scale: Scale, bias=None):
        x = torch.relu(self.left(batch["left"]) + self.right(batch["right"]))
        a, b = pair
        y = self.head(torch.cat([x, (a - b) * scale.by ** scale.power, b], 1))
        return {"scores": y if bias is None else y + bias}

def build():
    torch.manual_seed(1)
    return Net()
'''
DATA = """
import numpy as np

def nested(count, seed):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.uniform(-1, 1, shape).astype(np.float32)
    return {
        "batch": {"right": draw(count, 8), "left": draw(count, 8)}, "pair": (draw(count, 4), draw(count, 4)),
        "scale": {"by": draw(4)}, "bias": draw(count, 3),
    }

def calibration():
    for i in range(4):
        yield nested(8, i)

def train():
    for i in range(4):
        yield nested(8, 100 + i), np.arange(8) % 3

def loss(outputs, target):
    import torch
    return torch.nn.functional.cross_entropy(outputs["scores"], torch.as_tensor(target))

def evaluate(predict):
    scores = [predict(nested(4, 200 + i))["scores"] for i in range(3)]
    return {"mean": float(np.concatenate(scores).mean()) + 2.0}
"""
SHAPES = {
    "batch.left": ["n", 8], "batch.right": ["n", 8], "pair.0": ["n", 4], "pair.1": ["n", 4], "scale.by": [4],
    "bias": ["n", 3],
}  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("structured")
    (folder / "model.py").write_text(MODEL)
    (folder / "data.py").write_text(DATA)
    values = {
        "name": "structured", "model": "model.py:build",
        "inputs": {name: {"shape": shape, "values": [-1, 1]} for name, shape in SHAPES.items()},
        "axes": {"n": {"min": 1, "opt": 2, "max": 8}},
        "calibration": "data.py:calibration", "train": "data.py:train", "loss": "data.py:loss",
        "qat": {"max_steps": 2}, "evaluate": "data.py:evaluate", "limits": {"metric_drop": {"mean": 1.0}},
    }  # fmt: skip
    (folder / "edgeopt.yaml").write_text(json.dumps(values))
    out = folder / "structured.edgeopt"
    done = run_edgeopt(
        "build", "--project", str(folder), "--out", str(out), "--profile", "x86-cpu",
        "--set", "project.inputs.batch.left.values=[-2, 2]",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return out


def data() -> dict:
    """What the project's data.py defines."""
    namespace: dict = {}
    exec(DATA, namespace)
    return namespace


def inputs() -> tuple[dict, dict]:
    """One call in its nested form and by flat names."""
    nested = data()["nested"](3, 7)
    flat = {
        "batch.left": nested["batch"]["left"], "batch.right": nested["batch"]["right"], "pair.0": nested["pair"][0],
        "pair.1": nested["pair"][1], "scale.by": nested["scale"]["by"], "bias": nested["bias"],
    }  # fmt: skip
    return nested, flat


def expected(folder: Path, nested: dict) -> np.ndarray:
    build, scale = (load_attribute(f"model.py:{name}", folder, key="model") for name in ("build", "Scale"))
    net, tensor = build().eval(), torch.from_numpy
    with torch.no_grad():
        return net(
            {key: tensor(value) for key, value in nested["batch"].items()}, tuple(map(tensor, nested["pair"])),
            scale(tensor(nested["scale"]["by"])), tensor(nested["bias"]),
        )["scores"].numpy()  # fmt: skip


def test_the_manifest_tells_the_structure(built):
    manifest = Artifact.open(built).manifest
    assert [spec.name for spec in manifest.inputs] == list(SHAPES)
    kinds = {name: node["kind"] for name, node in manifest.input_structure["items"].items()}
    assert kinds == {"batch": "dict", "pair": "tuple", "scale": "dataclass", "bias": "tensor"}
    assert list(manifest.input_structure["items"]["batch"]["items"]) == ["left", "right"]
    assert manifest.input_structure["items"]["scale"]["items"]["power"] == {"kind": "constant", "value": 1.0}
    precisions = {candidate.name: candidate.precision for candidate in manifest.candidates}
    assert precisions == {"onnxruntime-fp32": "fp32", "torchscript-fp32": "fp32", "onnxruntime-int8": "int8"}
    assert [refusal.candidate for refusal in manifest.refused] == ["torchscript-int8"]


def test_the_metric_and_the_cases_are_of_the_nested_calls(built):
    manifest = Artifact.open(built).manifest
    calls = []

    def predict(nested: dict) -> dict:
        calls.append(nested)
        return {"scores": expected(built.parent, nested)}

    mean = data()["evaluate"](predict)["mean"]
    assert manifest.metrics["reference"]["mean"] == pytest.approx(mean, rel=1e-5)
    assert len(manifest.cases) == len(calls) == 3
    assert all(manifest.metrics[c.name]["mean"] == pytest.approx(mean, abs=0.05) for c in manifest.candidates)


@pytest.mark.parametrize("load", [edgeopt.load, onboard.load], ids=["host", "device"])
@pytest.mark.parametrize("candidate", ["onnxruntime-fp32", "torchscript-fp32"])
def test_predict_takes_both_forms(built, load, candidate):
    nested, flat = inputs()
    with load(built, candidate) as predictor:
        for given in (nested, flat, {**nested, "pair": list(nested["pair"])}):
            np.testing.assert_allclose(predictor.predict(given)["scores"], expected(built.parent, nested), atol=1e-5)
        assert list(predictor.outputs(nested)) == ["scores"]
        with pytest.raises(ValueError, match=r"missing: batch\.right"):
            predictor.predict({**nested, "batch": {"left": nested["batch"]["left"]}})
        with pytest.raises(ValueError, match="'pair' must be a tuple of 2, given: ndarray"):
            predictor.predict({**nested, "pair": nested["pair"][0]})
        with pytest.raises(ValueError, match=r"'scale\.power' was 1\.0 when the model was built"):
            predictor.predict({**nested, "scale": {"by": nested["scale"]["by"], "power": 2.0}})


def test_the_release_is_judged_with_nested_inputs(built):
    done = run_edgeopt("validate", str(built), "--json")
    assert done.returncode == 0, done.stderr
    judged = json.loads(done.stdout)
    metrics = [check for check in judged["checks"] if check["name"].endswith(": metric mean")]
    candidates = {candidate.name: candidate for candidate in Artifact.open(built).manifest.candidates}
    assert judged["verdict"] == "pass" and {check["name"].split(":")[0] for check in metrics} == set(candidates)
    measured = {candidate["name"]: candidate["metrics"]["mean"] for candidate in judged["candidates"]}
    built_with = Artifact.open(built).manifest.metrics
    assert all(measured[name] == pytest.approx(built_with[name]["mean"], rel=1e-3) for name in candidates)


def test_the_oldest_python_flattens(built):
    code = (
        f"import sys, json; sys.path.insert(0, {str(built / 'onboard.pyz')!r})\n"
        "from onboard.structure import flat_inputs\n"
        f"m = json.load(open({str(built / 'manifest.json')!r}))\n"
        "n = [s['name'] for s in m['inputs']]\n"
        "g = {'batch': {'left': 0, 'right': 1}, 'pair': (2, 3), 'scale': {'by': 4}, 'bias': 5}\n"
        "print(sorted(flat_inputs(m['input_structure'], n, g).items()) == sorted(zip(n, range(6))))\n"
    )
    done = subprocess.run([require("3.6"), "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True\n", "")
