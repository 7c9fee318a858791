"""What `edgeopt build` says of a stage on the screen."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

from edgeopt.cli.build_lines import Lines
from edgeopt.passes import Run, optimize
from edgeopt.passes.rules_run import as_pass
from edgeopt.pipeline.stages import StageRecord
from edgeopt.rules import rule
from tests.passes.support import PROFILE, program


class Gated(nn.Module):
    def forward(self, x):
        return x * torch.tanh(x)


def test_a_rule_that_matches_nowhere_says_how_near_it_came(capsys):
    silu = rule(pattern=lambda x: x * torch.sigmoid(x), replacement=lambda x: F.silu(x), inputs={"x": (...,)})
    _, records = optimize(program(Gated(), ("N", 4)), PROFILE, {}, Run(rules=(as_pass("silu", silu),)))
    details = {"passes": [dataclasses.asdict(record) for record in records]}
    Lines(quiet=False).listener.stage(StageRecord("optimize", 0.1, size_bytes=0, nodes=2, details=details))
    said = capsys.readouterr().out
    assert (
        "rule:silu matched nothing: nearest is mul" in said and "it is aten.tanh, the pattern has aten.sigmoid" in said
    )
