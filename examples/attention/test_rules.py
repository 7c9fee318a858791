"""The rule tried by itself: `pytest test_rules.py`. check_rule raises an AssertionError that says what is wrong."""

import math

import model
import ops  # noqa: F401  defines custom_ops::fused_attention
import pytest
import rules
import torch

from edgeopt.rules import check_rule

FRAMES = torch.randn(2, 24, 40, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("build", [model.build, model.build_with_torch_attention])
def test_the_rule_finds_the_attention_of_each_layer(build):
    checked = check_rule(
        rules.fused_attention,
        build().eval(),
        [FRAMES],
        places=2,
        dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=8), 1: torch.export.Dim("time", min=8, max=512)},),
        sizes=[{"queries": 1}, {"keys": 1}, {"queries": 130, "keys": 70}],
    )
    assert max(trial.max_abs_error for trial in checked.trials) < 1e-5


def test_attention_with_another_scale_is_not_taken_for_it():
    class Sharper(model.Attention):
        def attend(self, q, k, v):
            return torch.softmax(q @ k.transpose(-2, -1) * math.sqrt(q.shape[-1]), dim=-1) @ v

    with pytest.raises(AssertionError, match="matches nowhere"):
        check_rule(rules.fused_attention, model.build(Sharper).eval(), [FRAMES])
