"""The user's own operators before training: each that weights are trained through must have a gradient.

torch trains on without one: for an operator from torch.library.Library it gives a warning at most, and the weights
before it stay as they are.
"""

from __future__ import annotations

import ast
import functools
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from edgeopt.errors import StageError
from edgeopt.ports import user_code
from edgeopt.program import ExportedGraph, graph
from edgeopt.program.nodes import user_line
from edgeopt.program.own_operators import is_own


def require(program: ExportedGraph) -> None:
    """StageError for an operator of the user's own that stands after a weight and has no gradient; it is tried once."""
    wanted = _after_weights(program.module)
    if not wanted:
        return
    inputs = graph.synthetic(program.signature, graph.sizes(program.signature, "example"), seed=0)
    with torch.no_grad():
        _Prober(program.module, wanted).run(*graph.to_tensors(program.signature, inputs))


def _after_weights(module: GraphModule) -> set[Node]:
    """The user's operators whose arguments depend on a trained weight."""
    weights = dict(module.named_parameters(remove_duplicate=False))  # a tied weight has two names
    after: set[Node] = set()
    for node in module.graph.nodes:
        if node.op == "get_attr" and node.target in weights or any(source in after for source in node.all_input_nodes):
            after.add(node)
    return {node for node in after if node.op == "call_function" and is_own(node.target)}


def lost(module: GraphModule, folder: Path) -> tuple[str, ...]:
    """A warning for each autograd.Function of the user's whose own `backward` the captured graph does not have.

    torch.export follows the operators inside its `forward`; gradients then are those of these operators. It is told
    by the lines of the user's code below `folder` that made the nodes.
    """
    found: dict[tuple[str, str], None] = {}
    for node in module.graph.nodes:
        for file, line in re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or ""):
            if user_code.place(file, int(line), folder) and (name := _function_at(file, int(line))):
                found[Path(file).name, name] = None
    return tuple(
        f"{file}: {name} has a backward of its own, which a captured graph does not keep: training used the gradients "
        "of the operators in its forward; register the operator with torch.library to keep it"
        for file, name in found
    )


@functools.lru_cache(maxsize=4096)
def _function_at(file: str, line: int) -> str | None:
    """The class around that line, where it is an autograd.Function with a backward."""
    try:
        tree = ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.lineno <= line <= (node.end_lineno or 0):
            function = any(ast.unparse(base).split(".")[-1] == "Function" for base in node.bases)
            methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            if function and "backward" in methods:
                return node.name
    return None


class _Prober(Interpreter):
    """Runs the graph, and at each wanted node its operator once more with gradients."""

    def __init__(self, module: GraphModule, wanted: set[Node]):
        super().__init__(module)
        self._wanted = wanted

    def run_node(self, n: Node) -> Any:
        if n in self._wanted:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            reason = _reason_against(n.target, args, kwargs)
            if reason:
                name = n.target._schema.name
                raise StageError(
                    f"the operator {name} {reason}, and qat trains the weights before it",
                    where=user_line(n) or f"node '{n.name}'",
                    todo=f'register one: torch.library.register_autograd("{name}", backward, setup_context=...), or '
                    "leave 'train' and 'loss' out of the project",
                )  # fmt: skip
        return super().run_node(n)


def _reason_against(target: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> str | None:
    """Why no gradient goes through the operator, or None; also where its results are no floats, which have none."""
    args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, _with_gradient, (args, kwargs))
    given = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if _is_float(t)]
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            results = [t for t in torch.utils._pytree.tree_leaves(target(*args, **kwargs)) if _is_float(t)]
            total = sum(value.sum() for value in results if value.requires_grad)
            found = torch.autograd.grad(total, given, allow_unused=True) if isinstance(total, torch.Tensor) else []
    except Exception as why:  # the gradient is the user's code
        text = str(why)
        missing = "no autograd formula" in text or "autograd kernel was not registered" in text
        return "has no gradient" if missing else f"has a gradient that fails ({type(why).__name__}: {text[:200]})"
    return "has no gradient" if results and all(gradient is None for gradient in found) else None


def _with_gradient(value: torch.Tensor) -> torch.Tensor:
    copy = value.detach().clone()
    return copy.requires_grad_(True) if copy.is_floating_point() else copy


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
