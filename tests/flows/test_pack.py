"""Packing: one file, the same bytes each time, that any tar reads; unpacking trusts none of it."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile

import pytest

from edgeopt.errors import ArtifactError, SpaceError, UsageError
from edgeopt.flows import pack as room
from edgeopt.flows.pack import pack, unpack
from edgeopt.runtime import artifact_file
from edgeopt.runtime.artifact import Artifact
from edgeopt.spec import manifest as spec
from edgeopt.spec.manifest import Selection
from tests.conftest import absent, wait_until
from tests.flows.test_push import tree
from tests.tiny import tiny_artifact

LONG = "weights/" + "/".join(["a long folder's name"] * 12) + "/größe-大.bin"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    artifact = tiny_artifact(folder, torchscript=False, extra={"empty.bin": b""})
    path = artifact.folder / LONG
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * 513)
    listed = spec.File(sha256=hashlib.sha256(b"x" * 513).hexdigest(), size=513)
    manifest = artifact.manifest.model_copy(update={"files": artifact.manifest.files | {LONG: listed}})
    (artifact.folder / "manifest.json").write_bytes(spec.encode(manifest))
    selection = Selection(candidate="onnxruntime-fp32", decided_by="build", where="here", reason="-", verdict="only")
    opened = Artifact.open(artifact.folder)
    opened.write_selection(selection)
    (artifact.folder / "build.json").write_text("{}")
    return opened


@pytest.fixture
def packed(made, tmp_path):
    return pack(made, tmp_path / "stick.tar")


def names(path) -> list[str]:
    with tarfile.open(path) as tar:
        return tar.getnames()


def nothing_is_left(folder, *expected: str) -> bool:
    return sorted(os.listdir(folder)) == sorted(expected)


def test_there_and_back_is_the_same_artifact(made, packed, tmp_path):
    done = unpack(tmp_path / "stick.tar", tmp_path / "back")
    expected = {name: data for name, data in tree(made.folder).items() if name != "build.json"}
    assert tree(tmp_path / "back") == expected
    assert done.digest == packed.digest == made.digest == Artifact.open(tmp_path / "back").digest


def test_the_same_artifact_gives_the_same_bytes(made, packed, tmp_path):
    copy = shutil.copytree(made.folder, tmp_path / "copy")  # other inodes, times and modes
    for path in copy.rglob("*"):
        os.chmod(path, 0o700)
        os.utime(path, (1, 1))
    pack(Artifact.open(copy), tmp_path / "again.tar")
    assert (tmp_path / "again.tar").read_bytes() == (tmp_path / "stick.tar").read_bytes()


def test_the_form_of_the_file_is_fixed():
    """These bytes are an interface: what was packed years ago is unpacked by its headers being exactly these."""
    made = artifact_file.header("tiny", "float.onnx", 10) + artifact_file.header("tiny", LONG, 1 << 34)
    assert hashlib.sha256(made).hexdigest() == "24342378a1004b08cb71e74f40b17c23d3a26829363a03a2b423f4567b5218a9"


def test_other_tars_read_it_and_the_manifest_is_first(made, packed, tmp_path):
    assert names(tmp_path / "stick.tar")[0] == "tiny.edgeopt/manifest.json"
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "-xf", tmp_path / "stick.tar", "-C", tmp_path / "out"], check=True, capture_output=True)
    assert Artifact.open(tmp_path / "out" / "tiny.edgeopt").digest == made.digest
    with tarfile.open(tmp_path / "stick.tar") as tar:
        assert {(m.uid, m.gid, m.uname, m.mode, m.mtime, m.isreg()) for m in tar} == {(0, 0, "", 0o644, 0, True)}


def test_a_file_is_put_into_a_folder_under_the_artifacts_name(made, tmp_path):
    assert pack(made, tmp_path).path == str(tmp_path / "tiny.edgeopt.tar")


def test_a_pack_into_the_artifact_itself_is_refused(made):
    with pytest.raises(UsageError, match="in the artifact itself"):
        pack(made, made.folder / "x.tar")


def test_a_file_that_changed_since_the_artifact_was_opened_is_not_packed(tmp_path):
    artifact = tiny_artifact(tmp_path / "a", torchscript=False)
    (artifact.folder / "float.onnx").write_bytes((artifact.folder / "float.onnx").read_bytes()[:-1] + b"?")
    with pytest.raises(ArtifactError, match="changes while"):
        pack(artifact, tmp_path / "x.tar")
    assert nothing_is_left(tmp_path, "a")


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_modes_follow_the_umask_and_are_never_more_than_644(packed, tmp_path, umask):
    code = (
        f"import os, pathlib, sys; os.umask({umask})\n"
        "from edgeopt.flows.pack import unpack; unpack(*map(pathlib.Path, sys.argv[1:]))"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "stick.tar", tmp_path / "back"], check=True)
    for path in [tmp_path / "back", *(tmp_path / "back").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644) & ~umask


# what somebody could have put into the archive, in place of or besides 'float.onnx'


def member(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", **fields) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo("tiny.edgeopt/" + name)
    info.type, info.size, info.mode, info.mtime = kind, len(data), 0o644, 0
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def outer(name: str, **fields):
    info, data = member("x", data=b"evil", **fields)
    info.name = name
    return info, data


HOSTILE = {
    "a path that climbs": outer("tiny.edgeopt/../../evil"),
    "an absolute path": outer("/tmp/evil"),
    "a plain dot-dot": outer("../evil"),
    "a file that the manifest does not name": member("evil", data=b"evil"),
    "a symbolic link": member("float.onnx", tarfile.SYMTYPE, linkname="/etc/passwd"),
    "a hard link": member("float.onnx", tarfile.LNKTYPE, linkname="tiny.edgeopt/manifest.json"),
    "a hard link outside": member("float.onnx", tarfile.LNKTYPE, linkname="../../etc/passwd"),
    "a character device": member("float.onnx", tarfile.CHRTYPE, devmajor=1, devminor=5),
    "a block device": member("float.onnx", tarfile.BLKTYPE, devmajor=8, devminor=0),
    "a named pipe": member("float.onnx", tarfile.FIFOTYPE),
    "a folder": member("float.onnx", tarfile.DIRTYPE),
    "a folder that is a link's place": member("cases", tarfile.SYMTYPE, linkname="/tmp"),
    "a sparse file": member("float.onnx", tarfile.GNUTYPE_SPARSE),
    "setuid": "mode 04755",
    "another owner": "owner",
    "a name twice": "twice",
    "a manifest twice": "manifest twice",
    "another order": "order",
    "a size of its own": "size",
}  # fmt: skip


def rewritten(source, target, what) -> None:
    """The archive `source` with float.onnx replaced, or followed, by `what`."""
    with tarfile.open(source) as tar:
        members = [(m, tar.extractfile(m).read()) for m in tar]
    at = next(i for i, (m, _) in enumerate(members) if m.name.endswith("/float.onnx"))
    info, data = members[at]
    if what == "mode 04755":
        info.mode = 0o4755
    elif what == "owner":
        info.uid, info.uname = 1000, "eve"
    elif what == "twice":
        members.insert(at + 1, (info, data))
    elif what == "manifest twice":
        members.insert(at, members[0])
    elif what == "order":
        members[at], members[at - 1] = members[at - 1], members[at]
    elif what == "size":
        info, data = tarfile.TarInfo(info.name), data + b"more"
        info.size = len(data)
        members[at] = (info, data)
    else:
        members[at] = what
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in members:
            info.pax_headers = {}
            tar.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize("what", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_archive_is_refused_and_writes_nothing(packed, tmp_path, what):
    (tmp_path / "in").mkdir()
    rewritten(tmp_path / "stick.tar", tmp_path / "in" / "evil.tar", what)
    with pytest.raises(ArtifactError) as why:
        unpack(tmp_path / "in" / "evil.tar", tmp_path / "in" / "deeper" / "back")
    assert "evil.tar" in why.value.where
    assert nothing_is_left(tmp_path, "in", "stick.tar") and nothing_is_left(tmp_path / "in", "deeper", "evil.tar")
    assert nothing_is_left(tmp_path / "in" / "deeper")
    if hasattr(what, "__len__") and not isinstance(what, str) and what[0].type in (tarfile.SYMTYPE, tarfile.FIFOTYPE):
        assert "symbolic link" in why.value.what or "named pipe" in why.value.what


def test_what_rewriting_leaves_alone_is_accepted(packed, tmp_path):
    """The hostile archives are refused for what is wrong in them and not for how they were written."""
    with tarfile.open(tmp_path / "stick.tar") as tar:
        info = tar.getmember("tiny.edgeopt/float.onnx")
        original = info, tar.extractfile(info).read()
    rewritten(tmp_path / "stick.tar", tmp_path / "same.tar", original)
    assert (tmp_path / "same.tar").read_bytes() == (tmp_path / "stick.tar").read_bytes()


def with_manifest(folder, change) -> bytes:
    """An archive that begins with the manifest of `folder`'s artifact as `change` made it, and ends there."""
    import json

    from edgeopt.digest import canonical_json

    value = json.loads((folder / "manifest.json").read_bytes())
    change(value)
    data = canonical_json(value)
    return artifact_file.header("tiny", "manifest.json", len(data)) + data + bytes(artifact_file.padding(len(data)))


