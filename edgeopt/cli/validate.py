"""Commands about proof: validate measures an artifact on a device, report shows what was found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from edgeopt.cli.device import device_options, exit_by, open_connection
from edgeopt.cli.watch import watching


class _Duration(click.ParamType):
    """'90s', '30m', '2h', or seconds: at least one of them."""

    name = "TIME"

    def convert(self, value, param, ctx):
        if isinstance(value, float):
            return value
        number, unit = (value[:-1], value[-1]) if value[-1:] in _UNITS else (value, "s")
        try:
            seconds = float(number) * _UNITS[unit]
        except ValueError:
            seconds = 0.0
        if not 1 <= seconds <= 30 * 86400:
            self.fail(f"'{value}' is no duration from 1s to 30d, such as 90s, 30m, 2h", param, ctx)
        return seconds


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONG_S = 600
DURATION = _Duration()


def _interval_s(duration: float | None) -> float:
    """Seconds between two samples: a long soak has enough of them at one a second."""
    return 1.0 if duration and duration > _LONG_S else 0.1


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.argument("host", required=False)
@click.option("--project", type=click.Path(path_type=Path), help="Whose evaluate judges [default: that of the build].")
@click.option("--python", metavar="PATH", help="Python on the device [default: python3; without HOST this one].")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Turns of each candidate.")
@click.option("--calls", type=click.IntRange(min=1), default=50, show_default=True, help="Timed calls a round.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of the runtimes [default: their own choice].")
@click.option("--power-modes", metavar="A,B", help="Measure in each of these modes of nvpmodel, by name.")
@click.option("--jetson-clocks", is_flag=True, help="With --power-modes: at the fastest clocks of each mode.")
@click.option("--duration", type=DURATION, help="Keep measuring for so long, as in 90s, 30m or 2h: a soak.")
@click.option("--watch", is_flag=True, help="Show each round as it is measured.")
@click.option("--interval", type=click.FloatRange(min=0.02), help="Seconds between two samples of the sensors.")
@click.option("--sudo", is_flag=True, help="Read tegrastats by 'sudo -n'.")
@click.option("--no-sensors", is_flag=True, help="Sample no sensors: no power, no temperatures.")
@device_options
@click.pass_obj
def validate(
    progress, artifact, host, project, python, rounds, calls, threads, power_modes, jetson_clocks, duration, watch,
    interval, sudo, no_sensors, root, accept_new_host_key, ssh_config, as_json,
):  # fmt: skip
    """Measure ARTIFACT on HOST and judge it against its limits.

    Every candidate that the device can run is loaded in a process of its own and timed in turns; outputs and
    metric are compared with the unoptimised model's. The fastest that passes is written to selection.json, the
    report to ARTIFACT/reports/. HOST is an alias of ~/.ssh/config or user@host[:port], pushed to first where it
    lacks the release; without it this machine is the device.

    Power, temperatures and clocks are sampled meanwhile from what the device shows without root. The power mode
    that it had is put back after --power-modes, whatever happens.

    \b
    Example:
      edgeopt validate digits.edgeopt jetson --threads 4
      edgeopt validate digits.edgeopt jetson --power-modes 15W,MAXN
      edgeopt validate digits.edgeopt jetson --duration 30m --watch
    """
    import contextlib
    import sys

    from edgeopt.device.runner import Sensors
    from edgeopt.errors import UsageError
    from edgeopt.flows.place import locked
    from edgeopt.flows.power_modes import in_power_modes
    from edgeopt.flows.validate import How, validate_at, validate_here
    from edgeopt.runtime.artifact import Artifact

    if jetson_clocks and not power_modes:
        raise UsageError("--jetson-clocks goes with --power-modes", todo="name the modes, the present one too")
    opened = Artifact.open(artifact)
    sensors = None if no_sensors else Sensors(interval_s=interval or _interval_s(duration), sudo=sudo)
    how = How(
        project=project, python=python or ("python3" if host else sys.executable), rounds=rounds, calls=calls,
        threads=threads, sensors=sensors, duration_s=duration,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        connection, place = None, None
        if host is not None or root is not None or power_modes:
            connection = stack.enter_context(open_connection(host, ssh_config, accept_new_host_key))
        if host is not None or root is not None:
            held = locked(connection, root or opened.manifest.root, opened.manifest.name)
            place = stack.enter_context(held)

        def once(select: bool = True):
            with watching() if watch else contextlib.nullcontext() as seen:
                watched = replace(how, watch=seen)
                if place is None:
                    return validate_here(opened, watched, progress=progress, select=select)
                return validate_at(place, opened, watched, progress=progress, select=select)

        if power_modes:
            names = [name.strip() for name in power_modes.split(",") if name.strip()]
            done = in_power_modes(connection, names, once, jetson_clocks=jetson_clocks)
        else:
            done = once()
    if power_modes:
        show_modes(done, as_json)
    else:
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


def show_modes(done, as_json: bool) -> None:
    """Print an InModes: the report of each mode, or one JSON document of all."""
    import json

    from edgeopt.digest import finite

    if as_json:
        reports = [found.report.model_dump(mode="json") for _, found in done.validated]
        click.echo(json.dumps(finite({"power_mode": done.before.name, "reports": reports})))
        return
    for mode, found in done.validated:
        click.echo(f"power mode {mode.name}" + (", which the device had and has again" if mode == done.before else ""))
        show_report(found.report, as_json=False)
        click.echo(f"report   {found.path}\n")
    click.echo(f"power mode {done.before.name} again")


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
