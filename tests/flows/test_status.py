"""Status, garbage collection and the dry run: they say what is there, and change nothing that is needed."""

from __future__ import annotations

import os
import random
import time

import pytest

from edgeopt.errors import DeviceError, LockedError, SpaceError
from edgeopt.flows import status as flow
from edgeopt.flows.activate import activate, rollback
from edgeopt.flows.place import locked
from edgeopt.flows.plan import plan
from edgeopt.flows.push import push, shortage
from edgeopt.flows.status import collect, status
from edgeopt.ports.blobs import Part, Survey
from edgeopt.ports.connect import connect
from edgeopt.runtime.artifact import Artifact
from tests.tiny import tiny_artifact


@pytest.fixture
def two(device, root, tmp_path):
    """Two releases of 'tiny', the second current, and one of 'other'."""
    a = tiny_artifact(tmp_path / "a", torchscript=False)
    b = tiny_artifact(tmp_path / "b", torchscript=False, profile="arm64-cpu")
    other = tiny_artifact(tmp_path / "c", torchscript=False, name="other")
    for artifact in (a, b, other):
        push(artifact, device, root=str(root))
    for artifact in (a, b):
        activate(device, "tiny", artifact.digest, root=str(root))
    return a, b, other


def tree(root) -> dict[str, tuple]:
    """Every path below `root` with what it is."""
    return {
        str(p.relative_to(root)): os.readlink(p) if p.is_symlink() else p.read_bytes() if p.is_file() else None
        for p in root.rglob("*")
    }


def test_status_says_what_lies_there(device, root, two):
    a, b, other = two
    before = tree(root)
    found = status(device, root=str(root))
    assert tree(root) == before
    assert [named.name for named in found.names] == ["other", "tiny"]
    tiny = found.names[1]
    assert [(r.digest, r.profile, r.current, r.previous, r.damaged) for r in tiny.releases] == [
        (b.digest, "arm64-cpu", True, False, False),
        (a.digest, "x86-cpu", False, True, False),
    ]
    assert tiny.releases[0].size_bytes == sum(file.size for file in b.manifest.files.values())
    assert abs(tiny.releases[0].when - time.time()) < 3600 and not tiny.releases[0].signed
    assert tiny.locked_by is None and tiny.unproven is None and found.leftovers == ()
    assert found.free_bytes > 0 and found.used_bytes > 0 and found.root == str(root)
    assert [e.step for e in found.journal].count("push") == 6 and found.journal[-1].result == "done"
    assert [n.name for n in status(device, "other", root=str(root)).names] == ["other"]


def test_status_names_who_is_at_work_and_what_is_unproven(device, root, two):
    a, b, _ = two
    with connect(None) as here, locked(here, str(root), "tiny") as place:
        place.try_out(a.digest, b.digest, place.state(), ())
        found = status(device, "tiny", root=str(root)).names[0]
        assert f"process {os.getpid()}" in found.locked_by and found.unproven == a.digest
        assert [r.digest for r in found.releases if r.current] == [a.digest]
    found = status(device, "tiny", root=str(root)).names[0]
    assert found.locked_by is None and found.unproven is None
    assert [r.digest for r in found.releases if r.current] == [b.digest]


def test_a_damaged_release_a_signature_and_an_engine_are_shown(device, root, two):
    a, b, _ = two
    (root / "tiny" / "releases" / a.digest / "manifest.sig").write_text("signature")
    manifest = root / "tiny" / "releases" / b.digest / "manifest.json"
    manifest.unlink()
    manifest.write_text("{}")
    engine = root / "engines" / ("e" * 64)
    engine.mkdir(parents=True)
    (engine / "state.json").write_text('{"status": "ready", "share": 1.0}')
    (engine / "job.json").write_text('{"candidate": "tensorrt-fp16"}')
    found = status(device, root=str(root))
    assert [(r.signed, r.damaged) for r in found.names[1].releases] == [(False, True), (True, False)]
    assert [(e.passport, e.status, e.candidate) for e in found.engines] == [("e" * 64, "ready", "tensorrt-fp16")]


def test_where_nothing_lies_it_says_so(device, root, two):
    for name, where in ((None, root / "none"), ("nope", root)):
        with pytest.raises(DeviceError, match="no releases are there"):
            status(device, name, root=str(where))
    with pytest.raises(DeviceError, match="no releases are there"):
        collect(device, root=str(root / "none"))


