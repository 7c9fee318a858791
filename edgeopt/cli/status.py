"""The command that shows what a device holds, and clears away what cuts have left."""

from __future__ import annotations

import json
import time

import click

from edgeopt.cli.device import device_options, open_connection, size_text

_LAST = 5  # lines of the journal


@click.command()
@click.argument("host", required=False)
@click.argument("name", required=False)
@click.option("--gc", is_flag=True, help="Remove what cuts have left and blobs that no release needs.")
@device_options
def status(host, name, gc, root, accept_new_host_key, ssh_config, as_json):
    """Show the releases that HOST holds, of NAME or of all, its free space, and what was done there last.

    HOST is an alias of ~/.ssh/config or user@host[:port]; without it, or with '-', it is this machine. --root names
    the folder where a profile's `root` or an earlier --root put the releases. --gc is refused while anybody is at
    work there.

    \b
    Example:
      edgeopt status jetson
      edgeopt status jetson digits
      edgeopt status jetson --gc
    """
    from edgeopt.flows.status import collect, status

    with open_connection(None if host == "-" else host, ssh_config, accept_new_host_key) as connection:
        collected = collect(connection, root=root) if gc else None
        found = status(connection, name, root=root)
    if as_json:
        click.echo(json.dumps({**found.as_dict(), "collected": collected.as_dict() if collected else None}))
        return
    click.echo("\n".join(([*collected_lines(collected), ""] if collected else []) + status_lines(found)))


def status_lines(found) -> list[str]:
    """A Status for people."""
    inodes = "" if found.free_inodes is None else f", {found.free_inodes} inodes free"
    lines = [
        f"{found.host}:{found.root}: {size_text(found.used_bytes)} used, {size_text(found.free_bytes)} free{inodes}"
    ]
    for named in found.names:
        lines += ["", named.name + (f"  locked by {named.locked_by}" if named.locked_by else "")]
        lines += [_release(release) for release in named.releases] or ["  no release"]
        if named.unproven:
            lines.append(f"  unproven {named.unproven[:12]}: its switch was cut; whoever works there next undoes it")
    if found.engines:
        lines += ["", "engines"]
        lines += [
            f"  {e.passport[:12]}  {e.candidate or '-'}: {e.status}, {size_text(e.size_bytes)}" for e in found.engines
        ]
    if found.leftovers:
        size = size_text(sum(left.size_bytes for left in found.leftovers))
        lines += ["", f"left over: {_counts(found.leftovers)}, {size}; edgeopt status HOST --gc removes them"]
    if found.journal:
        lines += ["", "last steps"]
        lines += [f"  {_entry(entry)}" for entry in found.journal[-_LAST:]]
    return lines


def collected_lines(collected) -> list[str]:
    """A Collected for people."""
    if not collected.removed:
        return ["nothing to remove"]
    return [f"removed  {_counts(collected.removed)}: {size_text(collected.freed_bytes)} freed"]


_WORDS = {"part": "parts of uploads", "staging": "half-made releases", "blob": "blobs without a release"}


def _counts(leftovers) -> str:
    kinds = [left.kind for left in leftovers]
    return ", ".join(f"{kinds.count(kind)} {words}" for kind, words in _WORDS.items() if kind in kinds)


def _release(release) -> str:
    mark = "current" if release.current else "previous" if release.previous else ""
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(release.when))
    if release.damaged:
        return f"  {release.digest[:12]}  {mark:9} {when}  damaged: its manifest is not the one that was pushed"
    version = "" if release.version is None else f", version {release.version}"
    signed = ", signed" if release.signed else ""
    return (
        f"  {release.digest[:12]}  {mark:9} {when}  {release.profile}, {size_text(release.size_bytes)}{version}{signed}"
    )


def _entry(entry) -> str:
    digest = f" {entry.digest[:12]}" if entry.digest else ""
    return f"{entry.when}  {entry.who}  {entry.name} {entry.step}{digest}: {entry.result}".replace("   ", " ")
