"""Calls of the user's model as it is: the truth that every captured program is compared with."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from edgeopt import digest
from edgeopt.capture import state
from edgeopt.capture.arguments import Arguments
from edgeopt.errors import CaptureError, EdgeoptError, ModelError
from edgeopt.ports import user_code
from edgeopt.program.frames import Lens
from edgeopt.program.tracing import plain_attention
from edgeopt.runtime import structure
from edgeopt.spec.manifest import DTYPE_BYTES, TensorSpec

_RANDOM = {
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "feature_dropout",
    "bernoulli", "bernoulli_", "rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "randperm",
    "normal", "normal_", "uniform_", "multinomial", "gumbel_softmax", "rrelu",
}  # fmt: skip


@dataclass(frozen=True)
class Eager:
    """The user's model in eval mode, its named inputs, the folder of the user's code, and how inputs reach forward.

    `module` is never called or changed; calls go to copies from `fresh`. What `cameras` name is given as frames, and
    becomes what forward takes by the documented arithmetic in numpy.
    """

    module: nn.Module
    inputs: tuple[TensorSpec, ...]
    folder: Path
    arguments: Arguments
    cameras: Mapping[str, Lens] = dataclasses.field(default_factory=dict)  # input name -> how frames become it

    def fresh(self) -> nn.Module:
        """A copy of the module as it was loaded."""
        return copy.deepcopy(self.module)

    def answer(self, arrays: dict[str, np.ndarray]) -> Answer:
        """What the model as loaded gives for named inputs; ModelError with the user's line where it fails."""
        return call(self, arrays)


@dataclass(frozen=True)
class Answer:
    """What one call gave: named arrays, the structure around them as JSON data, and whether it wrote to its inputs."""

    outputs: dict[str, np.ndarray]
    structure: Any
    wrote_inputs: bool


