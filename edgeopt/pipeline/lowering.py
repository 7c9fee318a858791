"""Lowering a program by every backend of the profile, into one folder; the result is cached like a stage's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from edgeopt import digest
from edgeopt.backends import compiled_for
from edgeopt.errors import EdgeoptError
from edgeopt.pipeline.cache import StageCache, link_or_copy
from edgeopt.pipeline.job import Job
from edgeopt.program import Program, Signature
from edgeopt.progress import log
from edgeopt.spec.half_formats import FORMATS, HalfPrecision
from edgeopt.spec.manifest import Agreement, Candidate, EngineRecipe, Refusal, Tolerance
from edgeopt.spec.profile_checks import by_flag, refusal

_INDEX = "lowered.json"
# How close outputs must be to the reference, here and on the device. TensorRT's fp32 multiplies in TF32 where the GPU
# has it, with 10 bits of mantissa as fp16 has; where it makes fp16 of an fp32 file itself it keeps no islands, and has
# a bound of its own. int8 is bounded once it has been measured, see assemble.
_TOLERANCES = {
    ("onnxruntime", "fp32"): Tolerance(max_abs=1e-3),
    ("openvino", "fp32"): Tolerance(max_abs=1e-3),
    ("openvino", "bf16"): Tolerance(sqnr_db=FORMATS["bf16"].least_sqnr_db),
    ("torchscript", "fp32"): Tolerance(max_abs=1e-3),
    ("aoti", "fp32"): Tolerance(max_abs=1e-3),
    ("tensorrt", "fp32"): Tolerance(sqnr_db=40),
    ("tensorrt", "fp16"): Tolerance(sqnr_db=30),
    ("onnxruntime", "fp16"): Tolerance(sqnr_db=FORMATS["fp16"].least_sqnr_db),
    ("torchscript", "fp16"): Tolerance(sqnr_db=FORMATS["fp16"].least_sqnr_db),
    ("torchscript", "bf16"): Tolerance(sqnr_db=FORMATS["bf16"].least_sqnr_db),
    ("tensorrt", "bf16"): Tolerance(sqnr_db=FORMATS["bf16"].least_sqnr_db),
}
# The least share of classes that are the reference's, where the artifact chooses them. Between two that are equal but
# for rounding another order of sums chooses at random; TF32 rounds earlier, and one of nine reference samples may turn.
# 16 and 8 bits are bounded by `evaluate` or the proxy, and on the device by what was measured, see assemble.
_AGREEMENT = {
    ("onnxruntime", "fp32"): 0.99,
    ("openvino", "fp32"): 0.99,
    ("torchscript", "fp32"): 0.99,
    ("aoti", "fp32"): 0.99,
    ("tensorrt", "fp32"): 0.85,
}


@dataclass(frozen=True)
class Files:
    """What all backends wrote for one program: names relative to the folder, and what each declined."""

    files: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    recipes: tuple[EngineRecipe, ...]
    refused: tuple[Refusal, ...]


def lower(program: Program, job: Job, cache: StageCache, key: str, folder: Path) -> Files:
    """Write the program's files into `folder` by each backend of the profile. A backend that fails is refused."""
    place = digest.of_value(
        {
            "program": key,
            "profile": job.profile.model_dump(mode="json"),
            "target_python": job.target_python,
            "outputs": [program.signature.output_names, program.signature.decisions],
            "heads": {name: head.model_dump(mode="json") for name, head in job.project.outputs.items()},
            "compiled_for": compiled_for.of_stage_key(job.profile),
        }
    )
    found = cache.find("lower", place)
    if found is None:
        found = cache.store("lower", place, lambda part: _lower_into(program, job, part))
    index = json.loads((found / _INDEX).read_bytes())
    for name in index["files"]:
        link_or_copy(found / name, folder / name)
    return Files(
        tuple(index["files"]),
        tuple(Candidate.model_validate(c) for c in index["candidates"]),
        tuple(EngineRecipe.model_validate(r) for r in index["recipes"]),
        tuple(Refusal.model_validate(r) for r in index["refused"]),
    )


def half_takers(precision: HalfPrecision, job: Job) -> dict[str, str | None]:
    """Backend -> None where it takes a program in the precision, else why not; without those that a flag serves."""
    from edgeopt.backends import torchscript

    profile = job.profile
    takers = {}
    for backend in profile.backends:
        if not by_flag(precision, backend, profile):
            takers[backend] = refusal(precision, backend, profile.target)
    if "torchscript" in takers and takers["torchscript"] is None:
        takers["torchscript"] = next(iter(torchscript.untested(profile, job.target_python)), None)
    return takers


def _with_tolerance(candidate: Candidate, signature: Signature) -> Candidate:
    kind = candidate.runtime, candidate.precision
    tolerance = _TOLERANCES.get(kind, candidate.tolerance)
    if signature.decisions:
        least = _AGREEMENT.get(kind, 0.0)
        agreement = {name: Agreement(least=least, axis=axis) for name, axis in signature.decisions}
        only = len(agreement) == len(signature.outputs)  # nothing is left whose values could be near
        tolerance = Tolerance(agreement=agreement) if only else tolerance.model_copy(update={"agreement": agreement})
    return candidate.model_copy(update={"tolerance": tolerance})


def _lower_into(program: Program, job: Job, folder: Path) -> None:
    from edgeopt.backends.backend import precision_of
    from edgeopt.backends.table import BACKENDS

    files, candidates, recipes, refused = [], [], [], []
    precision = precision_of(program)
    for name in job.profile.backends:
        if by_flag(precision, name, job.profile):
            continue  # it makes the precision of the fp32 file
        backend = BACKENDS[name]
        candidate = f"{name}-{precision}"
        if reasons := backend.refusals(program, job.profile):
            refused.append(Refusal(candidate=candidate, reason="; ".join(reasons)))
            continue
        try:
            lowered = backend.lower(program, job.profile, folder, target_python=job.target_python)
        except EdgeoptError as why:
            log.debug("%s: %s", candidate, why)
            refused.append(Refusal(candidate=candidate, reason=why.what))
            continue
        files += [f for f in lowered.files if f not in files]
        candidates += [_with_tolerance(c, program.signature) for c in lowered.candidates]
        recipes += lowered.recipes
        refused += lowered.refused
    index = {
        "files": files,
        "candidates": [c.model_dump(mode="json") for c in candidates],
        "recipes": [r.model_dump(mode="json") for r in recipes],
        "refused": [r.model_dump(mode="json") for r in refused],
    }
    (folder / _INDEX).write_bytes(digest.canonical_json(index))
