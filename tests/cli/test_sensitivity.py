"""`edgeopt inspect --sensitivity` as people call it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from edgeopt import cli
from tests.mixed_project import mixed_project
from tests.tiny import tiny_artifact


@pytest.fixture
def edgeopt(capsys):
    """edgeopt(*argv) -> (exit status, stdout, stderr), in this process."""

    def run(*argv) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["inspect", "--profile", "x86-cpu", *map(str, argv)])
        out = capsys.readouterr()
        return ended.value.code, out.out, out.err

    return run


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return mixed_project(tmp_path_factory.mktemp("sensitivity") / "project")


def test_the_table_the_json_and_the_drawing_have_the_same_order(edgeopt, project, tmp_path):
    status, out, err = edgeopt("--project", project, "--sensitivity", "--plot", tmp_path / "x.svg")
    assert status == 0, err
    table = out[out.index("\nlayer ") :].splitlines()
    names = [line.split()[0] for line in table[2:8]]
    assert names[0] == "bad" and sorted(names) == ["adaptive_avg_pool2d", "bad", "good", "head", "stem", "tail"]
    assert "keep_float: ['bad']" in out and "lost" not in out
    status, out, _ = edgeopt("--project", project, "--sensitivity", "--json")
    data = json.loads(out)
    assert [layer["name"] for layer in data["layers"]] == names and data["metrics"] == {}
    assert data["layers"][0]["pattern"] == "%conv2d_1" and data["layers"][0]["sqnr_db"] < 30
    drawn = ET.parse(tmp_path / "x.svg").getroot()
    labels = [t.text for t in drawn.iter("{http://www.w3.org/2000/svg}text") if t.get("text-anchor") == "end"]
    assert labels == names


def test_with_metric_each_layer_says_what_evaluate_loses_and_a_second_look_is_cached(edgeopt, project):
    status, out, err = edgeopt("--project", project, "--sensitivity", "--metric", "--json")
    assert status == 0, err
    layers = json.loads(out)["layers"]
    lost = {layer["name"]: layer["metric_lost"]["closeness"] for layer in layers}
    assert lost["bad"] > 0.5 > max(value for name, value in lost.items() if name != "bad")
    assert list(lost.values()) == sorted(lost.values(), reverse=True)
    again = edgeopt("--project", project, "--sensitivity", "--metric", "--json")[1]
    assert json.loads(again)["layers"] == layers
    cached = sorted((project / ".edgeopt/cache/sensitivity").iterdir())
    assert len([folder for folder in cached if not folder.name.startswith(".")]) == 2
    status, out, _ = edgeopt("--project", project, "--sensitivity", "--metric", "--top", 2)
    assert "closeness lost" in out and "and 4 more; --top 6 shows them all" in out


WRONG = {
    "metric alone": (("--metric",), "--metric goes with --sensitivity"),
    "plot alone": (("--plot", "x.svg"), "--plot goes with --sensitivity"),
    "a plot of another kind": (("--sensitivity", "--plot", "x.png"), "drawn as .svg"),
    "a point as well": (("--sensitivity", "--stage", "quantize"), "--stage asks for something else"),
    "a drawing as well": (("--sensitivity", "--graph", "x.svg"), "--graph asks for something else"),
    "no evaluate": (("--sensitivity", "--metric", "--set", "project.evaluate=null"), "no 'evaluate'"),
    "no calibration": (("--sensitivity", "--set", "project.calibration=null"), "no 'calibration'"),
    "no int8": (("--sensitivity", "--set", "profile.precision.allowed=[fp32]"), "allows no int8"),
}  # fmt: skip


@pytest.mark.parametrize("argv, said", WRONG.values(), ids=WRONG)
def test_what_cannot_be_ranked_is_refused_with_what_to_do(edgeopt, project, argv, said):
    status, _, err = edgeopt("--project", project, *argv)
    assert status == 2 and said in err and "next:" in err


def test_an_artifact_is_lowered_already(capsys, tmp_path):
    artifact = tiny_artifact(tmp_path, torchscript=False)
    with pytest.raises(SystemExit) as ended:
        cli.main(["inspect", str(artifact.folder), "--sensitivity"])
    assert ended.value.code == 2 and "lowered already" in capsys.readouterr().err
