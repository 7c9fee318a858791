"""The search for mixed precision as a build asks for it: where it starts, which steps there are, and what remains."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from edgeopt.device.measured import timing_feed
from edgeopt.pipeline import mixed
from edgeopt.pipeline.gates import GateRow, target_is_here
from edgeopt.pipeline.mixed import Budget, Found
from edgeopt.pipeline.stages import integer_stages
from edgeopt.pipeline.tries import Ground, Setup, Tries, Try
from edgeopt.program import ExportedGraph
from edgeopt.progress import log
from edgeopt.runtime import tensors
from edgeopt.spec.half_formats import HALF_PRECISIONS
from edgeopt.spec.profile import Profile

if TYPE_CHECKING:
    from edgeopt.quant.sensitivity import Layer

FOLDER = "mixed"  # of the work folder


def search_for(
    ground: Ground, floats: tuple[GateRow, ...], last: tuple[GateRow, ...], budget_min: float | None, key: str,
    told: Callable[[Try], None],
) -> tuple[Found, ExportedGraph | None, str, Profile] | None:  # fmt: skip
    """What the search found, its program and the program's key and profile; None where there is no time for any.

    `floats` are the rows of the first gate, `last` those of the second, whose integer ones were dropped for their
    accuracy (see gates.mendable). The program is None where no int8 program keeps the limits.
    """
    minutes = mixed.DEFAULT_BUDGET_MIN if budget_min is None else budget_min
    if minutes <= 0:
        return None
    failed = next(row for row in last if row.candidate.precision == "int8")
    first = Setup(ground.job.profile.quantization.per_channel, ground.trained is not None)
    log.info("int8 does not keep the limits; searching for one that does, for %g min at the most", minutes)
    tries = Tries(ground, ground.job.workdir / FOLDER, key, told)
    found = mixed.search(
        tries, first, failed, Budget(minutes), steps=_steps(first, ground),
        gains=lambda layers: _gains(layers, ground, failed, floats), unranked=_unranked(ground),
    )  # fmt: skip
    if found.setup is None:
        for made in _what_remains(floats):
            tries.note(made)
        return Found(None, tuple(tries.done), found.ranked, found.ended, found.seconds), None, "", ground.job.profile
    program, program_key = tries.program(found.setup)
    return found, program, program_key, tries.job(found.setup).profile


def _steps(first: Setup, ground: Ground) -> tuple[Setup | Try, ...]:
    """Per channel instead of per tensor, then training instead of calibration; or why there is none."""
    project = ground.job.project
    steps: list[Setup | Try] = []
    if not first.per_channel and not project.calibration:
        steps.append(Try("per-channel weights", False, "no calibration is given"))
    elif not first.per_channel or first.trained and project.calibration:
        steps.append(Setup(True, False))
    if reason := integer_stages(())["qat"].declines(ground.optimized, ground.job):
        steps.append(Try("trained (QAT)", False, reason))
    elif first != Setup(True, True):
        steps.append(Setup(True, True))
    return tuple(steps)


def _unranked(ground: Ground) -> str:
    if isinstance(ground.optimized, ExportedGraph):
        return ""
    return "what each layer costs is measured in a graph of torch; of an ONNX file, name nodes in 'keep_float'"


def _gains(layers: tuple[Layer, ...], ground: Ground, failed: GateRow, floats: tuple[GateRow, ...]) -> dict[str, float]:
    """Node -> what int8 gains in it: ms, the difference of its times in the float and the int8 file.

    Where the target is not at hand multiply-accumulates stand in. A layer that cannot be timed by itself gains as much
    as the others do for its multiply-accumulates, and one that has none (an add, a pooling) as much as their mean.
    """
    own = {layer.node: float(layer.macs) for layer in layers if layer.macs}
    times = _times(ground, failed, floats)
    if times is not None:
        timed = {layer.node: gain for layer in layers if (gain := _gain(layer, *times)) is not None}
        rate = sum(timed.values()) / sum(own[node] for node in timed) if timed else 0.0
        if rate > 0:
            own = {node: timed.get(node, macs * rate) for node, macs in own.items()}
    mean = sum(own.values()) / len(own) if own else 1.0
    return {layer.node: own.get(layer.node, mean) for layer in layers}


_Times = dict[str, list[float | None]]


def _times(ground: Ground, failed: GateRow, floats: tuple[GateRow, ...]) -> tuple[_Times, _Times] | None:
    """The layers' times in onnxruntime's float file and in the int8 one that failed; None where they say nothing."""
    from edgeopt.backends.layer_times import layer_times

    job, signature = ground.job, ground.signature
    name = next((r.candidate.file for r in floats if r.candidate.name == "onnxruntime-fp32"), None)
    if failed.candidate.runtime != "onnxruntime" or name is None or not target_is_here(job.profile):
        return None
    _, _, at = timing_feed(signature.inputs, signature.axes, ground.reference).partition("/")
    inputs = {key: tensors.read(ground.staging, ref) for key, ref in ground.reference[int(at)].inputs.items()}
    try:
        own = ground.optimized.custom_ops
        return tuple(
            layer_times(ground.staging / file, inputs, custom_ops=own) for file in (name, failed.candidate.file)
        )
    except Exception as why:  # onnxruntime's own exceptions have no common root
        log.debug("the layers are not timed: %s", why)
        return None


def _gain(layer: Layer, floats: _Times, integers: _Times) -> float | None:
    kind = "convolution" if "convolution" in layer.rule else "product"
    before, after = floats[kind], integers[kind]
    if layer.place < 0 or len(before) != len(after) or layer.place >= len(before):
        return None
    pair = before[layer.place], after[layer.place]
    return None if None in pair else pair[0] - pair[1]


def _what_remains(floats: tuple[GateRow, ...]) -> list[Try]:
    """The last steps, which the first gate has judged: 16 bits, then fp32."""
    made = []
    for precisions in (HALF_PRECISIONS, ("fp32",)):
        rows = [row for row in floats if row.candidate.precision in precisions]
        name = " or ".join(precisions)
        if not rows:
            made.append(Try(name, False, f"no candidate in {name} was built: see precision.allowed of the profile"))
        for row in rows:
            made.append(_judged(row))
    return made


def _judged(row: GateRow) -> Try:
    result = row.result
    reason = "" if row.kept else row.reason
    return Try(
        row.candidate.name, row.kept, reason, metrics=result.metrics, sqnr_db=result.sqnr_db,
        p50_ms=result.p50_ms if row.stand_in is None else None,
    )  # fmt: skip
