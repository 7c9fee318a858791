"""Drawings and tables of graphs: what stands where, at the widths of terminals."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from edgeopt.program.description import describe
from edgeopt.program.operators import Builder, Value
from edgeopt.program.walk import walk
from edgeopt.report import graph_text
from edgeopt.report.figures import count, percent, size
from edgeopt.report.graph_dot import dot
from tests.conftest import absent
from tests.program import networks


def laid_out(text: str) -> dict:
    """The drawing as graphviz understands it."""
    if shutil.which("dot") is None:
        absent("graphviz is not installed (Debian: graphviz)")
    done = subprocess.run(["dot", "-Tjson"], input=text.encode(), capture_output=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return json.loads(done.stdout)


def boxes(drawn: dict) -> dict[str, str]:
    return {o["name"]: o["label"] for o in drawn["objects"] if not o["name"].startswith("cluster")}


def edges(drawn: dict) -> list[tuple[str, str, str]]:
    names = {o["_gvid"]: o["name"] for o in drawn["objects"]}
    return [(names[e["tail"]], names[e["head"]], e.get("label", "").strip()) for e in drawn.get("edges", [])]


def test_chains_are_one_box_and_weights_are_not_drawn():
    drawn = laid_out(dot(walk(networks.residual()), "a title"))
    found = boxes(drawn)
    assert drawn["label"] == "a title"
    assert not any("weight" in label for label in found.values())
    stem = next(label for label in found.values() if "3×8×16×16" in label and "batch_norm" in label)
    assert stem.count("<tr>") == 3  # convolution, batch norm, activation
    ends = {name: label for name, label in found.items() if name.startswith(("in", "out"))}
    assert "x0" in ends["in0"] and "float32 3×3×32×32" in ends["in0"] and "y0" in ends["out0"]
    frames = {o["label"] for o in drawn["objects"] if o["name"].startswith("cluster")}
    assert {"inner.stem", "inner.block"} <= frames


def test_views_are_words_on_edges():
    drawn = laid_out(dot(walk(networks.block()), ""))
    assert not any("transpose" in label or "unflatten" in label for label in boxes(drawn).values())
    words = [label for _, _, label in edges(drawn)]
    assert words.count("unflatten, transpose") == 3


def test_every_operator_that_works_is_drawn_once_and_every_edge_has_both_ends():
    for make in (networks.residual, networks.block, networks.branches, networks.views):
        found = walk(make())
        drawn = laid_out(dot(found, ""))
        rows = sum(label.count("<tr>") for label in boxes(drawn).values())
        assert rows == sum(o.kind not in ("view", "constant") for o in found.operators)
        inside = {name for name, label in boxes(drawn).items() if name.startswith("op")}
        assert {end for start, end, _ in edges(drawn)} >= inside
        assert ("out0" in {end for _, end, _ in edges(drawn)}) is True


def test_the_share_of_the_flops_is_the_colour():
    text = dot(walk(networks.branches()), "")
    rows = [row for row in text.replace("<tr>", "\n<tr>").splitlines() if row.startswith("<tr>")]
    heavy, light = (next(row for row in rows if f">{op}<" in row) for op in ("conv2d", "cat"))
    assert "%" in heavy and '"#ffffff"' not in heavy
    assert '"#ffffff"' in light and "%" not in light


def test_names_that_graphviz_would_read_as_its_own_are_only_names():
    given, made = Value("float32", (2, 3), 24, 0), Value("float32", (2, 3), 24, 1)
    builder = Builder({})
    builder.storage(0, 24)
    builder.storage(1, 24)
    first = builder.add("<b>&op;", 'node."a<b>', [given], [made], flops=1, kind="other")
    builder.add('say "x"', 'node."a<b>', [made], [made], flops=1, kind="other", sources=[first])
    found = builder.done({'in "put" <i>': given}, {"digraph": (made, (1,))})
    drawn = laid_out(dot(found, 'a "title" <b>'))
    (label,) = [label for name, label in boxes(drawn).items() if name.startswith("op")]
    assert "&lt;b&gt;&amp;op;" in label and "say &quot;x&quot;" in label
    assert drawn["label"] == 'a "title" <b>'
    assert 'node."a<b>' in [o.get("label") for o in drawn["objects"]]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("make", [networks.residual, networks.block, networks.branches])
def test_the_text_fits_the_terminal_and_says_it_all(make, width):
    found = describe(make(), "optimize/start")
    text = graph_text.plain(graph_text.described(found), width=width)
    assert all(len(line) <= width for line in text.splitlines())
    joined = " ".join(text.split())
    assert f"x0 {found.inputs[0].dtype} [N, " in joined
    assert f"{count(found.costs.flops)}:" in joined
    assert f"{size(found.costs.peak_activation_bytes)} of activations" in joined
    assert f"{found.costs.intensity:.1f} FLOPs a byte" in joined
    first = found.costs.top[0]
    assert first.name in text.replace("\n", "") or first.name[:20] in text


def test_branches_are_told_with_what_they_could_win():
    found = describe(networks.branches(), "capture")
    text = " ".join(graph_text.plain(graph_text.described(found), width=200).split())
    times = found.costs.branches.times_faster
    assert f"independent branches: 3, at most {times:.2f} times faster if they ran at once" in text
    assert "inner.left:conv2d" in text and "inner.right:conv2d" in text
    chain = graph_text.plain(graph_text.described(describe(networks.residual(), "capture")))
    assert "1: a chain; nothing could run at once" in chain


def test_reasons_of_passes_are_told_once_with_their_places():
    record = {
        "name": "conv_bn", "changed": 1, "declined": ["bn_1: read [twice]", "bn_2: read [twice]", "bn_7: no stats"],
        "nodes_before": 10, "nodes_after": 9, "seconds": 0.1, "max_abs_error": 1e-7, "max_rel_error": 2e-7,
        "status": "applied", "reason": "",
    }  # fmt: skip
    dropped = {**record, "name": "odd", "status": "dropped", "reason": "output 'y' is off by 3", "declined": []}
    text = " ".join(graph_text.plain(graph_text.passes([record, dropped]), width=160).split())
    assert "conv_bn 1 10 > 9 0.10 1.0e-07 2.0e-07 left bn_1 and 1 more: read [twice] left bn_7: no stats" in text
    assert "odd - 10 0.10 - - dropped output 'y' is off by 3" in text
    narrow = graph_text.plain(graph_text.passes([record, dropped]), width=80).splitlines()
    assert len(narrow) == 6 and max(map(len, narrow)) <= 80


def test_figures():
    assert [count(n) for n in (0, 999, 1000, 602_300_000, 3.2e9, 5e12)] == [
        "0", "999", "1.0 k", "602.3 M", "3.2 G", "5.0 T",
    ]  # fmt: skip
    assert count(2_000_000, "FLOPs") == "2.0 MFLOPs"
    assert [size(n) for n in (0, 1023, 1024, 14 << 20)] == ["0 B", "1023 B", "1.0 KiB", "14.0 MiB"]
    assert size(3 << 40) == "3072.0 GiB"
    assert [percent(x) for x in (0, 0.0001, 0.125, 1)] == ["0.0 %", "<0.1 %", "12.5 %", "100.0 %"]
