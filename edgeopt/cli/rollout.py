"""The command that brings an artifact onto a fleet, wave by wave."""

from __future__ import annotations

import json
from pathlib import Path

import click

from edgeopt.cli.device import keep_option


@click.command()
@click.argument("artifacts", metavar="ARTIFACT...", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--fleet", type=click.Path(path_type=Path), help="The file that names the devices.")
@click.option("--select", multiple=True, metavar="LABEL=VALUE", help="Only devices with this label; repeat to narrow.")
@click.option("--canary", type=click.IntRange(min=0), default=1, show_default=True, help="Devices of the first wave.")
@click.option("--waves", default="10%,50%,100%", show_default=True, help="Cumulative shares, or numbers of devices.")
@click.option("--max-failures", type=click.IntRange(min=0), default=0, show_default=True, help="That a wave may have.")
@click.option("--count-offline", is_flag=True, help="Count a device that is not reached as a failure.")
@click.option(
    "--undo", type=click.Choice(["wave", "rollout", "none"]), default="wave", show_default=True,
    help="Whose devices go back when a wave fails.",
)  # fmt: skip
@click.option(
    "--soak", type=click.FloatRange(min=0), default=0, metavar="SECONDS", help="Wait after a wave, then look."
)
@click.option("--jobs", type=click.IntRange(min=1), default=8, show_default=True, help="Devices at once.")
@click.option("--retries", type=click.IntRange(min=0), default=3, show_default=True, help="For devices not reached.")
@click.option(
    "--backoff", type=click.FloatRange(min=0), default=5, show_default=True, metavar="SECONDS",
    help="Before the first retry; doubled from one to the next.",
)  # fmt: skip
@click.option("--resume", is_flag=False, flag_value="", metavar="[ID]", help="Go on with a rollout, else the newest.")
@click.option("--ansible", type=click.Path(path_type=Path), metavar="DIR", help="Write inventory and playbook instead.")
@click.option("--project", type=click.Path(path_type=Path), help="Whose evaluate judges [default: that of the build].")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of the runtimes [default: their own choice].")
@keep_option
@click.option("--ssh-config", type=click.Path(path_type=Path), help="Read FILE instead of ~/.ssh/config.")
@click.option("--accept-new-host-key", is_flag=True, help="Trust hosts that were never seen; a changed key is refused.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Show the plan; no device is touched.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_context
def rollout(
    ctx, artifacts, fleet, select, canary, waves, max_failures, count_offline, undo, soak, jobs, retries, backoff,
    resume, ansible, project, threads, keep, ssh_config, accept_new_host_key, yes, dry_run, as_json,
):  # fmt: skip
    """Deploy ARTIFACT to the devices of a fleet, wave by wave.

    Each device is deployed as `edgeopt deploy` does it. A wave in which more devices fail than --max-failures halts
    the rollout, and its devices go back to what they ran before. Devices that are not reached are tried again, and
    named at the end. Where the fleet has several profiles, give an ARTIFACT for each.

    \b
    Example:
      edgeopt rollout digits.edgeopt --fleet fleet.yaml --select site=berlin --waves 10%,100%
      edgeopt rollout digits.edgeopt --resume
    """
    from edgeopt.cli.rollout_lines import confirm, plan_lines
    from edgeopt.errors import UsageError
    from edgeopt.flows import rollout as flow
    from edgeopt.flows.rollout_journal import folder_beside
    from edgeopt.runtime.artifact import Artifact, read_manifest
    from edgeopt.spec.fleet import load_fleet
    from edgeopt.spec.fleet import select as selected

    folder = folder_beside(artifacts[0])
    plan = None
    if resume is not None:
        _refuse_with_resume(ctx)
    else:
        if fleet is None:
            raise UsageError("no fleet is named", where="--fleet", todo="give --fleet FILE, or --resume")
        options = flow.Options(canary, waves, max_failures, undo, count_offline, soak, keep)
        devices = selected(load_fleet(fleet), select)
        plan = flow.make_plan([Artifact.open(path) for path in artifacts], devices, options)
        if ansible is not None:
            _write_ansible(ansible, plan, project, threads, ssh_config, accept_new_host_key, jobs, as_json)
            return
        if dry_run:
            click.echo(plan.model_dump_json(indent=1) if as_json else "\n".join(plan_lines(plan)))
            return
        if not yes:
            click.echo("\n".join(plan_lines(plan)), err=True)
            confirm(plan)

    def start(tools):
        if plan is not None:
            return flow.rollout(plan, folder, tools)
        return flow.resume(folder, read_manifest(artifacts[0]).name, resume, tools)

    names = [device.name for device in plan.devices] if plan else []
    _carry_out(
        ctx, start, names, (ssh_config, accept_new_host_key), (project, threads), (jobs, retries, backoff), as_json
    )


def _carry_out(ctx, start, names, how_to_reach, how_to_validate, pace, as_json) -> None:
    """Run the rollout that `start(tools)` is, show its result, and exit by it."""
    from functools import partial

    from edgeopt.cli.device import exit_by
    from edgeopt.cli.rollout_lines import result_lines, watching
    from edgeopt.errors import INTERRUPTED
    from edgeopt.flows.rollout import Tools
    from edgeopt.flows.rollout_crew import Pace
    from edgeopt.flows.validate import How
    from edgeopt.ports.connect import connect

    config, accept_new = how_to_reach
    project, threads = how_to_validate
    quiet = bool(ctx.parent and ctx.parent.params.get("quiet"))
    with watching(names, quiet=quiet) as watch:
        reach = partial(connect, accept_new=accept_new, config=config)
        done = start(Tools(reach, How(project=project, threads=threads), Pace(*pace), watch))
    click.echo(json.dumps(done.as_dict()) if as_json else "\n".join(result_lines(done)))
    if done.result == "interrupted":
        ctx.exit(INTERRUPTED)
    exit_by(done, as_json)


# what a plan was made from cannot be changed once it is under way
_OF_THE_PLAN = (
    "fleet", "select", "canary", "waves", "max_failures", "count_offline", "undo", "soak", "keep", "ansible", "dry_run",
)  # fmt: skip


def _refuse_with_resume(ctx: click.Context) -> None:
    from edgeopt.errors import UsageError

    given = [
        f"--{name.replace('_', '-')}" for name in _OF_THE_PLAN
        if ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
    ]  # fmt: skip
    if given:
        raise UsageError(
            f"a rollout goes on by the plan that it began with: {', '.join(given)} cannot be changed", where="--resume",
            todo="leave it out, or begin a new rollout without --resume",
        )  # fmt: skip


def _write_ansible(folder, plan, project, threads, ssh_config, accept_new_host_key, jobs, as_json) -> None:
    from edgeopt.flows.rollout_ansible import write

    options = [
        *(["--project", str(project.resolve())] if project else []), *(["--threads", str(threads)] if threads else []),
        *(["--ssh-config", str(ssh_config.resolve())] if ssh_config else []),
        *(["--accept-new-host-key"] if accept_new_host_key else []),
    ]  # fmt: skip
    inventory, playbook = write(folder, plan, options)
    argv = ["ansible-playbook", "-i", str(inventory), "--forks", str(jobs), str(playbook)]
    if as_json:
        click.echo(json.dumps({"inventory": str(inventory), "playbook": str(playbook), "run": argv}))
        return
    click.echo(f"inventory {inventory}\nplaybook  {playbook}\nrun       {' '.join(argv)}")