@pytest.mark.parametrize(
    "names",
    [["Float.onnx"], ["gr\u00f6\u00dfe", "gro\u0308\u00dfe"], ["stra\u00dfe", "STRASSE"], ["a", "a/b"], ["A/x", "a/y"],
     ["x\u202egnp"], ["a" * 201], ["d/" * 500 + "x"], ["manifest.sig"], ["MANIFEST.SIGNED"], ["manifest.sig.new"],
     ["Reports/x"], ["selection.json.part"]],
)  # fmt: skip
def test_names_that_do_not_keep_apart_on_every_disk_are_refused(made, tmp_path, names):
    def add(value):
        value["files"] |= {name: value["files"]["float.onnx"] for name in names}

    (tmp_path / "evil.tar").write_bytes(with_manifest(made.folder, add))
    with pytest.raises(ArtifactError, match="name|path|folder"):
        unpack(tmp_path / "evil.tar", tmp_path / "back")
    assert nothing_is_left(tmp_path, "evil.tar")


def test_a_size_that_the_file_does_not_have_is_refused_before_anything_is_written(made, tmp_path):
    """A manifest of 1 TB of zeros, as a sparse file on the stick would promise."""
    archive = with_manifest(made.folder, lambda value: value["files"]["empty.bin"].update(size=1 << 40))
    with open(tmp_path / "evil.tar", "wb") as f:
        f.write(archive)
        f.truncate(1 << 41)
    with pytest.raises(SpaceError, match="too full"):
        unpack(tmp_path / "evil.tar", tmp_path / "back")
    with open(tmp_path / "evil.tar", "r+b") as f:
        f.truncate(1 << 20)
    with pytest.raises(ArtifactError, match="ends early"):
        unpack(tmp_path / "evil.tar", tmp_path / "back")
    assert nothing_is_left(tmp_path, "evil.tar")


