"""`edgeopt init`: a commented edgeopt.yaml for a model, its inputs inferred where they can be."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from edgeopt.capture.infer import Inferred, infer
from edgeopt.errors import ProjectError, SpaceError, UsageError
from edgeopt.spec.project import load_project, model_is_factory, model_kind, name_for
from edgeopt.spec.yaml_file import to_flow

__all__ = ["Written", "infer", "write_project"]


@dataclasses.dataclass(frozen=True)
class Written:
    """What `write_project` wrote; `complete` where `edgeopt build` can read it as it is."""

    path: Path
    inferred: Inferred
    complete: bool


def write_project(model: str, out: Path, *, force: bool = False) -> Written:
    """Write `out` for MODEL (paths relative to the current folder); UsageError where it exists, unless `force`.

    The file appears whole or not at all. A complete one has been read back by `load_project`.
    """
    if out.is_dir():
        out = out / "edgeopt.yaml"
    if out.exists() and not force:
        raise UsageError(
            "the file exists already; nothing was written",
            where=str(out),
            todo="give --out FILE, or --force to replace it",
        )
    inferred = infer(model, Path.cwd())
    text = render(_from(model, out.parent), name_for(model), inferred)
    _write(out, text)
    complete = not inferred.unknown
    if complete:
        load_project(out)
    return Written(out, inferred, complete)


def _from(model: str, folder: Path) -> str:
    """MODEL as the project file names it: its path from that file's folder."""
    if not model_is_factory(model):
        return os.path.relpath(model, folder)
    place, _, name = model.rpartition(":")
    return f"{os.path.relpath(place, folder)}:{name}" if place.endswith(".py") else model


def _write(out: Path, text: str) -> None:
    part = out.with_name(out.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, out)
    except OSError as why:
        part.unlink(missing_ok=True)
        error = SpaceError if why.errno in (28, 122) else ProjectError  # ENOSPC, EDQUOT
        raise error(
            f"the file cannot be written: {why.strerror}", where=str(out), todo="check the folder and the free space"
        ) from None


def render(model: str, name: str, inferred: Inferred) -> str:
    """The text of an edgeopt.yaml: what is known as keys, what may follow as commented keys."""
    factory = model_kind(model) == "factory"
    lines = [
        "# What edgeopt needs to know of the model. Paths start at this file's folder. Reference: docs/project.md",
        f"name: {to_flow(name)}",
        f"model: {to_flow(model)}",
    ]
    if factory:
        lines.append("# weights: weights.pt   # a state_dict, loaded with weights_only")
    lines += ["", "# One entry for each tensor; the key is the name of forward's parameter,"]
    lines += ["# or of a part of one: PARAMETER.KEY of a dict or class, PARAMETER.0 of a tuple.", *_inputs(inferred)]
    lines += ["", "# Axes that may change from call to call; opt is the size to tune for.", *_axes(inferred)]
    lines += ["", *_rest(factory)]
    return "\n".join(lines) + "\n"


def _inputs(inferred: Inferred) -> list[str]:
    lines = ["inputs:"]
    for name, entry in inferred.inputs.items():
        note = f"   # {inferred.notes[name]}: check" if name in inferred.notes else ""
        lines.append(f"  {to_flow(name)}: {to_flow(entry)}{note}")
    for name, why in inferred.unknown.items():
        lines.append(f"  # TODO: {why}. As in {{shape: [batch, 3, 224, 224], dtype: float32}}")
        lines.append(f"  {to_flow(name)}: {{shape: TODO, dtype: float32}}")
    if not inferred.inputs and not inferred.unknown:
        lines.append("  # TODO: forward names no inputs that must be given; name them as forward takes them")
    lines += [
        f"  # {name}: optional in forward, left at its default"
        for name in inferred.optional
        if name not in {given.split(".")[0] for given in inferred.inputs}
    ]
    return lines


def _axes(inferred: Inferred) -> list[str]:
    if not inferred.axes:
        return ["# axes:", "#   batch: {min: 1, opt: 1, max: 8}"]
    lines = ["axes:"]
    for name, axis in inferred.axes.items():
        note = f"   # {inferred.notes[name]}: check" if name in inferred.notes else ""
        lines.append(f"  {name}: {to_flow(axis)}{note}")
    return lines


def _rest(factory: bool) -> list[str]:
    training = [
        "# QAT: fine-tunes the weights for int8.",
        "# train: data.py:train              # train() -> batches of ({input: array}, target)",
        "# loss: data.py:loss                # loss(outputs, target) -> scalar tensor",
        "# qat: {epochs: 1, learning_rate: 1e-4}",
    ]
    return [
        "# int8 needs data that the model will meet; without it only float is built.",
        "# calibration: data.py:calibration  # calibration() -> batches of {input: array}",
        "# calibration_batches: 32",
        *(training if factory else []),
        "",
        "# Judges every candidate, here and on the device; without it outputs are compared with the model's own.",
        "# evaluate: data.py:evaluate        # evaluate(predict) -> {metric: value}, higher is better",
        "# classifier: true                  # without evaluate: compare the top-1 class as well",
        "",
        "# limits:",
        "#   latency_ms: 20                  # p50 of one call on the device",
        "#   metric_drop: {accuracy: 0.5}    # the most that a metric may fall below the model's own",
    ]
