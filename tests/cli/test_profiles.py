"""`edgeopt profiles`, as a user runs it: a process, its output and its exit code."""

import json
import subprocess
import sys

import pytest
import yaml

from edgeopt.spec.profile import load_profile, profile_names


def edgeopt(*argv, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "edgeopt", "profiles", *argv], cwd=cwd, capture_output=True, text=True, timeout=60
    )


def test_list_is_a_table_with_a_line_for_each(tmp_path):
    done = edgeopt("list", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    header, *lines = done.stdout.splitlines()
    assert header.split()[:4] == ["NAME", "ARCH", "SM", "JETPACK"]
    assert [line.split()[0] for line in lines] == profile_names()
    xavier = next(line for line in lines if line.startswith("xavier "))
    assert xavier.split()[:7] == ["xavier", "aarch64", "7.2", "5.1", "4.6.0", "4.6", "5.0"]
    assert xavier.split()[7:] == ["fp32", "fp16", "int8", "tensorrt", "torchscript"]


def test_list_as_json():
    rows = {row["name"]: row for row in json.loads(edgeopt("list", "--json").stdout)}
    assert list(rows) == profile_names()
    assert rows["xavier"]["jetpacks"] == ["4.6.0", "4.6", "5.0", "5.1"]
    assert rows["x86-cpu"]["sm"] is None and rows["x86-cpu"]["backends"] == ["onnxruntime", "openvino", "torchscript"]


def test_show_prints_the_resolved_profile_as_yaml_and_as_json():
    shown = yaml.safe_load(edgeopt("show", "xavier@4.6").stdout)
    assert shown == json.loads(edgeopt("show", "xavier@4.6", "--json").stdout)
    assert shown["target"]["tensorrt"] == "8.2.1" and shown["target"]["onnx_opset_max"] == 13
    assert shown.pop("source").endswith("profiles/xavier.yaml")
    assert shown == load_profile("xavier@4.6").model_dump(mode="json")


def test_show_takes_overrides_of_the_profile_only():
    shown = yaml.safe_load(edgeopt("show", "x86-cpu", "--set", "profile.target.vnni=true").stdout)
    assert shown["quantization"]["weight_bits"] == 8
    wrong = edgeopt("show", "x86-cpu", "--set", "project.seed=1")
    assert wrong.returncode == 2 and "no project keys" in wrong.stderr


@pytest.mark.parametrize("as_json", [False, True])
def test_check_answers_with_its_exit_code(tmp_path, as_json):
    (tmp_path / "good.yaml").write_text("base: xavier\n")
    (tmp_path / "bad.yaml").write_text("base: xavier\nprecision: {allowed: [fp32, bf16]}\n")
    flag = ["--json"] if as_json else []
    good = edgeopt("check", "good.yaml", *flag, cwd=tmp_path)
    assert good.returncode == 0 and "good.yaml" in good.stdout and good.stderr == ""
    bad = edgeopt("check", "bad.yaml", *flag, cwd=tmp_path)
    assert bad.returncode == 3
    for part in ("bad.yaml", "precision.allowed", "sm_72 has no bf16", "remove bf16"):
        assert part in bad.stderr
    assert "Traceback" not in bad.stderr
    if as_json:
        assert json.loads(bad.stdout)["error"] == "ProfileError"


def test_check_tells_what_was_left_out():
    assert "fusion.strategy left out" in edgeopt("check", "xavier@4.6").stdout


def test_a_misspelt_name_is_answered():
    done = edgeopt("show", "xavir")
    assert done.returncode == 3 and "did you mean 'xavier'?" in done.stderr


def test_schema_is_json():
    schema = json.loads(edgeopt("schema").stdout)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert {"module", "precision", "backends", "dla"} <= set(schema["properties"])
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("command", [[], ["list"], ["show"], ["check"], ["schema"]])
def test_help_shows_an_example(command):
    done = edgeopt(*command, "--help")
    assert done.returncode == 0
    assert "edgeopt profiles " in done.stdout.split("Example:")[1]


def test_profiles_import_no_torch(tmp_path):
    code = (
        "import sys; from edgeopt.cli import main\n"
        "try: main(['profiles', 'list'])\n"
        "except SystemExit: pass\n"
        "print(*{'torch', 'paramiko', 'onnx'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr.strip() == "" and "xavier" in done.stdout
