"""`edgeopt inspect` as people call it: on a project, an artifact and bare files, right and wrong."""

from __future__ import annotations

import json
import platform
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
import warnings

import onnx
import pytest
import torch
from torch import nn

from edgeopt import cli
from edgeopt.passes import run
from edgeopt.passes.table import Pass
from tests.conftest import absent
from tests.pipeline.test_integer_guard import turns_twice
from tests.program.test_graph_lines import onnx_net
from tests.small_project import write_project
from tests.tiny import onnx_model, tiny_artifact


@pytest.fixture
def edgeopt(capsys):
    """edgeopt(*argv) -> (exit status, stdout, stderr), in this process."""

    def run(*argv) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main([str(arg) for arg in argv])
        out = capsys.readouterr()
        return ended.value.code, out.out, out.err

    return run


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return write_project(tmp_path_factory.mktemp("inspect") / "bars", without=("train", "loss", "qat", "evaluate"))


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return tiny_artifact(tmp_path_factory.mktemp("artifact"), metrics={}, cases_complete=False)


def ok(ran) -> str:
    status, out, err = ran
    assert status == 0, err
    return out


def data(ran) -> dict:
    return json.loads(ok(ran))


def test_a_project_shows_its_stages_its_passes_and_the_optimized_graph(edgeopt, project):
    out = ok(edgeopt("inspect", "--project", project, "--profile", "x86-cpu"))
    lines = out.splitlines()
    assert lines[0].startswith("bars for x86-cpu: ")
    assert any(re.match(r"capture +\d+\.\d s .* nodes .* error 0$", line) for line in lines)
    assert any(re.match(r"  conv_bn +2 +\d+ > \d+ ", line) for line in lines)
    assert any(re.match(r"  fold_constants +- .* found nothing$", line) for line in lines)
    assert "  inputs       image float32 [n, 1, 12, 12]" in lines
    assert "  axes         n 1 to 16, tuned for 1" in lines
    figures = next(line for line in lines if line.startswith("  operators"))
    assert "2 conv2d" in figures and "batch_norm" not in figures
    assert "\x1b" not in out
    again = ok(edgeopt("inspect", "--project", project, "--profile", "x86-cpu"))
    assert again.count("(cached)") == 2


def test_the_graph_at_a_pass_and_its_figures_as_json(edgeopt, project):
    common = ("inspect", "--project", project, "--profile", "x86-cpu", "--json")
    start, folded = (data(edgeopt(*common, "--pass", step)) for step in ("start", "conv_bn"))
    assert start["graph"]["name"] == "optimize/start" and folded["graph"]["name"] == "optimize/conv_bn"
    before, after = start["graph"]["costs"], folded["graph"]["costs"]
    # conv 1 to 8 and depthwise 8 on 12 x 12, linear 8 to 2: a multiply-add as 2
    assert before["contraction_flops"] == after["contraction_flops"] == 2 * (144 * 8 * 9 + 144 * 8 * 9 + 16)
    assert before["operators"]["batch_norm"] == 2 and "batch_norm" not in after["operators"]
    assert after["flops"] < before["flops"] and after["moved_bytes"] < before["moved_bytes"]
    assert before["sizes"] == {"n": 1}
    assert before["peak_activation_bytes"] == after["peak_activation_bytes"] == 4 * 3 * 8 * 144 + 4 * 144
    records = {p["name"]: p for p in folded["stages"][1]["details"]["passes"]}
    assert records["conv_bn"]["status"] == "applied" and records["conv_bn"]["changed"] == 2


def test_other_sizes_and_a_pass_that_is_off(edgeopt, project):
    settings = ("--set", "project.axes.n.opt=16", "--set", "profile.passes.conv_bn=off")
    found = data(edgeopt("inspect", "--project", project, *settings, "--pass", "conv_bn", "--json"))
    assert found["graph"]["costs"]["sizes"] == {"n": 16}
    assert found["graph"]["costs"]["operators"]["batch_norm"] == 2
    assert any("conv_bn is switched off" in note for note in found["graph"]["notes"])


def test_the_difference_of_two_points(edgeopt, project):
    common = ("inspect", "--project", project, "--profile", "x86-cpu", "--diff")
    out = ok(edgeopt(*common, "start", "optimize/conv_bn"))
    changed = [line for line in out.splitlines() if re.match(r"[-+](?![-+])", line)]
    assert sum("batch_norm(" in line for line in changed) == 2
    assert all(line[0] == "-" for line in changed if "batch_norm(" in line)
    assert len(changed) <= 12
    same = ok(edgeopt(*common, "dead_code", "contiguous_weights"))
    assert "no difference: optimize/dead_code and optimize/contiguous_weights are the same graph" in same
    found = data(edgeopt(*common, "capture", "optimize", "--json"))
    assert found["before"]["name"] == "capture" and found["graph"]["name"] == "optimize"
    assert any(line.startswith("-first.1:batch_norm") for line in found["diff"])


