"""The user's module from the factory that a project names."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from edgeopt.capture.weights import load_weights
from edgeopt.errors import ModelError
from edgeopt.ports import user_code
from edgeopt.spec.project import Project


def load_module(project: Project) -> nn.Module:
    """A deep copy of what the user's factory returns, in eval mode on the CPU, with the project's weights.

    The copy is the only thing that is ever changed or called: a factory may return a module that others hold.
    Raises ModelError (with the user's file and line) and ProjectError.
    """
    made = user_code.load_attribute(project.model, project.folder, key="model", error=ModelError)
    if not isinstance(made, nn.Module):
        if not callable(made):
            raise _no_module(project, made)
        made = user_code.call(made, key="model", base=project.folder)
    if not isinstance(made, nn.Module):
        raise _no_module(project, made)
    module = _copied(_unwrapped(made), project)
    if project.weights is not None:
        load_weights(module, project.path(project.weights))
    return module.eval()


def _unwrapped(made: nn.Module) -> nn.Module:
    """The user's own module inside what torch.compile and the data-parallel wrappers made of it."""
    while True:
        if isinstance(made, nn.DataParallel | nn.parallel.DistributedDataParallel):
            made = made.module
        elif isinstance(getattr(made, "_orig_mod", None), nn.Module):
            made = made._orig_mod
        else:
            return made


def _no_module(project: Project, value: Any) -> ModelError:
    return ModelError(
        f"'{project.model}' gives a {type(value).__name__}, not a torch.nn.Module", where="key 'model'",
        todo="name a function without arguments that returns the model, or the model's class",
    )  # fmt: skip


def _cycle(module: nn.Module, path: str = "", above: tuple[nn.Module, ...] = ()) -> str | None:
    """The path of a module that holds itself, or None."""
    if any(module is one for one in above):
        return path
    below = (_cycle(child, f"{path}.{name}".strip("."), (*above, module)) for name, child in module.named_children())
    return next((found for found in below if found is not None), None)


def _copied(made: nn.Module, project: Project) -> nn.Module:
    where = f"key 'model': {project.model}"
    cycle = _cycle(made)
    if cycle is not None:
        raise ModelError(
            f"the module '{cycle}' is one that holds it: such a model has no end", where=where,
            todo="keep the reference out of the submodules, as in object.__setattr__(child, 'parent', self)",
        )  # fmt: skip
    for name, value in (*made.named_parameters(), *made.named_buffers()):
        if isinstance(value, nn.parameter.UninitializedTensorMixin) or value.is_meta:
            raise ModelError(
                f"'{name}' has no values: the module is lazy or on the meta device", where=where,
                todo="give it sizes, or call it once in the factory",
            )  # fmt: skip
    # hooks such as weight_norm keep a computed weight, which deepcopy refuses: its value is copied instead
    computed = [t for part in made.modules() for t in vars(part).values() if isinstance(t, torch.Tensor)]
    memo = {id(t): t.detach().clone() for t in computed if not t.is_leaf}
    try:
        module = copy.deepcopy(made, memo)
    except Exception as why:
        raise ModelError(
            f"the model cannot be copied: {type(why).__name__}: {why}", where=where,
            todo="keep open files, generators and non-leaf tensors out of the module's attributes",
        ) from why  # fmt: skip
    return module.to(torch.device("cpu"))
