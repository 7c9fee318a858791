"""From gate results to an artifact: the files that are kept, the packs of tensors, and the manifest."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from edgeopt import digest
from edgeopt.pipeline import op_files, sizes_served, usage
from edgeopt.pipeline.baseline import CASES_FILE, Baseline
from edgeopt.pipeline.gates import GateRow
from edgeopt.pipeline.job import Job
from edgeopt.program import Program
from edgeopt.runtime.tensors import PackWriter, read
from edgeopt.runtime.zipapp import write_zipapp
from edgeopt.spec.manifest import Candidate, EngineRecipe, Feed, File, Manifest, Refusal, Tolerance, belongs_to

REFERENCE_FILE = "reference/tensors.bin"
_DEVICE_MARGIN_AGREEMENT = 0.05  # of the classes that 16 or 8 bits choose, which near ones may turn
_DEVICE_MARGIN_DB = 3.0  # an int8 kernel of another engine rounds some values to the neighbouring step (case Q07)


def write_reference(program: Program, folder: Path) -> tuple[Feed, ...]:
    """The reference calls as a pack below `folder`."""
    with PackWriter(folder / REFERENCE_FILE, REFERENCE_FILE) as pack:
        return tuple(
            Feed(
                inputs={name: pack.add(array) for name, array in call.inputs.items()},
                outputs={name: pack.add(array) for name, array in call.outputs.items()},
            )
            for call in program.reference
        )


def manifest(
    folder: Path, program: Program, job: Job, reference: tuple[Feed, ...], baseline: Baseline,
    kept: tuple[GateRow, ...], recipes: tuple[EngineRecipe, ...], refused: tuple[Refusal, ...],
) -> Manifest:  # fmt: skip
    """The manifest of the artifact in `folder`, from which every file that no candidate uses has been removed."""
    candidates = tuple(_with_device_tolerance(row) for row in kept)
    names = {c.name for c in candidates}
    write_zipapp(folder)
    cases, complete = _cases(folder, baseline, job)
    used = {c.file for c in candidates} | {REFERENCE_FILE, "onboard.pyz"} | ({CASES_FILE} if cases else set())
    recipes = tuple(r for r in recipes if r.candidate in names)
    used |= {file for recipe in recipes for file in recipe.files}
    arch = job.profile.target.arch
    libraries, held = op_files.put_for_target(program.custom_ops, arch, folder, candidates, recipes)
    used |= held
    shipped = usage.Shipped(
        job.project, job.profile.name, job.profile.target.tensorrt, program.signature, candidates, recipes,
        tuple(lib.artifact_path for lib in program.custom_ops.for_onnxruntime(arch) if lib.artifact_path in libraries),
    )  # fmt: skip
    used |= usage.write(shipped, folder)
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if not any(belongs_to(name, file) for file in used):
            path.unlink()
    profile, signature = job.profile, program.signature
    return Manifest(
        name=job.project.name,
        profile=profile.name if profile.jetpack is None else f"{profile.name.split('@')[0]}@{profile.jetpack}",
        target=profile.target.model_dump(mode="json"),
        root=profile.root,
        after_activate=profile.after_activate,
        health=profile.health,
        inputs=signature.inputs,
        outputs=signature.outputs,
        axes=signature.axes,
        adaptive=sizes_served.adaptive(program, job.project),
        input_structure=signature.input_structure,
        output_structure=signature.output_structure,
        files=_hashed(folder),
        candidates=candidates,
        refused=refused,
        engine_recipes=recipes,
        op_libraries=libraries,
        reference=reference,
        cases=cases,
        cases_complete=complete,
        limits=job.limits.model_dump(mode="json"),
        metrics=_metrics(baseline, kept),
    )


def _cases(folder: Path, baseline: Baseline, job: Job) -> tuple[tuple[Feed, ...], bool]:
    """The cases that the artifact carries: all of them, or the first that fit `limits.cases_mb`."""
    if not baseline.cases:
        return (), False
    judged_by_evaluate = job.project.evaluate is not None
    room = job.limits.cases_mb * (1 << 20)
    if baseline.size_bytes <= room:
        return baseline.cases, judged_by_evaluate
    kept: list[Feed] = []
    (folder / CASES_FILE).unlink(missing_ok=True)
    with PackWriter(folder / CASES_FILE, CASES_FILE) as pack:
        for feed in baseline.cases:
            room -= sum(ref.size_bytes for ref in (*feed.inputs.values(), *feed.outputs.values()))
            if room < 0:
                break
            copied = {
                part: {name: pack.add(read(baseline.folder, ref), dtype=ref.dtype) for name, ref in refs.items()}
                for part, refs in (("inputs", feed.inputs), ("outputs", feed.outputs))
            }
            kept.append(Feed(**copied))
    return tuple(kept), False


def _with_device_tolerance(row: GateRow) -> Candidate:
    """An int8 candidate must be on the device as close to the reference as it was here, less a margin."""
    candidate = row.candidate
    agreement = _device_agreement(candidate, row.result.top1_agreement)
    sqnr = row.result.sqnr_db
    if candidate.precision != "int8" or sqnr is None or not math.isfinite(sqnr):
        return candidate.model_copy(update={"tolerance": candidate.tolerance.model_copy(update=agreement)})
    least = math.floor(10 * (sqnr - _DEVICE_MARGIN_DB)) / 10
    return candidate.model_copy(update={"tolerance": Tolerance(sqnr_db=least, **agreement)})


def _device_agreement(candidate: Candidate, found: float | None) -> dict[str, Any]:
    """The agreement to ask for on the device: what a precision without a bound of its own kept here, less a margin."""
    given = candidate.tolerance.agreement
    least = 0.0 if found is None else max(0.0, math.floor(100 * (found - _DEVICE_MARGIN_AGREEMENT)) / 100)
    kept = {n: one if one.least else one.model_copy(update={"least": least}) for n, one in given.items()}
    return {"agreement": kept} if given else {}


def _metrics(baseline: Baseline, kept: tuple[GateRow, ...]) -> dict[str, dict[str, float]]:
    if not baseline.metrics:
        return {}
    return {"reference": baseline.metrics, **{row.candidate.name: row.result.metrics for row in kept}}


def _hashed(folder: Path) -> dict[str, File]:
    return {
        path.relative_to(folder).as_posix(): File(sha256=digest.of_file(path), size=path.stat().st_size)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
