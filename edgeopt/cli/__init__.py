"""The command line: a literal table of commands, each imported when it is called.

`edgeopt --help` imports neither torch nor paramiko: the table carries each command's one line of help.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import sys

import click

from edgeopt import __version__
from edgeopt.errors import INTERRUPTED, EdgeoptError, SpaceError

# name -> (module:attribute, one line of help)
COMMANDS = {
    "init": ("edgeopt.cli.init:init", "Write a commented edgeopt.yaml for a model."),
    "build": ("edgeopt.cli.build:build", "Build the artifact of a model for a profile."),
    "inspect": ("edgeopt.cli.inspect:inspect", "Show the graph of a model or an artifact, in figures."),
    "bisect": ("edgeopt.cli.bisect:bisect", "Find the pass and the operator at which an answer goes wrong."),
    "bench": ("edgeopt.cli.bench:bench", "Time a model or an artifact against other runtimes."),
    "push": ("edgeopt.cli.device:push", "Stage an artifact as a release on a device."),
    "prepare": ("edgeopt.cli.prepare:prepare", "Build an artifact's TensorRT engines on a device."),
    "validate": ("edgeopt.cli.validate:validate", "Measure an artifact on a device and judge it."),
    "activate": ("edgeopt.cli.device:activate", "Switch a device to a release that it holds."),
    "rollback": ("edgeopt.cli.device:rollback", "Switch a device back to its previous release."),
    "status": ("edgeopt.cli.status:status", "Show the releases and the room on a device."),
    "deploy": ("edgeopt.cli.deploy:deploy", "Push, prepare, validate and activate; undone when one fails."),
    "rollout": ("edgeopt.cli.rollout:rollout", "Deploy to a fleet, wave by wave; a wave that fails goes back."),
    "doctor": ("edgeopt.cli.doctor:doctor", "Say now what will fail later, here and on a device."),
    "compare": ("edgeopt.cli.compare:compare", "Say what changed between two reports, and whether it is noise."),
    "detect": ("edgeopt.cli.detect:detect", "Show what a device is and which profiles fit it."),
    "report": ("edgeopt.cli.validate:report", "Show the latest report of an artifact."),
    "profiles": ("edgeopt.cli.profiles:profiles", "List, show and check hardware profiles."),
    "artifact": ("edgeopt.cli.artifact:artifact", "Pack, unpack, sign and verify artifacts."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are used, and listed without being imported."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, attribute = COMMANDS[name][0].split(":")
        return getattr(importlib.import_module(module), attribute)

    def resolve_command(self, ctx, args):
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            if near:
                ctx.fail(f"No such command '{args[0]}'. Did you mean '{near[0]}'?")
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="edgeopt")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.option("--quiet", "-q", is_flag=True, help="No progress and no information, only results and errors.")
@click.option("--verbose", "-v", is_flag=True, help="Log more.")
@click.pass_context
def cli(ctx: click.Context, debug: bool, quiet: bool, verbose: bool) -> None:
    """Build, push and prove the fastest model artifact that keeps its accuracy on an edge device.

    \b
    Example:
      edgeopt init model.py:build
      edgeopt build --profile xavier
      edgeopt deploy model.edgeopt jetson
    """
    from edgeopt.progress import Progress, set_up_logging

    set_up_logging(verbose=verbose, quiet=quiet)
    ctx.obj = Progress(quiet=quiet)


_ANYWHERE = ("--debug", "--quiet", "-q", "--verbose", "-v")


def main(argv: list[str] | None = None) -> None:
    """The entry point: runs the command and turns every error into a message and its exit code.

    The options of `edgeopt` itself are taken wherever they stand, since `edgeopt build --debug` is what people type.
    """
    argv = sys.argv[1:] if argv is None else argv
    own = argv[: argv.index("--")] if "--" in argv else argv
    leading = [a for a in own if a in _ANYWHERE]
    argv = leading + [a for a in own if a not in _ANYWHERE] + argv[len(own) :]
    try:
        code = cli.main(args=argv, prog_name="edgeopt", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except (click.exceptions.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)
    except click.ClickException as wrong:
        wrong.show()
        sys.exit(wrong.exit_code)
    except BrokenPipeError:  # the reader of our output has gone: `edgeopt report x | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as wrong:
        if "--debug" in leading:
            raise
        known = wrong if isinstance(wrong, EdgeoptError) else _unexpected(wrong)
        _show(known, as_json="--json" in argv)
        sys.exit(known.exit_code)


def _unexpected(wrong: Exception) -> EdgeoptError:
    if isinstance(wrong, OSError) and wrong.errno in (errno.ENOSPC, errno.EDQUOT):
        return SpaceError(
            f"the disk is full: {wrong.strerror}", where=str(wrong.filename or ""), todo="free space and try again"
        )
    return EdgeoptError(
        f"an error in edgeopt itself: {type(wrong).__name__}: {wrong}",
        todo="repeat with --debug, and report what it prints",
    )


def _show(wrong: EdgeoptError, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(wrong.as_dict()))
    click.echo(f"error: {wrong}", err=True)
