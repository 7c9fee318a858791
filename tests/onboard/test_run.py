"""The packed runner in a process of its own: what it measures, and each failure as data."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edgeopt.onboard import machine
from edgeopt.runtime import tensors
from edgeopt.runtime.artifact import Artifact
from edgeopt.spec.manifest import TensorRef
from tests.onboard.asking import MEASURE, ask, request_of
from tests.tiny import expected, tiny_artifact


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Artifact:
    return tiny_artifact(tmp_path_factory.mktemp("artifact"))


def reference_input(artifact: Artifact) -> np.ndarray:
    return tensors.read(artifact.folder, artifact.manifest.reference[0].inputs["x"])


def with_op_library(artifact: Artifact, code: str) -> list[str]:
    (artifact.folder / "ops.py").write_text(code)  # beside the manifest's files: the runner trusts its request
    return ["ops.py"]


def test_measures_each_candidate_and_returns_its_outputs(artifact, tmp_path):
    response = ask(artifact, request_of(artifact, tmp_path / "out", measure=MEASURE), tmp_path)

    assert response["failure"] is None
    assert list(response["candidates"]) == ["onnxruntime-fp32", "torchscript-fp32"]
    for name, result in response["candidates"].items():
        assert result["status"] == "ok" and result["failure"] is None
        assert [len(calls) for calls in result["rounds_s"]] == [20, 20, 20]
        assert all(0 < call < 1 for calls in result["rounds_s"] for call in calls)
        assert result["load_s"] > 0 and result["first_call_s"] > 0
        assert 20 << 20 < result["peak_rss_bytes"] < 4 << 30
        ref = TensorRef(**result["outputs"]["reference/0"]["output"])
        got = tensors.read(tmp_path / "out", ref)
        np.testing.assert_allclose(got, expected(reference_input(artifact)), rtol=1e-5, atol=1e-6)
        assert ref.file == f"{name}.bin"


def test_says_what_the_device_is(artifact):
    import onnxruntime
    import torch

    argv = [sys.executable, str(artifact.folder / "onboard.pyz"), "environment"]
    facts = json.loads(subprocess.run(argv, capture_output=True, check=True, timeout=60).stdout)
    assert facts["python"] == sys.version.split()[0]
    assert facts["runtimes"]["onnxruntime"] == onnxruntime.__version__
    assert facts["runtimes"]["torch"] == torch.__version__
    assert facts["memory_bytes"] > 1 << 28
    assert facts["machine"] and facts["system"]


def test_max_s_ends_a_round_early_but_never_before_one_call(artifact, tmp_path):
    measure = {"feed": "reference/0", "rounds": 2, "calls": 10**9, "warmup": 0, "max_s": 0.2}
    one = [c for c in request_of(artifact, tmp_path / "out")["candidates"] if c["runtime"] == "onnxruntime"]
    request = request_of(artifact, tmp_path / "out", measure=measure, candidates=one)
    rounds = ask(artifact, request, tmp_path)["candidates"]["onnxruntime-fp32"]["rounds_s"]
    assert len(rounds) == 2
    assert all(len(calls) >= 1 and sum(calls) < 10 for calls in rounds)


FATAL = {
    "abort": ("import os\nos.abort()", "abort", signal.SIGABRT),
    "segmentation fault": ("import ctypes\nctypes.string_at(0)", "abort", signal.SIGSEGV),
    "illegal instruction": ("import os, signal\nos.kill(os.getpid(), signal.SIGILL)", "abort", signal.SIGILL),
    "killed": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "memory", signal.SIGKILL),
    "exit": ("import os\nos._exit(3)", "abort", None),
    "hang": ("import time\ntime.sleep(600)", "timeout", None),
    "hang that ignores SIGTERM": (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)", "timeout", None,
    ),
    "exception": ("raise RuntimeError('no such device')", "load", None),
    "memory": ("raise MemoryError", "memory", None),
    "bad_alloc": ("raise RuntimeError('std::bad_alloc')", "memory", None),
    "syntax error": ("def f(:", "load", None),
}  # fmt: skip


@pytest.mark.parametrize("code, kind, number", FATAL.values(), ids=FATAL)
def test_a_candidate_that_dies_is_an_answer_and_the_others_go_on(artifact, tmp_path, code, kind, number):
    timeout_s = 6 if kind == "timeout" else 120  # the child imports torch first, and the machine may be busy
    request = request_of(
        artifact, tmp_path / "out", op_libraries=with_op_library(artifact, code), measure=MEASURE, timeout_s=timeout_s
    )
    results = ask(artifact, request, tmp_path)["candidates"]

    failed = results["torchscript-fp32"]
    assert failed["status"] == "failed"
    assert failed["failure"]["kind"] == kind
    assert failed["failure"]["signal"] == (number and int(number))
    assert failed["failure"]["message"]
    assert results["onnxruntime-fp32"]["status"] == "ok"
    assert len(results["onnxruntime-fp32"]["rounds_s"]) == 3


def test_the_failure_repeats_the_last_words_of_the_process(artifact, tmp_path):
    code = "import os, sys\nsys.stderr.write('version 10, at most 6\\n')\nsys.stderr.flush()\nos.abort()"
    request = request_of(artifact, tmp_path / "out", op_libraries=with_op_library(artifact, code))
    failure = ask(artifact, request, tmp_path)["candidates"]["torchscript-fp32"]["failure"]
    assert failure["message"] == "the process ended by SIGABRT; it said: version 10, at most 6"


def test_a_helper_that_outlives_the_child_does_not_hold_the_answer_up(artifact, tmp_path):
    """It holds the child's stderr open, so that only the end of the answers tells that the child is gone."""
    code = (
        "import os, subprocess\nsubprocess.Popen(['sleep', '90'], close_fds=True)\nos.write(2, b'bye\\n')\nos.abort()"
    )
    request = request_of(artifact, tmp_path / "out", op_libraries=with_op_library(artifact, code), timeout_s=60)
    failure = ask(artifact, request, tmp_path)["candidates"]["torchscript-fp32"]["failure"]
    assert failure["kind"] == "abort" and failure["message"].endswith("it said: bye")


