"""The ways of capture in their order, and the choice of the first that the guard finds faithful."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

from edgeopt.capture import guard, inputs, onnx_file, operators, script, symbolic
from edgeopt.capture.arguments import annotations_of, arguments
from edgeopt.capture.declined import Declined
from edgeopt.capture.eager import Eager, check_repeatable
from edgeopt.capture.export import export
from edgeopt.capture.load import load_module
from edgeopt.capture.parts import export_with_parts
from edgeopt.capture.reference import reference_calls
from edgeopt.errors import CaptureError, ModelError
from edgeopt.program import ExportedGraph, Program, ScriptGraph, Signature, custom_ops, graph
from edgeopt.progress import Progress, log
from edgeopt.spec.project import Project

Way = tuple[str, Callable[..., ExportedGraph | ScriptGraph]]

# a trace before a script: traced files load on older torch and hold no dead branches
_MODULE_WAYS: tuple[Way, ...] = (
    ("torch.export", export),
    ("torch.export with scripted parts", export_with_parts),
    ("torch.jit.trace", script.trace),
    ("torch.jit.script", script.script),
)
_FILE_WAYS: tuple[Way, ...] = (("the TorchScript file", script.script),)


def capture(project: Project, *, progress: Progress) -> Program:
    """The project's model as a Program that equals it at every declared size, with reference calls.

    A Python model becomes an ExportedGraph where `torch.export` is faithful, else a ScriptGraph; a TorchScript
    file a ScriptGraph; an ONNX file an OnnxGraph. `notes` say how, and why not otherwise. The user's own module
    is never called or changed. Raises ProjectError (inputs that do not fit the model), ModelError (a model or
    weights that do not load or run), DataError (calibration data), CaptureError (no way is faithful).
    """
    if project.kind == "onnx":
        return onnx_file.capture(project)
    if project.kind == "exported":
        raise _no_pt2(project)
    model, ways = _load(project)
    signature, tried, noise, notes = _study(model, project)
    if ways is not _FILE_WAYS:
        operators.check(model, tried[0].inputs)
    reference = reference_calls(model, signature, project)
    own = custom_ops.of(project)
    with symbolic.kept(model, tried[0].inputs, own) as kept:
        program, why_not = _first_faithful(model, signature, tried, noise, ways, project, progress)
    return dataclasses.replace(program, reference=reference, notes=(*why_not, *notes, *kept), custom_ops=own)


def unoptimised(project: Project) -> guard.Model:
    """The user's model as it is, to be asked for its answers. Raises what `capture` does where it does not load."""
    if project.kind == "onnx":
        return onnx_file.as_given(project)
    if project.kind == "exported":
        raise _no_pt2(project)
    return _load(project)[0]


def _load(project: Project) -> tuple[Eager, tuple[Way, ...]]:
    specs = inputs.input_specs(project)
    custom_ops.load(custom_ops.of(project))
    if project.kind == "torchscript":
        module = script.read(project.path(project.model))
        given, annotation, where = script.parameters(module), script.annotations_of(module), project.model
    else:
        module = load_module(project)
        where = f"{project.model}, {type(module).__name__}"
        given, annotation = inputs.parameters(module.forward), annotations_of(module.forward)
    inputs.check_parameters(given, specs, where=where)
    reach = arguments(given, [spec.name for spec in specs], annotation, where=where)
    ways = _FILE_WAYS if project.kind == "torchscript" else _MODULE_WAYS
    return Eager(module, specs, project.folder, reach, inputs.cameras(project)), ways


def _no_pt2(project: Project) -> ModelError:
    return ModelError(
        "a .pt2 file is not read: it fits only the torch that wrote it, and loading it runs what was pickled inside",
        where=f"key 'model': {project.path(project.model)}", todo="name the Python factory that it was exported from",
    )  # fmt: skip


def _study(model: Eager, project: Project) -> tuple[Signature, list[guard.Probe], float, list[str]]:
    """The signature with the outputs' names and shapes, the eager answers to compare with, noise and notes."""
    ranges, structure = inputs.value_ranges(project), model.arguments.structure
    signature = Signature(model.inputs, (), project.axes, None, ranges, structure)
    base = graph.synthetic(signature, guard.sizes_to_vary(signature), project.seed)
    others = graph.synthetic(signature, guard.sizes_to_vary(signature), project.seed + 1)
    noise = check_repeatable(model, base, others, guard.difference)
    tried, notes = guard.probes(model, signature, project.seed)
    outputs = guard.output_specs(signature, tried)
    structure = tried[0].answer.structure
    return dataclasses.replace(signature, outputs=outputs, output_structure=structure), tried, noise, notes


def _first_faithful(
    model: Eager, signature: Signature, tried: list[guard.Probe], noise: float,
    ways: tuple[Way, ...], project: Project, progress: Progress,
) -> tuple[ExportedGraph | ScriptGraph, list[str]]:  # fmt: skip
    copy_inputs = any(probe.answer.wrote_inputs for probe in tried)
    declined: list[tuple[str, str, str | None]] = []
    with progress.bar("capture", len(ways)) as advance:
        for name, way in ways:
            try:
                program = way(model, signature, copy_inputs=copy_inputs, seed=project.seed)
                why = guard.disagreement(partial(graph.run, program), tried, noise)
                if why is None:
                    notes = [f"not captured by {n}: {reason}" for n, reason, _ in declined]
                    notes.append(f"captured by {name}, equal to eager in {len(tried)} calls")
                    notes += program.notes
                    if copy_inputs:
                        notes.append("the model writes to its inputs: the program works on copies of them")
                    return program, notes
                declined.append((name, why, None))
            except Declined as reason:
                declined.append((name, reason.reason, reason.where))
            log.debug("capture: %s: %s", *declined[-1][:2])
            advance(1)
    raise _refusal(model, signature, declined, project)


def _refusal(
    model: Eager, signature: Signature, declined: list[tuple[str, str, str | None]], project: Project
) -> CaptureError:
    where = next((where for _, _, where in declined if where), None)
    if where is None and not script.is_script(model.module):
        where = script.frozen_values(model, signature, project.seed)
    lines = [f"  - {name}: {reason}" + (f" ({at})" if at else "") for name, reason, at in declined]
    return CaptureError(
        "no way of capture gives a program that equals the model:\n" + "\n".join(lines),
        where=where or f"key 'model': {project.model}",
        todo="make forward depend on tensors rather than on Python values of them, or declare the axis that varies "
        "with min equal to max",
    )  # fmt: skip
