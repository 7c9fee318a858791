"""SSH signatures, made and checked by the `ssh-keygen` that is here (OpenSSH 8.1 or newer, `-Y sign` and `-Y verify`).

Keys in files, in the agent, and on hardware (sk-) are ssh-keygen's own affair, and so are passphrases and touches: it
asks on the terminal. No secret passes through here. allowed_signers and lists of revoked keys (KRL) are those of
ssh-keygen(1).
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from edgeopt.errors import ArtifactError, UsageError

PROGRAM = "ssh-keygen"
_TIMEOUT_S = 60  # of a check; signing waits for a person
_TOO_OLD = re.compile(r"(unknown|illegal|invalid) option -- '?Y|-Y.*(unsupported|unknown)", re.IGNORECASE)
_NO_PROGRAM = "OpenSSH's ssh-keygen {}: signatures need OpenSSH 8.1 or newer"


@dataclass(frozen=True)
class Signer:
    """Who signed: the identity of allowed_signers, and the key's fingerprint as `ssh-keygen -l` prints it."""

    identity: str
    fingerprint: str


def sign(data: bytes, key: Path, *, namespace: str, program: str = PROGRAM) -> bytes:
    """The signature of `data` by `key`: a private key, or a public one (.pub) whose private one is in the agent.

    Raises UsageError where the key is missing, locked or refused; ArtifactError where ssh-keygen is too old.
    """
    key = key.expanduser()
    if not key.is_file():
        raise UsageError("there is no such key", where=str(key), todo="give --key a file, such as ~/.ssh/id_ed25519")
    with tempfile.TemporaryDirectory() as folder:
        message = Path(folder) / "statement"
        message.write_bytes(data)
        argv = [program, "-q", "-Y", "sign", "-n", namespace, "-f", str(key), str(message)]
        # a person is shown what ssh-keygen has to say, as 'confirm user presence for key'
        done = _run(argv, shown=sys.stderr.isatty(), timeout_s=None)
        made = message.with_name(message.name + ".sig")
        if done.returncode != 0 or not made.is_file():
            raise UsageError(
                f"ssh-keygen did not sign: {_last(done, 'see what it said above')}", where=str(key),
                todo="unlock the key: ssh-add it and give its .pub, or sign on a terminal, where its passphrase can be "
                "typed",
            )  # fmt: skip
        return made.read_bytes()


def verify(
    data: bytes,
    signature: bytes,
    *,
    namespace: str,
    allowed_signers: Path,
    revoked: Path | None = None,
    identity: str | None = None,
    source: str = "manifest.sig",
    program: str = PROGRAM,
) -> Signer:
    """Who signed `data`: somebody of `allowed_signers`, and `identity` where it is given.

    Raises ArtifactError that says what is wrong: the signature, the key that nobody knows, the one that is revoked;
    UsageError where a file is missing.
    """
    for path in filter(None, (allowed_signers, revoked)):
        if not path.is_file():
            raise UsageError("there is no such file", where=str(path), todo="give the file as ssh-keygen(1) has it")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "signature"
        file.write_bytes(signature)
        ask = _Asking(program, namespace, str(allowed_signers), str(file), data, source)
        fingerprint = ask.fingerprint()
        names = [identity] if identity else ask.principals(fingerprint)
        if not any(ask.accepts(name, None) for name in names):
            raise ArtifactError(
                f"the key {fingerprint} is none that may sign as {' or '.join(names)}", where=source,
                todo=f"see {allowed_signers}: the identity, its namespaces and how long it is valid",
            )  # fmt: skip
        for name in names:
            if ask.accepts(name, revoked):
                return Signer(name, fingerprint)
        raise ArtifactError(f"the key {fingerprint} is revoked", where=source, todo="sign again with a key that is not")


@dataclass(frozen=True)
class _Asking:
    """The questions to ssh-keygen about one signature."""

    program: str
    namespace: str
    allowed: str
    signature: str
    data: bytes
    source: str

    def fingerprint(self) -> str:
        argv = [self.program, "-Y", "check-novalidate", "-n", self.namespace, "-s", self.signature]
        done = _run(argv, stdin=self.data)
        found = re.search(rb"key (SHA256:[A-Za-z0-9+/=]+)", done.stdout)
        if done.returncode != 0 or found is None:
            raise ArtifactError(
                f"the signature is not one of this artifact: {_last(done, 'ssh-keygen refuses it')}", where=self.source,
                todo="sign the artifact again, or get it from where it comes from once more",
            )  # fmt: skip
        return found[1].decode()

    def principals(self, fingerprint: str) -> list[str]:
        done = _run([self.program, "-Y", "find-principals", "-f", self.allowed, "-s", self.signature], stdin=self.data)
        names = [name for line in done.stdout.decode("utf-8", "replace").splitlines() for name in line.split(",")]
        names = [name for name in names if name and not name.startswith("!")]
        if done.returncode != 0 or not names:
            raise ArtifactError(
                f"nobody who may sign has the key {fingerprint}", where=self.source,
                todo=f"if it is right, add it to {self.allowed}",
            )  # fmt: skip
        return names

    def accepts(self, identity: str, revoked: Path | None) -> bool:
        argv = [self.program, "-Y", "verify", "-f", self.allowed, "-I", identity, "-n", self.namespace]
        argv += ["-s", self.signature, *(("-r", str(revoked)) if revoked else ())]
        return _run(argv, stdin=self.data).returncode == 0


def _run(argv: list[str], *, stdin: bytes = b"", shown: bool = False, timeout_s: float | None = _TIMEOUT_S):
    try:
        done = subprocess.run(
            argv, input=stdin, stdout=subprocess.PIPE, stderr=None if shown else subprocess.PIPE, timeout=timeout_s
        )
    except FileNotFoundError:
        raise ArtifactError(_NO_PROGRAM.format("is not installed"), todo="install openssh-client") from None
    except subprocess.TimeoutExpired:
        raise ArtifactError(f"{argv[0]} did not answer within {timeout_s} s", todo="run it by hand") from None
    if done.returncode != 0 and _TOO_OLD.search((done.stderr or b"").decode("utf-8", "replace")):
        raise ArtifactError(_NO_PROGRAM.format("is too old here"), todo="update OpenSSH, or use another machine")
    return done


def _last(done: subprocess.CompletedProcess, otherwise: str) -> str:
    lines = (done.stderr or b"").decode("utf-8", "replace").strip().splitlines()
    return lines[0].strip()[:300] if lines else otherwise
