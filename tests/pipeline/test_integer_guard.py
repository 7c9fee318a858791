"""int8 that is none is refused, and a pass that costs onnxruntime an integer kernel is dropped by name."""

from __future__ import annotations

import dataclasses
import json
import platform

import numpy as np
import pytest
import torch
from torch import nn

from edgeopt.passes import PassRecord, reoptimize
from edgeopt.passes.changed import Changed, Context
from edgeopt.passes.table import Pass
from edgeopt.pipeline import integer_guard, stages
from edgeopt.pipeline.job import Job
from edgeopt.program import Call, graph
from edgeopt.quant import convert
from edgeopt.spec.profile import load_profile
from edgeopt.spec.project import load_project
from tests.quant import models
from tests.quant.programs import batches, outputs, program, quantization, sqnr_db
from tests.small_project import run_edgeopt, write_project

HERE = {"target.arch": "x86_64", "target.cpu_features": "[]"}


@pytest.fixture(scope="module")
def integer():
    torch.manual_seed(0)
    p = program(models.Net(), 3, 16, 16)
    made, _ = convert.from_batches(p, quantization(), batches(3, 16, 16))
    x = batches(3, 16, 16, size=2, seed=3)[0]
    return dataclasses.replace(made, reference=(Call(x, graph.run(made, x)),))


@pytest.fixture
def job(tmp_path):
    project = load_project(write_project(tmp_path / "project") / "edgeopt.yaml")
    return Job(profile=load_profile("x86-cpu", HERE), project=project, workdir=tmp_path / "work")


def running(program_, job, more: tuple[Pass, ...] = ()):
    """The table with passes of the test's own in it, as the stage runs it."""
    from edgeopt.passes import Run

    return integer_guard.reoptimize(
        program_, job, lambda given: reoptimize(program_, job.profile, given, Run(rules=more))
    )


def test_the_kernels_before_and_after_are_recorded(integer, job):
    if platform.machine() != "x86_64":
        pytest.skip("this machine is no x86-64")
    assert integer_guard.target_is_here(job.profile)
    result, records, details = running(integer, job)
    for which in ("before", "after"):
        assert details["kernels"][which]["integer"]["QLinearConv"] == 3
        assert not details["kernels"][which]["floats"]
    assert "warnings" not in details and not [r for r in records if r.status == "dropped"]


def turns_twice(context: Context) -> Changed:
    """A pass that changes no value and costs a kernel: -(-x) stands between a convolution and its Q."""
    graph_of = context.module.graph
    conv = next(n for n in graph_of.nodes if "conv2d" in str(n.target))
    at = conv
    for _ in range(2):
        with graph_of.inserting_after(at):
            at = graph_of.call_function(torch.ops.aten.neg.default, (at,))
        at.meta["val"] = conv.meta["val"]
    first = next(iter(n for n in conv.users if "neg" in str(n.target)))
    conv.replace_all_uses_with(at, delete_user_cb=lambda user: user is not first)
    return Changed(1)


def test_a_pass_that_costs_an_integer_kernel_is_dropped_by_name(integer, job):
    if platform.machine() != "x86_64":
        pytest.skip("this machine is no x86-64")
    assert integer_guard.target_is_here(job.profile)
    result, records, details = running(integer, job, (Pass("costly", "integer", "node", turns_twice),))
    record = {r.name: r for r in records}["costly"]
    assert isinstance(record, PassRecord) and record.status == "dropped"
    assert record.reason == "onnxruntime runs 5 operators on integers with it, and 6 without"
    assert details["kernels"]["after"]["integer"]["QLinearConv"] == 3
    assert not any("neg" in str(n.target) for n in result.module.graph.nodes)
    others = {r.name: r.status for r in records}
    assert others["dequantize_later"] == "applied"  # the pass that costs goes, and no other
    x = batches(3, 16, 16, seed=9)[0]["x"]
    np.testing.assert_array_equal(outputs(integer, x), outputs(result, x))


def test_on_another_target_nothing_is_measured(integer, job):
    away = dataclasses.replace(job, profile=load_profile("arm64-cpu"))
    if platform.machine() == "aarch64":
        pytest.skip("this machine is an ARM")
    assert not integer_guard.target_is_here(away.profile)
    _, _, details = running(integer, away)
    assert details == {}


