"""The runner on the Pythons of JetPack 4 to 7, and what it may import."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import edgeopt.onboard
from tests.onboard.asking import ask, request_of
from tests.pythons import require
from tests.tiny import tiny_artifact

SOURCES = sorted(Path(edgeopt.onboard.__file__).parent.glob("*.py"))
VERSIONS = ["3.6", "3.8", "3.10", "3.12", "3.13"]  # 3.6: JetPack 4, 3.8: 5, 3.10: 6, 3.12: 7


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return tiny_artifact(tmp_path_factory.mktemp("artifact"), torchscript=False)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_device_without_runtimes_answers_what_to_install(artifact, tmp_path, version):
    request = request_of(artifact, tmp_path / "out")
    onnx = request["candidates"][0]
    others = ("torchscript", "openvino", "aoti")
    request["candidates"] = [onnx, *({**onnx, "name": f"{name}-fp32", "runtime": name} for name in others)]
    response = ask(artifact, request, tmp_path, python=bare(version, tmp_path))

    assert response["environment"]["python"].startswith(version + ".")
    assert response["environment"]["runtimes"] == dict.fromkeys(
        ["numpy", "onnxruntime", "openvino", "tensorrt", "torch"]
    )
    failures = {name: r["failure"] for name, r in response["candidates"].items()}
    assert {f["kind"] for f in failures.values()} == {"missing-runtime"}
    assert "install onnxruntime" in failures["onnxruntime-fp32"]["message"]
    assert "install torch" in failures["torchscript-fp32"]["message"]
    assert "install torch" in failures["aoti-fp32"]["message"]
    assert failures["openvino-fp32"]["message"] == "the device has no openvino: install openvino with pip"


@pytest.mark.parametrize("version", VERSIONS)
def test_an_application_imports_the_packed_runner(artifact, tmp_path, version):
    code = (
        f"import sys; sys.path.insert(0, {str(artifact.folder / 'onboard.pyz')!r}); import onboard\n"
        f"try: onboard.load({str(artifact.folder)!r})\n"
        "except onboard.Failure as failure: print(failure.kind)\n"
    )
    done = subprocess.run([bare(version, tmp_path), "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("missing-runtime\n", "")


@pytest.mark.parametrize("version", VERSIONS)
def test_environment_is_json(artifact, version):
    argv = [require(version), str(artifact.folder / "onboard.pyz"), "environment"]
    facts = json.loads(subprocess.run(argv, capture_output=True, check=True).stdout)
    assert facts["memory_bytes"] > 0


def bare(version: str, folder: Path) -> str:
    """A Python of `version` with nothing installed, for its children too."""
    subprocess.run([require(version), "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    return str(folder / "venv" / "bin" / "python")


def test_the_sources_need_no_more_than_python_3_6():
    argv = [
        sys.executable,
        "-c",
        "import vermin; vermin.main()",
        "-t=3.6-",
        "--no-tips",
        "--violations",
        *map(str, SOURCES),
    ]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.name)
def test_imports_are_the_standard_library_relative_or_a_runtime(source):
    runtimes = {"numpy", "onnxruntime", "openvino", "tensorrt", "torch"}
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            roots = {alias.name.split(".")[0] for alias in node.names}
            assert roots <= sys.stdlib_module_names | runtimes
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module.split(".")[0] in sys.stdlib_module_names
