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
    assert [r.name for r in records] == [p.name for p in PASSES if p.graphs != "integer"]
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


def _breaks(context):
    for node in context.module.graph.nodes:
        if node.target is torch.ops.aten.relu.default:
            node.target = torch.ops.aten.neg.default
    return Changed(1)


def _leaves_no_graph(context):
    context.module.graph.erase_node(next(n for n in context.module.graph.nodes if n.op == "output"))
    return Changed(1)


def _raises(context):
    raise KeyError("val")


@pytest.mark.parametrize("wrong", [_breaks, _leaves_no_graph, _raises])
def test_a_pass_that_fails_is_dropped_and_the_others_go_on(monkeypatch, wrong):
    monkeypatch.setattr(runner, "PASSES", (PASSES[0], Pass("wrong", "float", "node", wrong), *PASSES[1:]))
    given = small()
    result, records = optimized(given)
    assert records["wrong"].status == "dropped" and records["wrong"].reason
    assert records["conv_bn"].status == "applied"
    assert_equal(result, given)


def test_running_twice_changes_nothing_more():
    once, _ = optimized(small())
    twice, records = optimized(once)
    assert {r.status for r in records.values() if r.status != "off"} == {"nothing"}
    assert targets(twice) == targets(once)


def test_other_programs_come_back_as_they_are():
    given = small()
    script = ScriptGraph(signature=given.signature, reference=given.reference, module=None)
    result, records = passes.optimize(script, PROFILE, {})
    assert records == [] and result.module is None
    assert result.stages == ("capture", "optimize") and result.notes


class _Tables(nn.Module):
    """A constant that is larger than what it is made of: four rows of one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("row", torch.linspace(0, 1, 64))

    def forward(self, x):
        return x + self.row.expand(64, 64) * 2


def test_a_setting_of_a_pass_is_heard():
    given = program(_Tables(), ("N", 64, 64))
    assert optimized(given)[1]["fold_constants"].changed == 2  # 16 KiB: at the cap
    small_cap, records = optimized(given, fold_constants={"max_new_bytes": 1024})
    assert records["fold_constants"].changed == 0
    assert any("16384 bytes" in reason for reason in records["fold_constants"].declined)
    assert_equal(small_cap, given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_new_byte": 1}, "did you mean 'max_new_bytes'"),
        ({"max_new_bytes": "many"}, "no whole number"),
        ({"max_new_bytes": True}, "no whole number"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_key(given, message):
    with pytest.raises(ProfileError, match=message) as wrong:
        optimized(small(), fold_constants=given)
    assert "passes.fold_constants." in wrong.value.where


def _scales_outputs(factor):
    def run(context):
        output = context.module.graph.output_node()
        with context.module.graph.inserting_before(output):
            scaled = context.module.graph.call_function(torch.ops.aten.mul.Tensor, (output.args[0][0], factor))
        scaled.meta = dict(output.args[0][0].meta)
        output.args = ((scaled, *output.args[0][1:]),)
        return Changed(1)

    return run


class _Tiny(nn.Module):
    def forward(self, x):
        return x * 1e-6


def test_a_fault_in_tiny_outputs_is_seen_by_the_relative_error(monkeypatch):
    given = program(_Tiny(), ("N", 4))
    monkeypatch.setattr(runner, "PASSES", (*PASSES, Pass("wrong", "float", "node", _scales_outputs(1.01))))
    result, records = optimized(given)
    assert records["wrong"].status == "dropped" and "of its largest value" in records["wrong"].reason
    assert_equal(result, given, atol=0)


def test_rounding_in_the_last_place_is_no_fault_and_both_errors_are_reported(monkeypatch):
    """Case G05: folding moves float32 results by about 1e-6, relative to their size by less."""
    given = small()
    monkeypatch.setattr(runner, "PASSES", (*PASSES, Pass("rounds", "float", "node", _scales_outputs(1 + 3e-7))))
    _, records = optimized(given)
    for name in ("conv_bn", "rounds"):
        assert records[name].status == "applied"
        assert 0 < records[name].max_abs_error < 1e-5 and 0 < records[name].max_rel_error < 1e-5


class _Cancels(nn.Module):
    """Large terms cancel: the model's own float32 noise is far above that of a fold."""

    def forward(self, x):
        return (x + 4096) * 8 - (x + 4096) * 7 - 4096


def test_the_references_own_noise_is_measured_first():
    given = program(_Cancels(), ("N", 16))
    check = runner.Check(given)
    assert check.noise["y0"].max_abs > 1e-4  # more than MAX_ABS: equal rewrites may differ by as much
    assert check(given.module).reason is None


def test_an_unverified_run_keeps_a_wrong_pass_and_stops_where_it_is_told(monkeypatch):
    monkeypatch.setattr(runner, "PASSES", (*PASSES, Pass("wrong", "float", "node", _scales_outputs(2.0))))
    given, seen = small(), []
    how = passes.Run(verified=False, watch=lambda name, program: seen.append(name))
    _, records = passes.optimize(given, PROFILE, {}, how)
    assert records[-1].status == "applied" and seen[0] == "start" and seen[-1] == "wrong"
    _, records = passes.optimize(given, PROFILE, {}, passes.Run(last="conv_bn"))
    assert records[-1].name == "conv_bn"


class _Chain(nn.Module):
    """`length` blocks of an in-place operator, a product and a sum, with constants to fold and work to merge."""

    def __init__(self, length):
        super().__init__()
        self.length = length
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, x):
        for i in range(self.length):
            y = (x * (self.scale + i / self.length)).relu_()
            x = torch.dropout(y, 0.5, False) * 0.5 + x * 0.5
        return x


def test_ten_times_the_nodes_are_ten_times_the_calls_into_a_pass():
    """The work of the table, counted in Python calls of this room, grows no worse than linearly."""
    import cProfile
    import pstats

    def calls(length):
        given = program(_Chain(length), ("N", 8))
        profiler = cProfile.Profile()
        profiler.enable()
        optimized(given)
        profiler.disable()
        stats = pstats.Stats(profiler).stats
        return sum(count for (file, _, _), (_, count, *_) in stats.items() if "edgeopt" in file or "fx" in file)

    small_graph, large_graph = calls(15), calls(150)
    assert large_graph < 12 * small_graph