def test_the_integer_graph_and_what_quantizing_changed(edgeopt, project):
    common = ("inspect", "--project", project, "--profile", "x86-cpu")
    found = data(edgeopt(*common, "--stage", "reoptimize", "--json"))["graph"]["costs"]
    assert found["integer_contractions"] == found["contractions"] == 3
    assert {w["dtype"] for w in found["weights"]} >= {"int8", "int32"}
    out = ok(edgeopt(*common, "--diff", "optimize", "quantize"))
    assert re.search(r"^-first.0:conv2d .*= conv2d\(image, ", out, re.MULTILINE)
    assert re.search(r"^\+first.0:conv2d .*= conv2d\(real\(", out, re.MULTILINE)
    assert not re.search(r"^[-+]second.2:hardtanh f32.*= hardtanh", out, re.MULTILINE)  # is what it was


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--pass", "conv_bm"), "there is no pass 'conv_bm' and no stage of that name, did you mean 'conv_bn'?"),
        (("--stage", "quantise"), "there is no stage 'quantise', did you mean 'quantize'?"),
        (("--stage", "reoptimize", "--pass", "conv_bn"), "there is no pass 'conv_bn' in reoptimize"),
        (("--diff", "capture", "optimise"), "did you mean 'optimize'?"),
        (("--diff", "capture/conv_bn", "optimize"), "the stage capture runs no passes"),
        (("--diff", "optimize", "qat"), "there is no graph after qat: it was left out: no training is given"),
        (("--diff", "a", "b", "--pass", "conv_bn"), "two things to show"),
        (("--diff", "capture", "optimize", "--graph", "x.svg"), "--diff compares two graphs"),
        (("--graph", "model.gif"), "a graph is not drawn as '.gif'"),
        (("--profile", "x87"), "x87"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_does(edgeopt, project, argv, words):
    status, _, err = edgeopt("inspect", "--project", project, *argv)
    assert status in (2, 3)
    assert words in err and "next:" in err and "Traceback" not in err


def test_a_torchscript_model_has_stages_and_no_passes(edgeopt, tmp_path):
    folder = write_project(tmp_path / "p", model="net.pt", without=("train", "loss", "qat", "evaluate", "calibration"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU()).eval()), str(folder / "net.pt"))
    given = ("--set", "project.inputs={input: {shape: [n, 1, 12, 12]}}")
    out = ok(edgeopt("inspect", "--project", folder, *given))
    assert "optimize  TorchScript (file), at n=1" in out
    assert "note         a TorchScript program: the operators that its run dispatched" in out
    assert data(edgeopt("inspect", "--project", folder, *given, "--json"))["graph"]["costs"]["contraction_flops"] == (
        2 * 4 * 9 * 100
    )
    status, _, err = edgeopt("inspect", "--project", folder, *given, "--pass", "conv_bn")
    assert status == 2 and "captured as TorchScript, which has no graph passes" in err
    assert "next:  look at one of: capture, optimize" in err


def test_an_onnx_model_is_shown_as_it_was_captured(edgeopt, tmp_path):
    onnx.save(onnx_net(), tmp_path / "net.onnx")
    axes = {"n": {"min": 1, "opt": 2, "max": 8}}
    values = {"name": "net", "model": "net.onnx", "inputs": {"x": {"shape": ["n", 4]}}, "axes": axes}
    (tmp_path / "edgeopt.yaml").write_text(json.dumps(values))
    out = ok(edgeopt("inspect", "--project", tmp_path))
    assert "capture  ONNX, opset 17, at n=2" in out and "optimize    left out:" in out
    status, _, err = edgeopt("inspect", "--project", tmp_path, "--stage", "optimize")
    assert status == 2 and "it was left out: an ONNX file is taken as it is" in err


