"""Engines and their states as files on a device: found, missing, cut off, left behind; and what is refused before."""

from __future__ import annotations

import json
import os
import subprocess
import time

import pytest

from edgeopt.onboard import build_times, device_facts, engines, prepare, processes
from edgeopt.onboard.failures import Failure
from edgeopt.onboard.release import read_manifest
from tests.conftest import wait_until
from tests.pythons import require
from tests.tensorrt_device import install, with_engines

FACTS = {"gpu": "Xavier", "sm": "7.2", "l4t": "35.6.1", "cuda": "11.4", "tensorrt": "8.5.2", "simulated": None}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An artifact's folder; engines of it lie below this test's home."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return str(with_engines(tmp_path / "a").folder)


def built(folder: str, facts: dict = FACTS) -> engines.Engine:
    """An engine of these facts, as its builder leaves it."""
    manifest = read_manifest(folder)
    passport = engines.passport(engines.job_of(folder, manifest, "tensorrt-fp16"), facts)
    engine = engines.Engine(engines.root_of(folder, manifest), engines.digest(passport))
    os.makedirs(engine.folder)
    processes.write_json(engine.path("passport.json"), passport)
    with open(engine.plan, "wb") as f:
        f.write(b"engine")
    engine.write(status="ready", size_bytes=6, seconds=1.0)
    return engine


def ready(folder: str, facts: dict = FACTS) -> engines.Engine:
    return engines.ready(folder, read_manifest(folder), "tensorrt-fp16", facts)[1]


def test_engines_lie_beside_the_releases_and_of_an_artifact_in_the_home(tmp_path, folder):
    release = tmp_path / "root" / "tiny" / "releases" / "0123"
    release.mkdir(parents=True)
    os.symlink("releases/0123", release.parent.parent / "current")
    expected = str(tmp_path / "root" / "engines")
    assert engines.root_of(str(release), {}) == engines.root_of(str(release.parent.parent / "current"), {}) == expected
    assert engines.root_of(folder, {}) == str(tmp_path / "home" / ".edgeopt" / "engines")
    assert engines.root_of(folder, {"root": "/data"}) == "/data/engines"


def test_what_was_built_for_this_device_is_found(folder):
    assert built(folder).folder == ready(folder).folder


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("gpu", "Orin", "the GPU was Xavier and is Orin"),
        ("sm", "8.7", "the compute capability was 7.2 and is 8.7"),
        ("l4t", "35.4.1", "L4T was 35.6.1 and is 35.4.1"),
        ("cuda", "12.2", "CUDA was 11.4 and is 12.2"),
        ("tensorrt", "8.6.2", "TensorRT was 8.5.2 and is 8.6.2"),
        ("simulated", "a recording", "the stand-in was None and is a recording"),
    ],
)
def test_any_difference_of_the_device_is_told_and_not_loaded(folder, key, value, words):
    built(folder)
    with pytest.raises(Failure, match="built for another device or software") as wrong:
        ready(folder, {**FACTS, key: value})
    assert words in wrong.value.message and "run 'edgeopt prepare" in wrong.value.message


def test_what_it_is_made_from_is_part_of_the_passport(folder):
    manifest = read_manifest(folder)
    job = engines.job_of(folder, manifest, "tensorrt-fp16")
    first = engines.digest(engines.passport(job, FACTS))
    others = [
        {**job, "recipe": {**job["recipe"], "flags": []}},
        {**job, "recipe": {**job["recipe"], "dla": True}},
        {**job, "recipe": {**job["recipe"], "typing": "strong"}},
        {**job, "sha256": {**job["sha256"], "onnx": ["0"]}},
        {**job, "sha256": {**job["sha256"], "plugins": ["1"]}},
        {**job, "sha256": {**job["sha256"], "calibration": "2"}},
    ]
    digests = {engines.digest(engines.passport(other, FACTS)) for other in others}
    assert len(digests) == len(others) and first not in digests
    elsewhere = {**job, "onnx": "/another/release/float.onnx"}  # the same file of another release
    assert engines.digest(engines.passport(elsewhere, FACTS)) == first


