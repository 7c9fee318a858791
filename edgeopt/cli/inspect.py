"""`edgeopt inspect`."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.argument("target", metavar="[MODEL | ARTIFACT]", required=False)
@click.option(
    "--profile", "profile_name", metavar="NAME", help="A profile: NAME, NAME@JETPACK or FILE. Default: this CPU's."
)
@click.option("--project", "project_path", metavar="FILE", help="The project file or its folder. Default: this folder.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Replace project.KEY or profile.KEY.")
@click.option("--stage", metavar="STAGE", help="The graph after a stage: capture, optimize, quantize, reoptimize.")
@click.option("--pass", "step", metavar="PASS", help="The graph after a pass; 'start' is the one before the first.")
@click.option("--diff", nargs=2, metavar="A B", help="The difference of two points, candidates or files.")
@click.option("--graph", "graph_path", metavar="FILE", help="Draw the graph: .svg, .png, .pdf, .dot; or .txt, .onnx.")
@click.option("--netron", is_flag=True, help="Show the graph in netron until Ctrl-C.")
@click.option("--sensitivity", is_flag=True, help="Rank the layers by what int8 costs in each of them.")
@click.option("--metric", is_flag=True, help="With --sensitivity: also by what the project's evaluate loses.")
@click.option("--plot", "plot_path", metavar="FILE", help="With --sensitivity: draw the ranking as FILE.svg.")
@click.option(
    "--top", default=10, show_default=True, metavar="N", help="List the N operators or layers that cost most."
)
@click.option("--no-cache", is_flag=True, help="Do every stage again.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.pass_obj
def inspect(
    progress,
    target,
    profile_name,
    project_path,
    settings,
    stage,
    step,
    diff,
    graph_path,
    netron,
    sensitivity,
    metric,
    plot_path,
    top,
    no_cache,
    as_json,
):
    """Show the graph of a model at any point of its build, or what is in an artifact.

    For a project or MODEL: what each stage and each pass did, then inputs, operators, parameters, FLOPs, bytes moved,
    peak memory and branches of the graph at the point asked for (default: after optimize). A point is a STAGE, a
    PASS, or STAGE/PASS. For an ARTIFACT: the same of each candidate. A bare .onnx or TorchScript file does as well.

    \b
    Example:
      edgeopt inspect --profile xavier
      edgeopt inspect --pass conv_bn --graph model.svg
      edgeopt inspect --diff capture optimize
      edgeopt inspect --sensitivity --metric --plot layers.svg
      edgeopt inspect digits.edgeopt --diff float.onnx int8.onnx
    """
    from edgeopt.cli.inspect_lines import Lines

    asked = _asked(stage, step, diff)
    plot = Path(plot_path).expanduser() if plot_path else None
    _check_sensitivity(
        sensitivity,
        {
            "--metric": metric,
            "--plot": plot,
            "--graph": graph_path,
            "--netron": netron,
            "--stage": stage,
            "--pass": step,
            "--diff": diff,
        },
        plot,
    )
    if sensitivity:
        how = {"profile_name": profile_name, "project_path": project_path, "settings": settings, "progress": progress}
        _sensitivity(target, metric, plot, top, no_cache, as_json, **how)
        return
    graph = Path(graph_path).expanduser() if graph_path else None
    _check(graph, netron, diff)
    lines = Lines(quiet=as_json, top=top)
    found = _found(
        target, asked, profile_name=profile_name, project_path=project_path, settings=settings,
        progress=progress, lines=lines, use_cache=not no_cache,
    )  # fmt: skip
    if graph is not None:
        _write(found, graph)
    if not as_json:
        lines.end(found, graph)
    if netron:
        _serve(found, as_json)
    elif as_json:
        click.echo(json.dumps(_data(found)))


def _check_sensitivity(wanted, options, plot) -> None:
    """Refuse options that need --sensitivity, and those that it has no use for."""
    from edgeopt.cli import sensitivity_lines
    from edgeopt.errors import UsageError

    for name, given in options.items():
        own = name in ("--metric", "--plot")
        if given and own and not wanted:
            raise UsageError(f"{name} goes with --sensitivity", where=name, todo="add --sensitivity")
        if given and not own and wanted:
            raise UsageError(
                f"--sensitivity ranks the layers of the optimized graph, and {name} asks for something else",
                where=name, todo="leave one of them out",
            )  # fmt: skip
    sensitivity_lines.check(plot)


def _sensitivity(
    target, metric, plot, top, no_cache, as_json, *, profile_name, project_path, settings, progress
) -> None:
    from edgeopt.cli import sensitivity_lines
    from edgeopt.cli.inspect_lines import Lines
    from edgeopt.errors import UsageError
    from edgeopt.flows import inspect as builds
    from edgeopt.flows.inspect import Asked
    from edgeopt.flows.sensitivity import as_data, sensitivity

    if (what := builds.target_of(target, project_path, Asked())) != "project":
        raise UsageError(
            f"the {what} {target} is lowered already; its layers are those of the project that it was built from",
            where="--sensitivity", todo="name the project: --project FILE",
        )  # fmt: skip
    job = builds.job_for(target, profile_name, project_path, settings, progress)
    lines = Lines(quiet=as_json, top=top)
    lines.start(job.project.name, job.profile, chosen=profile_name is not None)
    found = sensitivity(job, metric=metric, use_cache=not no_cache, told=lines.stage)
    if plot is not None:
        sensitivity_lines.draw(found, plot)
    if as_json:
        click.echo(json.dumps(as_data(found)))
        return
    sensitivity_lines.lines(found, top)
    if plot is not None:
        click.echo(f"\nwritten  {plot}")


def _asked(stage, step, diff):
    from edgeopt.errors import UsageError
    from edgeopt.flows.inspect import Asked

    if diff and step:
        raise UsageError("--pass and --diff name two things to show", where="--pass", todo="give one of them")
    return Asked(stage=stage, step=step, diff=tuple(diff) if diff else None)


def _check(graph, netron, diff) -> None:
    """Refuse before any work what cannot be done after it."""
    from edgeopt.errors import UsageError
    from edgeopt.report import graph_draw

    if diff and (graph or netron):
        raise UsageError(
            "--diff compares two graphs, and one is drawn", where="--graph" if graph else "--netron",
            todo="draw each by itself: --stage, --pass, or the file's name",
        )  # fmt: skip
    if graph is not None and graph.suffix.lower() not in (".txt", ".onnx"):
        graph_draw.check(graph)


def _found(target, asked, *, profile_name, project_path, settings, progress, lines, use_cache):
    """What TARGET is decides who looks into it."""
    from edgeopt.errors import UsageError
    from edgeopt.flows import inspect as builds
    from edgeopt.flows import inspect_files as files
    from edgeopt.runtime.artifact import Artifact

    what = builds.target_of(target, project_path, asked)
    if what != "project" and (profile_name or settings):
        raise UsageError(
            "a file on disk has no profile to choose and no keys to set",
            where="--profile" if profile_name else "--set",
            todo="leave it out, or name the project that is built: --project FILE",
        )
    if what == "artifact":
        return files.inspect_artifact(Artifact.open(target), asked)
    if what == "file":
        return files.inspect_file(Path(target).expanduser(), asked)
    if what == "two files":
        return files.inspect_two(*asked.diff)
    job = builds.job_for(target, profile_name, project_path, settings, progress)
    lines.start(job.project.name, job.profile, chosen=profile_name is not None)
    return builds.inspect_build(job, asked, use_cache=use_cache, told=lines.stage)


def _write(found, path: Path) -> None:
    import shutil

    from edgeopt.errors import UsageError
    from edgeopt.flows.inspect import model_file, write_text
    from edgeopt.report import graph_draw
    from edgeopt.spec.manifest import belongs_to

    suffix = path.suffix.lower()
    if suffix == ".txt":
        write_text(found, path)
    elif suffix == ".onnx":
        with model_file(found) as written:
            if written.suffix.lower() != ".onnx":
                raise UsageError(
                    f"{written.name} is a TorchScript file, not ONNX", where=f"--graph {path}", todo="copy the file"
                )
            for file in (f for f in written.parent.iterdir() if belongs_to(f.name, written.name)):
                shutil.copy(file, path.with_name(path.name + file.name.removeprefix(written.name)))
    elif found.shown.walk is None:
        raise UsageError(
            f"the graph cannot be drawn: {found.shown.why_not}", where=f"--graph {path}", todo="write FILE.txt instead"
        )
    else:
        graph_draw.draw(found.shown.walk, path, _title(found))


def _title(found) -> str:
    shown = found.shown
    words = [found.name if found.name == shown.name else f"{found.name}: {shown.name}"]
    words += [f"{name}={size}" for name, size in shown.walk.sizes.items()]
    if shown.costs.flops:
        from edgeopt.report.figures import count

        words.append(f"{count(shown.costs.flops, 'FLOPs')}, shares in %")
    return ", ".join(words)


def _serve(found, as_json: bool) -> None:
    """Show the graph in netron until the user ends it."""
    import contextlib
    import sys
    import threading

    from edgeopt.flows.inspect import model_file
    from edgeopt.report.graph_netron import served

    terminal = sys.stdout.isatty() and not as_json
    ended = contextlib.suppress(KeyboardInterrupt)  # from the first moment at which the user can know the address
    with model_file(found) as path, served(path, browse=terminal) as address, ended:
        if as_json:
            click.echo(json.dumps({**_data(found), "netron": address}))
        else:
            click.echo(f"netron   {address}  (Ctrl-C ends it)")
        sys.stdout.flush()
        threading.Event().wait()


def _data(found):
    from edgeopt.flows.inspect import as_data

    return as_data(found)
