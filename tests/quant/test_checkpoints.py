"""A killed training goes on from the last epoch bit for bit; a full disk leaves the last checkpoint."""

from __future__ import annotations

import contextlib
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from edgeopt.errors import SpaceError
from edgeopt.quant.training import checkpoints
from edgeopt.quant.training.checkpoints import Checkpoints
from tests.conftest import absent
from tests.quant.training import Loader, equal, loss_of_module, net, trained


@pytest.fixture(scope="module", name="net")
def _net():
    return net()


def settings() -> dict:
    """Everything that a checkpoint must bring back: momentum, a schedule of the user's, the best state, random data."""

    def make(parameters):
        optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=1e-3)
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=24)

    def score(module):
        return {"loss": -loss_of_module(module)}

    return {"how": {"make_optimizer": make, "score": score}, "epochs": 4, "evaluate_every": 1, "precision": "bf16"}


def train(net, folder: Path | None, loader=None, key: str = "k", **changed):
    wanted = settings()
    kept = Checkpoints(folder, key) if folder else None
    how = {**wanted.pop("how"), "kept": kept}
    return trained(net, loader, how=how, **{**wanted, **changed})[1]


class Stopping(Loader):
    """Ends its process in the third epoch, or raises there: the first time of four is only for counting."""

    def __init__(self, end, epoch: int = 3):
        super().__init__()
        self.end, self.left = end, epoch

    def __iter__(self):
        self.left -= 1
        for k, item in enumerate(super().__iter__()):
            if self.left == 0 and k == 2:
                self.end()
            yield item


KILLED = """
import os, signal, sys
import torch
torch.set_num_threads(int(sys.argv[2]))
from pathlib import Path
from tests.quant.test_checkpoints import Stopping, train
from tests.quant.training import net
train(net(), Path(sys.argv[1]), Stopping(lambda: os.kill(os.getpid(), signal.SIGKILL)))
"""


def test_a_killed_training_ends_as_one_that_ran_through(net, tmp_path):
    """Over 5 s: a process of its own to kill, which imports torch and captures the model."""
    through = train(net, None)
    argv = [sys.executable, "-c", KILLED, str(tmp_path / "k"), str(torch.get_num_threads())]
    killed = subprocess.run(argv, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = train(net, tmp_path / "k")
    assert resumed.details["resumed_after_epoch"] == 2
    assert equal(through.state, resumed.state)
    assert resumed.details["steps"] == through.details["steps"] == 24
    for name in ("first_loss", "last_loss", "metrics", "best_epoch"):
        assert resumed.details[name] == through.details[name]


@pytest.mark.parametrize("every, after", [(1, 2), (2, 2), (3, None), (0, None)])
def test_checkpoints_come_every_so_many_epochs(net, tmp_path, every, after):
    with pytest.raises(KeyboardInterrupt):
        train(net, tmp_path / "k", Stopping(stop), checkpoint_every=every)
    assert train(net, tmp_path / "k", checkpoint_every=every).details.get("resumed_after_epoch") == after


def stop():
    raise KeyboardInterrupt


def test_a_finished_training_is_not_trained_again(net, tmp_path):
    """The stage's result may fail to be stored: a full disk there must not cost the training."""
    first = train(net, tmp_path / "k")
    again = train(net, tmp_path / "k", [])
    assert equal(first.state, again.state)


def test_a_checkpoint_of_another_training_is_not_used(net, tmp_path, caplog):
    with pytest.raises(KeyboardInterrupt):
        train(net, tmp_path / "k", Stopping(stop))
    with caplog.at_level("WARNING", logger="edgeopt"):
        other = train(net, tmp_path / "k", key="other")
    assert "resumed_after_epoch" not in other.details
    assert "is of another training" in caplog.text


DAMAGE = {
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "a bit": lambda data: data[:9000] + bytes([data[9000] ^ 1]) + data[9001:],
    "code": lambda data: b"cos\nsystem\n(S'touch /tmp/x'\ntR.",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_checkpoint_is_said_and_not_used(net, tmp_path, caplog, damage):
    with pytest.raises(KeyboardInterrupt):
        train(net, tmp_path / "k", Stopping(stop))
    (file,) = (tmp_path / "k").iterdir()
    file.write_bytes(damage(file.read_bytes()))
    with caplog.at_level("WARNING", logger="edgeopt"):
        again = train(net, tmp_path / "k", epochs=1)
    assert "resumed_after_epoch" not in again.details
    assert "is damaged" in caplog.text


class Odd(torch.optim.SGD):
    """An optimizer whose state holds an object of its own."""

    def state_dict(self):
        return {**super().state_dict(), "odd": Odd}


def test_a_checkpoint_that_only_code_could_read_is_not_read(net, tmp_path, caplog):
    how = {"make_optimizer": lambda parameters: Odd(parameters, lr=1e-2), "kept": Checkpoints(tmp_path / "k", "k")}
    with pytest.raises(KeyboardInterrupt):
        trained(net, Stopping(stop), how=how)
    with caplog.at_level("WARNING", logger="edgeopt"):
        assert "resumed_after_epoch" not in trained(net, how=how, epochs=1)[1].details
    assert "cannot be read safely" in caplog.text


def test_a_part_of_a_write_is_never_taken(net, tmp_path):
    kept = Checkpoints(tmp_path / "k", "k")
    kept.write({"value": torch.ones(3)})
    (tmp_path / "k" / "checkpoint.part").write_bytes(b"half of the next one")
    assert torch.equal(checkpoints.loaded(kept.read())["value"], torch.ones(3))


def test_removing_leaves_the_newest_of_other_trainings(tmp_path):
    for k in range(6):
        Checkpoints(tmp_path / str(k), str(k)).write({})
    Checkpoints(tmp_path / "0", "0").remove()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3", "4", "5"]


@contextlib.contextmanager
def quota(folder: Path):
    """The most that a file of this process may be: what a quota is to a program, without a disk of one's own."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield folder
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def small_disk(folder: Path):
    """A file system that is filled up in the block."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True)
    if done.returncode != 0:
        absent("no tmpfs can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    with contextlib.suppress(OSError), open(folder / "fill", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_full_disk_stops_training_and_keeps_the_last_checkpoint(net, tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        with pytest.raises(SpaceError) as refused:
            train(net, disk / "k", Stopping(lambda: fill(disk)))
        assert "training stops" in refused.value.what
        assert "goes on from the last checkpoint" in refused.value.todo
        assert [p.name for p in (disk / "k").iterdir()] == ["checkpoint"]
        (disk / "fill").unlink()
        resumed = train(net, disk / "k")
        assert resumed.details["resumed_after_epoch"] == 2
    assert equal(resumed.state, train(net, None).state)


def test_a_full_quota_at_the_first_checkpoint_says_what_to_do(net, tmp_path):
    with quota(tmp_path), pytest.raises(SpaceError) as refused:
        train(net, tmp_path / "k")
    assert "free space and build again; qat.checkpoint_every: 0" in refused.value.todo
    assert not list((tmp_path / "k").iterdir())