def test_an_engine_that_was_cut_off_is_not_there(folder):
    engine = built(folder)
    with open(engine.plan, "wb") as f:
        f.write(b"eng")
    assert engine.state() == {"status": "absent"}
    with pytest.raises(Failure, match="not built on this device"):
        ready(folder)


def test_a_state_that_was_cut_off_is_not_there(folder):
    engine = built(folder)
    with open(engine.path("state.json"), "w") as f:
        f.write('{"status": "rea')
    assert engine.state() == {"status": "absent"}


def test_a_recycled_pid_is_not_taken_for_the_builder(folder):
    engine = built(folder)
    ours = processes.this_process()
    building = {"status": "building", "started_at": time.monotonic(), "share": 0.4, "stage": "s", "estimate_s": None}
    engine.write(process=ours, **building)
    assert engine.state()["status"] == "building"
    with pytest.raises(Failure, match="being built, 40 % are done"):
        ready(folder)
    for other in ({"started": ours["started"] - 1}, {"boot": "before the restart"}, {"pid": 2**22 + 1}):
        engine.write(process={**ours, **other}, **building)
        assert engine.state()["status"] == "interrupted"


def test_what_was_queued_and_nobody_works_for_was_left_behind(folder):
    engine = built(folder)
    engine.write(status="queued", queued_at=time.monotonic())
    assert engine.state()["status"] == "queued"  # its builder may be starting
    engine.write(status="queued", queued_at=time.monotonic() - 60)
    assert engine.state()["status"] == "interrupted"
    engine.write(status="queued", queued_at=time.monotonic() + 1e6)  # before a restart
    assert engine.state()["status"] == "interrupted"


def test_too_little_memory_is_refused_and_nothing_begins(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{install(tmp_path / 'jetson')}:{os.environ['PATH']}")
    monkeypatch.setattr(device_facts, "available_mb", lambda: (120, 0))
    monkeypatch.setattr(processes, "detach", lambda *words: pytest.fail("a builder was started"))
    (row,) = prepare.prepare(folder, [])["engines"]
    assert (row["status"], row["failure"]["kind"]) == ("failed", "memory")
    assert "120 MiB and 0 MiB of swap are free" in row["failure"]["message"]


def test_an_artifact_without_a_recipe_says_so(folder):
    with pytest.raises(Failure, match="no recipe for an engine of gone"):
        engines.job_of(folder, read_manifest(folder), "gone")


def test_earlier_builds_tell_how_long_the_next_takes(tmp_path):
    def job(size: int, **recipe) -> dict:
        return {"bytes": size, "recipe": {"flags": ["fp16"], **recipe}}

    assert build_times.estimate_s(str(tmp_path), job(100)) is None
    for seconds in (10, 30, 20):
        build_times.remember(str(tmp_path), job(100), seconds)
    build_times.remember(str(tmp_path), job(100, dla=True), 500)
    assert build_times.estimate_s(str(tmp_path), job(200)) == 40
    assert build_times.estimate_s(str(tmp_path), job(100, dla=True)) == 500
    assert len(json.loads((tmp_path / "history.json").read_text())) == 4


@pytest.mark.parametrize("version", ["3.6", "3.13"])
def test_the_pythons_of_the_devices_build_engines(tmp_path, version):
    """From the packed runner, by an interpreter with nothing installed: JetPack 4 has 3.6."""
    python, artifact = require(version), with_engines(tmp_path / "a")
    environment = {"PATH": f"{install(tmp_path / 'jetson')}:/usr/bin:/bin", "HOME": str(tmp_path / "home")}

    def ask(*words: str) -> dict:
        argv = [python, str(artifact.folder / "onboard.pyz"), *words]
        return json.loads(subprocess.run(argv, env=environment, capture_output=True, check=True, timeout=60).stdout)

    first = ask("prepare", str(artifact.folder))
    passport = first["engines"][0]["passport"]
    assert wait_until(lambda: ask("engines", first["root"], passport)["engines"][0]["status"] == "ready", 60)
    assert ask("ready", str(artifact.folder), "tensorrt-fp16")["failure"] is None


def test_the_command_answers_in_json_whatever_is_wrong(tmp_path, capsys):
    assert prepare.main(["prepare", str(tmp_path)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert "not a release" in answer["failure"]["message"] and answer["engines"] == []
