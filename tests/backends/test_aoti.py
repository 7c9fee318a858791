"""AOTInductor packages: compiled here for here, equal at other sizes, refused elsewhere in words."""

from __future__ import annotations

import dataclasses
import platform

import numpy as np
import pytest

from edgeopt.backends import aoti, compiled_for
from edgeopt.onboard import aoti as adaptor
from edgeopt.onboard.failures import Failure
from edgeopt.program import ScriptGraph
from edgeopt.spec.profile import load_profile
from tests.conftest import absent


def here(folder, extra: str = ""):
    """A profile of a CPU of this machine's architecture."""
    base = {"x86_64": "x86-cpu", "aarch64": "arm64-cpu"}[platform.machine()]
    (folder / "here.yaml").write_text(f"base: {base}\nbackends: [onnxruntime, aoti]\n{extra}")
    return load_profile(str(folder / "here.yaml"))


@pytest.fixture(scope="module")
def package(case, tmp_path_factory):
    """(folder, lowered) of the residual net, compiled once: some 20 s of one core, which is what g++ takes."""
    if compiled_for.compiler() is None:
        absent("no g++ on this machine (Debian: g++)")
    folder = tmp_path_factory.mktemp("package")
    return folder, aoti.lower(case("residual").program, here(folder), folder)


def opened(made, folder, flags):
    signature = made.program.signature
    specs = [[spec.model_dump(mode="json") for spec in side] for side in (signature.inputs, signature.outputs)]
    return adaptor.open_program(str(folder), {"file": aoti.FILE_NAME, "flags": flags}, *specs, [], 1)


def test_the_package_equals_the_eager_module_at_every_size_and_holds_nothing_of_this_machine(case, package):
    folder, lowered = package
    assert lowered.refused == () and lowered.files == ("float.pt2",)
    (candidate,) = lowered.candidates
    assert (candidate.name, candidate.runtime, candidate.file) == ("aoti-fp32", "aoti", "float.pt2")
    assert candidate.flags == {"compiled_for": compiled_for.here()}
    made = case("residual")
    program = opened(made, folder, candidate.flags)
    for batch in (1, 2, 5, 8, 1):
        inputs = made.inputs(batch=batch)
        (found,) = program.call([inputs["image"]])
        np.testing.assert_allclose(found, made.expected(inputs)[0], rtol=0, atol=2e-5)
    program.close()
    data = (folder / "float.pt2").read_bytes()
    assert not [word for word in (b"wrapper.cpp", b"/home/", b"site-packages", b"/tmp/", b"edgeopt") if word in data]


def other(**changed):
    return {**compiled_for.here(), **changed}


MISMATCHES = {
    "torch": (other(torch="2.12.0"), "compiled for torch 2.12.0 and this machine has torch"),
    "architecture": (other(arch="riscv64"), "compiled for riscv64 and this machine is"),
    "one instruction": (other(cpu_flags=["avx9000"]), r"lacks \(avx9000\)"),
    "many": (other(cpu_flags=[f"avx900{i}" for i in range(9)]), "avx9003 and 5 more"),
    "not said": (None, "does not say"),
}


@pytest.mark.parametrize("flags, said", MISMATCHES.values(), ids=MISMATCHES)
def test_another_machines_package_is_refused_in_a_sentence_before_it_is_touched(flags, said, case, tmp_path):
    (tmp_path / "float.pt2").write_bytes(b"would crash")
    with pytest.raises(Failure, match=said) as caught:
        opened(case("residual"), tmp_path, {"compiled_for": flags})
    assert caught.value.kind == "load" and "\n" not in caught.value.message


def test_this_machine_fits_itself():
    assert adaptor.mismatch(compiled_for.here()) is None
    assert not set(compiled_for.here()["cpu_flags"]) & {"hypervisor", "nopl", "constant_tsc", "arch_capabilities"}


ELSEWHERE = {
    "a GPU": ("base: orin-nx", "the target has a GPU"),
    "another architecture": (None, "this machine"),
    "a CPU with more": ("base: x86-cpu\ntarget: {cpu_features: [avx9000]}", "no avx9000"),
    "another torch": ('base: x86-cpu\ntarget: {torch: {min: "1.11", max: "2.1"}}', "torch that compiled it"),
}


@pytest.mark.parametrize("text, said", ELSEWHERE.values(), ids=ELSEWHERE)
def test_nothing_is_compiled_for_another_machine(text, said, case, tmp_path):
    if text is None:
        text = "base: " + ("arm64-cpu" if platform.machine() == "x86_64" else "x86-cpu")
    elif "x86" in text and platform.machine() != "x86_64":
        pytest.skip("the profile is of another architecture here")
    (tmp_path / "other.yaml").write_text(text)
    lowered = aoti.lower(case("residual").program, load_profile(str(tmp_path / "other.yaml")), tmp_path)
    assert not lowered.candidates and said in lowered.refused[0].reason
    assert [path.name for path in tmp_path.iterdir()] == ["other.yaml"]


def test_integers_halves_and_scripts_are_refused(case, tmp_path):
    profile, program = here(tmp_path), case("residual").program
    assert "ONNX with Q/DQ" in aoti.refusals(case("integer").program, profile)[0]
    assert "fp32 only" in aoti.refusals(dataclasses.replace(program, half="bf16"), profile)[0]
    script = ScriptGraph(signature=program.signature, reference=())
    assert "exported graphs" in aoti.refusals(script, profile)[0]


def test_no_compiler_is_a_refusal_that_says_what_to_install(case, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # a real PATH on which there is none
    assert compiled_for.compiler() is None
    lowered = aoti.lower(case("residual").program, here(tmp_path), tmp_path)
    assert not lowered.candidates and "Debian: g++" in lowered.refused[0].reason


DEATHS = {
    "an error": ("sys.stderr.write('x\\na.cpp:3: error: no such thing\\nstopped\\n'); sys.exit(1)", "no such thing"),
    "an abort": ("os.abort()", "ended by signal 6"),
    "nothing": ("pass", "it said nothing"),
}  # fmt: skip


@pytest.mark.parametrize("code, said", DEATHS.values(), ids=DEATHS)
def test_a_compiler_that_fails_or_dies_is_a_refusal_with_its_words(code, said, case, tmp_path, monkeypatch):
    if compiled_for.compiler() is None:
        absent("no g++ on this machine (Debian: g++)")
    monkeypatch.setattr(aoti, "_START", f"import os, sys; {code}")  # in a process of its own, as the compiler is
    profile, out = here(tmp_path), tmp_path / "out"
    out.mkdir()
    lowered = aoti.lower(case("residual").program, profile, out)
    assert not lowered.candidates and not list(out.iterdir())
    assert "AOTInductor cannot compile the program" in lowered.refused[0].reason and said in lowered.refused[0].reason


def test_what_a_package_is_bound_to_counts_in_a_builds_key_and_only_with_aoti(tmp_path):
    with_it, without = here(tmp_path), load_profile("x86-cpu")
    facts = compiled_for.of_stage_key(with_it)
    assert {"torch", "arch", "cpu_flags", "compiler"} == set(facts)
    assert compiled_for.of_stage_key(without) is None
