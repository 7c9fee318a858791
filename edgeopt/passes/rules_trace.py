"""A rule's functions as graphs of aten operators, traced as torch.export traces a model.

A pattern is traced twice in sizes and numbers that all differ, so that what it always says (softmax over -1, an
epsilon) can be told from what follows from the tensors' sizes (a reshape, a square root of the width) and from the
numbers that the rule leaves open. Where a place is found, it is traced a third time on the very tensors of the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from edgeopt.errors import EdgeoptError, ProjectError, first_line
from edgeopt.passes import in_place, no_ops
from edgeopt.passes.changed import Context
from edgeopt.passes.rewrite import remove_dead
from edgeopt.passes.rules import FusionRule, TensorInput, name_of
from edgeopt.ports.user_code import user_line
from edgeopt.program.tracing import plain_attention, silenced

Scalars = Mapping[str, int | float]
_LEADING = ((5, 7), (9, 11))  # the dimensions that '...' stands for in the two traces


@dataclass(frozen=True)
class Traced:
    """A function as a graph: its inputs by name, its operators that give tensors, in order, and its outputs."""

    module: GraphModule
    inputs: dict[str, Node]
    operators: tuple[Node, ...]
    outputs: tuple[Node, ...]


def example_sizes(rule: FusionRule, which: int) -> dict[str, int]:
    """The sizes of the named dimensions in the first (0) or second (1) trace."""
    return {name: pair[which] for name, pair in rule.sizes.items()}


def example_shape(given: TensorInput, sizes: Mapping[str, int], leading: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an input where named dimensions have `sizes` and '...' stands for `leading`."""
    shape: list[int] = []
    for size in given.shape:
        shape += leading if size is ... else [sizes[size] if isinstance(size, str) else size]
    return tuple(shape)


def example_scalars(rule: FusionRule, which: int) -> dict[str, int | float]:
    return {name: given.examples[which] for name, given in rule.scalars.items()}


def on_examples(function: Callable[..., Any], rule: FusionRule, which: int, role: str) -> Traced:
    """The function traced at the rule's example sizes; `role` is 'pattern' or 'replacement'.

    Raises ProjectError with the user's file and line where the function fails or returns no tensors.
    """
    sizes, mode = example_sizes(rule, which), FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        tensors = {
            name: torch.empty(example_shape(given, sizes, _LEADING[which]), dtype=given.dtype or torch.float32)
            for name, given in rule.tensors.items()
        }
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in tensors.items())
    with user_errors(function, f"the {role}", f"fails on {shapes}"):
        return trace(function, tensors, example_scalars(rule, which), mode, clean=role == "pattern")


def trace(
    function: Callable[..., Any],
    tensors: Mapping[str, torch.Tensor],
    scalars: Scalars,
    mode: FakeTensorMode,
    *,
    clean: bool,
) -> Traced:
    """The function on fake tensors of `mode`; whatever it raises. No guard is added to the mode's sizes.

    `clean` takes out in-place operators and no-ops, as they are taken out of the model before rules run.
    """

    def called(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        returned = function(**dict(zip(tensors, values, strict=True)), **scalars)
        outputs = tuple(returned) if isinstance(returned, list | tuple) else (returned,)
        for value in outputs or (None,):
            if not isinstance(value, torch.Tensor):
                raise NotTensors(f"it returns {type(value).__name__}, where tensors are wanted")
        return outputs

    unguarded = mode.shape_env.suppress_guards() if mode.shape_env else contextlib.nullcontext()
    with torch.no_grad(), mode, unguarded, plain_attention(), silenced("torch._subclasses.fake_tensor"):
        own = [value.detach() for value in tensors.values()]  # one tensor may be two inputs, and each is traced
        module = make_fx(called, tracing_mode="real", pre_dispatch=True)(*own)
    if clean:
        context = Context(module, None)  # type: ignore[arg-type]  # neither pass reads the profile
        in_place.run(context)
        no_ops.run(context)
    remove_dead(module.graph)
    nodes = list(module.graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    operators = tuple(n for n in nodes if n.op == "call_function" and gives_tensors(n))
    return Traced(
        module, dict(zip(tensors, placeholders, strict=True)), operators, tuple(module.graph.output_node().args[0])
    )


class NotTensors(TypeError):
    """A function of the user returned something else."""


def gives_tensors(node: Node) -> bool:
    """Whether the node's value is a tensor or several, and not a size."""
    return isinstance(node.meta.get("val"), torch.Tensor | list | tuple)


def arguments(node: Node) -> list[tuple[str, Any]]:
    """The node's arguments by name, positional or not, the defaults that it leaves out filled in."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return [("", value) for value in node.args]
    named = enumerate(node.target._schema.arguments)
    return [
        (a.name, node.args[i] if i < len(node.args) else node.kwargs.get(a.name, a.default_value)) for i, a in named
    ]


@contextlib.contextmanager
def user_errors(function: Callable[..., Any], what: str, failed: str) -> Iterator[None]:
    """An exception of the user's function becomes a ProjectError that names their file and line."""
    try:
        yield
    except EdgeoptError:
        raise
    except Exception as why:
        message = str(why) if isinstance(why, NotTensors) else f"it {failed}: {type(why).__name__}: {first_line(why)}"
        raise ProjectError(
            f"{what} '{name_of(function)}' is not usable: {message}",
            where=line_of(function, why),
            todo=_todo(why),
        ) from why


def _todo(why: Exception) -> str:
    if "_OpNamespace" in str(why):
        return "list the file that defines the operator under 'op_libraries' in the project"
    return "correct it there; where it takes no such sizes, give the rule others: sizes={'name': (8, 16)}"


def line_of(function: Callable[..., Any], why: BaseException | None = None) -> str:
    """'file.py, line N' of the user's own line that raised `why`, else of where the function begins."""
    code = getattr(function, "__code__", None)
    if code is None:
        return name_of(function)
    file = Path(code.co_filename)
    found = user_line(why, file.parent) if why is not None and file.is_absolute() else None
    return found or f"{file.name}, line {code.co_firstlineno}"