@pytest.mark.parametrize("size", [0, 1, 511, 512, 600, 5000, -1, -10_240])
def test_a_file_that_ends_early_is_an_error_and_leaves_nothing(packed, tmp_path, size):
    data = (tmp_path / "stick.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(data[:size])
    with pytest.raises(ArtifactError, match="ends"):
        unpack(tmp_path / "cut.tar", tmp_path / "back")
    assert nothing_is_left(tmp_path, "stick.tar", "cut.tar")


@pytest.mark.parametrize("more", [b"x", bytes(512), b"evil" * 3000])
def test_what_follows_the_end_is_refused(packed, tmp_path, more):
    (tmp_path / "long.tar").write_bytes((tmp_path / "stick.tar").read_bytes() + more)
    with pytest.raises(ArtifactError, match="follows after the end"):
        unpack(tmp_path / "long.tar", tmp_path / "back")


@pytest.mark.parametrize(("command", "todo"), [("gzip", "gunzip"), ("bzip2", "bunzip2"), ("xz", "unxz")])
def test_a_compressed_file_is_named_as_such(packed, tmp_path, command, todo):
    import bz2
    import gzip
    import lzma

    write = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}[command]
    (tmp_path / "x").write_bytes(write((tmp_path / "stick.tar").read_bytes()))
    with pytest.raises(ArtifactError, match="compressed") as why:
        unpack(tmp_path / "x", tmp_path / "back")
    assert todo in why.value.todo


