"""The host's side of the runner, over the local Connection and a real child; the runner's own tests are in onboard."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edgeopt.device import runner
from edgeopt.device.runner import Request, Timing, environment, measure
from edgeopt.errors import DeviceError, LockedError, SpaceError
from edgeopt.ports.local import LocalConnection
from tests.tiny import case_inputs, expected, tiny_artifact


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return tiny_artifact(tmp_path_factory.mktemp("artifact"), torchscript=False)


@pytest.fixture
def device_tmp(tmp_path, monkeypatch) -> Path:
    """Where the device's mktemp makes its folders: empty again after every test that uses it."""
    folder = tmp_path / "device-tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    assert list(folder.glob("tmp.*")) == []  # as mktemp names them; onnxruntime leaves a file of its own there


def request_of(artifact, **changes) -> Request:
    manifest = artifact.manifest
    feeds = {f"cases/{i}": feed.inputs for i, feed in enumerate(manifest.cases)}
    fields = {
        "folder": str(artifact.folder), "candidates": manifest.candidates, "inputs": manifest.inputs,
        "outputs": manifest.outputs, "feeds": feeds, **changes,
    }  # fmt: skip
    return Request(**fields)


def ask(request: Request, into: Path, **how):
    how = {"python": sys.executable, **how}
    with LocalConnection() as connection:
        return measure(connection, request, into, **how)


def test_outputs_come_back_and_nothing_stays(artifact, tmp_path, device_tmp):
    timing = Timing("cases/0", rounds=2, calls=7, warmup=1)
    response = ask(request_of(artifact, timing=timing, threads=1), tmp_path / "got")

    run = response.runs["onnxruntime-fp32"]
    assert run.failure is None and [len(calls) for calls in run.rounds_s] == [7, 7] and len(run.calls_s) == 14
    for i, x in enumerate(case_inputs()):
        got = response.outputs("onnxruntime-fp32", f"cases/{i}")
        np.testing.assert_allclose(got["output"], expected(x), rtol=1e-5, atol=1e-6)
    assert response.environment["python"] == sys.version.split()[0]


def test_the_artifacts_own_runner_is_used_where_it_is_named(artifact, tmp_path, device_tmp):
    own = str(artifact.folder / "onboard.pyz")
    assert ask(request_of(artifact), tmp_path / "got", runner=own).runs["onnxruntime-fp32"].status == "ok"
    with pytest.raises(DeviceError, match="ended without a response"):
        ask(request_of(artifact), tmp_path / "got", runner=own + ".gone")


def test_the_environment_alone(device_tmp):
    with LocalConnection() as connection:
        facts = environment(connection, python=sys.executable)
    assert facts["runtimes"]["onnxruntime"] and facts["memory_bytes"] > 0


def test_a_request_that_the_runner_refuses_is_an_error(artifact, tmp_path, device_tmp):
    with pytest.raises(DeviceError, match="refuses the request: measure: there is no feed 'none'"):
        ask(request_of(artifact, timing=Timing("none")), tmp_path / "got")


def script(folder: Path, body: str) -> str:
    path = folder / "fake-python"
    path.write_text("#!/bin/sh\n" + body)
    path.chmod(0o755)
    return str(path)


NO_PYTHON = {
    "not there": (None, DeviceError, "cannot run /no/such/python|there is no '/no/such/python'"),
    "127": ("exit 127", DeviceError, "there is no '.*fake-python'"),
    "too old": ("echo 'the runner needs Python 3.6 or newer, this is 3.5' >&2; exit 1", DeviceError, "this is 3.5"),
    "crash": ("kill -SEGV $$", DeviceError, "ended without a response: exit status 139"),
    "disk full": ("echo 'cannot write: No space left on device' >&2; exit 28", SpaceError, "disk is full"),
    "no answer": ("exit 0", Exception, "response.json"),
}


@pytest.mark.parametrize("body, error, said", NO_PYTHON.values(), ids=NO_PYTHON)
def test_a_device_that_cannot_run_the_runner_is_an_error(artifact, tmp_path, device_tmp, body, error, said):
    python = script(tmp_path, body) if body else "/no/such/python"
    with pytest.raises(error, match=said):
        ask(request_of(artifact), tmp_path / "got", python=python)


def answering(folder: Path, text: str) -> str:
    """A Python that answers `text`, whatever it is asked: argv is RUNNER run REQUEST RESPONSE."""
    (folder / "answer").write_text(text)
    return script(folder, f'cp "{folder}/answer" "$4"')


