"""When the fp16 and bf16 stages have nothing to run, and what they say then; which backend takes what."""

from __future__ import annotations

import sys

import pytest

from edgeopt.pipeline.gates import _rank
from edgeopt.pipeline.job import Job
from edgeopt.pipeline.keys import stage_keys
from edgeopt.pipeline.lowering import half_takers
from edgeopt.pipeline.stages import STAGES
from edgeopt.program import ScriptGraph, Signature
from edgeopt.spec.manifest import Candidate
from edgeopt.spec.profile import load_profile
from edgeopt.spec.project import load_project
from tests.small_project import write_project

BRANCHES = {stage.name: stage for stage in STAGES if stage.branch}


@pytest.fixture
def job(tmp_path):
    """job(PROFILE, overrides of it, overrides of the project, target_python)."""
    write_project(tmp_path)

    def make(name: str, profile: dict | None = None, project: dict | None = None, python: str | None = None) -> Job:
        given = load_profile(name, profile or {})
        return Job(given, load_project(tmp_path, project or {}), tmp_path / ".edgeopt", target_python=python)

    return make


def test_the_branches_follow_optimize_and_precede_the_integer_stages():
    assert [s.name for s in STAGES] == ["capture", "optimize", "fp16", "bf16", "qat", "quantize", "reoptimize"]
    assert list(BRANCHES) == ["fp16", "bf16"]


@pytest.mark.parametrize(
    ("profile", "overrides", "precision", "reason"),
    [
        ("x86-cpu", {}, "fp16", "the profile 'x86-cpu' allows no fp16"),
        ("x86-cpu", {"precision.allowed": "[fp32, fp16]"}, "bf16", "allows no bf16"),
        ("nano", {"backends": "[tensorrt]"}, "fp16", "the backends make fp16 of the fp32 file themselves"),
        ("xavier", {}, "fp16", "torchscript: not test-loaded: the target runs torch 1.11 to 2.1"),
        ("x86-cpu", {"precision.allowed": "[fp32, fp16]"}, "fp16", "the model came as torch.jit trace"),
    ],
)
def test_a_stage_with_nothing_to_run_says_why(job, profile, overrides, precision, reason):
    script = ScriptGraph(signature=Signature((), (), {}, None, {}), reference=())
    assert reason in BRANCHES[precision].declines(script, job(profile, overrides))


def test_who_takes_a_program_in_16_bits(job):
    both = {"precision.allowed": "[fp32, fp16, bf16]"}
    takers = {p: half_takers(p, job("x86-cpu", both)) for p in ("fp16", "bf16")}
    assert takers["fp16"]["onnxruntime"] is None and "no fp16 kernels" in takers["fp16"]["torchscript"]
    assert takers["bf16"]["torchscript"] is None and "no bf16 kernels" in takers["bf16"]["onnxruntime"]
    desktop = {p: half_takers(p, job("desktop-cuda", both)) for p in ("fp16", "bf16")}
    assert desktop["fp16"] == {"tensorrt": None, "onnxruntime": None, "torchscript": None}
    assert desktop["bf16"]["torchscript"] is None and "could prove it" in desktop["bf16"]["tensorrt"]
    assert set(half_takers("fp16", job("xavier"))) == {"torchscript"}  # its TensorRT has a flag
    assert half_takers("fp16", job("xavier", python=sys.executable)) == {"torchscript": None}


@pytest.mark.parametrize(
    ("project", "profile", "changed"),
    [
        ({"keep_fp32": "[head]"}, {}, {"fp16", "bf16", "qat", "quantize", "reoptimize", "build"}),
        ({"calibration_batches": "3"}, {}, {"fp16", "bf16", "quantize", "reoptimize", "build"}),
        ({"qat.epochs": "2"}, {}, {"qat", "quantize", "reoptimize", "build"}),
        ({"limits.latency_ms": "9"}, {}, {"build"}),
    ],
)
def test_a_branch_is_made_again_for_what_it_reads_and_changes_no_later_key(job, project, profile, changed):
    before, after = stage_keys(job("x86-cpu")), stage_keys(job("x86-cpu", profile, project))
    assert {name for name in before if before[name] != after[name]} == changed


def test_16_bits_are_expected_between_int8_and_fp32():
    names = ["fp32", "bf16", "int8", "fp16"]
    ranked = sorted(
        (Candidate(name=p, runtime="onnxruntime", precision=p, file="a.onnx") for p in names), key=_rank
    )  # fmt: skip
    assert [c.name for c in ranked] == ["int8", "fp16", "bf16", "fp32"]