def test_what_is_no_plain_file_is_refused_and_does_not_hold_us(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "nowhere", "/dev/zero"):
        with pytest.raises(ArtifactError):
            unpack(tmp_path / path, tmp_path / "back")


def test_a_folder_with_something_else_is_never_replaced_and_an_artifact_keeps_its_reports(packed, tmp_path):
    back = tmp_path / "back"
    back.mkdir()
    (back / "thesis.txt").write_text("x")
    with pytest.raises(ArtifactError, match="something else"):
        unpack(tmp_path / "stick.tar", back)
    (back / "thesis.txt").unlink()
    unpack(tmp_path / "stick.tar", back)
    (back / "reports").mkdir()
    (back / "reports" / "1.json").write_text("{}")
    unpack(tmp_path / "stick.tar", back)
    assert (back / "reports" / "1.json").read_text() == "{}"
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ArtifactError, match="in the way"):
        unpack(tmp_path / "stick.tar", tmp_path / "link")


def test_a_full_disk_leaves_nothing(made, packed, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], capture_output=True).returncode:
        absent("mounting a small disk needs root")
    try:
        with pytest.raises(SpaceError):
            unpack(tmp_path / "stick.tar", small / "back")
        with pytest.raises(SpaceError):
            pack(made, small / "x.tar")
        assert nothing_is_left(small)
    finally:
        subprocess.run(["umount", "-l", small], check=True)


def test_an_unpacker_that_was_killed_leaves_what_the_next_one_removes(packed, tmp_path):
    code = (
        "import sys, pathlib, signal; from edgeopt.flows import pack\n"
        "def stop(folder): print('here', flush=True); signal.pause()\n"
        "pack._sync_folders = stop; pack.unpack(*map(pathlib.Path, sys.argv[1:]))"
    )
    argv = [sys.executable, "-c", code, tmp_path / "stick.tar", tmp_path / "back"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"here\n"
        others = [name for name in os.listdir(tmp_path) if name.startswith(".back.unpack-")]
        unpack(tmp_path / "stick.tar", tmp_path / "back")  # one that lives is left alone
        assert others and all((tmp_path / name).is_dir() for name in others)
        child.send_signal(signal.SIGKILL)
    assert wait_until(lambda: child.poll() is not None)
    unpack(tmp_path / "stick.tar", tmp_path / "back")
    assert nothing_is_left(tmp_path, "stick.tar", "back")


def test_a_stick_that_is_pulled_while_it_is_read_leaves_nothing(packed, tmp_path, monkeypatch):
    read = room.Reader.exactly

    def pulled(reader, count):
        if reader.position > 3000:
            reader.stream.close()
            reader.stream = open("/proc/self/mem", "rb")  # noqa: SIM115  its first page gives EIO, as a gone disk does
        return read(reader, count)

    monkeypatch.setattr(room.Reader, "exactly", pulled)
    with pytest.raises(ArtifactError, match="cannot read it: Input/output error"):
        unpack(tmp_path / "stick.tar", tmp_path / "back")
    assert nothing_is_left(tmp_path, "stick.tar")