ANSWERS = {
    "no JSON": ("Segmentation fault", "is not JSON"),
    "no object": ("[]", "not a JSON object"),
    "other protocol": ('{"protocol": 2, "environment": {}, "failure": null, "candidates": {}}', "protocol"),
    "missing": ("{}", "missing key"),
}


@pytest.mark.parametrize("text, said", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_that_is_none_is_an_error(artifact, tmp_path, device_tmp, text, said):
    with pytest.raises(DeviceError, match=said):
        ask(request_of(artifact), tmp_path / "got", python=answering(tmp_path, text))


@pytest.mark.parametrize("file", ["../../escaped", "/etc/passwd", "a/../../b"])
def test_a_device_cannot_name_files_outside(artifact, tmp_path, device_tmp, file):
    ref = f'{{"file": "{file}", "offset": 0, "dtype": "float32", "shape": [1]}}'
    run = (
        '{"status": "ok", "failure": null, "flags": [], "load_s": 1, "first_call_s": 1, "rounds_s": [],'
        f' "peak_rss_bytes": 1, "outputs": {{"cases/0": {{"output": {ref}}}}}}}'
    )
    text = f'{{"protocol": 1, "environment": {{}}, "failure": null, "candidates": {{"onnxruntime-fp32": {run}}}}}'
    with pytest.raises(DeviceError, match="not a plain path"):
        ask(request_of(artifact), tmp_path / "got", python=answering(tmp_path, text))


def test_a_runner_that_is_silent_is_given_up(artifact, tmp_path, device_tmp):
    python = script(tmp_path, "sleep 600")
    with pytest.raises(DeviceError, match="did not finish within 2 s"):
        ask(
            request_of(artifact, total_s=-59), tmp_path / "got", python=python
        )  # a minute is added for the start, a second for the lock


HOLD = (
    "import sys; from edgeopt.onboard import lock\n"
    "with lock.measuring(sys.argv[1]) as held: print(held, flush=True); sys.stdin.readline()\n"
)


@pytest.fixture
def other_measurement(tmp_path):
    """Another process that measures, until its stdin says otherwise; gives (process, lock file)."""
    path = str(tmp_path / "lock")
    root = Path(__file__).parents[2]
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root
    )
    assert child.stdout.readline()
    yield child, path
    child.kill()
    child.wait()
    child.stdout.close()


def test_another_measurement_is_waited_for_and_the_message_names_its_process(
    artifact, tmp_path, device_tmp, other_measurement, monkeypatch
):
    child, path = other_measurement
    said = []

    def warning(text, *args):
        said.append(text % args)
        child.stdin.close()  # and so the other measurement ends

    monkeypatch.setattr(runner.log, "warning", warning)
    monkeypatch.setattr(runner, "LOCK_WAIT_S", (0.2, 60))
    response = ask(request_of(artifact, timing=Timing("cases/0", rounds=2, calls=7, lock=path)), tmp_path / "got")
    assert said == [
        f"this machine: another measurement is going on: process {child.pid} holds {path}; waiting for up to 60 s"
    ]
    assert len(response.runs["onnxruntime-fp32"].rounds_s) == 2
    assert response.noise["lock"]["path"] == path


def test_a_measurement_that_does_not_end_is_an_error_with_its_process(
    artifact, tmp_path, device_tmp, other_measurement, monkeypatch
):
    child, path = other_measurement
    monkeypatch.setattr(runner, "LOCK_WAIT_S", (0.1, 0.3))
    with pytest.raises(LockedError, match=f"process {child.pid} holds") as failed:
        ask(request_of(artifact, timing=Timing("cases/0", lock=path)), tmp_path / "got")
    assert failed.value.where == "this machine"


def test_an_older_artifacts_runner_is_understood(artifact, tmp_path, device_tmp):
    """Its answer lacks what it did not know: noise, settings, warm-up."""
    run = (
        '{"status": "ok", "failure": null, "flags": [], "load_s": 1, "first_call_s": 1, "rounds_s": [[0.5], [0.25]],'
        ' "peak_rss_bytes": 1, "outputs": {}}'
    )
    text = f'{{"protocol": 1, "environment": {{}}, "failure": null, "candidates": {{"onnxruntime-fp32": {run}}}}}'
    response = ask(request_of(artifact), tmp_path / "got", python=answering(tmp_path, text))
    found = response.runs["onnxruntime-fp32"]
    assert (response.noise, found.setting, found.tried, found.warm_up) == (None, None, (), None)
