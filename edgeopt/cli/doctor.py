"""`edgeopt doctor`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from edgeopt.cli.device import device_options, exit_by, open_connection

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
_TITLES = {"here": "this machine", "device": "device"}


@click.command()
@click.argument("host", required=False)
@click.option("--profile", "profile_name", metavar="NAME", help="What is to run there [default: that of --artifact].")
@click.option("--artifact", type=click.Path(path_type=Path), help="What exactly is to run there.")
@click.option("--project", "project_path", type=click.Path(path_type=Path), help="The project file, for its limits.")
@click.option("--python", metavar="PATH", help="Python on the device [default: python3; without HOST this one].")
@click.option("--all", "every", is_flag=True, help="Show the checks that do not apply here, too.")
@device_options
def doctor(host, profile_name, artifact, project_path, python, every, root, accept_new_host_key, ssh_config, as_json):
    """Say now what will fail later, on this machine and on HOST, with the command that mends it.

    Looked at are the way to the device, its tools, Python and runtimes, JetPack, TensorRT and opset against the
    profile, memory, disk, swap, permissions, power mode and clock; and here Python, packages, container engine,
    qemu, keys and disk. HOST is an alias of ~/.ssh/config or user@host[:port]; without it this machine is the device.
    Exit status: 0 where nothing fails, warnings or not; 15 where something does.

    \b
    Example:
      edgeopt doctor jetson --profile xavier
      edgeopt doctor jetson --artifact digits.edgeopt --json
    """
    from edgeopt.flows.doctor import Asked
    from edgeopt.flows.doctor import doctor as look
    from edgeopt.runtime.artifact import Artifact
    from edgeopt.spec.profile import load_profile
    from edgeopt.spec.project import load_project

    opened = Artifact.open(artifact) if artifact else None
    name = profile_name or (opened.manifest.profile if opened else None)
    project = load_project(project_path) if project_path else None
    asked = Asked(
        load_profile(name) if name else None, opened, project, host,
        python or ("python3" if host else sys.executable), root,
        project.folder if project else Path("."),
    )  # fmt: skip
    with open_connection(host, ssh_config, accept_new_host_key) as connection:
        done = look(connection, asked)
    if as_json:
        click.echo(json.dumps(done.as_dict(), indent=1))
    else:
        _show(done, every)
    exit_by(done, as_json)


def _show(done, every: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for where in ("here", "device"):
        console.print(Text(_TITLES[where] if where == "here" else f"{_TITLES[where]} {done.device}", style="bold"))
        for finding in done.findings:
            if finding.where == where and (every or finding.verdict != "skip"):
                console.print(Text.assemble(
                    "  ", (f"{finding.verdict:4}", _STYLES[finding.verdict]), f"  {finding.name}: {finding.sentence}"
                ))  # fmt: skip
                if finding.mend and finding.verdict in ("warn", "fail"):
                    console.print(Text(f"        {finding.mend}", style="cyan"))
    counts = done.as_dict()["counts"]
    shown = "" if every or not counts["skip"] else f" ({counts['skip']} do not apply: --all)"
    console.print(f"{counts['ok']} ok, {counts['warn']} warn, {counts['fail']} fail{shown}")
