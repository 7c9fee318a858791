"""`edgeopt artifact`: an artifact as one file, and who vouches for it."""

from __future__ import annotations

import json
from pathlib import Path

import click

_json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
_PATH = click.Path(path_type=Path)


@click.group()
def artifact() -> None:
    """Pack, unpack, sign and verify artifacts.

    \b
    Example:
      edgeopt artifact sign digits.edgeopt --key ~/.ssh/id_ed25519
      edgeopt artifact pack digits.edgeopt /media/stick
    """


@artifact.command()
@click.argument("artifact", type=_PATH)
@click.argument("file", required=False, type=_PATH)
@_json_option
@click.pass_obj
def pack(progress, artifact, file, as_json):
    """Write ARTIFACT into one FILE, for a stick or a file server.

    FILE is a plain tar, the same bytes for the same artifact, with its signature where it is signed. A folder as FILE
    takes it under its own name; without FILE it is written here.

    \b
    Example:
      edgeopt artifact pack digits.edgeopt /media/stick
    """
    from edgeopt.flows.pack import pack
    from edgeopt.runtime.artifact import Artifact

    done = pack(Artifact.open(artifact), file, progress=progress)
    _say(done, [f"packed   {done.name} {done.digest[:12]}{_signed(done)}", f"file     {done.path}"], as_json)


@artifact.command()
@click.argument("file", type=_PATH)
@click.argument("folder", required=False, type=_PATH)
@_json_option
@click.pass_obj
def unpack(progress, file, folder, as_json):
    """Make FOLDER the artifact that was packed into FILE.

    The folder appears when every file in it is verified, and not before; without FOLDER it is NAME.edgeopt here. Who
    signed it is what 'edgeopt artifact verify' says.

    \b
    Example:
      edgeopt artifact unpack /media/stick/digits.edgeopt.tar
    """
    from edgeopt.flows.pack import unpack

    done = unpack(file, folder, progress=progress)
    _say(done, [f"unpacked {done.name} {done.digest[:12]}{_signed(done)}", f"artifact {done.path}"], as_json)


@artifact.command()
@click.argument("artifact", type=_PATH)
@click.option("--key", required=True, type=_PATH, help="A private SSH key, or the .pub of one in the agent.")
@click.option("--version", "version", type=int, metavar="N", help="Counts up [default: the UTC time as a number].")
@_json_option
def sign(artifact, key, version, as_json):
    """Sign ARTIFACT with an SSH key: its manifest, and so every file of it.

    ssh-keygen signs, and asks for a passphrase, a PIN or a touch on the terminal. A device that has seen a version
    refuses a lower one.

    \b
    Example:
      edgeopt artifact sign digits.edgeopt --key ~/.ssh/id_ed25519
      edgeopt artifact sign digits.edgeopt --key ~/.ssh/id_ed25519_sk.pub --version 7
    """
    from edgeopt.flows.sign import sign
    from edgeopt.runtime.artifact import Artifact

    done = sign(Artifact.open(artifact), key, version=version)
    _say(done, [f"signed   {done.name} {done.digest[:12]}, version {done.version}"], as_json)


@artifact.command()
@click.argument("artifact", type=_PATH)
@click.option("--allowed-signers", required=True, type=_PATH, help="Who may sign, as ssh-keygen(1) has it.")
@click.option("--revoked", type=_PATH, help="Keys that may no more: a KRL, or public keys.")
@click.option("--identity", metavar="NAME", help="Who must have signed [default: anyone of the allowed].")
@_json_option
def verify(artifact, allowed_signers, revoked, identity, as_json):
    """Say who signed ARTIFACT; every file of it is hashed.

    \b
    Example:
      edgeopt artifact verify digits.edgeopt --allowed-signers allowed_signers
    """
    from edgeopt.flows.sign import verify
    from edgeopt.runtime.artifact import Artifact

    done = verify(Artifact.open(artifact), allowed_signers, revoked=revoked, identity=identity)
    lines = [
        f"good     {done.name} {done.digest[:12]}, version {done.version}, signed {done.when}",
        f"signer   {done.identity}, {done.fingerprint}",
    ]
    if done.not_covered:
        lines.append(f"unsigned {', '.join(done.not_covered)}: not part of the artifact")
    _say(done, lines, as_json)


def _signed(done) -> str:
    return ", with its signature" if done.signed else ", not signed"


def _say(done, lines: list[str], as_json: bool) -> None:
    click.echo(json.dumps(done.as_dict()) if as_json else "\n".join(lines))
