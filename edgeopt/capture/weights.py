"""Weights of a file into a module: only tensors are ever read, and every key must fit."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edgeopt.errors import ModelError, first_line
from edgeopt.spec.values import did_you_mean

_WRAPPERS = ("state_dict", "model_state_dict", "model", "net", "weights")  # keys that training scripts nest it under
_PREFIXES = ("module.", "_orig_mod.")
_SHOWN = 3


def load_weights(module: nn.Module, path: Path) -> None:
    """Load the state_dict of `path` into `module`.

    Raises ModelError where the file is no state_dict, or has missing, unexpected, mis-shaped or non-finite entries.
    """
    state = _without_wrapper(read_state_dict(path), module)
    _check_fit(module, state, path)
    module.load_state_dict(state, strict=False)  # the keys were checked above, with better messages


def read_state_dict(path: Path) -> dict[str, torch.Tensor]:
    """The tensors by name in a `.safetensors` file or in one that `torch.save` wrote.

    Nothing but tensors and plain containers is unpickled (`weights_only=True`); a state_dict nested under one of
    the usual keys is found. Raises ModelError.
    """
    if not path.is_file():
        raise ModelError("there is no weights file", where=f"key 'weights': {path}", todo="correct the path")
    data = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    return _unwrapped(data, path)


def _read_safetensors(path: Path) -> Any:
    try:
        from safetensors.torch import load_file
    except ModuleNotFoundError:
        raise ModelError(
            "reading .safetensors needs the package safetensors", where=str(path), todo="pip install safetensors"
        ) from None
    try:
        return load_file(path, device="cpu")
    except Exception as why:
        raise _unreadable(path, why) from why


def _read_torch(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of old pickle protocols, which load or are refused below
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as why:
        raise ModelError(
            "the weights file is not a state_dict: it is damaged, or holds Python objects, which are never loaded",
            where=str(path), todo="write it again with torch.save(model.state_dict(), path)",
        ) from why  # fmt: skip
    except Exception as why:
        raise _unreadable(path, why) from why


def _unreadable(path: Path, why: Exception) -> ModelError:
    return ModelError(
        f"the weights file cannot be read: {first_line(why)}", where=str(path),
        todo="copy it again, or write it with torch.save(model.state_dict(), path)",
    )  # fmt: skip


def _unwrapped(data: Any, path: Path) -> dict[str, torch.Tensor]:
    if _is_state_dict(data):
        return dict(data)
    if isinstance(data, dict):
        for key in _WRAPPERS:
            if _is_state_dict(data.get(key)):
                return dict(data[key])
    held = f"a dict with the keys {list(data)[:5]}" if isinstance(data, dict) else f"a {type(data).__name__}"
    raise ModelError(
        f"the weights file is not a state_dict: it holds {held}", where=str(path),
        todo="write it with torch.save(model.state_dict(), path)",
    )  # fmt: skip


def _is_state_dict(value: Any) -> bool:
    return (
        isinstance(value, dict) and bool(value)
        and all(isinstance(k, str) for k in value)
        and all(isinstance(v, torch.Tensor) for v in value.values())
    )  # fmt: skip


def _without_wrapper(state: dict[str, torch.Tensor], module: nn.Module) -> dict[str, torch.Tensor]:
    """Without the prefix that DataParallel or torch.compile gives every key, where that makes more keys fit."""
    known = module.state_dict().keys()
    for prefix in _PREFIXES:
        if all(key.startswith(prefix) for key in state):
            stripped = {key.removeprefix(prefix): value for key, value in state.items()}
            if len(stripped.keys() & known) > len(state.keys() & known):
                state = stripped
    return state


def _check_fit(module: nn.Module, state: dict[str, torch.Tensor], path: Path) -> None:
    expected = module.state_dict()
    # older files lack BatchNorm's counter, which inference does not read
    missing = [k for k in expected if k not in state and not k.endswith("num_batches_tracked")]
    unexpected = [k for k in state if k not in expected]
    shapes = [
        f"'{k}' is {list(state[k].shape)} in the file and {list(expected[k].shape)} in the model"
        for k in expected
        if k in state and state[k].shape != expected[k].shape
    ]
    problems = [
        *_shown("missing from the file", [f"'{k}'" for k in missing]),
        *_shown("not in the model", [_with_hint(k, missing) for k in unexpected]),
        *_shown("of another shape", shapes),
    ]
    if problems:
        raise ModelError(
            "the weights do not fit the model:\n" + "\n".join(f"  - {p}" for p in problems), where=str(path),
            todo="check that the factory builds the model that these weights were trained in",
        )  # fmt: skip
    bad = [f"'{k}'" for k, v in state.items() if v.is_floating_point() and not torch.isfinite(v).all()]
    if bad:
        raise ModelError(
            f"the weights hold NaN or infinity: {_some(bad)}", where=str(path),
            todo="take a checkpoint from before the training diverged",
        )  # fmt: skip


def _with_hint(key: str, missing: list[str]) -> str:
    near = did_you_mean(key, missing)
    return f"'{key}' (did you mean '{near}'?)" if near else f"'{key}'"


def _shown(label: str, items: list[str]) -> list[str]:
    return [f"{label}: {_some(items)}"] if items else []


def _some(items: list[str]) -> str:
    rest = len(items) - _SHOWN
    return ", ".join(items[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
