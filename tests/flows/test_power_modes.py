"""Power modes over a real sshd whose nvpmodel and jetson_clocks are scripts with their state in files."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from edgeopt.errors import DeviceError, EdgeoptError, UsageError
from edgeopt.flows.power_modes import in_power_modes
from edgeopt.ports.connect import connect
from tests.conftest import wait_until
from tests.sensor_trees import command

# `mode` holds the id; `does` what a change does: nothing silently, hang, ask for a reboot, fail the first time, ...
NVPMODEL = """\
cd "$(dirname "$0")/.." || exit 1
name() { sed -n "s/^$1 //p" modes; }
case $1 in
-q) echo 'NVPM WARN: fan mode is not set!'; printf 'NV Power Mode: %s\\n%s\\n' "$(name "$(cat mode)")" "$(cat mode)" ;;
-p) sed 's/^\\([0-9]*\\) \\(.*\\)/POWER_MODEL: ID=\\1 NAME=\\2/' modes ;;
-m)
  echo "$2" >> asked
  case $(cat does) in
  silent) ;;
  hang) exec sleep 600 ;;
  reboot) echo 'NVPM WARN: Reboot required for changing to this power mode'; read answer; echo "$answer" >> answers ;;
  refuse) echo 'NVPM ERROR: Error in mode'; exit 1 ;;
  slow) sleep 1; echo "$2" > mode ;;
  only-away) [ "$2" = 0 ] || echo "$2" > mode ;;
  second) if [ -e tried ]; then echo "$2" > mode; else : > tried; fi ;;
  *) echo "$2" > mode ;;
  esac ;;
esac
"""
JETSON_CLOCKS = """\
cd "$(dirname "$0")/.." || exit 1
case $1 in
--store) cp clocks "$2" ;;
--restore) cp "$2" clocks ;;
*) echo fastest > clocks ;;
esac
"""


@dataclass
class Board:
    """A Jetson whose mode is a file: 0 MAXN, 1 15W, 2 30W."""

    folder: Path
    config: Path | None

    def connect(self):
        return connect("device" if self.config else None, config=self.config)

    def read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text().strip() if path.exists() else ""

    def does(self, what: str) -> None:
        (self.folder / "does").write_text(what)


@pytest.fixture(params=["ssh", "local"])
def board(request, tmp_path, start_sshd, ssh_config, monkeypatch):
    folder = tmp_path / "the board"
    command(folder / "bin", "nvpmodel", NVPMODEL)
    command(folder / "bin", "jetson_clocks", JETSON_CLOCKS)
    for name, text in {"mode": "0", "modes": "0 MAXN\n1 15W\n2 30W\n", "does": "", "clocks": "slow"}.items():
        (folder / name).write_text(text)
    path = f"{folder / 'bin'}:/usr/bin:/bin"
    if request.param == "local":
        monkeypatch.setenv("PATH", path)
        return Board(folder, None)
    home = tmp_path / "sshd" / "home"
    return Board(folder, ssh_config(start_sshd("sshd", f'SetEnv HOME="{home}" PATH="{path}"')))


over_ssh = pytest.mark.parametrize("board", ["ssh"], indirect=True)


def visit(board: Board, names: list[str], then=lambda: None, **how):
    """The (mode, select, clocks) in which each validation ran, and what in_power_modes returned."""
    seen = []

    def validate(select: bool):
        seen.append((board.read("mode"), select, board.read("clocks")))
        then()

    with board.connect() as connection:
        return seen, in_power_modes(connection, names, validate, **how)


def test_each_mode_by_its_name_and_the_old_one_again(board):
    seen, done = visit(board, ["30w", "MAXN", "30W"])
    assert seen == [("2", False, "slow"), ("0", True, "slow")]  # each once
    assert (done.before.name, [mode.name for mode, _ in done.validated]) == ("MAXN", ["30W", "MAXN"])
    assert board.read("mode") == "0"


def test_the_fastest_clocks_where_asked_for_and_the_old_ones_again(board):
    seen, _ = visit(board, ["15W"], jetson_clocks=True)
    assert seen == [("1", False, "fastest")]
    assert (board.read("mode"), board.read("clocks")) == ("0", "slow")


@over_ssh
def test_a_mode_that_the_device_has_not_is_refused_with_those_that_it_has(board):
    for names in (["15W", "MODE_99W"], []):
        with pytest.raises(UsageError, match="MAXN, 15W, 30W"):
            visit(board, names)
    assert board.read("asked") == ""


@over_ssh
def test_a_device_without_nvpmodel_is_said(board):
    (board.folder / "bin" / "nvpmodel").unlink()
    with pytest.raises(DeviceError, match="has no nvpmodel"):
        visit(board, ["15W"])


REFUSED = {
    "silent": ("silent", "keeps power mode MAXN instead of 15W, and nvpmodel says nothing"),
    "reboot": ("reboot", "15W comes with a reboot only"),
    "refuse": ("refuse", "keeps power mode MAXN instead of 15W; nvpmodel said: NVPM ERROR: Error in mode"),
    "hang": ("hang", "keeps power mode MAXN instead of 15W"),
}


@over_ssh
@pytest.mark.parametrize("does, words", REFUSED.values(), ids=REFUSED)
def test_a_mode_that_does_not_come_is_said_and_nothing_is_measured(board, does, words):
    board.does(does)
    with pytest.raises(DeviceError, match=words) as failed:
        visit(board, ["15W"], then=lambda: pytest.fail("measured in the wrong mode"), patience_s=1)
    assert "sudo nvpmodel -m 1" in failed.value.todo
    assert board.read("mode") == "0" and set(board.read("answers")) <= set("no")


@pytest.mark.parametrize("raised", [EdgeoptError("the candidate failed"), KeyboardInterrupt(), SystemExit(1)])
def test_the_old_mode_is_put_back_after_an_error_and_ctrl_c(board, raised):
    def fail():
        raise raised

    with pytest.raises(type(raised)):
        visit(board, ["15W", "30W"], then=fail, jetson_clocks=True)
    assert wait_until(lambda: (board.read("mode"), board.read("clocks")) == ("0", "slow"))


@over_ssh
def test_a_mode_that_is_put_back_at_the_second_try_only(board):
    def fail_once():
        board.does("second")

    visit(board, ["15W"], then=fail_once)
    assert board.read("mode") == "0" and board.read("asked").split() == ["1", "0", "0"]


@over_ssh
def test_a_device_that_does_not_go_back_is_an_error_with_the_command_that_mends_it(board):
    board.does("only-away")
    with pytest.raises(DeviceError, match="did not go back to its power mode MAXN; it is in 15W") as failed:
        visit(board, ["15W"])
    assert failed.value.todo == "run there: sudo nvpmodel -m 0"


@over_ssh
def test_the_device_puts_it_back_when_the_connection_is_cut(board):
    connection = board.connect()

    def cut(select):
        assert board.read("mode") == "2"
        connection.close()
        raise EdgeoptError("cut")

    with pytest.raises(EdgeoptError, match="cut"):
        in_power_modes(connection, ["30W"], cut)
    assert wait_until(lambda: board.read("mode") == "0")


OPERATOR = """\
import sys, time
from pathlib import Path
from edgeopt.flows.power_modes import in_power_modes
from edgeopt.ports.connect import connect

