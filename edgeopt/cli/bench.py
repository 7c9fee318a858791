"""`edgeopt bench`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from edgeopt.cli.device import device_options, open_connection


@click.command()
@click.argument("target", metavar="[MODEL|ARTIFACT]", required=False)
@click.argument("host", required=False)
@click.option(
    "--against", metavar="A,B,...", help="eager, compile, aoti, onnxruntime, openvino; the last two -int8 too."
)
@click.option("--mode", type=click.Choice(["latency", "throughput"]), default="latency", show_default=True)
@click.option("--rounds", type=click.IntRange(min=2), default=7, show_default=True, help="Turns of each contender.")
@click.option("--calls", type=click.IntRange(min=1), default=50, show_default=True, help="Timed calls a round.")
@click.option("--max-s", type=click.FloatRange(min=0.1), default=20, show_default=True, help="Seconds a contender.")
@click.option("--project", type=click.Path(path_type=Path), help="The project file or its folder.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Replace project.KEY.")
@click.option("--python", metavar="PATH", help="Python on the device [default: python3; without HOST this one].")
@device_options
@click.pass_obj
def bench(
    progress, target, host, against, mode, rounds, calls, max_s, project, settings, python, root, accept_new_host_key,
    ssh_config, as_json,
):  # fmt: skip
    """Time a model or an artifact, and other runtimes beside it, in one run.

    Contenders have a process each and take turns; what is printed are medians with 95 % intervals, the ratio to the
    first contender, and the agreement with the model in eager mode. An artifact's candidates run with the settings
    that are best here, the others at their own defaults. Without a MODEL it is the project of this folder; HOST is an
    alias of ~/.ssh/config or user@host[:port], without it this machine.

    \b
    Example:
      edgeopt bench digits.edgeopt --against eager,compile,onnxruntime,openvino
      edgeopt bench model.py:build
      edgeopt bench digits.edgeopt jetson
    """
    import sys

    from edgeopt.cli.bench_lines import table
    from edgeopt.flows.bench import Asked
    from edgeopt.flows.bench import bench as run_bench
    from edgeopt.flows.place import DEFAULT_ROOT
    from edgeopt.spec.overrides import parse_overrides

    names = None if against is None else tuple(filter(None, (name.strip() for name in against.split(","))))
    overrides, _ = parse_overrides(settings)
    asked = Asked(
        target, project, overrides, names, mode, rounds, calls, max_s,
        python=python or ("python3" if host else sys.executable), root=root or DEFAULT_ROOT,
    )  # fmt: skip
    with open_connection(host, ssh_config, accept_new_host_key) as connection:
        done = run_bench(asked, connection, progress=progress)
    click.echo(json.dumps(done.as_dict(), default=str) if as_json else table(done))
    if all(row.result.failure for row in done.rows):
        click.get_current_context().exit(1)
