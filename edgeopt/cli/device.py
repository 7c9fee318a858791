"""Commands that change what a device holds: push, activate, rollback."""

from __future__ import annotations

import json
from pathlib import Path

import click


def device_options(command):
    """The options of every command that talks to a device."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
        click.option("--ssh-config", type=click.Path(path_type=Path), help="Read FILE instead of ~/.ssh/config."),
        click.option(
            "--accept-new-host-key", is_flag=True, help="Trust a host that was never seen; a changed key is refused."
        ),
        click.option("--root", metavar="DIR", help="Where releases lie on the device [default: ~/.edgeopt]."),
    ):
        command = option(command)
    return command


def keep_option(command):
    return click.option(
        "--keep", type=click.IntRange(min=1), default=3, show_default=True, help="Releases that stay on the device."
    )(command)


def wait_option(command):
    return click.option(
        "--wait", "wait_s", type=click.FloatRange(min=0), default=0, metavar="SECONDS",
        help="Wait so long for somebody else who is at work there.",
    )(command)  # fmt: skip


def open_connection(host: str | None, ssh_config: Path | None, accept_new_host_key: bool):
    """The Connection that the options of `device_options` describe; use it in a `with` block."""
    from edgeopt.ports.connect import connect

    return connect(host, accept_new=accept_new_host_key, config=ssh_config)


def open_both(artifact: Path, host: str | None, ssh_config: Path | None, accept_new_host_key: bool):
    """(Artifact, Connection): the files are hashed while we log in; use the Connection in a `with` block."""
    from concurrent.futures import ThreadPoolExecutor

    connection = open_connection(host, ssh_config, accept_new_host_key)
    with ThreadPoolExecutor(1) as pool:
        reached = pool.submit(connection.reach)
        try:
            from edgeopt.runtime.artifact import Artifact

            opened = Artifact.open(artifact)
            reached.result()
        except BaseException:
            reached.exception()
            connection.close()
            raise
    return opened, connection


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.argument("host", required=False)
@keep_option
@click.option("--dry-run", is_flag=True, help="Say what would move and what would be removed; change nothing.")
@wait_option
@device_options
@click.pass_obj
def push(progress, artifact, host, keep, dry_run, wait_s, root, accept_new_host_key, ssh_config, as_json):
    """Stage ARTIFACT as a release on HOST; it is not activated.

    HOST is an alias of ~/.ssh/config or user@host[:port]; without it this machine is the device. Only what the
    device lacks travels, compressed where that pays, and a push that broke goes on where it was.

    \b
    Example:
      edgeopt push digits.edgeopt jetson
      edgeopt push digits.edgeopt jetson --dry-run
    """
    opened, connection = open_both(artifact, host, ssh_config, accept_new_host_key)

    from edgeopt.flows.plan import plan
    from edgeopt.flows.push import push

    with connection:
        if dry_run:
            planned = plan(opened, connection, root=root, keep=keep)
        else:
            done = push(opened, connection, root=root, keep=keep, progress=progress, wait_s=wait_s)
    if dry_run:
        say(planned.as_dict(), planned_lines(planned), as_json)
        exit_by(planned, as_json)
        return
    say(done.as_dict(), pushed_lines(done), as_json)


@click.command()
@click.argument("target", metavar="ARTIFACT|NAME")
@click.argument("host", required=False)
@click.option("--release", metavar="DIGEST", help="The beginning of the release's digest, where a NAME is given.")
@wait_option
@device_options
def activate(target, host, release, wait_s, root, accept_new_host_key, ssh_config, as_json):
    """Make a release that HOST holds the current one.

    The release is that of ARTIFACT, a folder, or of the artifact NAME the one that --release names. Where its
    after_activate or health command fails, the device goes back to the release that was current.

    \b
    Example:
      edgeopt activate digits.edgeopt jetson
      edgeopt activate digits jetson --release 3f9a
    """
    from edgeopt.errors import UsageError
    from edgeopt.flows.activate import activate

    name, digest, manifest_root = _named(target)
    if digest and release and not digest.startswith(release):
        raise UsageError("--release is not the artifact's digest", where=target, todo="leave --release out")
    with open_connection(host, ssh_config, accept_new_host_key) as connection:
        done = activate(connection, name, digest or release, root=root or manifest_root, wait_s=wait_s)
    say(done.as_dict(), activated_lines(done), as_json)


@click.command()
@click.argument("target", metavar="ARTIFACT|NAME")
@click.argument("host", required=False)
@click.option("--release", metavar="DIGEST", help="The beginning of a release's digest [default: the previous one].")
@wait_option
@device_options
def rollback(target, host, release, wait_s, root, accept_new_host_key, ssh_config, as_json):
    """Make the previous release of ARTIFACT or NAME on HOST the current one again, or another that it holds.

    \b
    Example:
      edgeopt rollback digits jetson
      edgeopt rollback digits jetson --release 3f9a
    """
    from edgeopt.flows.activate import rollback

    name, _, manifest_root = _named(target)
    with open_connection(host, ssh_config, accept_new_host_key) as connection:
        done = rollback(connection, name, release, root=root or manifest_root, wait_s=wait_s)
    say(done.as_dict(), activated_lines(done), as_json)


def pushed_lines(done) -> list[str]:
    """A Pushed for people."""
    if done.already_there:
        first = f"pushed   {done.name} {done.digest[:12]}: already there, nothing moved"
    else:
        rate = f", {done.moved_bytes / 1e6 / done.seconds:.0f} MB/s" if done.moved_bytes > 10e6 else ""
        sent = f" ({size_text(done.sent_bytes)} compressed)" if done.sent_bytes < done.moved_bytes else ""
        first = (
            f"pushed   {done.name} {done.digest[:12]}: {size_text(done.moved_bytes)} in {done.blobs_moved} blobs "
            f"moved{sent}, {done.blobs_skipped} were there, {done.seconds:.1f} s{rate}"
        )
    pruned = [f"removed  {digest[:12]}, older than the releases that are kept" for digest in done.pruned]
    return [first, f"release  {done.host}:{done.release}", *pruned]


def planned_lines(planned) -> list[str]:
    """A Planned for people."""
    lines = [f"would push {planned.name} {planned.digest[:12]} to {planned.host}:{planned.root}"]
    for file in sorted(planned.files, key=lambda f: -f.size_bytes):
        resumed = f", {size_text(file.resume_at)} of it are there" if file.resume_at else ""
        packed = f", about {size_text(file.about_bytes)} by {file.method}" if file.method else ""
        lines.append(f"  move     {size_text(file.size_bytes):>12}  {file.path}{resumed}{packed}")
    if planned.already_there:
        lines.append("  the release is already there, nothing would move")
    else:
        total = f"{size_text(planned.move_bytes)} of {len(planned.files)} files would move"
        lines.append(f"  total    {total}, {planned.blobs_skipped} are there")
    inodes = "" if planned.free_inodes is None else f", {planned.free_inodes} inodes"
    lines.append(f"  free     {size_text(planned.free_bytes)}{inodes}")
    return lines + [f"  remove   release {digest[:12]}" for digest in planned.prune]


def activated_lines(done) -> list[str]:
    """An Activated for people."""
    first = f"active   {done.name} {done.digest[:12]}" + ("" if done.changed else ": it was already")
    previous = f"previous {done.previous[:12]}" if done.previous else "previous none"
    return [first, previous, f"current  {done.host}:{done.current_link}"]


def size_text(count: int) -> str:
    """Bytes for people: '3.2 MB', or '812 bytes' below 0.1 MB."""
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count} bytes"


def say(data: dict, lines: list[str], as_json: bool) -> None:
    click.echo(json.dumps(data) if as_json else "\n".join(lines))


def _named(target: str) -> tuple[str, str | None, str | None]:
    """(name, digest, root) of an artifact's folder, or (name, None, None) of a name on the device."""
    import re

    from edgeopt.errors import UsageError
    from edgeopt.runtime.artifact import SUFFIX, read_manifest
    from edgeopt.spec import manifest as spec

    folder = Path(target)
    if folder.is_dir() or "/" in target or target.endswith(SUFFIX):
        manifest = read_manifest(folder)
        return manifest.name, spec.digest(manifest), manifest.root
    if not re.fullmatch(spec.NAME_PATTERN, target):
        raise UsageError(f"'{target}' is neither a folder nor an artifact's name")
    return target, None, None


def exit_by(done, as_json: bool) -> None:
    """Raise what `done.check` raises; with --json as an exit status, since stdout holds one document already."""
    from edgeopt.errors import EdgeoptError

    try:
        done.check()
    except EdgeoptError as wrong:
        if not as_json:
            raise
        click.echo(f"error: {wrong}", err=True)
        click.get_current_context().exit(wrong.exit_code)