def test_an_artifact_shows_its_candidates(edgeopt, artifact):
    out = ok(edgeopt("inspect", artifact.folder))
    assert re.search(r"^\* onnxruntime-fp32 +float.onnx +13 .* 3 +0 +0 of 2 +67 +", out, re.MULTILINE)
    assert re.search(r"^  torchscript-fp32 +float.pt +- ", out, re.MULTILINE)
    assert "float.onnx  ONNX, opset 13, at n=2" in out and "2 Gemm, 1 Relu" in out
    found = data(edgeopt("inspect", artifact.folder, "--json"))["candidates"]
    flops = {name: row["graph"]["costs"]["contraction_flops"] for name, row in found.items()}
    assert flops == {"onnxruntime-fp32": 2 * 2 * (4 * 8 + 8 * 3), "torchscript-fp32": 2 * 2 * (4 * 8 + 8 * 3)}
    assert "no difference" in ok(edgeopt("inspect", artifact.folder, "--diff", "float.onnx", "onnxruntime-fp32"))


def test_what_is_wrong_with_an_artifact_is_said(edgeopt, artifact, tmp_path):
    status, _, err = edgeopt("inspect", artifact.folder, "--diff", "float.onnx", "int8.onnx")
    assert status == 2 and "no candidate or file 'int8.onnx'" in err and "one of: float.onnx, float.pt" in err
    status, _, err = edgeopt("inspect", artifact.folder, "--diff", "float.onnx", "float.pt")
    assert status == 2 and "they have no line in common" in err
    status, _, err = edgeopt("inspect", artifact.folder, "--stage", "optimize")
    assert status == 2 and "an artifact has no stages" in err
    status, _, err = edgeopt("inspect", artifact.folder, "--profile", "xavier")
    assert status == 2 and "no profile to choose" in err
    status, _, err = edgeopt("inspect", tmp_path)
    assert status == 10 and "this folder is no artifact" in err
    damaged = tmp_path / "damaged"
    shutil.copytree(artifact.folder, damaged)
    (damaged / "float.onnx").write_bytes((damaged / "float.onnx").read_bytes()[:-1] + b"x")
    status, _, err = edgeopt("inspect", damaged)
    assert status == 10 and "has changed since it was built" in err and "float.onnx" in err


def test_a_candidate_that_does_not_load_here_costs_only_itself(edgeopt, tmp_path):
    extra = {"other.pt": b"PK\x03\x04 no TorchScript"}
    from tests.tiny import candidate

    candidates = [
        candidate("onnxruntime-fp32", "onnxruntime", "float.onnx", opset=13),
        candidate("torchscript-fp32", "torchscript", "other.pt"),
    ]
    made = tiny_artifact(tmp_path, torchscript=False, extra=extra, candidates=candidates, metrics={})
    out = ok(edgeopt("inspect", made.folder))
    assert re.search(r"costs +not counted: the TorchScript file cannot be loaded", out)
    assert "2 Gemm, 1 Relu" in out


def test_bare_files(edgeopt, artifact, tmp_path):
    onnx.save(onnx_net(), tmp_path / "float.onnx")
    onnx.save(onnx_net(quantized=True), tmp_path / "int8.onnx")
    out = ok(edgeopt("inspect", tmp_path / "float.onnx"))
    assert "float.onnx  ONNX, opset 17, at n=1" in out and "n=1 was taken" in out
    both = ok(edgeopt("inspect", "--diff", tmp_path / "float.onnx", tmp_path / "int8.onnx"))
    assert "+QuantizeLinear u8[n, 4] = QuantizeLinear(x, f32(0.5), u8(3))" in both
    beside = ok(edgeopt("inspect", tmp_path / "float.onnx", "--diff", "float.onnx", "int8.onnx"))
    assert beside == both
    script = ok(edgeopt("inspect", artifact.folder / "float.pt"))
    assert re.search(r"costs +not counted: a TorchScript file does not tell its inputs' shapes", script)
    assert re.search(r"operators +2 matmul, 2 add", script) and "67 float32" in script
    (tmp_path / "broken.onnx").write_bytes(b"no protobuf at all")
    status, _, err = edgeopt("inspect", tmp_path / "broken.onnx")
    assert status == 5 and "broken.onnx" in err and "Traceback" not in err
    status, _, err = edgeopt("inspect", tmp_path / "absent.onnx")
    assert status == 5 and "no such model file" in err


