"""The fake-quantized model in the hands of a trainer that is not edgeopt's: `prepare` it, train it, `finish` it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from edgeopt.errors import DataError, StageError
from edgeopt.onboard.structure import flat_inputs
from edgeopt.progress import log
from edgeopt.quant import finetune
from edgeopt.quant import state as state_dict
from edgeopt.quant.prepare import Prepared
from edgeopt.quant.training import ranges
from edgeopt.runtime.artifact import replace_file
from edgeopt.runtime.structure import restore


class FakeQuantized(torch.nn.Module):
    """The model as the integer program will compute, made of differentiable operators; train it as any module.

    It is called with the tensors of the project's inputs, in their order, by name, or as one dict of them, and gives
    the outputs in the model's own structure. In `train()` mode, which it starts in, the activations' ranges follow
    the data; in `eval()` mode they stay. There is no dropout in it, and BatchNorm keeps its statistics: it was
    captured for inference. `freeze_ranges()` lets the ranges stay in training too, as is usual for its second half.
    """

    def __init__(self, prepared: Prepared):
        super().__init__()
        self.program = prepared.module
        self._signature = prepared.program.signature
        for weight in self.program.parameters():
            if weight.is_floating_point():
                weight.requires_grad_(True)
        self.train()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        signature = self._signature
        if len(inputs) == 1 and isinstance(inputs[0], Mapping):
            inputs, named = (), dict(inputs[0])
        if named:
            flat = flat_inputs(signature.input_structure, signature.input_names, named)
            inputs = tuple(flat[name] for name in signature.input_names)
        return restore(signature.output_structure, list(self.program(*inputs)))

    def train(self, mode: bool = True) -> FakeQuantized:
        """Let the ranges follow the data, or stay; the graph itself has no mode."""
        self.training = mode
        for fake in ranges.fakes(self.program):
            fake.train(mode)
        return self

    def freeze_ranges(self) -> None:
        """The ranges stay from now on, in training too."""
        ranges.freeze(self.program)


def finish(model: torch.nn.Module, path: Path | str | None = None) -> dict[str, torch.Tensor]:
    """What training has learned, as a state_dict of CPU tensors, written to `path` where one is given.

    `model` is the FakeQuantized of `prepare`, or a DistributedDataParallel around it. Fake-quantizers that were
    switched off are switched on again, with a warning. StageError for a value that is NaN and for a model that no
    data went through in train() mode.
    """
    inner = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
    if not isinstance(inner, FakeQuantized):
        raise StageError(
            f"finish was given a {type(inner).__name__}", where="edgeopt.qat.finish",
            todo="give it the model that edgeopt.qat.prepare returned",
        )  # fmt: skip
    inner.eval()
    for warning in ranges.mixed(inner.program):
        log.warning("warning: %s", warning)
    for fake in ranges.fakes(inner.program):
        fake.enable_fake_quant()
    state = finetune.state_of(inner.program)
    if path is not None:
        written = io.BytesIO()
        torch.save(state, written)
        replace_file(Path(path).expanduser(), written.getvalue())
    return state


def from_file(prepared: Prepared, path: Path) -> dict[str, torch.Tensor]:
    """The state that `finish` wrote to `path`, checked against this program's preparation."""
    todo = "train again with edgeopt.qat.prepare of this project and profile, and write the file with finish"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        state_dict.load(prepared.module, state)
    except (pickle.UnpicklingError, EOFError, TypeError, AttributeError) as why:
        raise DataError(
            f"it is not a file of edgeopt.qat.finish: {str(why)[:300]}", where=f"key 'qat.state': {path}", todo=todo
        ) from why
    except RuntimeError as why:
        raise DataError(
            f"it is of another program or of other settings: {str(why)[:300]}", where=f"key 'qat.state': {path}",
            todo=todo,
        ) from why  # fmt: skip
    return finetune.state_of(prepared.module)
