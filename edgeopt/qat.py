"""Quantization-aware training by a trainer of your own: the model made ready, and what it learned handed back.

    from edgeopt import qat

    model = qat.prepare("edgeopt.yaml", profile="xavier")  # a torch.nn.Module; call and train it as you like
    my_trainer.fit(model)
    qat.finish(model, "trained.pt")  # then `qat: {state: trained.pt}` in the project, and `edgeopt build`

`prepare` runs the stages before training, from the project's stage cache where they are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeopt.errors import StageError

if TYPE_CHECKING:
    from edgeopt.quant.training.hooks import FakeQuantized

__all__ = ["finish", "prepare"]


def prepare(project: Path | str = ".", *, profile: str, overrides: Mapping[str, str] | None = None) -> FakeQuantized:
    """The fake-quantized model of the project in the file or folder `project`, for the profile of that name.

    It computes as the integer program will. `overrides`: dotted key -> YAML text, as `--set KEY=VALUE` on the command
    line, with 'project.' or 'profile.' in front. StageError for a model that int8 cannot be made of, and whatever
    loading, capturing and optimizing it raises.
    """
    from edgeopt.pipeline.cache import StageCache
    from edgeopt.pipeline.job import Job
    from edgeopt.pipeline.keys import stage_keys
    from edgeopt.pipeline.stages import STAGES, no_int8, run_stage
    from edgeopt.quant.stages import prepared_model
    from edgeopt.spec.overrides import parse_overrides
    from edgeopt.spec.profile import load_profile
    from edgeopt.spec.project import load_project

    on_project, on_profile = parse_overrides([f"{key}={value}" for key, value in (overrides or {}).items()])
    loaded = load_project(project, on_project)
    job = Job(profile=load_profile(profile, on_profile), project=loaded, workdir=loaded.folder / ".edgeopt")
    keys, cache, program = stage_keys(job), StageCache(job.workdir / "cache"), None
    for stage in STAGES[:2]:
        program, _ = run_stage(stage, program, job, cache, keys[stage.name])
    if reason := no_int8(program, job):
        raise StageError(f"there is nothing to quantize: {reason}", where=f"{loaded.source}, profile {profile}")
    return prepared_model(program, loaded, job.profile)


def finish(model: FakeQuantized, path: Path | str | None = None) -> dict[str, Any]:
    """What training has learned, as a state_dict of CPU tensors; written to `path`, for the key `qat.state`.

    `model` is what `prepare` returned, or a DistributedDataParallel around it. StageError for a value that is NaN and
    for a model that no data went through in train() mode.
    """
    from edgeopt.quant.training import hooks

    return hooks.finish(model, path)
