"""The command rollout, as a user calls it: in a process, over SSH to a small fleet."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from edgeopt.cli.rollout_lines import Table, shown
from tests.fleet import version


@pytest.fixture
def artifact(tmp_path):
    return version(tmp_path, 1)


@pytest.fixture
def edgeopt(fleet):
    def call(*args, code: int = 0):
        argv = [sys.executable, "-m", "edgeopt", "rollout", *args, "--ssh-config", fleet.config(), "--retries", "0"]
        done = subprocess.run([str(a) for a in argv], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done

    return call


def test_plain_lines_a_table_at_the_end_and_json(edgeopt, fleet, artifact):
    fleet.make_ill("d2")
    done = edgeopt(artifact.folder, "--fleet", fleet.file(), "--select", "rack=0", "--yes", code=18)
    for line in ("wave 1 of 2: 1 device", "d0: pushing", "d0: validating", "d0: active", "d2: failed: ", "halted: "):
        assert line in done.stderr
    rows = done.stdout.splitlines()
    assert rows[0].split()[:3] == ["device", "wave", "state"] and rows[1].split()[:3] == ["d0", "1", "active"]
    assert rows[2].split()[:3] == ["d2", "2", "failed"] and "halted" in rows[3] and len(rows) == 5
    (fleet.root("d2") / "ill").unlink()
    again = edgeopt(artifact.folder, "--fleet", fleet.file(), "--select", "rack=0", "--yes", "--json")
    data = json.loads(again.stdout)
    assert data["result"] == "done" and [d["kept"] for d in data["devices"]] == [True, False]


def test_a_dry_run_shows_the_plan_and_touches_nothing(edgeopt, fleet, artifact):
    done = edgeopt(artifact.folder, "--fleet", fleet.file(), "--dry-run")
    assert "wave 1     1  d0" in done.stdout and str(artifact.folder) in done.stdout
    plan = json.loads(edgeopt(artifact.folder, "--fleet", fleet.file(), "--dry-run", "--json").stdout)
    assert plan["waves"][0] == ["d0"] and plan["max_failures"] == 0
    assert not (artifact.folder.parent / "rollouts").exists() and not (fleet.folder / "devices").exists()


def test_what_is_wrong_is_said_before_any_work(edgeopt, fleet, artifact, tmp_path):
    file = fleet.file()
    assert "--yes" in edgeopt(artifact.folder, "--fleet", file, code=2).stderr
    assert "--fleet" in edgeopt(artifact.folder, code=2).stderr
    assert "--waves" in edgeopt(artifact.folder, "--resume", "--waves", "100%", code=2).stderr
    assert "no rollout" in edgeopt(artifact.folder, "--resume", code=2).stderr
    assert "last wave" in edgeopt(artifact.folder, "--fleet", file, "--waves", "50%", "--yes", code=2).stderr
    (tmp_path / "bad.yaml").write_text("devices: [{hots: a}]")
    assert "did you mean 'host'" in edgeopt(artifact.folder, "--fleet", tmp_path / "bad.yaml", code=4).stderr
    assert not (fleet.folder / "devices").exists()


def test_the_live_table_has_room_for_those_that_matter():
    rows = {f"d{at}": ("waiting" if at % 2 else "active", "", float(at)) for at in range(200)}
    rows |= {"d7": ("pushing", "1.0 of 5.0 MB", 3.0), "d8": ("failed", "no disk", 1.0)}
    names = [name for name, _ in shown(rows)]
    assert len(names) == 20 and {"d7", "d8", "d198"} <= set(names) and "d1" not in names
    from rich.console import Console

    console = Console(width=100, force_terminal=False, record=True)
    table = Table(list(rows), console)
    for name, (state, detail, _) in rows.items():
        table.device(name, state, detail)
    console.print(table)
    said = console.export_text()
    assert "99 waiting" in said and "1 failed" in said and "1.0 of 5.0 MB" in said
