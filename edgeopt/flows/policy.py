"""The device's own policy: whose signature it demands, asked before anything moves and before a release is switched to.

The policy and the verifier belong to root there (scripts/install-device-policy). What is asked here is a courtesy, so
that a refusal comes early and in words: what keeps an artifact from running is the verifier at the application's start.
docs/signing.md says what that protects from.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from edgeopt.errors import ArtifactError, DeviceError
from edgeopt.flows import sign
from edgeopt.flows.place import Place
from edgeopt.ports import signatures
from edgeopt.ports.connection import Connection, Result, patience_s, script, transfer_error
from edgeopt.progress import log
from edgeopt.runtime.artifact import Artifact
from edgeopt.spec import manifest as spec
from edgeopt.spec import statement
from edgeopt.spec.manifest import Manifest

FOLDER = "/etc/edgeopt"  # where scripts/install-device-policy puts it
CHECK_S = 600  # the device hashes a release

_FIRST = "edgeopt-policy 1"
_INSTALL = "install the policy again: scripts/install-device-policy HOST"
_REFUSED = 1
_NO_POLICY = 3

# $1 the policy's folder
_READ = f"""\
[ -e "$1/policy" ] || exit {_NO_POLICY}
cat "$1/policy"
"""

# $1 verifier, $2 name, $3 digest, $4 the signature; the statement comes on stdin
_ASK = """\
folder=$(mktemp -d) || exit 74
trap 'rm -rf "$folder"' EXIT
cat > "$folder/manifest.signed" && printf %s "$4" > "$folder/manifest.sig" || exit 74
"$1" --statement "$folder" "$2" "$3"
"""

# $1 the release, $2 the signature, $3 the statement's size; the statement comes on stdin. The verifier takes
# manifest.sig.new for manifest.sig, so that at no moment the running release is one that it refuses.
_CARRY = """\
LC_ALL=C; export LC_ALL
umask 022
cd "$1" && printf %s "$2" > manifest.sig.new && cat > manifest.signed.new || exit 1
[ "$(wc -c < manifest.signed.new)" -eq "$3" ] || { rm -f manifest.signed.new; echo "only a part arrived" >&2; exit 1; }
if cmp -s manifest.signed.new manifest.signed && cmp -s manifest.sig.new manifest.sig; then
  rm -f manifest.signed.new manifest.sig.new
  exit
fi
sync manifest.sig.new manifest.signed.new 2>/dev/null || sync
mv -f manifest.signed.new manifest.signed && mv -f manifest.sig.new manifest.sig || exit 1
sync . 2>/dev/null || sync
"""

# $1 verifier, $2 the release
_RECORD = '[ "$(id -u)" != 0 ] || "$1" --record "$2"'


@dataclass(frozen=True)
class Policy:
    """What a device demands. `device_verifies` False: its OpenSSH is too old, and who pushes verifies instead."""

    verifier: str
    device_verifies: bool
    downgrade: bool  # a version below the one that ran before is taken
    identities: tuple[str, ...]

    def __str__(self) -> str:
        who = f" by {' or '.join(self.identities)}" if self.identities else ""
        by = "" if self.device_verifies else "; verified by who pushes, since its OpenSSH is older than 8.1"
        return f"demands artifacts signed{who}{by}"


def read(connection: Connection) -> Policy | None:
    """The policy of a device, None where it has none. DeviceError where it cannot be read or understood."""
    done = connection.run(script(_READ, FOLDER), check=False)
    where = f"{connection.label}:{FOLDER}/policy"
    if done.status == _NO_POLICY:
        return None
    lines = done.text.splitlines()
    if done.status != 0 or lines[:1] != [_FIRST]:
        why = done.complaint if done.status else "this edgeopt does not know its form"
        raise DeviceError(f"the device's policy cannot be read: {why}", where=where, todo=_INSTALL)
    values: dict[str, list[str]] = {}
    for line in lines[1:]:
        key, _, value = line.partition(" ")
        values.setdefault(key, []).append(value)
    verifier = values.get("verifier", [""])[-1]
    if not verifier.startswith("/"):
        raise DeviceError("the device's policy names no verifier", where=where, todo=_INSTALL)
    return Policy(
        verifier, values.get("verify") != ["host"], values.get("downgrade") == ["allow"],
        tuple(values.get("identity", ())),
    )  # fmt: skip


def check(place: Place, artifact: Artifact) -> None:
    """Before anything moves: ArtifactError where the device's policy refuses `artifact`; without one all is well."""
    policy = read(place.connection)
    if policy is None:
        return
    found = sign.signature_files(artifact)
    if len(found) < 2:
        raise ArtifactError(
            "the device takes signed artifacts only, and this one is not signed", where=place.where,
            todo="sign it: edgeopt artifact sign ARTIFACT --key KEY",
        )  # fmt: skip
    _, text, signature = sign.read(artifact, found)
    if not policy.device_verifies:
        _verify_here(place, policy, text, signature)
    argv = script(_ASK, policy.verifier, place.name, artifact.digest, _as_word(signature, artifact))
    _judge(place.connection.run(argv, stdin=text, check=False), place, "the artifact")


