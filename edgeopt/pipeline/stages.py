"""The stages, in order. Each takes the program before it and gives a new one, or says why it is left out."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from edgeopt.errors import DeclinedError
from edgeopt.pipeline.cache import StageCache
from edgeopt.pipeline.job import Job
from edgeopt.program import ExportedGraph, OnnxGraph, Program, ScriptGraph, custom_ops
from edgeopt.progress import log
from edgeopt.spec.half_formats import HalfPrecision


@dataclass(frozen=True)
class Stage:
    """`run(program, job)` gives the next program and details for the record; `declines` why there is nothing to run.

    Of a `branch` the result is lowered beside the program that it was given, which the next stage takes.
    """

    name: str
    run: Callable[[Program | None, Job], tuple[Program, dict[str, Any]]]
    declines: Callable[[Program | None, Job], str | None] = lambda program, job: None
    branch: bool = False
    stored: Callable[[Job], None] = lambda job: None  # called once the result is in the cache


@dataclass(frozen=True)
class StageRecord:
    """What a stage did. Errors are against the unoptimised model on the reference calls; None where not measured."""

    name: str
    seconds: float
    cached: bool = False
    skipped: str | None = None
    size_bytes: int | None = None
    nodes: int | None = None
    sqnr_db: float | None = None
    max_abs_error: float | None = None
    details: dict[str, Any] = field(default_factory=dict)


def run_stage(
    stage: Stage, program: Program | None, job: Job, cache: StageCache, key: str
) -> tuple[Program | None, StageRecord]:
    """The stage's program, from the cache where its `key` is known; the program itself where the stage declines."""
    from edgeopt.pipeline import storage

    started = time.perf_counter()
    job = dataclasses.replace(job, key=key)
    reason = stage.declines(program, job)
    if reason is not None:
        return program, StageRecord(stage.name, 0.0, skipped=reason)
    found = cache.find(stage.name, key)
    if found is not None:
        operators = custom_ops.of(job.project)
        custom_ops.load(operators)  # a graph that holds the user's operators is read only where they are defined
        result, details = storage.load(found, program)
        result = dataclasses.replace(result, custom_ops=operators)
    else:
        log.debug("stage %s: running", stage.name)
        try:
            result, details = stage.run(program, job)
        except DeclinedError as why:
            return program, StageRecord(stage.name, time.perf_counter() - started, skipped=why.what)
        cache.store(stage.name, key, lambda folder: storage.save(result, details, folder))
        stage.stored(job)
    measured = _measure(result)
    seconds = time.perf_counter() - started
    return result, StageRecord(stage.name, seconds, cached=found is not None, details=details, **measured)


def _capture(program: Program | None, job: Job) -> tuple[Program, dict[str, Any]]:
    from edgeopt.capture import capture

    captured = capture(job.project, progress=job.progress)
    return captured, {"how": _kind(captured), "notes": list(captured.notes)}


def _optimize(program: Program, job: Job) -> tuple[Program, dict[str, Any]]:
    from edgeopt import passes

    result, records = passes.optimize(program, job.profile, job.passes, _run_of(job))
    return result, {"passes": [_as_data(r) for r in records]}


def _half(precision: HalfPrecision, program: ExportedGraph, job: Job) -> tuple[Program, dict[str, Any]]:
    """The program in a 16-bit precision; the program as it was, and the reason in the details, where that fails."""
    from edgeopt.passes.half import half
    from edgeopt.program.data import calibration_batches

    project = job.project
    batches = calibration_batches(project, program.signature) if project.calibration else ()
    keep = (*project.keep_fp32, *job.profile.precision.keep_fp32)
    result, report = half(program, precision, keep_fp32=keep, batches=batches)
    details = _as_data(report)
    return result, {"half": details, "warnings": details.pop("warnings")}


