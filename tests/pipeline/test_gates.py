"""When this machine may stand for the target, and which candidate runs first."""

from __future__ import annotations

import platform

import numpy as np
import pytest

from edgeopt.onboard import environment
from edgeopt.pipeline.gates import GateRow, choose, target_is_here
from edgeopt.spec.manifest import Candidate
from edgeopt.spec.profile import load_profile
from edgeopt.spec.report import CandidateResult

NATIVE = {"x86_64": "x86-cpu", "aarch64": "arm64-cpu"}[platform.machine()]
FOREIGN = {"x86_64": "arm64-cpu", "aarch64": "x86-cpu"}[platform.machine()]


def row(name: str, precision: str, *rounds_ms: float, **fields) -> GateRow:
    candidate = Candidate(name=name, runtime="onnxruntime", precision=precision, file=f"{name}.onnx")
    p50 = float(np.median(rounds_ms)) if rounds_ms else None
    result = CandidateResult(name=name, runtime="onnxruntime", precision=precision, p50_ms=p50, rounds_ms=rounds_ms)
    return GateRow(candidate, result, (), **fields)


@pytest.mark.parametrize("name", [FOREIGN, "xavier", "orin-nx", "desktop-cuda"])
def test_another_architecture_or_a_gpu_is_not_here(name):
    assert not target_is_here(load_profile(name))


def test_a_cpu_that_lacks_what_the_profile_needs_is_not_here():
    assert target_is_here(load_profile(NATIVE)) is (platform.machine() != "x86_64" or "avx2" in flags())
    assert not target_is_here(load_profile(NATIVE, {"target.cpu_features": "[avx9]"}))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="VNNI is an x86 extension")
def test_a_vnni_target_is_here_only_where_the_cpu_has_it():
    has = bool({"avx512_vnni", "avx_vnni"} & flags())
    assert target_is_here(load_profile("x86-cpu", {"target.vnni": "true"})) is has


def test_where_the_target_is_not_here_the_speed_is_undecided():
    rows = (row("float", "fp32", 1.0), row("int8", "int8", 9.0))
    chosen = choose(rows, load_profile(FOREIGN), {"float": 4, "int8": 1})
    assert (chosen.candidate, chosen.verdict, chosen.figures) == ("int8", "undecided", {})


def test_an_int8_that_is_slower_does_not_run_first():
    rows = (row("float", "fp32", 1.0), row("int8", "int8", 1.2))
    chosen = choose(rows, load_profile(NATIVE), {"float": 4, "int8": 1})
    assert (chosen.candidate, chosen.verdict) == ("float", "faster")
    assert chosen.figures["int8"]["p50_ms"] == 1.2


def test_of_equals_within_the_noise_the_smaller_runs_first():
    rows = (row("float", "fp32", 1.0, 1.03, 1.0), row("int8", "int8", 1.02, 1.02, 1.01))
    assert choose(rows, load_profile(NATIVE), {"float": 4, "int8": 1}).candidate == "int8"
    assert choose(rows, load_profile(NATIVE), {"float": 1, "int8": 4}).candidate == "float"


def test_a_noisy_machine_does_not_make_a_clearly_slower_candidate_equal():
    rows = (row("float", "fp32", 1.0, 1.9, 0.5), row("int8", "int8", 1.2, 0.9, 1.7))
    assert choose(rows, load_profile(NATIVE), {"float": 4, "int8": 1}).candidate == "float"


def flags() -> set[str]:
    return set(environment.describe()["cpu_flags"])
