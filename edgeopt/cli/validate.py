"""Commands about proof: validate measures an artifact on a device, report shows what was found."""

from __future__ import annotations

from pathlib import Path

import click

from edgeopt.cli.device import device_options, exit_by, open_connection


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.argument("host", required=False)
@click.option("--project", type=click.Path(path_type=Path), help="Whose evaluate judges [default: that of the build].")
@click.option("--python", metavar="PATH", help="Python on the device [default: python3; without HOST this one].")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Turns of each candidate.")
@click.option("--calls", type=click.IntRange(min=1), default=50, show_default=True, help="Timed calls a round.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of the runtimes [default: their own choice].")
@device_options
@click.pass_obj
def validate(
    progress, artifact, host, project, python, rounds, calls, threads, root, accept_new_host_key, ssh_config, as_json
):
    """Measure ARTIFACT on HOST and judge it against its limits.

    Every candidate that the device can run is loaded in a process of its own and timed in turns; outputs and
    metric are compared with the unoptimised model's. The fastest that passes is written to selection.json, the
    report to ARTIFACT/reports/. HOST is an alias of ~/.ssh/config or user@host[:port], pushed to first where it
    lacks the release; without it this machine is the device.

    \b
    Example:
      edgeopt validate digits.edgeopt jetson --threads 4
    """
    import sys

    from edgeopt.flows.place import locked
    from edgeopt.flows.validate import How, validate_at, validate_here
    from edgeopt.runtime.artifact import Artifact

    opened = Artifact.open(artifact)
    python = python or ("python3" if host else sys.executable)
    how = How(project=project, python=python, rounds=rounds, calls=calls, threads=threads)
    if host is None and root is None:
        done = validate_here(opened, how, progress=progress)
    else:
        with (
            open_connection(host, ssh_config, accept_new_host_key) as connection,
            locked(connection, root or opened.manifest.root, opened.manifest.name) as place,
        ):
            done = validate_at(place, opened, how, progress=progress)
    show_report(done.report, as_json)
    if not as_json:
        click.echo(f"report   {done.path}")
    exit_by(done, as_json)


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def report(artifact, as_json):
    """Show the latest report of ARTIFACT, of whichever device.

    \b
    Example:
      edgeopt report digits.edgeopt
    """
    from edgeopt.flows.validate import latest_report

    show_report(latest_report(artifact), as_json)


def show_report(found, as_json: bool) -> None:
    """Print a Report on stdout, as JSON or for people."""
    if as_json:
        click.echo(found.model_dump_json(indent=1))
        return
    from rich.console import Console

    from edgeopt.report.text import WIDTH, render

    console = Console(highlight=False)
    # a pipe has no width of its own, and rich would fold the table at 80
    console = console if console.is_terminal else Console(highlight=False, width=WIDTH)
    console.print(render(found))
