"""What a user can get wrong in a build: one message (what, where, what to do), its exit code, nothing left behind."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from edgeopt.cli import main
from tests.conftest import absent
from tests.small_project import run_edgeopt, write_project

PLAIN = ("train", "loss", "qat")  # left out where the case is not about training


def fails(capsys, monkeypatch, tmp_path, argv: list[str]) -> tuple[int, str]:
    """The exit code and stderr of `edgeopt ARGV`, run in this process with a module table that is put back."""
    before, path = dict(sys.modules), list(sys.path)
    try:
        with pytest.raises(SystemExit) as ended:
            main(argv)
    finally:
        for name in set(sys.modules) - set(before):
            if name.split(".")[0] in ("model", "data"):
                del sys.modules[name]
        sys.path[:] = path
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert not list(tmp_path.glob(".*part*")) and not (tmp_path / "out.edgeopt").exists()
    return ended.value.code, err


def a_pickle(folder: Path) -> dict:
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(folder.parent / "evil"),))

    (folder / "weights.pt").write_bytes(pickle.dumps(Evil()))
    return {"weights": "weights.pt"}


def wrong_shapes(folder: Path) -> dict:
    import torch

    torch.save({"head.weight": torch.zeros(3, 8)}, folder / "weights.pt")
    return {"weights": "weights.pt"}


def corrupt_onnx(folder: Path) -> dict:
    (folder / "model.onnx").write_bytes(b"\x08\x07not a model")
    return {"model": "model.onnx", "calibration": None, "evaluate": None}


# ruff: noqa: E501
CASES = {
    # name: (project keys left out, changes or a function of the folder, appended data.py, code, words in the message)
    "misspelt key": (PLAIN, {"calibrations": "x.py:y"}, "", 4, ["unknown key 'calibrations'", "did you mean 'calibration'"]),
    "missing factory": (PLAIN, {"model": "model.py:biuld"}, "", None, ["no 'biuld'", "did you mean 'build'"]),
    "missing model file": (PLAIN, {"model": "modle.py:build"}, "", 4, ["modle.py"]),
    "weights of another shape": (PLAIN, wrong_shapes, "", 5, ["head.weight", "weights"]),
    "a pickle that is no state_dict": (PLAIN, a_pickle, "", 5, ["weights"]),
    "missing weights": (PLAIN, {"weights": "no.pt"}, "", 4, ["no.pt"]),
    "a corrupt ONNX file": (PLAIN, corrupt_onnx, "", 5, ["model.onnx"]),
    "NaN in calibration": (
        PLAIN, {}, "\ndef calibration():\n    yield {'image': np.full((2, 1, 12, 12), np.nan, np.float32)}\n", 7,
        ["NaN", "image"],
    ),
    "an empty calibration loader": (PLAIN, {}, "\ndef calibration():\n    return iter(())\n", 7, ["calibration", "no batch"]),
    "an empty training loader": ((), {}, "\ndef train():\n    return iter(())\n", 7, ["train", "no batch"]),
    "a calibration batch that fits no axis": (
        PLAIN, {}, "\ndef calibration():\n    yield {'image': np.zeros((17, 1, 12, 12), np.float32)}\n", 7, ["17", "image"],
    ),
    "an evaluate batch that fits no axis": (
        PLAIN, {}, "\ndef evaluate(predict):\n    return {'p0': float(predict({'image': bars(17, 0)[0]})['scores'].sum())}\n",
        7, ["17", "evaluate"],
    ),
    "a metric that is NaN": (
        PLAIN, {}, "\ndef evaluate(predict):\n    predict({'image': bars(2, 0)[0]})\n    return {'p0': float('nan')}\n",
        7, ["nan", "p0"],
    ),
    "evaluate raises": (
        PLAIN, {}, "\ndef evaluate(predict):\n    return 1 / 0\n", 7, ["ZeroDivisionError", "data.py, line"],
    ),
    "a loss that is NaN": (
        (), {}, "\ndef loss(outputs, target):\n    return outputs['scores'].sum() * float('nan')\n", 8, ["loss", "batch 1 of"],
    ),
    "an input that forward does not take": (
        PLAIN, {"inputs": {"imgae": {"shape": ["n", 1, 12, 12]}}}, "", 4, ["imgae", "image"],
    ),
    "the wrong number of channels": (
        PLAIN, {"inputs": {"image": {"shape": ["n", 3, 12, 12]}}}, "", None, ["model.py"],
    ),
    "a limit on a metric that evaluate does not give": (
        PLAIN, {"limits": {"metric_min": {"accuracy": 0.5}}}, "", 9, ["no metric 'accuracy'"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_one_message_its_exit_code_and_nothing_left(name, tmp_path, capsys, monkeypatch):
    without, changes, data, code, words = CASES[name]
    folder = tmp_path / "project"
    if callable(changes):
        folder.mkdir()
        changes = changes(folder)
    dropped = tuple(key for key, value in changes.items() if value is None)
    write_project(
        folder, without=(*without, *dropped), data_code=data, **{k: v for k, v in changes.items() if v is not None}
    )
    argv = ["build", "--profile", "x86-cpu", "--project", str(folder), "--out", str(tmp_path / "out.edgeopt")]
    found, err = fails(capsys, monkeypatch, tmp_path, argv)
    assert "error: " in err and "where:" in err and "next:" in err, err
    for word in words:
        assert word in err, err
    assert found in ((4, 5, 6) if code is None else (code,)), err
    assert not (tmp_path / "evil").exists()


def test_debug_shows_the_traceback(tmp_path):
    done = run_edgeopt("build", "--profile", "x86-cpu", "--project", str(tmp_path / "nowhere"), "--debug")
    assert done.returncode != 0 and "Traceback" in done.stderr and "ProjectError" in done.stderr


def test_a_misspelt_profile_is_answered_with_the_right_one(tmp_path, capsys, monkeypatch):
    project = write_project(tmp_path / "project")
    code, err = fails(capsys, monkeypatch, tmp_path, ["build", "--profile", "x86cpu", "--project", str(project)])
    assert code == 3 and "did you mean 'x86-cpu'" in err


def test_what_stands_at_out_is_never_overwritten_by_another_artifact_or_lost(tmp_path, capsys):
    project = write_project(tmp_path / "project")
    other = tmp_path / "mine"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    with pytest.raises(SystemExit) as ended:
        main(["build", "--profile", "x86-cpu", "--project", str(project), "--out", str(other)])
    assert ended.value.code == 10
    assert (other / "thesis.txt").read_text() == "years of work"
    assert "something else" in capsys.readouterr().err


def test_two_builds_of_one_project_at_once(tmp_path, capsys, monkeypatch):
    import fcntl

    project = write_project(tmp_path / "project")
    (project / ".edgeopt").mkdir()
    with open(project / ".edgeopt" / "lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        argv = ["build", "--profile", "x86-cpu", "--project", str(project), "--out", str(tmp_path / "out.edgeopt")]
        code, err = fails(capsys, monkeypatch, tmp_path, argv)
    assert code == 17 and "another build" in err


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 100 KiB: too small for the artifact, large enough for the project."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(place)], capture_output=True)
    if done.returncode != 0:
        absent("a tmpfs cannot be mounted here (it needs root)")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_is_said_and_leaves_no_artifact(small_disk, tmp_path):
    project = write_project(tmp_path / "project", without=PLAIN)
    out = small_disk / "out.edgeopt"
    done = run_edgeopt("build", "--profile", "x86-cpu", "--project", str(project), "--out", str(out))
    assert done.returncode == 14, done.stderr
    assert "disk is full" in done.stderr and "Traceback" not in done.stderr
    assert list(small_disk.iterdir()) == []