def test_a_child_that_complains_without_end_is_not_stopped_by_a_full_pipe(artifact, tmp_path):
    code = "import os\nfor _ in range(100): os.write(2, b'x' * 65536 + b'\\n')"
    request = request_of(artifact, tmp_path / "out", op_libraries=with_op_library(artifact, code), timeout_s=30)
    assert ask(artifact, request, tmp_path)["candidates"]["torchscript-fp32"]["status"] == "ok"


def test_a_library_that_prints_does_not_break_the_protocol(artifact, tmp_path):
    code = "import os\nprint('{\"done\": true}', flush=True)\nos.write(1, b'noise\\n' * 20000)"
    request = request_of(artifact, tmp_path / "out", op_libraries=with_op_library(artifact, code))
    results = ask(artifact, request, tmp_path)["candidates"]
    assert [r["status"] for r in results.values()] == ["ok", "ok"]


def test_a_candidate_that_was_killed_beside_others_runs_once_more_alone(artifact, tmp_path):
    code = (
        "import os, signal\n"
        f"marker = {str(tmp_path / 'killed')!r}\n"
        "if not os.path.exists(marker):\n"
        "    open(marker, 'w').close()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    request = request_of(artifact, tmp_path / "out", op_libraries=with_op_library(artifact, code), measure=MEASURE)
    result = ask(artifact, request, tmp_path)["candidates"]["torchscript-fp32"]
    assert (tmp_path / "killed").exists()
    assert result["status"] == "ok" and len(result["rounds_s"]) == 3


def test_total_s_ends_everything(artifact, tmp_path):
    code = "import time\ntime.sleep(600)"
    request = request_of(artifact, tmp_path / "out", op_libraries=with_op_library(artifact, code), total_s=3)
    results = ask(artifact, request, tmp_path)["candidates"]
    assert results["torchscript-fp32"]["failure"]["kind"] == "timeout"


def test_no_child_outlives_the_runner(artifact, tmp_path):
    pid_file = tmp_path / "pid"
    code = f"import os, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    request = request_of(artifact, tmp_path / "out", op_libraries=with_op_library(artifact, code))
    (tmp_path / "out").mkdir()
    (tmp_path / "q.json").write_text(json.dumps(request))
    argv = [sys.executable, str(artifact.folder / "onboard.pyz"), "run", str(tmp_path / "q.json"), "unused"]
    runner = subprocess.Popen(argv, cwd=tmp_path)
    wait_until(lambda: pid_file.exists() and pid_file.read_text())
    runner.kill()
    runner.wait()
    wait_until(lambda: not is_running(int(pid_file.read_text())))


def with_ops(artifact: Artifact, tmp_path: Path, code: str, **changes) -> dict:
    """The whole response about both candidates, of which TorchScript's runs `code` when it loads its op library."""
    request = request_of(artifact, tmp_path / "out", op_libraries=with_op_library(artifact, code), **changes)
    return ask(artifact, request, tmp_path)


def test_a_candidate_that_takes_more_memory_than_it_may_loses_its_place_and_no_other_does(artifact, tmp_path):
    """Real memory: 64 MiB every 20 ms, of which 512 are allowed; the machine's own limit is never reached."""
    code = "import time\nheld = []\nwhile True:\n    held.append(bytearray(64 << 20))\n    time.sleep(0.02)"
    results = with_ops(artifact, tmp_path, code, measure=MEASURE, memory_bytes=512 << 20)["candidates"]
    failure = results["torchscript-fp32"]["failure"]
    assert failure["kind"] == "memory" and "the limit is 512 MiB; the process was ended" in failure["message"]
    assert len(results["onnxruntime-fp32"]["rounds_s"]) == 3


def test_the_kernel_ends_a_candidate_first_where_memory_runs_out(artifact, tmp_path):
    code = f"open({str(tmp_path / 'score')!r}, 'w').write(open('/proc/self/oom_score_adj').read())"
    with_ops(artifact, tmp_path, code)
    assert (tmp_path / "score").read_text().strip() == "1000"


def test_each_candidate_is_tuned_and_warmed_up_and_the_answer_says_how(artifact, tmp_path):
    measure = {**MEASURE, "tune": ["onnxruntime-fp32"], "lock": str(tmp_path / "lock")}
    request = request_of(artifact, tmp_path / "out", measure=measure, threads=None)
    response = ask(artifact, request, tmp_path)
    tuned, plain = (response["candidates"][name] for name in ("onnxruntime-fp32", "torchscript-fp32"))
    every = machine.cores()["all"]
    assert [s["threads"] for s in tuned["tried"]][0] == 1 and max(s["threads"] for s in tuned["tried"]) == every
    assert tuned["setting"] in [{k: s[k] for k in ("threads", "streams", "flags")} for s in tuned["tried"]]
    assert plain["setting"] is None and plain["tried"] == []
    assert tuned["warm_up"]["calls"] >= 5 and set(plain["warm_up"]) == {"calls", "seconds", "stable"}
    noise = response["noise"]
    assert noise["cores"] == machine.cores() and noise["lock"]["path"] == str(tmp_path / "lock")
    assert 0 <= noise["others"] <= 1 and 0 <= noise["busy_rounds"] <= 3 and noise["repeated"] == 0


SETTING_DIES = {
    "exception": ("raise RuntimeError('not two')", "RuntimeError: not two"),
    "abort": ("os.abort()", "SIGABRT"),
}


@pytest.mark.parametrize("death, said", SETTING_DIES.values(), ids=SETTING_DIES)
def test_a_setting_that_dies_costs_itself_and_not_the_candidate(artifact, tmp_path, death, said):
    """The first setting that is tried meets a torch whose set_num_threads dies, once."""
    marker = tmp_path / "died"
    code = (
        "import os, torch\n"
        "def dies(n):\n"
        f"    if not os.path.exists({str(marker)!r}):\n"
        f"        open({str(marker)!r}, 'w').close()\n"
        f"        {death}\n"
        "torch.set_num_threads = dies\n"
    )
    measure = {**MEASURE, "tune": ["torchscript-fp32"]}
    result = with_ops(artifact, tmp_path, code, measure=measure, threads=None)["candidates"]["torchscript-fp32"]
    assert marker.exists() and result["status"] == "ok" and len(result["rounds_s"]) == 3
    assert said in str([setting["failure"] for setting in result["tried"]])


def test_a_candidate_that_aborts_while_it_is_timed_leaves_the_others_their_rounds(artifact, tmp_path):
    """It dies at its 230th input: after every warm-up (200 calls at most), in a round."""
    code = (
        "import os, torch\n"
        "count, given = [0], torch.from_numpy\n"
        "def dies(array):\n"
        "    count[0] += 1\n"
        "    return os.abort() if count[0] == 230 else given(array)\n"
        "torch.from_numpy = dies\n"
    )
    results = with_ops(artifact, tmp_path, code, measure={**MEASURE, "calls": 150})["candidates"]
    assert results["torchscript-fp32"]["failure"]["kind"] == "abort"
    assert [len(calls) for calls in results["onnxruntime-fp32"]["rounds_s"]] == [150, 150, 150]


def test_throughput_gives_one_figure_a_round_for_the_streams_that_were_asked_for(artifact, tmp_path):
    measure = {**MEASURE, "mode": "throughput", "streams": 3, "tune": ["onnxruntime-fp32", "torchscript-fp32"]}
    response = ask(artifact, request_of(artifact, tmp_path / "out", measure=measure), tmp_path)
    for result in response["candidates"].values():
        assert result["failure"] is None and result["setting"]["streams"] == 3
        assert [len(figures) for figures in result["rounds_s"]] == [1, 1, 1]
        assert all(0 < figure < 1 for (figure,) in result["rounds_s"])


def test_two_measurements_are_never_made_at_once(artifact, tmp_path):
    """While one process measures, a second one is told by which; outputs alone need no lock."""
    lock = str(tmp_path / "lock")
    inside = tmp_path / "inside"
    code = (
        "import time, torch\n"
        f"def hang(n):\n    open({str(inside)!r}, 'w').close()\n    time.sleep(600)\n"
        "torch.set_num_threads = hang\n"
    )
    measure = {**MEASURE, "lock": lock, "tune": ["torchscript-fp32"]}
    request = request_of(
        artifact, tmp_path / "out", op_libraries=with_op_library(artifact, code), measure=measure, threads=None
    )
    (tmp_path / "out").mkdir()
    (tmp_path / "first.json").write_text(json.dumps(request))
    argv = [sys.executable, str(artifact.folder / "onboard.pyz"), "run", str(tmp_path / "first.json"), "unused"]
    first = subprocess.Popen(argv, cwd=tmp_path)
    try:
        wait_until(inside.exists)
        plain = request_of(artifact, tmp_path / "out", candidates=request["candidates"][:1])
        refused = ask(artifact, {**plain, "measure": {**MEASURE, "lock": lock, "lock_wait_s": 0.3}}, tmp_path)
        assert refused["failure"]["kind"] == "locked" and f"process {first.pid} holds" in refused["failure"]["message"]
        assert refused["candidates"] == {}
        assert ask(artifact, plain, tmp_path)["candidates"]["onnxruntime-fp32"]["status"] == "ok"
    finally:
        first.kill()
        first.wait()
    again = ask(artifact, {**plain, "measure": {**MEASURE, "lock": lock, "lock_wait_s": 5}}, tmp_path)
    assert again["candidates"]["onnxruntime-fp32"]["status"] == "ok"


def wait_until(condition, timeout_s: float = 120) -> None:
    import time

    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
