"""`edgeopt compare`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("first", metavar="REPORT_A|ARTIFACT", type=click.Path(path_type=Path))
@click.argument("second", metavar="[REPORT_B|ARTIFACT]", required=False, type=click.Path(path_type=Path))
@click.option("--last", type=click.IntRange(min=2), metavar="N", help="ARTIFACT's newest report against its Nth.")
@click.option("--fail-if-worse", is_flag=True, help="Leave by status 16 where what runs is measurably worse.")
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
@click.pass_context
def compare(ctx, first, second, last, fail_if_worse, as_json):
    """Say what changed from REPORT_A to REPORT_B, and whether it is more than noise.

    An ARTIFACT stands for its newest report. Times are compared by their rounds, metrics by their intervals; what was
    taken on another host, in another power mode, on an emulator or while the device throttled is not compared. Exit
    status: 0, and with --fail-if-worse 16 where what runs got measurably slower, larger in memory, hungrier, less
    accurate, or fails.

    \b
    Example:
      edgeopt compare digits.edgeopt --last 2
      edgeopt compare old.edgeopt new.edgeopt --fail-if-worse
      edgeopt compare digits.edgeopt/reports/20261201T010203Z-jetson.json digits.edgeopt
    """
    from edgeopt.errors import ValidationError
    from edgeopt.flows.compare import compare as work_out
    from edgeopt.flows.compare import reports_of

    found = work_out(*reports_of(first, second, last))
    if as_json:
        click.echo(found.model_dump_json(indent=1))
    else:
        _show(found)
    if fail_if_worse and found.verdict == "worse":
        click.echo("error: worse: " + "; ".join(found.reasons), err=True)
        ctx.exit(ValidationError.exit_code)


def _show(found) -> None:
    from rich.console import Console

    from edgeopt.report.compare import render
    from edgeopt.report.text import WIDTH

    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=WIDTH)
    console.print(render(found))
