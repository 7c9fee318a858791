"""What a process that only helps to train does of a build: see torchrun.py."""

from __future__ import annotations

import dataclasses
from typing import Any

from edgeopt.errors import EdgeoptError, StageError
from edgeopt.pipeline import torchrun
from edgeopt.pipeline.cache import StageCache
from edgeopt.pipeline.job import Job
from edgeopt.pipeline.keys import stage_keys
from edgeopt.pipeline.stages import STAGES, run_stage
from edgeopt.pipeline.torchrun import CALL, LONGEST_BUILD
from edgeopt.progress import SILENT, log


def help_train(job: Job) -> dict[str, Any]:
    """What a helping process does; returns what it did, for `--json`."""
    here = torchrun.place()
    store = here.store()
    try:
        store.wait([CALL], LONGEST_BUILD)
        call, _, key = store.get(CALL).decode().partition(" ")
        if call == "leave":
            return {"rank": here.rank, "trained": False}
        _join(job, store, here, key)
        return {"rank": here.rank, "trained": True}
    finally:
        store.set(f"edgeopt/left/{here.rank}", "yes")


def _join(job: Job, store: Any, here: torchrun.Place, key: str) -> None:
    by_name = {stage.name: stage for stage in STAGES}
    job, keys, program = dataclasses.replace(job, progress=SILENT), stage_keys(job), None
    try:
        if keys["qat"] != key:
            raise StageError("its sources, data, settings or versions are others", where=f"process {here.rank}")
        for name in ("capture", "optimize"):
            program, _ = run_stage(by_name[name], program, job, StageCache(job.workdir / "cache"), keys[name])
    except EdgeoptError as why:
        store.set(f"edgeopt/joins/{here.rank}", str(why))
        raise
    log.debug("process %d joins the training", here.rank)
    store.set(f"edgeopt/joins/{here.rank}", key)
    by_name["qat"].run(program, dataclasses.replace(job, key=key))
