"""Bisect on faults that are really there: a wrong pass, a runtime with a wrong kernel, here and over SSH."""

from __future__ import annotations

import json
import platform
import sys

import numpy as np
import pytest
import torch

from edgeopt.cli.bisect import lines
from edgeopt.errors import ArtifactError, DataError, UsageError
from edgeopt.flows.bisect import How, bisect, job_for
from edgeopt.flows.bisect_candidate import Machine
from edgeopt.passes import run as table
from edgeopt.passes.changed import Changed
from edgeopt.passes.table import PASSES, Pass
from edgeopt.ports.local import LocalConnection
from edgeopt.progress import SILENT
from tests.pipeline.test_integer_guard import turns_twice
from tests.small_project import run_edgeopt, write_project

aten = torch.ops.aten


def _relu_as_relu6(context):
    """A pass as careless people write it: right on small values, so that its verification lets it through."""
    relus = [n for n in context.module.graph.nodes if n.target is aten.relu.default]
    for node in relus:
        node.target = aten.relu6.default
    return Changed(len(relus))


def _negates(context):
    node = next(n for n in context.module.graph.nodes if n.target is aten.linear.default)
    with context.module.graph.inserting_after(node):
        wrong = context.module.graph.call_function(aten.neg.default, (node,))
    wrong.meta = dict(node.meta)
    node.replace_all_uses_with(wrong, delete_user_cb=lambda user: user is not wrong)
    return Changed(1)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return write_project(tmp_path_factory.mktemp("bisect") / "bars", without=("train", "loss", "qat", "evaluate"))


@pytest.fixture
def job(project):
    return job_for(None, "x86-cpu", str(project), (), SILENT)


@pytest.fixture
def here(tmp_path):
    return Machine(LocalConnection(), sys.executable, tmp_path)


@pytest.fixture
def large(tmp_path):
    """Inputs far beyond those that the passes are verified with."""
    path = tmp_path / "large.npz"
    np.savez(path, image=np.random.default_rng(0).normal(0, 60, (3, 1, 12, 12)).astype(np.float32))
    return path


def _with_pass(monkeypatch, step):
    at = [p.name for p in PASSES].index("conv_bn") + 1
    monkeypatch.setattr(table, "PASSES", (*PASSES[:at], step, *PASSES[at:]))


def test_a_build_that_is_right_holds_everywhere(job, here):
    found = bisect(job, How(), here)
    assert found.first is None and found.culprit is None
    names = [tried.name for tried in found.tried]
    assert any(name.startswith("optimize/") for name in names)
    assert {"onnxruntime-fp32 on this machine", "torchscript-fp32 on this machine"} <= set(names)
    assert all(tried.max_abs < 1e-4 for tried in found.tried)
    assert lines(found, "eager")[-1] == "every point and candidate holds"


def test_a_wrong_pass_is_found_with_its_node_and_the_line_that_turns_it_off(monkeypatch, job, here, large):
    _with_pass(monkeypatch, Pass("careless", "float", "node", _relu_as_relu6))
    assert (
        bisect(job, How(candidate="onnxruntime-fp32"), here).first is None
    )  # its verification and the calls are small
    found = bisect(job, How(inputs=large), here)
    assert found.first == "optimize/careless"
    assert found.setting == "profile.passes.careless=off"
    culprit = found.culprit
    assert (culprit.operator, culprit.module) == ("aten.relu6", "first.2")
    assert culprit.line.startswith("model.py, line ")
    assert culprit.found.high == 6 and culprit.wanted.high > 10
    assert culprit.wanted.shape == culprit.found.shape == (3, 8, 12, 12)
    assert culprit.max_rel == pytest.approx(1 - 6 / culprit.wanted.high, rel=1e-5)
    assert [value.low < 0 for value in culprit.inputs] == [True]
    tried = {t.name: t.reason for t in found.tried}
    assert tried["optimize/careless"] and len(tried) < len(PASSES)  # bisected: not every point was run
    off = job_for(None, "x86-cpu", str(job.project.folder), ("profile.passes.careless=off",), SILENT)
    assert bisect(off, How(inputs=large, candidate="onnxruntime-fp32"), here).first is None


def test_a_pass_that_every_build_drops_is_opened_on_demand(monkeypatch, job, here):
    _with_pass(monkeypatch, Pass("negates", "float", "node", _negates))
    found = bisect(job, How(candidate="onnxruntime-fp32"), here)
    assert found.first is None and [name for name, _ in found.dropped] == ["optimize/negates"]
    found = bisect(job, How(kept=True), here)
    assert found.first == "optimize/negates" and found.culprit.operator == "aten.neg"
    assert found.culprit.max_rel == pytest.approx(2, rel=1e-3)
    assert (found.culprit.found.low, found.culprit.found.high) == pytest.approx(
        (-found.culprit.wanted.high, -found.culprit.wanted.low)
    )


