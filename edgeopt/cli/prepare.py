"""The command that has a device build what only it can make: TensorRT engines."""

from __future__ import annotations

import json
from pathlib import Path

import click

from edgeopt.cli.device import device_options, exit_by, open_both


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.argument("host", required=False)
@click.option("--candidate", "candidates", multiple=True, metavar="NAME", help="Only this one; may stand repeatedly.")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Stay until the engines are built.")
@click.option("--python", metavar="PATH", help="Python on the device [default: python3; without HOST this one].")
@device_options
@click.pass_obj
def prepare(progress, artifact, host, candidates, wait, python, root, accept_new_host_key, ssh_config, as_json):
    """Build the TensorRT engines of ARTIFACT on HOST.

    The device builds by itself: a dropped connection or Ctrl-C does not end it, and asking again tells how far it
    is. An engine that was built for this GPU and this TensorRT is not built twice. HOST is an alias of
    ~/.ssh/config or user@host[:port], pushed to first where it lacks the release; without it this machine is
    the device.

    \b
    Example:
      edgeopt prepare digits.edgeopt jetson
      edgeopt prepare digits.edgeopt jetson --no-wait
    """
    import sys

    from edgeopt.flows.prepare import prepare

    opened, connection = open_both(artifact, host, ssh_config, accept_new_host_key)
    with connection:
        done = prepare(
            opened, connection, root=root, candidates=candidates, wait=wait,
            python=python or ("python3" if host else sys.executable), progress=progress,
        )  # fmt: skip
    click.echo(json.dumps(done.as_dict()) if as_json else "\n".join(prepared_lines(done)))
    exit_by(done, as_json)


def prepared_lines(done) -> list[str]:
    """What was prepared, a line an engine; a stand-in for TensorRT is named first."""
    from edgeopt.flows.prepare import in_words

    lines = [f"SIMULATED: {done.simulated}. These are no engines of the device."] if done.simulated else []
    lines += [f"engine   {in_words(engine)}" for engine in done.engines]
    return lines + (["to ask how far it is: the same command again"] if done.pending else [])
