"""`python -m edgeopt.testing up|down|ssh|models`: what scripts/virtual-jetson runs.

scripts/virtual-jetson up --model orin-nx-r36     # prints the ssh_config to reach it with; it runs until `down`
scripts/virtual-jetson ssh -- nvpmodel -q
scripts/virtual-jetson down
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import click

from edgeopt.errors import EdgeoptError, UsageError
from edgeopt.progress import set_up_logging
from edgeopt.testing import arm64_root, virtual
from edgeopt.testing.namespace import end_detached
from edgeopt.testing.recordings import recordings

STATE = "device.json"


@click.group(epilog="Example: scripts/virtual-jetson up; edgeopt detect virtual-jetson --ssh-config DIR/ssh_config")
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Where its files lie. [default: below --cache]")
@click.option("--cache", type=click.Path(path_type=Path), help="Where root and kernel are kept. [default: XDG's]")
@click.pass_context
def cli(context: click.Context, folder: Path | None, cache: Path | None) -> None:
    """A Jetson that is none: arm64 programs, a recorded device's sysfs and commands, reached over SSH."""
    cache = (cache or arm64_root.default_cache()).resolve()
    context.obj = ((folder or cache / "device").resolve(), cache)


@cli.command(epilog="Example: scripts/virtual-jetson up --model agx-xavier-r35 --tier 1")
@click.option("--model", default=virtual.DEFAULT_MODEL, show_default=True, help="A recorded device; see `models`.")
@click.option("--tier", type=click.Choice(["1", "2"]), default="1", show_default=True, help="2: a whole machine.")
@click.pass_obj
def up(where: tuple[Path, Path], model: str, tier: str) -> None:
    """Start it, with a fresh disk; one that still runs is stopped before."""
    folder, cache = where
    _down(folder)
    device = virtual.start(model, tier=int(tier), cache=cache, folder=folder, detached=True)
    (folder / STATE).write_text(json.dumps({"pid": device.pid, "model": model, "tier": device.tier}))
    click.echo(f"ssh -F {device.config} {device.host}")


@cli.command(epilog="Example: scripts/virtual-jetson down")
@click.pass_obj
def down(where: tuple[Path, Path]) -> None:
    """Stop it and delete its files."""
    click.echo("stopped" if _down(where[0]) else "was not running")


@cli.command(epilog="Example: scripts/virtual-jetson ssh -- tegrastats --interval 500")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def ssh(where: tuple[Path, Path], command: tuple[str, ...]) -> None:
    """A shell on it, or one command."""
    config = where[0] / "ssh_config"
    if not config.exists():
        raise UsageError("no virtual device runs", where=str(where[0]), todo="run: scripts/virtual-jetson up")
    os.execvp("ssh", ["ssh", "-F", str(config), virtual.ALIAS, *command])


@cli.command(epilog="Example: scripts/virtual-jetson models")
def models() -> None:
    """The recorded devices."""
    click.echo("\n".join(recordings()))


def _down(folder: Path) -> bool:
    try:
        pid = json.loads((folder / STATE).read_text())["pid"]
    except (OSError, ValueError, KeyError):
        return False
    ended = end_detached(pid, folder)
    shutil.rmtree(folder, ignore_errors=True)
    return ended


def main() -> int:
    set_up_logging()
    try:
        cli.main(standalone_mode=False)
    except click.ClickException as why:
        why.show()
        return why.exit_code
    except EdgeoptError as why:
        print(f"error: {why}", file=sys.stderr)
        return why.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
