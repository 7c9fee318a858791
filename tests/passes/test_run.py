"""The table as a whole: switches, records, verification, and what is left untouched."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from edgeopt import passes
from edgeopt.errors import ProfileError
from edgeopt.passes import run as runner
from edgeopt.passes.changed import Changed
from edgeopt.passes.table import PASSES, Pass
from edgeopt.program import ScriptGraph
from tests.passes.support import PROFILE, assert_equal, optimized, program, targets


def small():
    torch.manual_seed(0)
    return program(nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)), ("N", 2, 5, 5))


def test_the_program_given_is_not_touched():
    given = small()
    code, state = given.module.code, copy.deepcopy(given.module.state_dict())
    result, _ = optimized(given)
    assert given.module.code == code
    assert all(torch.equal(state[k], v) for k, v in given.module.state_dict().items())
    assert result.stages == ("capture", "optimize") and given.stages == ("capture",)


def test_every_pass_leaves_a_record_in_order():
    _, records = passes.optimize(small(), PROFILE, {})
    assert [r.name for r in records] == [p.name for p in PASSES if p.level != "integer"]
    for record, following in zip(records, records[1:], strict=False):
        assert record.nodes_after == following.nodes_before
        assert record.seconds >= 0


def test_a_switch_turns_one_pass_off():
    given = small()
    result, records = optimized(given, conv_bn=False)
    assert records["conv_bn"].status == "off" and records["out_of_place"].status == "applied"
    assert "aten.batch_norm.default" in targets(result)
    assert_equal(result, given)


def test_a_misspelt_switch_is_refused():
    with pytest.raises(ProfileError, match="did you mean 'conv_bn'"):
        optimized(small(), conv_bnn=False)


def _breaks(module, profile):
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.relu.default:
            node.target = torch.ops.aten.neg.default
    return Changed(1)


def _leaves_no_graph(module, profile):
    module.graph.erase_node(next(n for n in module.graph.nodes if n.op == "output"))
    return Changed(1)


def _raises(module, profile):
    raise KeyError("val")


@pytest.mark.parametrize("wrong", [_breaks, _leaves_no_graph, _raises])
def test_a_pass_that_fails_is_dropped_and_the_others_go_on(monkeypatch, wrong):
    monkeypatch.setattr(runner, "PASSES", (PASSES[0], Pass("wrong", "float", wrong), *PASSES[1:]))
    given = small()
    result, records = optimized(given)
    assert records["wrong"].status == "dropped" and records["wrong"].reason
    assert records["conv_bn"].status == "applied"
    assert_equal(result, given)


def test_running_twice_changes_nothing_more():
    once, _ = optimized(small())
    twice, records = optimized(once)
    assert {r.status for r in records.values()} == {"nothing"}
    assert targets(twice) == targets(once)


def test_other_programs_come_back_as_they_are():
    given = small()
    script = ScriptGraph(signature=given.signature, reference=given.reference, module=None)
    result, records = passes.optimize(script, PROFILE, {})
    assert records == [] and result.module is None
    assert result.stages == ("capture", "optimize") and result.notes
