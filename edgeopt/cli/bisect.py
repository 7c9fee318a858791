"""`edgeopt bisect`."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import click

from edgeopt.cli.device import open_connection


@click.command()
@click.argument("target", metavar="[MODEL|ARTIFACT]", required=False)
@click.option("--profile", "profile_name", metavar="NAME", help="The profile [default: that of ARTIFACT].")
@click.option("--project", "project_path", metavar="FILE", help="The project file or its folder.")
@click.option("--against", metavar="eager|ARTIFACT|HOST", default="eager", show_default=True, help="What is right.")
@click.option("--inputs", type=click.Path(path_type=Path), help="The call that goes wrong: a .npz of the inputs.")
@click.option("--until", default="optimize", show_default=True, metavar="STAGE", help="optimize, or reoptimize (int8).")
@click.option("--candidate", metavar="NAME", help="Run this candidate only.")
@click.option("--tolerance", type=click.FloatRange(min=0, min_open=True), help="Largest error / max(1, max |value|).")
@click.option("--keep-dropped", is_flag=True, help="Keep passes that a build drops, to see where they go wrong.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Replace project.KEY or profile.KEY.")
@click.option("--python", metavar="PATH", help="Python on HOST [default: python3].")
@click.option("--ssh-config", type=click.Path(path_type=Path), help="Read FILE instead of ~/.ssh/config.")
@click.option("--accept-new-host-key", is_flag=True, help="Trust a host that was never seen; a changed key is refused.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
@click.pass_context
def bisect(
    ctx, target, profile_name, project_path, against, inputs, until, candidate, tolerance, keep_dropped, settings,
    python, ssh_config, accept_new_host_key, as_json,
):  # fmt: skip
    """Find the pass and the operator at which an answer goes wrong.

    The build is followed pass by pass, and its candidates are run, until an output leaves its tolerance. MODEL is
    as for build; an ARTIFACT stands for the project and the profile that it was built from. With --against HOST the
    candidates run there; with --against ARTIFACT its answers are the right ones. Exit status: 0 where everything
    holds, 16 where something was found.

    \b
    Example:
      edgeopt bisect --profile x86-cpu
      edgeopt bisect --profile x86-cpu --inputs wrong.npz --until reoptimize
      edgeopt bisect digits.edgeopt --against jetson
    """
    from edgeopt import digest
    from edgeopt.errors import ValidationError
    from edgeopt.flows.bisect import How, bisect, job_for
    from edgeopt.flows.bisect_candidate import Machine
    from edgeopt.runtime.artifact import Artifact

    other = Artifact.open(against) if Path(against).is_dir() else None
    host = None if other or against == "eager" else against
    job = job_for(target, profile_name, project_path, settings, ctx.obj)
    how = How(until, other, inputs, keep_dropped, candidate, tolerance)
    python = python or ("python3" if host else sys.executable)
    with (
        open_connection(host, ssh_config, accept_new_host_key) as connection,
        tempfile.TemporaryDirectory() as scratch,
    ):
        found = bisect(job, how, Machine(connection, python, Path(scratch), ctx.obj))
    if as_json:
        click.echo(json.dumps(digest.finite(dataclasses.asdict(found)), allow_nan=False))
    else:
        for line in lines(found, against):
            click.echo(line)
    ctx.exit(0 if found.first is None else ValidationError.exit_code)


def lines(found, against: str) -> list[str]:
    """What was found, for people."""
    width = max((len(tried.name) for tried in found.tried), default=0)
    out = [f"against {against}, {len(found.calls)} calls"]
    for tried in found.tried:
        said = f"{tried.max_abs:8.2g}  {tried.sqnr_db:6.1f} dB"
        out.append(f"  {tried.name:<{width}}  {said}  " + (f"wrong: {tried.reason}" if tried.reason else "holds"))
    out += [f"  {name} is dropped by every build: {reason}" for name, reason in found.dropped]
    if found.first is None:
        return [*out, "every point and candidate holds"]
    out.append(f"first wrong: {found.first}")
    if found.culprit is not None:
        out += _culprit_lines(found.culprit)
    if found.note:
        out.append(f"  {found.note}")
    if found.setting:
        out.append(f"leave it out with  --set {found.setting}")
    return out


def _culprit_lines(culprit) -> list[str]:
    module = f"  module {culprit.module}" if culprit.module else ""
    line = f"  {culprit.line}" if culprit.line else ""
    out = [f"  at {culprit.node}  {culprit.operator}{module}{line}"]
    out += [f"  {'given' if i == 0 else '':<7} {_value(value)}" for i, value in enumerate(culprit.inputs)]
    out += [f"  {'wanted':<7} {_value(culprit.wanted)}", f"  {'found':<7} {_value(culprit.found)}"]
    if culprit.max_rel is not None:
        out.append(f"  error   {culprit.max_rel:.3g} of the largest value")
    return out


def _value(value) -> str:
    return f"{value.node} {value.dtype} {list(value.shape)}  {value.low:.5g} to {value.high:.5g}"