def litter(root) -> list[str]:
    """What cuts leave: an old part, a half-made release, half a switch, a blob that nothing links to."""
    folder = root / "blobs" / "sha256" / "ab"
    folder.mkdir(exist_ok=True)
    (folder / ("ab" + "0" * 62 + ".tiny.part")).write_bytes(b"x" * 10000)
    (folder / ("ab" + "1" * 62)).write_bytes(b"x" * 10000)
    staging = root / "tiny" / "releases" / ".staging-1-token"
    staging.mkdir()
    (staging / "float.onnx").write_bytes(b"x")
    (root / "tiny" / ".current.new").symlink_to("releases/none")
    return ["blob", "part", "staging"]


def test_garbage_goes_and_nothing_else(device, root, two):
    before = tree(root)
    kinds = litter(root)
    assert sorted(left.kind for left in status(device, root=str(root)).leftovers) == kinds
    done = collect(device, root=str(root))
    assert sorted(left.kind for left in done.removed) == kinds and done.freed_bytes >= 20000
    after = tree(root)
    assert {k: v for k, v in after.items() if k not in (".journal", ".lock")} == {
        **{k: v for k, v in before.items() if k not in (".journal", ".lock")}, "blobs/sha256/ab": None
    }  # fmt: skip
    for artifact in two:
        release = root / artifact.manifest.name / "releases" / artifact.digest
        assert Artifact.open(release).digest == artifact.digest
    assert collect(device, root=str(root)).removed == ()


def test_garbage_is_not_collected_while_anybody_is_at_work(device, root, two):
    litter(root)
    before = tree(root)
    with connect(None) as here, locked(here, str(root), "other") as place:
        with pytest.raises(LockedError, match="somebody is at work"):
            collect(device, root=str(root))
        before["other/lock"] = (root / "other" / "lock").read_bytes()
        assert tree(root) == before and place.state()
    assert len(collect(device, root=str(root)).removed) == 3


def test_blobs_stay_where_releases_are_copies(device, root, two):
    """A file system without hard links: what a manifest names is no garbage, though nothing links to it."""
    a, b, _ = two
    for path in (root / "blobs").rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            path.unlink()
            path.write_bytes(data)
    named = {file.sha256 for artifact in two for file in artifact.manifest.files.values()}
    collect(device, root=str(root))
    assert named <= {p.name for p in (root / "blobs").rglob("*") if p.is_file()}


def test_a_rollback_to_a_named_release(device, root, two, tmp_path):
    a, b, _ = two
    c = tiny_artifact(tmp_path / "named", torchscript=False, profile="orin-nx")
    push(c, device, root=str(root))
    activate(device, "tiny", c.digest, root=str(root))
    done = rollback(device, "tiny", a.digest[:10], root=str(root))
    assert (done.digest, done.previous) == (a.digest, c.digest)
    with pytest.raises(DeviceError, match="no release ffff is there"):
        rollback(device, "tiny", "ffff", root=str(root))


def test_a_cut_between_the_links_leaves_nothing_to_roll_back_to(device, root, two):
    _, b, _ = two
    (root / "tiny" / "previous").unlink()
    (root / "tiny" / "previous").symlink_to(f"releases/{b.digest}")
    with pytest.raises(DeviceError, match="no previous release"):
        rollback(device, "tiny", root=str(root))


def test_what_a_device_says_is_not_believed(two, device, root):
    """Anything but what was asked for is a DeviceError: cut, mixed up, or noise."""
    from edgeopt.flows import status_scripts
    from edgeopt.ports.connection import script

    said = device.run(script(status_scripts.LOOK, str(root), "")).stdout
    flow.parse(said, host="h", where="w")
    chance = random.Random(7)
    for _ in range(300):
        broken = bytearray(said)
        for _ in range(chance.randrange(1, 6)):
            at = chance.randrange(len(broken))
            if chance.random() < 0.5:
                del broken[at : at + chance.randrange(1, 200)]
            else:
                broken[at : at + 1] = bytes(chance.randrange(256) for _ in range(chance.randrange(4)))
            broken = broken or bytearray(b"x")
        try:
            flow.parse(bytes(broken), host="h", where="w")
        except DeviceError as why:
            assert why.where and why.todo


