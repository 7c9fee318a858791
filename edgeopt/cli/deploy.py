"""The command that brings an artifact onto a device and proves it there."""

from __future__ import annotations

import json
from pathlib import Path

import click

from edgeopt.cli.device import activated_lines, device_options, keep_option, open_both, pushed_lines, wait_option
from edgeopt.cli.prepare import prepared_lines
from edgeopt.cli.validate import show_report


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.argument("host", required=False)
@click.option("--project", type=click.Path(path_type=Path), help="Whose evaluate judges [default: that of the build].")
@click.option("--python", metavar="PATH", help="Python on the device [default: python3; without HOST this one].")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of the runtimes [default: their own choice].")
@keep_option
@wait_option
@device_options
@click.pass_obj
def deploy(
    progress, artifact, host, project, python, threads, keep, wait_s, root, accept_new_host_key, ssh_config, as_json
):
    """Push ARTIFACT to HOST, build its engines, measure it there, and activate it where it passes.

    Where a step fails the device keeps the release that it had. HOST is an alias of ~/.ssh/config or
    user@host[:port]; without it this machine is the device.

    \b
    Example:
      edgeopt deploy digits.edgeopt jetson
    """
    import sys

    from edgeopt.flows.deploy import deploy
    from edgeopt.flows.validate import How

    how = How(project=project, python=python or ("python3" if host else sys.executable), threads=threads)
    opened, connection = open_both(artifact, host, ssh_config, accept_new_host_key)
    with connection:
        done = deploy(opened, connection, how, root=root, keep=keep, progress=progress, wait_s=wait_s)
    if as_json:
        click.echo(json.dumps(done.as_dict()))
        return
    click.echo("\n".join(pushed_lines(done.pushed)))
    if done.prepared:
        click.echo("\n".join(prepared_lines(done.prepared)))
    show_report(done.validated.report, as_json=False)
    click.echo("\n".join([f"report   {done.validated.path}", *activated_lines(done.activated)]))