def validate(select):
    print("measuring", flush=True)
    time.sleep(600)

host, config = ("device", Path(sys.argv[1])) if sys.argv[1:] else (None, None)
with connect(host, config=config) as connection:
    in_power_modes(connection, ["30W"], validate, jetson_clocks=True)
"""


@pytest.mark.parametrize("does", ["", "slow"])
def test_the_device_puts_it_back_when_the_operator_is_killed(board, does):
    """Killed while it measures; and where a change is slow while that is under way, which must not come last."""
    board.does(does)
    argv = [sys.executable, "-c", OPERATOR, *([str(board.config)] if board.config else [])]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as operator:
        try:
            if does:
                assert wait_until(lambda: board.read("asked"))
            else:
                assert operator.stdout.readline() == "measuring\n" and board.read("mode") == "2"
        finally:
            operator.send_signal(signal.SIGKILL)
    assert wait_until(lambda: board.read("asked").split() == ["2", "0"])
    assert wait_until(lambda: (board.read("mode"), board.read("clocks")) == ("0", "slow"))


@over_ssh
def test_behind_a_dead_link_the_device_puts_it_back_after_the_longest_time(board):
    visit(board, ["15W"], then=lambda: wait_until(lambda: board.read("mode") == "0") or pytest.fail("kept"), most_s=4)


@over_ssh
def test_sudo_is_used_by_who_is_not_root_and_its_refusal_is_said(board):
    command(board.folder / "bin", "id", "echo 1000\n")
    command(board.folder / "bin", "sudo", 'cd "$(dirname "$0")/.."; echo "$*" >> sudo; shift; [ $1 = -l ] || "$@"\n')
    visit(board, ["15W"])
    assert board.read("mode") == "0" and "-n nvpmodel -m 1" in board.read("sudo")
    command(board.folder / "bin", "sudo", "echo 'sudo: a password is required' >&2; exit 1\n")
    with pytest.raises(DeviceError, match="sudo asks for a password") as failed:
        visit(board, ["15W"])
    assert "NOPASSWD" in failed.value.todo
