"""Fuser flags on the host: read back inside the block, restored after it whatever happens there."""

from __future__ import annotations

import pytest
import torch

from edgeopt.backends import fuser
from edgeopt.spec.profile_values import Fuser

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
    after_loading = {"optimize_for_inference"}  # no flag of the process: the runner calls it
    assert set(Fuser.model_fields) - after_loading <= set(fuser.FLAGS)


def test_every_flag_of_the_table_is_known_to_the_runner():
    values = {flag: False for flag in fuser.FLAGS} | {"fusion_strategy": [["STATIC", 2]]}
    with fuser.applied(values) as records:
        assert not [r for r in records if "does not know" in r["message"]]