def _qat(program: ExportedGraph, job: Job) -> tuple[Program, dict[str, Any]]:
    from edgeopt import quant
    from edgeopt.pipeline import torchrun
    from edgeopt.program.parts import parts_of

    with torchrun.training(job) as ranks:
        state, details = quant.qat(
            program, job.project, job.profile, kept=_checkpoints(job), ranks=ranks, progress=job.progress
        )
    fixed = [part.label for part in parts_of(program.module)]  # gradients pass through them to what is before them
    return program.after("qat", qat_state=state), {**details, "not_trained": fixed} if fixed else details


def _checkpoints(job: Job) -> Any:
    from edgeopt.quant.training.checkpoints import Checkpoints

    return Checkpoints(job.workdir / "training" / job.key[:16], job.key)


def _quantize(
    program: ExportedGraph | OnnxGraph, job: Job, keep_float: tuple[str, ...] = ()
) -> tuple[Program, dict[str, Any]]:
    from edgeopt import quant

    result, report = quant.quantize(program, job.project, job.profile, keep_float=keep_float, progress=job.progress)
    details = _as_data(report)
    if report.refusal:  # int8 was asked for, and nothing that costs time would be
        warnings = (*details["warnings"], f"int8 is refused: {report.refusal}")
        return program, {**details, "refused": report.refusal, "warnings": warnings}
    return result, details


def _reoptimize(program: ExportedGraph, job: Job) -> tuple[Program, dict[str, Any]]:
    from edgeopt import passes
    from edgeopt.pipeline import integer_guard

    how = _run_of(job)
    result, records, details = integer_guard.reoptimize(
        program, job, lambda given: passes.reoptimize(program, job.profile, given, how)
    )
    return result, {"passes": [_as_data(r) for r in records], **details}


def followed(
    stage: str,
    program: Program,
    job: Job,
    *,
    watch: Callable[[str, Program], None],
    verified: bool = True,
    without: Iterable[str] = (),
) -> tuple[Program, list[Any]]:
    """'optimize' or 'reoptimize' run anew, with every pass shown to `watch(name, program)`; the passes' records.

    `verified` off keeps the passes that a build would drop; `without` leaves out those that the build dropped for more
    than their numbers (see integer_guard.py), as `dropped` finds them in its record.
    """
    from edgeopt import passes

    run = {"optimize": passes.optimize, "reoptimize": passes.reoptimize}[stage]
    given = {**job.passes, **dict.fromkeys(without, False)}
    return run(program, job.profile, given, _run_of(job, watch=watch, verified=verified))


def dropped(record: StageRecord) -> dict[str, str]:
    """The passes that the stage dropped, and why."""
    return {p["name"]: p["reason"] for p in record.details.get("passes", ()) if p["status"] == "dropped"}


def _run_of(job: Job, **how: Any) -> Any:
    """How the passes are run for this project: with its own rules, whose names `passes` may switch."""
    from edgeopt import passes

    return passes.Run(rules=passes.load_rules(job.project), **how)


def _no_optimize(program: Program | None, job: Job) -> str | None:
    if isinstance(program, OnnxGraph):
        return "an ONNX file is taken as it is; its runtime optimizes it when it loads it"
    return None


def _no_half(precision: HalfPrecision, program: Program | None, job: Job) -> str | None:
    from edgeopt.pipeline.lowering import half_takers

    if precision not in job.profile.precision.allowed:
        return f"the profile '{job.profile.name}' allows no {precision}"
    takers = half_takers(precision, job)
    if not takers:
        return f"the backends make {precision} of the fp32 file themselves"
    if all(takers.values()):
        return "; ".join(f"{backend}: {reason}" for backend, reason in takers.items())
    if not isinstance(program, ExportedGraph):
        return f"{precision} is made of a graph that torch.export captures; the model came as {_kind(program)}"
    return None


def no_int8(program: Program | None, job: Job) -> str | None:
    """Why no integer program can be made of `program` for the profile, or None."""
    if "int8" not in job.profile.precision.allowed:
        return f"the profile '{job.profile.name}' allows no int8"
    if isinstance(program, ScriptGraph):
        return (
            "the model was captured as TorchScript; int8 needs a graph that torch.export captures, at least around the "
            "modules that it cannot take: the notes of 'capture' say what kept it from that"
        )
    if isinstance(program, OnnxGraph):
        if program.integer:
            return "the model is quantized already and is left as it is"
        from edgeopt.quant import onnx_ptq

        return onnx_ptq.refusal(program.model)
    return None


