"""`edgeopt build`."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.argument("model", required=False)
@click.option("--profile", "profile_name", required=True, metavar="NAME", help="A profile: NAME, NAME@JETPACK or FILE.")
@click.option("--project", "project_path", default=".", metavar="FILE", help="The project file or its folder.")
@click.option("--out", metavar="DIR", help="The artifact's folder. Default: NAME.edgeopt in this folder.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Replace project.KEY or profile.KEY.")
@click.option("--until", metavar="STAGE", help="Stop after a stage: capture, optimize, qat, quantize, reoptimize.")
@click.option(
    "--target-python",
    metavar="PYTHON",
    help="A Python here that has the target's torch: TorchScript is test-loaded by it.",
)
@click.option(
    "--budget",
    type=click.FloatRange(min=0),
    metavar="MIN",
    help="Minutes to search for mixed precision where int8 misses the limits. Default 10; 0: none.",
)
@click.option(
    "--on",
    "host",
    metavar="HOST",
    help="Measure on HOST and take its CPU's instructions; 'here' is this machine. Default: here, if it is a target.",
)
@click.option("--python", metavar="PATH", help="Python on HOST that has the runtimes [default: python3].")
@click.option("--ssh-config", type=click.Path(path_type=Path), help="Read FILE instead of ~/.ssh/config.")
@click.option("--accept-new-host-key", is_flag=True, help="Trust a host that was never seen.")
@click.option("--no-cache", is_flag=True, help="Do every stage again.")
@click.option("--json", "as_json", is_flag=True, help="Print the record of the build as JSON.")
@click.pass_obj
def build(
    progress, model, profile_name, project_path, out, settings, until, target_python, budget, host, python, ssh_config,
    accept_new_host_key, no_cache, as_json,
):  # fmt: skip
    """Build the artifact of a model for a profile.

    MODEL is file.py:factory, package.module:factory, an .onnx or a TorchScript file; without it, the model that
    the project file names.

    \b
    Example:
      edgeopt build --profile xavier
      edgeopt build --profile x86-cpu --project examples/digits --out digits.edgeopt
      edgeopt build --profile orin-nx@5.1 --set profile.passes.fold_constants=off
      edgeopt build --profile arm64-cpu --on box.local
    """
    import contextlib
    import dataclasses

    from edgeopt.cli.build_lines import Lines
    from edgeopt.cli.device import open_connection
    from edgeopt.flows.build import WORKDIR
    from edgeopt.flows.build import build as run_build
    from edgeopt.flows.project import find_project
    from edgeopt.flows.target import HERE, device_of
    from edgeopt.pipeline import torchrun
    from edgeopt.pipeline.job import Job
    from edgeopt.spec.overrides import parse_overrides
    from edgeopt.spec.profile import load_profile

    project_overrides, profile_overrides = parse_overrides(settings)
    profile = load_profile(profile_name, profile_overrides)
    project = find_project(model, Path(project_path), project_overrides)
    job = Job(
        profile=profile,
        project=project,
        workdir=project.folder / WORKDIR,
        progress=progress,
        target_python=target_python,
    )
    place = Path(out or f"{project.name}.edgeopt").expanduser()
    lines = Lines(quiet=as_json or torchrun.helps())
    with contextlib.ExitStack() as stack:
        if host is not None and not torchrun.helps():
            connection = stack.enter_context(
                open_connection(None if host == HERE else host, ssh_config, accept_new_host_key)
            )
            device, profile = stack.enter_context(device_of(connection, profile_name, profile_overrides, python))
            job = dataclasses.replace(job, device=device, profile=profile)
        lines.start(project.name, job.profile)
        built = run_build(job, place, until=until, use_cache=not no_cache, listener=lines.listener, budget_min=budget)
    if torchrun.helps():
        return
    if as_json:
        click.echo(json.dumps({**built.record, "artifact": str(place) if built.artifact else None}, default=str))
    else:
        lines.end(built, place)