def carry(place: Place, artifact: Artifact) -> None:
    """Put the signature of `artifact` beside the manifest of its release, atomically; nothing where it has none."""
    found = sign.signature_files(artifact)
    if len(found) < 2:
        return
    _, text, signature = sign.read(artifact, found)
    argv = script(_CARRY, place.release(artifact.digest), _as_word(signature, artifact), str(len(text)))
    done = place.connection.run(argv, stdin=text, check=False)
    if done.status != 0:
        raise transfer_error(done, "cannot store the signature", where=place.where)


def check_release(place: Place, digest: str, manifest: Manifest) -> Policy | None:
    """Before a switch: ArtifactError where the policy refuses the release, as it lies there, or as a downgrade.

    Returns the policy, for `record`.
    """
    policy = read(place.connection)
    if policy is None:
        return None
    release = place.release(digest)
    if not policy.device_verifies:
        found = [place.connection.run(["cat", f"{release}/{name}"], check=False) for name in sign.FILES]
        if any(done.status != 0 for done in found):
            raise _refusal("release " + digest[:12], "it is not signed", place)
        text, signature = (done.stdout for done in found)
        statement.decode(text, manifest, source=f"{place.connection.label}:{release}")
        _verify_here(place, policy, text, signature)
    argv = [policy.verifier, "--after", f"{place.path}/current", release]
    timeout_s = max(CHECK_S, patience_s(sum(file.size for file in manifest.files.values())))
    _judge(place.connection.run(argv, timeout_s=timeout_s, check=False), place, f"release {digest[:12]}")
    return policy


def record(place: Place, digest: str, policy: Policy | None) -> None:
    """After a release has proven itself: its version is the lowest from now on, where we are root there."""
    if policy is None:
        return
    done = place.connection.run(script(_RECORD, policy.verifier, place.release(digest)), timeout_s=CHECK_S, check=False)
    if done.status != 0:
        log.warning("%s: the version was not recorded: %s", place.where, done.complaint)


def _verify_here(place: Place, policy: Policy, text: bytes, signature: bytes) -> None:
    """The signature checked on this machine, by the lists of the device."""
    log.warning("%s: its OpenSSH is older than 8.1 and cannot verify signatures; this machine does", place.where)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("allowed_signers", "revoked")]
        for file in files:
            place.connection.get(f"{FOLDER}/{file.name}", file)
        allowed, revoked = files
        names = policy.identities or (None,)
        for name in names:
            try:
                signatures.verify(
                    text, signature, namespace=statement.NAMESPACE, allowed_signers=allowed, identity=name,
                    revoked=revoked if revoked.stat().st_size else None, source=place.where,
                )  # fmt: skip
                return
            except ArtifactError:
                if name == names[-1]:
                    raise


def _as_word(signature: bytes, artifact: Artifact) -> str:
    """The signature as an argument of a command: it is text."""
    if not re.fullmatch(rb"[A-Za-z0-9+/=\n -]+", signature):
        raise ArtifactError(
            "the signature is not one of ssh-keygen", where=str(artifact.folder / spec.SIGNATURE_NAME),
            todo="sign the artifact again",
        )  # fmt: skip
    return signature.decode()


def _judge(done: Result, place: Place, what: str) -> None:
    if done.status == 0:
        return
    if done.status == _REFUSED:
        raise _refusal(what, done.complaint.removeprefix("refused: "), place)
    raise DeviceError(f"the device's verifier gave no answer: {done.complaint}", where=place.where, todo=_INSTALL)


def _refusal(what: str, why: str, place: Place) -> ArtifactError:
    return ArtifactError(
        f"the device's policy refuses {what}: {why}", where=place.where,
        todo="sign it with a key that the device allows, and a version that is not lower: "
        "edgeopt artifact sign ARTIFACT --key KEY",
    )  # fmt: skip
