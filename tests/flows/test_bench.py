"""`edgeopt bench`: an artifact and a model, here and over a real OpenSSH server, with contenders that fail."""

from __future__ import annotations

import json
import sys

import pytest

from edgeopt.errors import UsageError
from edgeopt.flows.bench import Asked, bench
from edgeopt.ports.connect import connect
from edgeopt.ports.local import LocalConnection
from tests.small_project import run_edgeopt
from tests.tiny import candidate, tiny_artifact

MODEL = """
import os, sys
import numpy as np
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
    def forward(self, x):
        return torch.relu(self.layer(x))

def build():
    torch.manual_seed(7)
    return Net()

def calibration():
    if "onnxruntime.quantization" in sys.modules:
        os.abort()  # what a library does to the process that quantizes
    yield {"x": np.ones((2, 4), np.float32)}
"""
YAML = """
name: benched
model: model.py:build
inputs: {x: {shape: [n, 4]}}
axes: {n: {min: 1, opt: 2, max: 4}}
calibration: model.py:calibration
"""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return tiny_artifact(tmp_path_factory.mktemp("artifact"), torchscript=False)


def ask(artifact, **changes) -> Asked:
    return Asked(str(artifact.folder), rounds=3, calls=10, python=sys.executable, **changes)


def test_an_artifact_is_benched_by_its_candidates_with_what_is_best_here(artifact):
    with LocalConnection() as connection:
        done = bench(ask(artifact), connection)
    (row,) = done.rows
    assert row.ours and row.result.name == "onnxruntime-fp32"
    assert row.ratio.value == row.ratio.low == row.ratio.high == 1.0
    low, high = row.result.interval_ms
    assert 0 < low <= high and len(row.result.rounds_ms) == 3
    assert row.result.setting["threads"] >= 1 and row.result.tried
    assert row.result.sqnr_db > 100  # as the recorded outputs of the unoptimised model


def test_peers_of_an_artifact_without_its_project_fail_with_that_reason(artifact):
    with LocalConnection() as connection:
        done = bench(ask(artifact, against=("eager", "onnxruntime")), connection)
    ours, *peers = done.rows
    assert ours.result.failure is None
    for row in peers:
        assert row.result.failure == "the project of the artifact is not at hand: give it with --project"
        assert row.ratio is None and not row.ours


def test_a_peer_of_a_candidates_name_is_another_row(tmp_path):
    """Both are called onnxruntime: the peer, which has no project here, takes nothing away from the candidate."""
    named = tiny_artifact(
        tmp_path, torchscript=False, candidates=[candidate("onnxruntime", "onnxruntime", "float.onnx", opset=13)]
    )
    with LocalConnection() as connection:
        ours, peer = bench(ask(named, against=("onnxruntime",)), connection).rows
    assert (ours.result.name, ours.ours, ours.result.failure) == ("onnxruntime", True, None) and ours.result.rounds_ms
    assert (peer.result.name, peer.ours, peer.result.rounds_ms) == ("onnxruntime", False, ()) and peer.result.failure


def test_an_artifact_is_benched_on_a_device(artifact, sshd, ssh_config, tmp_path):
    with connect("device", config=ssh_config(sshd)) as connection:
        done = bench(ask(artifact, root=str(tmp_path / "root")), connection)
    assert "@127.0.0.1:" in done.host and done.rows[0].result.failure is None
    assert list((tmp_path / "root").iterdir()) == []


def test_throughput_has_answers_a_second(artifact):
    with LocalConnection() as connection:
        (row,) = bench(ask(artifact, mode="throughput"), connection).rows
    assert row.result.answers_per_s > 0 and row.result.p50_ms is None
    assert row.result.ms == pytest.approx(1e3 / row.result.answers_per_s)


def test_a_contender_that_does_not_exist_is_said_before_any_work(artifact):
    with LocalConnection() as connection, pytest.raises(UsageError, match="did you mean 'onnxruntime'") as failed:
        bench(ask(artifact, against=("onnxruntim",)), connection)
    assert "eager, compile, aoti" in failed.value.todo


def test_a_model_is_benched_and_a_contender_that_aborts_costs_itself_only(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "edgeopt.yaml").write_text(YAML)
    argv = ["bench", "--against", "eager,onnxruntime-int8,onnxruntime", "--rounds", "3", "--calls", "10"]
    done = run_edgeopt(*argv, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == ["eager", "onnxruntime-int8", "onnxruntime"]
    assert "SIGABRT" in rows["onnxruntime-int8"]["failure"] and rows["onnxruntime-int8"]["ratio"] is None
    assert rows["eager"]["failure"] is None and rows["eager"]["max_abs_error"] == 0
    fast = rows["onnxruntime"]
    assert fast["sqnr_db"] > 100
    assert fast["ratio"]["low"] <= fast["ratio"]["value"] <= fast["ratio"]["high"]
    assert len(fast["rounds_ms"]) == 3 and found["noise"]["cores"]["all"] >= 1