def test_a_boundary_that_costs_is_named(job):
    if platform.machine() != "x86_64":
        pytest.skip("this machine is no x86-64")
    assert integer_guard.target_is_here(job.profile)
    torch.manual_seed(0)
    p = program(models.Gated(nn.Tanh()), 3, 8, 8)
    made, _ = convert.from_batches(p, quantization(), batches(3, 8, 8))
    x = batches(3, 8, 8, size=2)[0]
    made = dataclasses.replace(made, reference=(Call(x, graph.run(made, x)),))
    _, _, details = running(made, job)
    assert len(details["warnings"]) == 1 and details["warnings"][0].startswith("float between integers: Tanh")


def test_layers_that_the_runtime_multiplies_in_float_all_the_same_are_counted(job):
    """Pairs placed for TensorRT, none behind a layer and none on a bias, make no QLinearConv and no QGemm."""
    if platform.machine() != "x86_64":
        pytest.skip("this machine is no x86-64")
    assert integer_guard.target_is_here(job.profile)
    torch.manual_seed(0)
    p = program(models.Net(), 3, 16, 16)
    made, _ = convert.from_batches(p, quantization("tensorrt"), batches(3, 16, 16))
    x = batches(3, 16, 16, size=2)[0]
    made = dataclasses.replace(made, reference=(Call(x, graph.run(made, x)),))
    _, _, details = running(made, job)
    assert details["warnings"][0] == "onnxruntime runs 4 of 4 layers with integer weights in float"


def test_batch_norms_that_passes_left_go_through_qat_and_quantize(job):
    """With passes.conv_bn off, QAT ended in "'GraphModule' object has no attribute 'aten'"."""
    profile = load_profile("x86-cpu", {**HERE, "passes.conv_bn": "off"})
    left = dataclasses.replace(job, profile=profile)
    captured, _ = stages._capture(None, left)
    optimized, details = stages._optimize(captured, left)
    assert any("batch_norm" in str(n.target) for n in optimized.module.graph.nodes)
    trained, _ = stages._qat(optimized, left)
    result, details = stages._quantize(trained, left)
    assert result.integer and details["coverage"] == 1.0 and details["batch_norms_folded"] == 2
    for call in captured.reference:
        got = graph.run(result, call.inputs)
        assert all(sqnr_db(call.outputs[name], got[name]) > 15 for name in got)


UNTOUCHABLE = '''

class Transposing(torch.nn.Module):
    """Only what onnxruntime has no integer kernel for."""
    def __init__(self):
        super().__init__()
        self.up = torch.nn.ConvTranspose2d(1, 2, 3)
    def forward(self, image):
        return {"scores": self.up(image).mean((2, 3))}

def build():
    torch.manual_seed(3)
    return Transposing()
'''


def test_int8_in_which_nothing_is_integer_is_refused_with_the_reason_of_each_layer(tmp_path):
    project = write_project(tmp_path / "project", model_code=UNTOUCHABLE, without=("train", "loss"))
    done = run_edgeopt(
        "build", "--profile", "x86-cpu", "--project", str(project), "--out", str(tmp_path / "out"), "--json"
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert [c["name"] for c in record["candidates"]] == ["onnxruntime-fp32", "torchscript-fp32"]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    reason = {r["candidate"]: r["reason"] for r in manifest["refused"]}["int8"]
    assert "no convolution, linear layer or matrix product would run on integers" in reason
    assert "up: the runtime has no integer kernel for it" in reason


def test_the_stage_gives_the_float_program_back_where_it_refuses(job, tmp_path):
    project = load_project(write_project(tmp_path / "other") / "edgeopt.yaml", {"keep_float": "['conv2d', 'linear']"})
    kept = dataclasses.replace(job, project=project)
    captured, _ = stages._capture(None, kept)
    result, details = stages._quantize(captured, kept)
    assert result is captured and not result.integer
    assert "kept float by the project" in details["refused"]
    assert details["operator_coverage"] == details["coverage"] == 0
