"""Fuser flags on the host: read back inside the block, restored after it whatever happens there."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch

from edgeopt.backends import fuser, torchscript
from edgeopt.errors import ProfileError
from edgeopt.onboard import torchscript as adaptor
from edgeopt.spec.profile import load_profile
from edgeopt.spec.profile_values import Fuser, FuserTrial

FLAGS = {
    "profiling_mode": False,
    "texpr_fuser": False,
    "texpr_reductions": True,
    "fusion_strategy": [["STATIC", 3], ["DYNAMIC", 5]],
}


def state():
    strategy = torch.jit.set_fusion_strategy([("STATIC", 1)])
    torch.jit.set_fusion_strategy(strategy)
    mode = torch._C._jit_set_profiling_mode(True)
    torch._C._jit_set_profiling_mode(mode)
    return strategy, mode, torch._C._jit_texpr_fuser_enabled(), torch._C._jit_texpr_reductions_enabled()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_flags_hold_inside_the_block_and_are_restored():
    before = state()
    with fuser.applied(FLAGS) as records:
        assert [(r["flag"], r["status"]) for r in records] == [(flag, "applied") for flag in FLAGS]
        assert state() == ([("STATIC", 3), ("DYNAMIC", 5)], False, False, True)
    assert state() == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_flags_are_restored_after_an_error():
    before = state()
    with pytest.raises(RuntimeError, match="in the block"), fuser.applied(FLAGS):
        raise RuntimeError("in the block")
    assert state() == before


def test_fusing_on_a_cpu_without_llvm_is_refused_and_unknown_flags_are_missing():
    before = torch._C._jit_can_fuse_on_cpu()
    with fuser.applied({"fuse_on_cpu": True, "warp_drive": 9}) as records:
        answers = {r["flag"]: (r["status"], r["message"]) for r in records}
        if not torch._C._llvm_enabled():
            assert answers["fuse_on_cpu"][0] == "refused" and "LLVM" in answers["fuse_on_cpu"][1]
            assert torch._C._jit_can_fuse_on_cpu() == before
    assert answers["warp_drive"][0] == "missing"
    assert torch._C._jit_can_fuse_on_cpu() == before


def test_every_flag_of_a_profile_is_in_the_table():
    after_loading = {"optimize_for_inference", "trials"}  # no flag of the process: the runner calls it
    assert set(Fuser.model_fields) - after_loading <= set(fuser.FLAGS)


def test_every_flag_of_the_table_is_known_to_the_runner():
    values = {flag: False for flag in fuser.FLAGS} | {"fusion_strategy": [["STATIC", 2]]}
    with fuser.applied(values) as records:
        assert not [r for r in records if "does not know" in r["message"]]


def profile_with(folder, text: str):
    (folder / "own.yaml").write_text(text)
    return load_profile(str(folder / "own.yaml"))


def test_what_is_tried_unasked_depends_on_the_target(tmp_path):
    x86, declined = fuser.trials(profile_with(tmp_path, "base: x86-cpu\nfuser: {trials: on}"))
    assert list(x86) == ["onednn", *(["nnc-cpu", "nnc-cpu-dynamic"] if torch._C._llvm_enabled() else [])]
    assert not declined  # what nobody named is not reported
    assert x86["onednn"]["onednn_fusion"] is True and "optimize_for_inference" not in x86["onednn"]
    assert fuser.trials(profile_with(tmp_path, "base: arm64-cpu\nfuser: {trials: on}")) == ({}, {})
    orin, _ = fuser.trials(profile_with(tmp_path, "base: orin-nx\nfuser: {trials: on}"))
    assert list(orin) == ["nnc", "nnc-dynamic"] and orin["nnc-dynamic"]["fusion_strategy"] == [["DYNAMIC", 10]]
    xavier, _ = fuser.trials(profile_with(tmp_path, "base: xavier@5.1\nfuser: {trials: on}"))
    assert list(xavier) == ["nnc", "nnc-dynamic", "nvfuser"]
    assert list(fuser.trials(profile_with(tmp_path, "base: nano\nfuser: {trials: on}"))[0]) == ["nnc"]  # torch 1.10
    assert fuser.trials(profile_with(tmp_path, "base: x86-cpu\nfuser: {trials: off}")) == ({}, {})


NAMED = {
    "nvfuser": ("base: x86-cpu", "gone from 2.2"),
    "nnc": ("base: x86-cpu", "has none"),
    "onednn": ("base: arm64-cpu", "x86 CPUs"),
    "nnc-dynamic": ("base: nano", "came with torch 1.11"),
}


@pytest.mark.parametrize("name, base, said", [(name, *case) for name, case in NAMED.items()])
def test_a_variant_that_is_named_and_cannot_be_tried_is_reported(name, base, said, tmp_path):
    tried, declined = fuser.trials(profile_with(tmp_path, f"{base}\nfuser: {{trials: [{name}]}}"))
    assert not tried and list(declined) == [name] and said in declined[name]


def test_every_variant_sets_flags_that_the_runner_knows_and_the_profile_can_name():
    assert {v.name for v in fuser.VARIANTS} == set(get_args(FuserTrial))
    for variant in fuser.VARIANTS:
        assert set(variant.flags) <= set(fuser.FLAGS) | {"optimize_for_inference"}


def test_a_misspelt_variant_is_refused_by_the_profile(tmp_path):
    with pytest.raises(ProfileError, match="trials"):
        profile_with(tmp_path, "base: x86-cpu\nfuser: {trials: [onednm]}")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name, sizes", [
    ("residual", [{"batch": n} for n in (1, 5, 1, 8, 3)]),
    ("transformer", [{"batch": 1, "time": 2}, {"batch": 3, "time": 11}, {"batch": 8, "time": 16}]),
])  # fmt: skip
def test_each_variant_that_is_tried_here_equals_the_eager_module_at_several_sizes(name, sizes, case, tmp_path):
    made = case(name)
    own = profile_with(tmp_path, "base: x86-cpu\nfuser: {trials: [onednn, unprofiled, nnc-cpu]}")
    lowered = torchscript.lower(made.program, own, tmp_path)
    names = [c.name for c in lowered.candidates]
    assert names[:2] == ["torchscript-fp32", "torchscript-fp32-onednn"] and names[-1] == "torchscript-fp32-unprofiled"
    assert lowered.files == ("float.pt",) and {c.file for c in lowered.candidates} == {"float.pt"}
    signature = made.program.signature
    specs = [[spec.model_dump(mode="json") for spec in side] for side in (signature.inputs, signature.outputs)]
    for candidate in lowered.candidates:
        program = adaptor.open_program(str(tmp_path), candidate.model_dump(mode="json"), *specs, [], None)
        try:
            assert {r["status"] for r in program.records} == {"applied"}
            for at in sizes:
                inputs = made.inputs(**at)
                for _ in range(3):  # profiled, then optimised
                    found = program.call([inputs[n] for n in signature.input_names])
                    for wanted, got in zip(made.expected(inputs), found, strict=True):
                        np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5)
        finally:
            program.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit.*:DeprecationWarning")
def test_the_two_optimisers_that_exclude_each_other_are_never_both_applied(case, tmp_path):
    made = case("residual")
    torchscript.save(made.program, tmp_path / "float.pt")
    signature = made.program.signature
    specs = [[spec.model_dump(mode="json") for spec in side] for side in (signature.inputs, signature.outputs)]
    both = {"file": "float.pt", "flags": {"onednn_fusion": True, "optimize_for_inference": True}}
    program = adaptor.open_program(str(tmp_path), both, *specs, [], None)
    try:
        assert {r["flag"]: r["status"] for r in program.records} == {
            "onednn_fusion": "applied", "optimize_for_inference": "refused",
        }  # fmt: skip
        inputs = made.inputs(batch=2)
        for _ in range(3):
            (found,) = program.call([inputs["image"]])
            np.testing.assert_allclose(found, made.expected(inputs)[0], rtol=0, atol=2e-5)
    finally:
        program.close()


def test_a_variant_that_fails_once_it_has_fused_is_refused_and_the_others_stay(case, tmp_path):
    """oneDNN graph of torch 2.13 fails on this model's padding and pooling at its second call or later."""
    own = profile_with(tmp_path, "base: x86-cpu\nfuser: {trials: [onednn, unprofiled]}")
    lowered = torchscript.lower(case("resizing").program, own, tmp_path)
    names = [c.name for c in lowered.candidates]
    assert "torchscript-fp32" in names and "torchscript-fp32-unprofiled" in names
    refused = {r.candidate: r.reason for r in lowered.refused}
    # a torch that can fuse it gives a candidate, one that cannot a reason; never neither, never both
    assert ("torchscript-fp32-onednn" in names) != ("torchscript-fp32-onednn" in refused)
    assert all("cannot run the file" in reason for reason in refused.values())
