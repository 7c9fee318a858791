"""Parts: modules of the user's that stay TorchScript inside an exported graph, each as one operator.

torch.export cannot take control flow that depends on data, and freezes the time axis of recurrent layers. Such a
module is scripted, and the graph calls it as the operator `edgeopt_parts::part_DIGEST`: pure, its outputs fresh, its
weights inside. The digest is that of the part's path, code, weights and sizes, so that a name means the same part in
every program and process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from edgeopt.errors import ModelError

NAMESPACE = "edgeopt_parts"


@dataclass(frozen=True)
class Size:
    """`times * (size of the axis 'axis' of the input 'input') + plus`; a constant where `times` is 0."""

    input: int
    axis: int
    times: int
    plus: int

    def of(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The size, symbolic where the tensor's is."""
        return self.times * tensors[self.input].shape[self.axis] + self.plus if self.times else self.plus


@dataclass(frozen=True)
class Input:
    """A tensor that a part takes: None in `shape` is a size that varies between calls."""

    dtype: str
    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class Output:
    """A tensor that a part gives."""

    dtype: str
    shape: tuple[Size, ...]


@dataclass(frozen=True)
class Part:
    """A scripted module of positional tensors to a flat tuple of fresh tensors, in eval mode on the CPU.

    `name` is that of its operator, `label` the module's path in the user's model. `examples` are inputs of some
    sizes, as the model gave them.
    """

    name: str
    label: str
    module: torch.jit.ScriptModule
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    examples: tuple[tuple[torch.Tensor, ...], ...]

    @property
    def size_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.module.parameters(), *self.module.buffers()))


# torch's table of operators is one for the process; this is what it cannot be asked for. Entries never change, since
# a name is the digest of what it names, and stay, since graphs may outlive the program that they came with.
_REGISTERED: dict[str, tuple[Part, torch.library.Library]] = {}


def register(part: Part) -> torch._ops.OpOverload:
    """The part's operator, made where the process does not have it yet.

    It knows sizes without data (export, shape propagation), any strides, float64 in place of float32, and gradients
    for its inputs; its weights get none.
    """
    if part.name not in _REGISTERED:
        library = torch.library.Library(NAMESPACE, "FRAGMENT")
        taken = ", ".join(f"Tensor x{i}" for i in range(len(part.inputs)))
        given = ", ".join("Tensor" for _ in part.outputs)
        library.define(f"{part.name}({taken}) -> {given if len(part.outputs) == 1 else f'({given})'}")
        run = _runner(part)
        library.impl(part.name, _kernel(part, run), "CompositeExplicitAutograd")
        name = f"{NAMESPACE}::{part.name}"
        torch.library.register_fake(name, _fake(part), lib=library)
        torch.library.register_autograd(name, _backward(run), setup_context=_keep_inputs, lib=library)
        _REGISTERED[part.name] = (part, library)
    return getattr(getattr(torch.ops, NAMESPACE), part.name).default


def part_of(node: Node) -> Part | None:
    """The part that a node calls, or None."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or target.namespace != NAMESPACE:
        return None
    return _REGISTERED[target._schema.name.split("::")[1]][0]


def parts_of(module: GraphModule) -> tuple[Part, ...]:
    """The parts of the graph and of the graphs in it, each once, in the order of their first call."""
    found = {
        part.name: part
        for inner in module.modules()
        if isinstance(inner, GraphModule)
        for node in inner.graph.nodes
        if (part := part_of(node)) is not None
    }
    return tuple(found.values())


def size_bytes(module: GraphModule) -> int:
    """The bytes of the weights inside the graph's parts, which are none of the graph's own tensors."""
    return sum(part.size_bytes for part in parts_of(module))


def variants(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
    """The tensors and others of their shapes, so that a branch that depends on values goes both ways.

    Integers stay: they may be indices or lengths.
    """
    draw = torch.Generator().manual_seed(0)
    floats: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        torch.clone, torch.neg, torch.zeros_like, torch.ones_like,
        lambda t: torch.randn(t.shape, generator=draw, dtype=torch.float64).to(t.dtype) * 2,
    )  # fmt: skip
    flags = (torch.clone, torch.logical_not, torch.zeros_like, torch.ones_like, torch.clone)
    for of_float, of_flag in zip(floats, flags, strict=True):
        yield tuple(
            of_float(t) if t.is_floating_point() else of_flag(t) if t.dtype is torch.bool else t.clone()
            for t in tensors
        )


Run = Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]


def _runner(part: Part) -> Run:
    """The module as a function; for float64 where it takes float32 a copy of it in float64, made once."""
    wide: list[torch.jit.ScriptModule] = []

    def run(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if not _widened(part, tensors):
            return part.module(*tensors)
        if not wide:
            wide.append(_in_float64(part.module))
        return wide[0](*tensors)

    return run


def _in_float64(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    module = copy.deepcopy(module).double()
    for layer in module.modules():
        if hasattr(layer, "_flat_weights_names"):  # torch's recurrent layers compute with a list of their weights
            layer._flat_weights = [getattr(layer, name) for name in layer._flat_weights_names]
    return module


def _widened(part: Part, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether every float32 input comes as float64; ModelError for other dtypes than the part takes."""
    pairs = [
        (str(t.dtype).removeprefix("torch."), wanted.dtype) for t, wanted in zip(tensors, part.inputs, strict=True)
    ]
    wide = ("float64", "float32") in pairs
    for got, wanted in pairs:
        if got != ("float64" if wide and wanted == "float32" else wanted):
            raise ModelError(
                f"the part '{part.label}' takes {wanted} and was given {got}", where="a graph with scripted parts",
                todo="convert before it and after it: a part keeps the types that it was captured with",
            )  # fmt: skip
    return wide


def _kernel(part: Part, run: Run) -> Callable[..., Any]:
    def kernel(*tensors: torch.Tensor) -> Any:
        outputs = run(tensors)
        for got, wanted in zip(outputs, part.outputs, strict=True):
            expected = [size.of(tensors) for size in wanted.shape]
            if list(got.shape) != expected:
                raise ModelError(
                    f"the part '{part.label}' gives a tensor of {list(got.shape)} for inputs of "
                    f"{[list(t.shape) for t in tensors]}, where {expected} was found when it was captured",
                    where="a graph with scripted parts", todo="declare the axes' whole range, or script the model",
                )  # fmt: skip
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return kernel


def _fake(part: Part) -> Callable[..., Any]:
    def fake(*tensors: torch.Tensor) -> Any:
        wide = _widened(part, tensors)
        outputs = tuple(
            tensors[0].new_empty(
                [size.of(tensors) for size in output.shape],
                dtype=torch.float64 if wide and output.dtype == "float32" else getattr(torch, output.dtype),
            )
            for output in part.outputs
        )
        return outputs[0] if len(outputs) == 1 else outputs

    return fake


def _keep_inputs(ctx: Any, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(run: Run) -> Callable[..., Any]:
    """Gradients of the inputs: the part runs again, with gradients."""

    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        inputs = [t.detach().requires_grad_(t.is_floating_point()) for t in ctx.saved_tensors]
        with torch.enable_grad():
            outputs = run(inputs)
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
        wanted = [t for t in inputs if t.requires_grad]
        if not pairs or not wanted:
            return (None,) * len(inputs) if len(inputs) > 1 else None
        found = torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        by_input = dict(zip(map(id, wanted), found, strict=True))
        given = tuple(by_input.get(id(t)) for t in inputs)
        return given if len(given) > 1 else given[0]

    return backward
