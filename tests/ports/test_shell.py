"""Quoting for login shells, and output framed by tokens."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeopt.ports import shell
from tests.conftest import absent

TOKEN = "edgeopt-0123456789abcdef0123456789abcdef"
HARD = ["it's", "a\\b", "\\", "\\'", "'", '"$HOME"', "$(id)", "`id`", "a b\nc", "*", "~", "!", "%s", "\\\\n", "é", ""]


@pytest.mark.parametrize("login_shell", ["sh", "bash", "dash", "fish"])
def test_arguments_arrive_unchanged_through_a_login_shell(login_shell):
    program = shutil.which(login_shell)
    if program is None:
        absent(f"{login_shell} is not installed")
    line = shell.wrap(["printf", "%s|", *HARD], TOKEN)
    done = subprocess.run([program, "-c", line], capture_output=True, check=True)
    out = shell.Frame(TOKEN)
    assert out.feed(done.stdout).decode() == "".join(f"{word}|" for word in HARD)
    assert (out.ended, out.status) == (True, 0)


def test_status_and_pid_are_those_of_the_command():
    line = shell.wrap(["sh", "-c", "echo $PPID; exit 7"], TOKEN)
    done = subprocess.run(["sh", "-c", line], capture_output=True, check=True)
    out, err = shell.Frame(TOKEN), shell.Frame(TOKEN)
    assert int(out.feed(done.stdout)) == out.pid
    assert out.status == 7
    assert err.feed(done.stderr) == b"" and err.ended and err.status is None


@given(
    noise=st.binary(max_size=50), output=st.binary(max_size=200), after=st.binary(max_size=20),
    cuts=st.lists(st.integers(0, 400), max_size=8),
)  # fmt: skip
def test_a_frame_gives_the_output_however_it_is_cut(noise, output, after, cuts):
    token = TOKEN.encode()
    whole = noise + token + b" 12\n" + output + token + b" 3\n" + after
    frame = shell.Frame(TOKEN)
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    got = b"".join(frame.feed(whole[a:b]) for a, b in zip(edges, edges[1:], strict=False))
    assert got == output
    assert (frame.noise, frame.pid, frame.status) == (noise, 12, 3)


def test_output_is_given_as_it_comes_and_a_frame_that_is_cut_has_no_status():
    frame = shell.Frame(TOKEN)
    assert frame.feed(TOKEN.encode() + b" 1\nheld\n") == b"held\n"
    assert frame.feed(b"more edgeopt-01") == b"more "
    assert frame.feed(b"x") == b"edgeopt-01x"
    assert not frame.ended and frame.status is None
