"""Sign and verify: who vouches for an artifact, and which version of it this is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from edgeopt.errors import ArtifactError, UsageError
from edgeopt.ports import signatures
from edgeopt.runtime.artifact import Artifact, replace_file
from edgeopt.spec import manifest as spec
from edgeopt.spec import statement
from edgeopt.spec.statement import NAMESPACE, Statement

FILES = (spec.STATEMENT_NAME, spec.SIGNATURE_NAME)


@dataclass(frozen=True)
class Signed:
    """A signature that was made, or one that was checked: then `identity` is who signed.

    `not_covered`: what lies in the folder and is not signed, by design or because it was put there.
    """

    name: str
    digest: str
    version: int
    when: str
    fingerprint: str | None = None
    identity: str | None = None
    not_covered: tuple[str, ...] = ()

    def as_dict(self) -> dict:
        return asdict(self)


def sign(artifact: Artifact, key: Path, *, version: int | None = None, program: str = signatures.PROGRAM) -> Signed:
    """Write manifest.signed and manifest.sig beside the manifest, replacing what is there.

    `version` counts up: a device refuses a lower one than it had. None takes the UTC time as a number, or one more
    than the version that was signed before where that is higher. Raises UsageError for a key that does not sign.
    """
    default, when = statement.now()
    if version is None:
        version = max(default, (_signed_before(artifact) or 0) + 1)
    if not 1 <= version <= statement.MAX_VERSION:
        raise UsageError(f"the version {version} is not from 1 to {statement.MAX_VERSION}", where="--version")
    text = statement.encode(artifact.manifest, version, when)
    signature = signatures.sign(text, key, namespace=NAMESPACE, program=program)
    replace_file(artifact.folder / spec.STATEMENT_NAME, text)
    replace_file(artifact.folder / spec.SIGNATURE_NAME, signature)
    return Signed(artifact.manifest.name, artifact.digest, version, when)


def verify(
    artifact: Artifact,
    allowed_signers: Path,
    *,
    revoked: Path | None = None,
    identity: str | None = None,
    program: str = signatures.PROGRAM,
) -> Signed:
    """Check the signature of `artifact`, whose files `Artifact.open` has hashed. ArtifactError says what is wrong."""
    said, text, signature = read(artifact)
    where = str(artifact.folder / spec.SIGNATURE_NAME)
    signer = signatures.verify(
        text, signature, namespace=NAMESPACE, allowed_signers=allowed_signers, revoked=revoked, identity=identity,
        source=where, program=program,
    )  # fmt: skip
    return Signed(
        said.name, said.digest, said.version, said.when, signer.fingerprint, signer.identity, not_covered(artifact)
    )


def read(artifact: Artifact, found: dict[str, bytes] | None = None) -> tuple[Statement, bytes, bytes]:
    """What the artifact's signature says, its text and the signature, unchecked; ArtifactError where it has none.

    `found`: what `signature_files` gave already.
    """
    found = signature_files(artifact) if found is None else found
    if len(found) < 2:
        raise ArtifactError(
            "the artifact is not signed", where=str(artifact.folder),
            todo="sign it: edgeopt artifact sign ARTIFACT --key KEY",
        )  # fmt: skip
    text, signature = found[spec.STATEMENT_NAME], found[spec.SIGNATURE_NAME]
    source = str(artifact.folder / spec.STATEMENT_NAME)
    return statement.decode(text, artifact.manifest, source=source), text, signature


def signature_files(artifact: Artifact) -> dict[str, bytes]:
    """manifest.signed and manifest.sig as they lie in the artifact, those that are there."""
    found = {}
    for name, most in ((spec.STATEMENT_NAME, spec.MAX_MANIFEST_BYTES), (spec.SIGNATURE_NAME, spec.MAX_SIGNATURE_BYTES)):
        path = artifact.folder / name
        if not path.is_file() or path.is_symlink():
            continue
        if path.stat().st_size > most:
            raise ArtifactError("the signature is absurdly large", where=str(path), todo="sign the artifact again")
        found[name] = path.read_bytes()
    return found


def not_covered(artifact: Artifact) -> tuple[str, ...]:
    """The files of the folder that no signature of the artifact covers, sorted."""
    covered = {spec.FILE_NAME, spec.STATEMENT_NAME, spec.SIGNATURE_NAME, *artifact.manifest.files}
    found = (p.relative_to(artifact.folder).as_posix() for p in artifact.folder.rglob("*") if not p.is_dir())
    return tuple(sorted(name for name in found if name not in covered))


def _signed_before(artifact: Artifact) -> int | None:
    path = artifact.folder / spec.STATEMENT_NAME
    return statement.version_of(path.read_bytes()) if path.is_file() else None