def test_a_dry_run_says_what_would_move_and_changes_nothing(device, root, two, tmp_path):
    a, b, _ = two
    before = tree(root)
    new = tiny_artifact(tmp_path / "new", torchscript=False, extra={"weights.bin": bytes(100_000)})
    planned = plan(new, device, root=str(root), keep=1)
    assert tree(root) == before
    assert {f.path: f.size_bytes for f in planned.files} == {
        "weights.bin": 100_000, "manifest.json": (new.folder / "manifest.json").stat().st_size
    }  # fmt: skip
    assert planned.prune == () and planned.short_of is None and not planned.already_there
    weights = next(f for f in planned.files if f.path == "weights.bin")
    assert (weights.method, weights.about_bytes < 1000) == (("zstd", True) if device.remote else (None, False))
    done = push(new, device, root=str(root), keep=1)
    assert done.moved_bytes == planned.move_bytes and done.blobs_moved == len(planned.files)
    if device.remote:
        assert done.sent_bytes < 10_000 < done.moved_bytes
    assert plan(new, device, root=str(root)).already_there
    other = plan(new, device, root=str(root / "deeper" / "none"))
    assert len(other.files) == len(new.manifest.files) + 1 and not (root / "deeper").exists()


def test_a_dry_run_names_what_would_be_pruned_and_resumed(device, root, two, tmp_path):
    new = tiny_artifact(tmp_path / "new", torchscript=False, extra={"weights.bin": bytes(range(256)) * 400})
    sha256 = new.manifest.files["weights.bin"].sha256
    part = root / "blobs" / "sha256" / sha256[:2] / f"{sha256}.tiny.part"
    part.parent.mkdir(exist_ok=True)
    part.write_bytes((bytes(range(256)) * 400)[:50_000])
    c = tiny_artifact(tmp_path / "third", torchscript=False, profile="orin-nx")
    push(c, device, root=str(root), keep=1)
    planned = plan(new, device, root=str(root), keep=1)
    assert planned.prune == (c.digest,)
    assert next(f.resume_at for f in planned.files if f.path == "weights.bin") == 50_000
    done = push(new, device, root=str(root), keep=1)
    assert done.pruned == planned.prune and done.moved_bytes == planned.move_bytes


MB = 1 << 20


@pytest.mark.parametrize(
    ("survey", "short"),
    [
        (Survey({"a": None}, 100 * MB), None),
        (Survey({"a": None}, 10 * MB), "are needed, 10.5 MB are free"),
        (Survey({"a": Part(9 * MB, "x")}, 3 * MB), None),
        (Survey({}, 0), None),
        (Survey({}, 0, links=True), None),
        (Survey({"a": None}, 15 * MB, links=False), "for a copy"),
        (Survey({}, 5 * MB, links=False), "for a copy"),
        (Survey({"a": None}, 100 * MB, free_inodes=5), "inodes are needed, 5 are free"),
        (Survey({"a": None}, 100 * MB, free_inodes=1000), None),
    ],
)
def test_room_for_blobs_release_and_inodes(survey, short):
    found = shortage(survey, {"a": 10 * MB})
    assert found is None if short is None else short in found


def test_a_dry_run_on_a_full_disk_is_refused_as_the_push_is(device, tmp_path):
    from tests.flows.test_push import small_disk

    artifact = tiny_artifact(tmp_path / "a", torchscript=False, extra={"weights.bin": os.urandom(4 * MB)})
    with small_disk(tmp_path / "disk", 3 * MB) as disk:
        planned = plan(artifact, device, root=str(disk))
        with pytest.raises(SpaceError, match="are needed"):
            planned.check()
        assert list(disk.iterdir()) == []


def test_old_releases_make_room_before_a_push_is_refused(device, tmp_path):
    from tests.flows.test_push import small_disk

    artifacts = [
        tiny_artifact(tmp_path / str(i), torchscript=False, extra={"weights.bin": os.urandom(2 * MB)}) for i in range(3)
    ]
    with small_disk(tmp_path / "disk", 6 * MB) as disk:
        for artifact in artifacts[:2]:
            push(artifact, device, root=str(disk))
        for blob in (disk / "blobs").rglob("*"):
            os.utime(blob, (1000, 1000))  # so old that nobody is about to link it
        done = push(artifacts[2], device, root=str(disk), keep=1)
        assert set(done.pruned) == {a.digest for a in artifacts[:2]}
        assert Artifact.open(done.release).digest == artifacts[2].digest
