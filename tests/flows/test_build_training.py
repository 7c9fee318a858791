"""Training inside a build: killed and taken up again, by two processes, by a trainer of one's own, from a file."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from edgeopt import qat
from edgeopt.errors import DataError, StageError
from edgeopt.flows.build import Built, build
from edgeopt.pipeline.job import Job
from edgeopt.spec.profile import load_profile
from edgeopt.spec.project import load_project
from tests.small_project import BUILD, write_project

KILLING = """
import os, signal
_calls = iter(range(100))
_train = train

def train():
    call = next(_calls)
    for k, item in enumerate(_train()):
        if os.environ.get("KILL") and (call, k) == (3, 4):  # the first call is for counting: the third epoch
            os.kill(os.getpid(), signal.SIGKILL)
        yield {"image": item[0]["image"] + np.random.normal(0, 0.1, item[0]["image"].shape).astype(np.float32)}, item[1]
"""
QAT = {"epochs": 4, "learning_rate": 1e-2}


def run(project: Path, *options: str, launcher: tuple[str, ...] = (), **environment: str):
    argv = [BUILD[0], *launcher, *BUILD[1:], "--project", str(project)]
    return subprocess.run(
        [*argv, "--until", "qat", "--json", *options], env={**os.environ, **environment},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip


def learned(project: Path) -> dict[str, torch.Tensor]:
    files = sorted((project / ".edgeopt" / "cache" / "qat").glob("*/qat_state.pt"), key=lambda f: f.stat().st_mtime)
    return torch.load(files[-1], weights_only=True)


def test_a_build_that_is_killed_in_training_goes_on_at_the_last_epoch(tmp_path):
    """Over 20 s: three builds in processes of their own. The second has its program from the cache, where parameters
    stand in another order than in the third, which captures it."""
    project = write_project(tmp_path / "p", data_code=KILLING, qat=QAT)
    killed = run(project, KILL="1")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert list((project / ".edgeopt" / "training").glob("*/qat/checkpoint"))
    resumed = run(project)
    assert resumed.returncode == 0, resumed.stderr
    assert "qat: goes on after epoch 2 of 4" in resumed.stderr
    assert not (project / ".edgeopt" / "training").exists()
    first = learned(project)
    through = run(project, "--no-cache")
    assert through.returncode == 0 and "goes on" not in through.stderr, through.stderr
    second = learned(project)
    assert first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def test_two_processes_build_together(tmp_path):
    """Over 20 s: two processes that import torch, twice. torchrun chooses a free port."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    project = write_project(tmp_path / "p", qat=QAT)
    done = run(project, launcher=launcher, GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"stages"') == 1  # one process says what happened
    assert '"processes": 2' in done.stdout and '"batches_of_each": 4' in done.stdout
    again = run(project, launcher=launcher, GLOO_SOCKET_IFNAME="lo")  # nothing to train: the other one leaves
    assert again.returncode == 0, again.stderr
    assert '"cached": true' in again.stdout


TRAINER = """
import torch

def fit(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for inputs, target in train():
        optimizer.zero_grad()
        loss(model(torch.from_numpy(inputs["image"])), target).backward()
        optimizer.step()

def nothing(model):
    pass

def broken(model):
    raise RuntimeError("no licence")
"""


def built(project: Path, until: str = "quantize", **settings: str) -> Built:
    loaded = load_project(project, {f"qat.{key}": value for key, value in settings.items()})
    job = Job(profile=load_profile("x86-cpu"), project=loaded, workdir=project / ".edgeopt")
    return build(job, project / "out.edgeopt", until=until)


def stage(result: Built, name: str) -> dict:
    return next(s for s in result.record["stages"] if s["name"] == name)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    return write_project(tmp_path_factory.mktemp("own") / "p", data_code=TRAINER, without=("train", "loss"), qat={})


def test_a_trainer_of_ones_own_trains_in_the_build(own):
    result = built(own, trainer="data.py:fit")
    assert stage(result, "qat")["details"]["trainer"] == "data.py:fit"
    assert stage(result, "quantize")["sqnr_db"] < 60  # other weights than the model's
    assert stage(result, "quantize")["details"]["coverage"] == 1.0


@pytest.mark.parametrize(
    ("trainer", "message"), [("nothing", "no data went through"), ("broken", "RuntimeError: no licence")]
)
def test_a_trainer_that_fails_is_named(own, trainer, message):
    with pytest.raises(StageError, match=message):
        built(own, until="qat", trainer=f"data.py:{trainer}")


def test_prepare_and_finish_hand_a_model_to_a_trainer_and_back(own):
    model = qat.prepare(own, profile="x86-cpu")
    torch.manual_seed(0)
    images, labels = torch.randn(32, 1, 12, 12), torch.randint(0, 2, (32,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(image=images)["scores"], labels).backward()
        optimizer.step()
    qat.finish(model, own / "trained.pt")
    result = built(own, state="trained.pt")
    assert stage(result, "qat")["details"] == {"taken_from": "trained.pt"}
    assert stage(result, "quantize")["skipped"] is None
    again = qat.prepare(own, profile="x86-cpu", overrides={"project.keep_float": "[head]"})
    again(images)
    qat.finish(again, own / "trained.pt")  # the file's content counts for the cache: another stage result is made
    with pytest.raises(DataError, match="of another program or of other settings"):
        built(own, state="trained.pt")


BAD = """
import itertools

def nan(predict):
    predict({"image": bars(4, 3)[0]})
    return {"p0": float("nan")}

def raising():
    yield from itertools.islice(train(), 2)
    raise OSError("the share is gone")
"""


@pytest.mark.parametrize(
    ("keys", "message", "where"),
    [
        ({"evaluate": "data.py:nan"}, "evaluate gave nan for the metric 'p0'", "qat, after epoch 1"),
        ({"train": "data.py:raising"}, "'train' failed: OSError: the share is gone", "data.py, line"),
    ],
    ids=["a metric that is NaN", "a loader that raises"],
)
def test_what_the_users_functions_do_wrong_in_training_is_said(tmp_path, keys, message, where):
    project = write_project(tmp_path / "p", data_code=BAD, qat={"evaluate_every": 1}, **keys)
    with pytest.raises(DataError, match=message) as refused:
        built(project, until="qat")
    assert where in refused.value.where


def test_a_gradient_that_the_graph_does_not_keep_is_said(tmp_path):
    code = """
class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()
    @staticmethod
    def backward(ctx, gradient):
        return gradient

class Rounding(Net):
    def forward(self, image):
        return {"scores": self.head(Straight.apply(self.first(image)).mean((2, 3)))}

def rounding():
    torch.manual_seed(3)
    return Rounding()
"""
    project = write_project(tmp_path / "p", model_code=code, model="model.py:rounding", qat={"max_steps": 2})
    (warning,) = stage(built(project, until="qat"), "qat")["details"]["warnings"]
    assert warning.startswith("model.py: Straight has a backward of its own")
