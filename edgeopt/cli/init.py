"""`edgeopt init`."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.argument("model")
@click.option("--out", default="edgeopt.yaml", show_default=True, metavar="FILE", help="The file to write.")
@click.option("--force", is_flag=True, help="Replace the file where it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print what was inferred as JSON.")
def init(model: str, out: str, force: bool, as_json: bool) -> None:
    """Write a commented edgeopt.yaml for MODEL, its inputs inferred where they can be.

    MODEL is file.py:factory, package.module:factory, an .onnx or a TorchScript file. A function example_inputs()
    beside the factory, returning a tensor, a tuple or a dict, tells shapes and dtypes.

    \b
    Example:
      edgeopt init model.py:build
      edgeopt init detector.onnx --out detector/edgeopt.yaml
    """
    from edgeopt.flows.init import write_project

    written = write_project(model, Path(out).expanduser(), force=force)
    found = written.inferred
    if as_json:
        data = {
            "path": str(written.path), "complete": written.complete, "inputs": found.inputs, "axes": found.axes,
            "check": found.notes, "unknown": found.unknown,
        }  # fmt: skip
        click.echo(json.dumps(data))
        return
    click.echo(f"wrote {written.path}")
    for name, entry in found.inputs.items():
        note = f"  ({found.notes[name]}: check)" if name in found.notes else ""
        click.echo(f"  {name}: {entry['dtype']} {entry['shape']}{note}")
    for name, why in found.unknown.items():
        click.echo(f"  {name}: TODO: {why}")
    click.echo("next: edgeopt build --profile x86-cpu" if written.complete else "next: complete the TODO lines")
