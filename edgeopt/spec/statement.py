"""What a signature is of: the text `manifest.signed` beside the manifest, which names every file by its sha256.

    edgeopt-signed 1
    name digits
    version 20261201005000
    signed 2026-12-01T00:50:00Z
    bytes 81920
    SHA256  ./manifest.json
    SHA256  ./FILE ...                 those of the manifest, sorted

The manifest holds what the inputs of a build determine, so the version cannot stand there: it is signed beside it. A
device without Python checks this text with `ssh-keygen -Y verify` and the lines from the sixth on with `sha256sum -c`.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass

from edgeopt.errors import ArtifactError
from edgeopt.spec import manifest as spec
from edgeopt.spec.manifest import Manifest

NAMESPACE = "edgeopt-artifact"  # what is signed for another purpose is no signature of an artifact
MAX_VERSION = 10**15 - 1  # 15 digits, which a shell compares without overflow
_FIRST = "edgeopt-signed 1"
_WHEN = "%Y-%m-%dT%H:%M:%SZ"
_HEADER = re.compile(
    rf"{_FIRST}\nname ({spec.NAME_PATTERN})\nversion ([1-9][0-9]{{0,14}})\nsigned (\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\dZ)\n"
)


@dataclass(frozen=True)
class Statement:
    """An artifact by name and digest, with the `version` that counts up and when it was signed (UTC)."""

    name: str
    digest: str
    version: int
    when: str


def now(at: datetime.datetime | None = None) -> tuple[int, str]:
    """(version, when) of a signature that is made now, or `at`: the UTC time as a number of 14 digits."""
    at = at or datetime.datetime.now(datetime.timezone.utc)
    return int(at.strftime("%Y%m%d%H%M%S")), at.strftime(_WHEN)


def encode(manifest: Manifest, version: int, when: str) -> bytes:
    """The text that is signed."""
    files = {spec.FILE_NAME: (spec.digest(manifest), len(spec.encode(manifest)))}
    files |= {name: (file.sha256, file.size) for name, file in sorted(manifest.files.items())}
    total = sum(size for _, size in files.values())
    head = f"{_FIRST}\nname {manifest.name}\nversion {version}\nsigned {when}\nbytes {total}\n"
    return (head + "".join(f"{sha256}  ./{name}\n" for name, (sha256, _) in files.items())).encode()


def decode(data: bytes, manifest: Manifest, *, source: str) -> Statement:
    """The statement `data`, which must be the very text that `encode` gives for the manifest and its own version.

    ArtifactError where it is no statement, or one of another artifact.
    """
    todo = "sign the artifact again: edgeopt artifact sign ARTIFACT --key KEY"
    found = _HEADER.match(data[:1000].decode("utf-8", "replace"))
    if found is None:
        raise ArtifactError("this is not what 'edgeopt artifact sign' writes", where=source, todo=todo)
    version, when = int(found[2]), found[3]
    if data != encode(manifest, version, when):
        raise ArtifactError("what is signed is another artifact than this one", where=source, todo=todo)
    return Statement(manifest.name, spec.digest(manifest), version, when)


def version_of(data: bytes) -> int | None:
    """The version that a statement has, whatever artifact it is of; None where it is no statement."""
    found = _HEADER.match(data[:1000].decode("utf-8", "replace"))
    return int(found[2]) if found else None