@pytest.fixture
def faulty_python(tmp_path):
    """An interpreter whose onnxruntime has a wrong kernel: its Relu lets a tenth of what is negative through."""
    shim = tmp_path / "shim"
    shim.mkdir()
    (shim / "onnxruntime.py").write_text(
        f"""
import importlib, sys
sys.path = [p for p in sys.path if p != {str(shim)!r}]
del sys.modules["onnxruntime"]
import onnxruntime as real
import onnx
_Session = real.InferenceSession
def _faulty(path, *args, **kwargs):
    model = onnx.load(path)
    for node in model.graph.node:
        if node.op_type == "Relu":
            node.op_type = "LeakyRelu"
            node.attribute.append(onnx.helper.make_attribute("alpha", 0.1))
    return _Session(model.SerializeToString(), *args, **kwargs)
real.InferenceSession = _faulty
sys.modules["onnxruntime"] = real
"""
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{shim}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python


def _check_relu(found, label):
    assert found.first == f"onnxruntime-fp32 on {label}"
    assert found.culprit.operator == "aten.relu" and found.culprit.module == "first.2"
    assert found.culprit.wanted.low == 0 and found.culprit.found.low < 0
    assert found.setting == "profile.backends=[openvino, torchscript]"
    held = {tried.name for tried in found.tried if tried.reason is None}
    assert any(name.startswith("optimize/") for name in held)


def test_a_runtime_with_a_wrong_kernel_is_opened(job, here, faulty_python):
    machine = Machine(LocalConnection(), str(faulty_python), here.scratch)
    _check_relu(bisect(job, How(candidate="onnxruntime-fp32"), machine), "this machine")


def _made_on(monkeypatch, connection):
    """The folders and files that are made on the device over this connection from now on."""
    made, run, put = [], connection.run, connection.put

    def recorded_run(argv, **how):
        done = run(argv, **how)
        if argv[0] == "mktemp":
            made.append(done.text)
        return done

    def recorded_put(local, remote, **how):
        made.append(remote)
        return put(local, remote, **how)

    monkeypatch.setattr(connection, "run", recorded_run)
    monkeypatch.setattr(connection, "put", recorded_put)
    return made


def test_a_device_with_a_wrong_kernel_is_opened_over_ssh(monkeypatch, job, here, faulty_python, sshd, ssh_config):
    from edgeopt.ports.connect import connect

    with connect("device", config=ssh_config(sshd)) as connection:
        made = _made_on(monkeypatch, connection)
        machine = Machine(connection, str(faulty_python), here.scratch)
        found = bisect(job, How(candidate="onnxruntime-fp32"), machine)
        assert {"model.onnx", "feeds.bin", "request.json"} <= {path.rpartition("/")[2] for path in made}
        left = [path for path in made if connection.run(["test", "-e", path], check=False).status == 0]
        assert left == []
    _check_relu(found, connection.label)
    assert "wanted" in "\n".join(lines(found, "device"))


def test_the_command_finds_where_a_device_parts_from_the_host(artifact, faulty_python, sshd, ssh_config):
    """`bisect ARTIFACT --against HOST`: the device's first wrong layer, where all before it is right."""
    login = ("--against", "device", "--ssh-config", str(ssh_config(sshd)), "--candidate", "onnxruntime-fp32", "--json")
    wrong = run_edgeopt("bisect", str(artifact), *login, "--python", str(faulty_python))
    assert wrong.returncode == 16, wrong.stderr
    found = json.loads(wrong.stdout)
    assert found["first"].startswith("onnxruntime-fp32 on ") and found["first"].endswith(f"127.0.0.1:{sshd.port}")
    culprit = found["culprit"]
    assert (culprit["operator"], culprit["module"]) == ("aten.relu", "first.2")
    assert culprit["wanted"]["low"] == 0 and culprit["found"]["low"] < 0
    held = [tried["name"] for tried in found["tried"] if tried["reason"] is None]
    assert any(name.startswith("optimize/") for name in held)  # the host's own graph is right


def test_int8_is_followed_to_its_own_passes(job, here):
    found = bisect(job, How(until="reoptimize", candidate="onnxruntime-int8"), here)
    assert found.first is None
    names = [tried.name for tried in found.tried]
    assert any(name.startswith(("quantize", "reoptimize/")) for name in names)
    assert "onnxruntime-int8 on this machine" in names


def test_a_wrong_pass_after_quantization_is_found(monkeypatch, job, here):
    monkeypatch.setattr(table, "PASSES", (*PASSES, Pass("negates", "integer", "node", _negates)))
    found = bisect(job, How(until="reoptimize", kept=True), here)
    assert found.first == "reoptimize/negates" and found.culprit.operator == "aten.neg"


def test_what_a_kept_wrong_pass_leads_to_is_not_what_a_build_finds_stored(monkeypatch, here, tmp_path):
    own = write_project(tmp_path / "bars", without=("train", "loss", "qat", "evaluate"))
    job = job_for(None, "x86-cpu", str(own), (), SILENT)
    with monkeypatch.context() as patched:
        _with_pass(patched, Pass("negates", "float", "node", _negates))
        found = bisect(job, How(until="reoptimize", kept=True), here)
        assert found.first == "optimize/negates"
    assert bisect(job, How(until="reoptimize", candidate="onnxruntime-int8"), here).first is None


@pytest.mark.skipif(platform.machine() != "x86_64", reason="kernels are counted where the target is this machine")
def test_a_pass_that_the_build_drops_for_a_kernel_is_told_and_not_followed(monkeypatch, here, tmp_path):
    own = write_project(tmp_path / "bars", without=("train", "loss", "qat", "evaluate"))
    job = job_for(None, "x86-cpu", str(own), ("profile.target.cpu_features=[]",), SILENT)
    monkeypatch.setattr(table, "PASSES", (*PASSES, Pass("costly", "integer", "node", turns_twice)))
    found = bisect(job, How(until="reoptimize", candidate="onnxruntime-int8"), here)
    assert found.first is None
    assert dict(found.dropped)["reoptimize/costly"].startswith("onnxruntime runs")
    assert "reoptimize/costly" not in [tried.name for tried in found.tried]


@pytest.fixture(scope="module")
def artifact(project, tmp_path_factory):
    out = tmp_path_factory.mktemp("artifact") / "bars.edgeopt"
    done = run_edgeopt("build", "--profile", "x86-cpu", "--project", str(project), "--out", str(out))
    assert done.returncode == 0, done.stderr
    return out


def test_an_artifact_is_the_truth_and_another_model_is_told(artifact, project, here, tmp_path):
    from edgeopt.runtime.artifact import Artifact

    opened = Artifact.open(artifact)
    job = job_for(str(artifact), None, None, (), SILENT)
    assert job.profile.name == "x86-cpu" and job.project.folder == project.resolve()
    calls = How(against=opened, max_abs=0.1, candidate="onnxruntime-fp32")
    assert bisect(job, calls, here).first is None
    changed = write_project(
        tmp_path / "other", without=("train", "loss", "qat", "evaluate"),
        model_code="\n_build = build\ndef build():\n    net = _build()\n    net.head.bias.data += 5\n    return net\n",
    )  # fmt: skip
    other = job_for(None, "x86-cpu", str(changed), (), SILENT)
    found = bisect(other, How(against=opened, max_abs=0.1), here)
    assert found.first == "capture" and "other answers than the artifact" in found.note


def test_the_command_says_what_it_found_and_leaves_by_its_status(artifact, large):
    of_artifact = ("--against", str(artifact), "--tolerance", "0.1")  # an int8 candidate may be the chosen one
    done = run_edgeopt("bisect", str(artifact), "--until", "reoptimize", *of_artifact, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout, parse_constant=pytest.fail)  # Infinity is no JSON
    assert found["first"] is None
    same = [tried for tried in found["tried"] if tried["max_abs"] == 0]
    assert same and all(tried["sqnr_db"] is None for tried in same)  # the candidate that the artifact itself runs
    tight = run_edgeopt("bisect", str(artifact), "--inputs", str(large), "--tolerance", "1e-12")
    assert tight.returncode == 16, tight.stderr
    assert "first wrong: " in tight.stdout and "leave it out with  --set " in tight.stdout


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda job, here, path: bisect(job, How(until="capture"), here), UsageError, "no stage to follow"),
        (lambda job, here, path: bisect(job, How(candidate="nothing"), here), UsageError, "no candidate 'nothing'"),
        (lambda job, here, path: bisect(job, How(inputs=path / "no.npz"), here), DataError, "cannot be read"),
        (lambda job, here, path: job_for(None, None, str(job.project.folder), (), SILENT), UsageError, "no profile"),
    ],
)
def test_bad_input_is_answered(job, here, tmp_path, make, error, message):
    with pytest.raises(error, match=message):
        make(job, here, tmp_path)


def test_inputs_of_another_name_are_answered(job, here, tmp_path):
    np.savez(tmp_path / "x.npz", picture=np.zeros((1, 1, 12, 12), np.float32))
    with pytest.raises(DataError, match="image"):
        bisect(job, How(inputs=tmp_path / "x.npz"), here)


def test_an_artifact_without_its_project_says_so(artifact, tmp_path):
    import shutil

    moved = tmp_path / "moved.edgeopt"
    shutil.copytree(artifact, moved)
    record = json.loads((moved / "build.json").read_bytes())
    (moved / "build.json").write_text(json.dumps({**record, "project": "/nowhere/edgeopt.yaml"}))
    with pytest.raises(ArtifactError, match="not on this machine"):
        job_for(str(moved), None, None, (), SILENT)