def call(model: Eager, inputs: dict[str, np.ndarray], *, module: nn.Module | None = None, seed: int = 0) -> Answer:
    """The model's answer to named inputs, which are copied, so that a model which writes to them changes nothing.

    `module` is a copy from `model.fresh()`, else a new one; `seed` is torch's random state for the call. An
    exception becomes a ModelError with the user's file and line.
    """
    module = model.fresh() if module is None else module
    inputs = {n: model.cameras[n].reference(array) if n in model.cameras else array for n, array in inputs.items()}
    tensors = {spec.name: torch.from_numpy(np.array(inputs[spec.name], copy=True, order="C")) for spec in model.inputs}
    try:
        with torch.no_grad(), plain_attention(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            returned = module(**model.arguments.of(list(tensors.values())))
    except EdgeoptError:
        raise
    except Exception as why:
        shapes = ", ".join(f"{k} {list(v.shape)} {v.dtype}" for k, v in inputs.items())
        raise ModelError(
            f"the model fails on {shapes}: {type(why).__name__}: {why}",
            where=user_code.user_line(why, model.folder) or "the model's forward",
            todo="correct the model, or the shapes, axes and values of 'inputs' in the project",
        ) from why  # fmt: skip
    wrote = any(not np.array_equal(tensors[n].numpy(), a, equal_nan=a.dtype.kind == "f") for n, a in inputs.items())
    named, tree = flatten(returned)
    names = output_names(list(named), list(inputs))
    return Answer(
        {name: to_array(name, value, model) for name, value in zip(names, named.values(), strict=True)}, tree, wrote
    )


def output_names(names: list[str], inputs: list[str]) -> list[str]:
    """The outputs' names, 'output.NAME' for one that is an input's: in an ONNX file no two values share a name."""
    found: list[str] = []
    for name in names:
        free = name if name not in inputs else f"{structure.ROOT_NAME}.{name}"
        while free in (*inputs, *found, *(other for other in names if other != name)):
            free += "_2"
        found.append(free)
    return found


def flatten(returned: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """What a forward returned as named tensors and the structure around them."""
    found = structure.flatten(returned, lambda value: isinstance(value, torch.Tensor))
    return dict(zip(found.names, found.tensors, strict=True)), found.structure


def to_array(name: str, value: torch.Tensor, model: Eager) -> np.ndarray:
    """An output as an array of its own; CaptureError for a dtype that artifacts do not hold."""
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES or value.dtype is torch.bfloat16 or value.is_sparse:
        raise CaptureError(
            f"the output '{name}' is {dtype}{' and sparse' if value.is_sparse else ''}, which artifacts do not hold",
            where=state.forward_line(model.module, model.folder) or "the model's forward",
            todo="convert it in forward, as in .float() or torch.view_as_real",
        )  # fmt: skip
    return np.array(value.detach().cpu().resolve_conj().resolve_neg().numpy(), copy=True, order="C")


def check_repeatable(model: Eager, inputs: dict[str, np.ndarray], others: dict[str, np.ndarray], differ: Any) -> float:
    """The largest difference between two equal calls (the model's own noise), by `differ(answer, answer)`.

    Raises CaptureError where the model keeps state between calls or draws random numbers: no captured file
    could do the same. `others` are inputs of the same sizes and other values, whose answer must not depend on the
    call before. `differ` gives (largest scaled difference, None or why the answers do not agree).
    """
    module = model.fresh()
    before = _state(module)
    first = call(model, inputs, module=module)
    changed = [name for name, value in _state(module).items() if before.get(name) != value]
    if changed:
        raise CaptureError(
            f"the model changes its own state while it runs: '{changed[0]}'",
            where=state.written(model.module, changed[0], model.folder) or _owner(model, changed[0]),
            todo="make the state an input and an output of forward, and keep it in the application",
        )  # fmt: skip
    noise, why = differ(first, call(model, inputs, module=module))
    if why:
        raise CaptureError(
            f"two calls with equal inputs give different outputs: {why}",
            where=_changed_attribute(model, inputs) or _random_call(model, inputs),
            todo="keep no state in the module's attributes, and draw no random numbers in eval mode",
        )  # fmt: skip
    _, why = differ(call(model, others), call(model, others, module=module))
    if why:
        raise CaptureError(
            f"the answer depends on the call before: {why}",
            where=_changed_attribute(model, inputs) or "the model's forward",
            todo="make the state an input and an output of forward, and keep it in the application",
        )  # fmt: skip
    _, why = differ(first, call(model, inputs, module=module, seed=1))
    if why:
        raise CaptureError(
            "the model draws random numbers in eval mode, so that equal inputs give different outputs",
            where=_random_call(model, inputs),
            todo="give a functional dropout `training=self.training`, or use nn.Dropout",
        )  # fmt: skip
    return noise


def _state(module: nn.Module) -> dict[str, str]:
    return {
        name: digest.of_bytes(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        if value.numel()
        else ""
        for name, value in (*module.named_parameters(), *module.named_buffers())
    }


def _changed_attribute(model: Eager, inputs: dict[str, np.ndarray]) -> str | None:
    """The user's line that writes an attribute of a module during a call, or the attribute, or None."""
    module = model.fresh()
    before = state.attributes(module)
    call(model, inputs, module=module)
    after = state.attributes(module)
    changed = [name for name in after if before.get(name) != after[name]]
    lines = [line for name in changed if (line := state.written(module, name, model.folder))]
    return next(iter(lines), f"the attribute '{changed[0]}'" if changed else None)


def _owner(model: Eager, name: str) -> str:
    path = name.rpartition(".")[0]
    owner = dict(model.module.named_modules())[path]
    kind = getattr(owner, "original_name", type(owner).__qualname__)  # TorchScript keeps the class's name
    return f"the module '{path}' ({kind})" if path else f"the class {kind}"


class _RandomCalls(TorchFunctionMode):
    """Notes the first call of a function that draws random numbers, with the user's line."""

    def __init__(self, folder: Path):
        super().__init__()
        self.folder = folder.resolve()
        self.found: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if self.found is None and name in _RANDOM and (kwargs or {}).get("training", True):
            self.found = f"{self._line()} ({name})"
        return func(*args, **(kwargs or {}))

    def _line(self) -> str:
        return user_code.calling_line(self.folder) or "the model's forward"


def _random_call(model: Eager, inputs: dict[str, np.ndarray]) -> str:
    with _RandomCalls(model.folder) as calls:
        call(model, inputs)
    return calls.found or "the model's forward"