def test_the_graph_as_files(edgeopt, project, artifact, tmp_path):
    common = ("inspect", "--project", project, "--profile", "x86-cpu", "--graph")
    ok(edgeopt(*common, tmp_path / "g.dot", "--pass", "start"))
    text = (tmp_path / "g.dot").read_text()
    assert text.startswith("digraph") and "bars: optimize/start, n=1" in text and "batch_norm" in text
    ok(edgeopt(*common, tmp_path / "g.txt"))
    assert (tmp_path / "g.txt").read_text().startswith("input image f32[n, 1, 12, 12]\n")
    ok(edgeopt(*common, tmp_path / "g.onnx"))
    onnx.checker.check_model(str(tmp_path / "g.onnx"), full_check=True)
    ok(edgeopt("inspect", artifact.folder, "--graph", tmp_path / "a.onnx"))
    assert (tmp_path / "a.onnx").read_bytes() == (artifact.folder / "float.onnx").read_bytes()
    if shutil.which("dot") is None:
        absent("graphviz is not installed (Debian: graphviz)")
    for suffix, head in ((".svg", b"<?xml"), (".png", b"\x89PNG"), (".pdf", b"%PDF")):
        ok(edgeopt(*common, tmp_path / f"g{suffix}"))
        assert (tmp_path / f"g{suffix}").read_bytes().startswith(head)
    assert not list(tmp_path.glob(".*"))


def test_without_graphviz_the_error_says_what_to_do(edgeopt, project, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    status, _, err = edgeopt("inspect", "--project", project, "--graph", tmp_path / "g.svg")
    assert status == 1 and "apt-get install graphviz, or write g.dot, which needs nothing" in err


def test_without_netron_the_error_says_what_to_install(edgeopt, artifact, monkeypatch):
    monkeypatch.setitem(sys.modules, "netron", None)
    status, _, err = edgeopt("inspect", artifact.folder, "--netron")
    assert status == 1 and "pip install 'edgeopt[netron]'" in err


def test_netron_serves_the_file_until_it_is_interrupted(tmp_path):
    try:
        import netron  # noqa: F401
    except ImportError:
        absent("netron is not installed: pip install 'edgeopt[netron]'")
    onnx.save(onnx_model(), tmp_path / "net.onnx")
    argv = [sys.executable, "-m", "edgeopt", "inspect", str(tmp_path / "net.onnx"), "--netron"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = next(line for line in process.stdout if line.startswith("netron"))
        address = line.split()[1]
        assert address.startswith("http://127.0.0.1:")
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"{address}/data/net.onnx", timeout=60) as answer:
            assert answer.read() == (tmp_path / "net.onnx").read_bytes()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    finally:
        process.kill()
        process.wait()


def test_netron_may_be_ended_as_soon_as_its_address_is_written(edgeopt, tmp_path, monkeypatch):
    pytest.importorskip("netron")
    onnx.save(onnx_model(), tmp_path / "net.onnx")

    def interrupted():
        raise KeyboardInterrupt

    written = []
    monkeypatch.setattr(
        "click.echo", lambda line="", **how: written.append(line) or line[:6] != "netron" or interrupted()
    )
    status, _, _ = edgeopt("inspect", tmp_path / "net.onnx", "--netron")
    assert status == 0 and written[-1].startswith("netron   http://127.0.0.1:")


def test_another_process_may_take_the_port_that_netron_found(tmp_path, monkeypatch):
    netron = pytest.importorskip("netron")
    import socket

    from edgeopt.report.graph_netron import served

    onnx.save(onnx_model(), tmp_path / "net.onnx")
    find = netron.server._make_port
    with socket.create_server(("127.0.0.1", 0)) as taken:
        answers = iter([taken.getsockname()])
        monkeypatch.setattr(netron.server, "_make_port", lambda address: next(answers, None) or find(address))
        with served(tmp_path / "net.onnx", browse=False) as address:
            assert address != f"http://127.0.0.1:{taken.getsockname()[1]}" and not list(answers)


def test_one_build_and_inspect_at_a_time(edgeopt, project):
    from edgeopt.flows.build import WORKDIR, workdir_lock

    with workdir_lock(project / WORKDIR):
        status, _, err = edgeopt("inspect", "--project", project)
    assert status == 17 and "another build of this project is running" in err


@pytest.mark.skipif(platform.machine() != "x86_64", reason="kernels are counted where the target is this machine")
def test_a_pass_that_the_build_dropped_for_a_kernel_is_not_in_the_graphs_after_it(edgeopt, project, monkeypatch):
    monkeypatch.setattr(run, "PASSES", (*run.PASSES, Pass("costly", "integer", "node", turns_twice)))
    plain = ("inspect", "--project", project, "--profile", "x86-cpu", "--set", "profile.target.cpu_features=[]")
    found = data(edgeopt(*plain, "--no-cache", "--diff", "reoptimize", "reoptimize/costly", "--json"))
    record = next(stage for stage in found["stages"] if stage["name"] == "reoptimize")
    status = {step["name"]: (step["status"], step["reason"]) for step in record["details"]["passes"]}
    assert status["costly"][0] == "dropped" and status["costly"][1].startswith("onnxruntime runs")
    assert found["diff"] == []