def _no_qat(program: Program | None, job: Job) -> str | None:
    if reason := no_int8(program, job):
        return reason
    if job.project.qat.trainer or job.project.qat.state:
        return None
    if isinstance(program, OnnxGraph):
        return "training needs a PyTorch model; this is an ONNX file"
    missing = [key for key in ("train", "loss") if getattr(job.project, key) is None]
    return f"no training is given: add '{missing[0]}' to the project to fine-tune for int8" if missing else None


def _no_quantize(program: Program | None, job: Job) -> str | None:
    if reason := no_int8(program, job):
        return reason
    trained = isinstance(program, ExportedGraph) and program.qat_state is not None
    if job.project.calibration is None and not trained:
        return "no calibration is given: add 'calibration: data.py:function' to the project"
    return None


def _no_reoptimize(program: Program | None, job: Job) -> str | None:
    if isinstance(program, OnnxGraph) and "quantize" in program.stages:
        return "an ONNX file stays as the quantizer wrote it; its runtime optimizes it when it loads it"
    integer = isinstance(program, ExportedGraph) and program.integer
    return None if integer else "there is no integer program"


STAGES = (
    Stage("capture", _capture),
    Stage("optimize", _optimize, _no_optimize),
    Stage("fp16", partial(_half, "fp16"), partial(_no_half, "fp16"), branch=True),
    Stage("bf16", partial(_half, "bf16"), partial(_no_half, "bf16"), branch=True),
    Stage("qat", _qat, _no_qat, stored=lambda job: _checkpoints(job).remove()),
    Stage("quantize", _quantize, _no_quantize),
    Stage("reoptimize", _reoptimize, _no_reoptimize),
)
INTEGER_STAGES = ("qat", "quantize", "reoptimize")
STAGE_NAMES = tuple(stage.name for stage in STAGES)


def integer_stages(keep_float: tuple[str, ...]) -> dict[str, Stage]:
    """The stages from qat on by name, where quantize leaves more layers float than project and profile say."""
    stages = {stage.name: stage for stage in STAGES if stage.name in INTEGER_STAGES}
    quantize = dataclasses.replace(stages["quantize"], run=partial(_quantize, keep_float=keep_float))
    return stages | {"quantize": quantize}


def _measure(program: Program) -> dict[str, Any]:
    """Size, nodes and the error against the reference calls, as fields of a StageRecord."""
    from edgeopt.program import parts
    from edgeopt.program.predict import predictor
    from edgeopt.runtime.compare import output_errors

    if isinstance(program, ExportedGraph):
        tensors = [*program.module.parameters(), *program.module.buffers()]
        size = sum(t.numel() * t.element_size() for t in tensors) + parts.size_bytes(program.module)
        nodes = sum(1 for node in program.module.graph.nodes if node.op == "call_function")
    elif isinstance(program, ScriptGraph):
        size, nodes = None, sum(1 for _ in program.module.graph.nodes())
    else:
        size, nodes = program.model.ByteSize(), len(program.model.graph.node)
    predict = predictor(program)
    given = [call.outputs for call in program.reference]
    errors = output_errors(given, [predict(call.inputs) for call in program.reference]).values()
    return {
        "size_bytes": size,
        "nodes": nodes,
        "sqnr_db": min((e.sqnr_db for e in errors), default=None),
        "max_abs_error": max((e.max_abs for e in errors), default=None),
    }


def _kind(program: Program) -> str:
    if isinstance(program, ScriptGraph):
        return f"torch.jit {program.how}"
    if not isinstance(program, ExportedGraph):
        return "onnx"
    from edgeopt.program.parts import parts_of

    count = len(parts_of(program.module))
    return f"torch.export with scripted parts ({count})" if count else "torch.export"


def _as_data(value: Any) -> Any:
    import pydantic

    if isinstance(value, pydantic.BaseModel):
        return value.model_dump(mode="json")
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
