"""A program walked operator by operator at given axis sizes: without data where it can be, else run.

torch's FlopCounterMode counts the contractions, with our formulas for those that it leaves out. Memory that tensors
share is seen as it is: a reshape that copies is told from one that does not. A TorchScript program has no graph of
aten operators: it is run on synthetic inputs, and what its run dispatches is noted.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from edgeopt.errors import StageError, first_line
from edgeopt.program import estimates, graph, node_words, parts
from edgeopt.program.operators import Builder, Kind, Value, Walk
from edgeopt.program.program import ExportedGraph, OnnxGraph, Program, ScriptGraph
from edgeopt.program.tracing import quiet

# torch notes there what it cannot run without data: it is run with data then
_LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.interpreter")


def walk(program: Program, sizes: Mapping[str, int] | None = None) -> Walk:
    """The program's operators at the axis sizes given; without, at each axis's `opt`.

    Raises StageError where the program runs neither on synthetic inputs of these sizes nor on a reference call.
    """
    at = dict(sizes) if sizes is not None else graph.sizes(program.signature, "opt")
    if isinstance(program, OnnxGraph):
        from edgeopt.program import onnx_walk

        return onnx_walk.walk(program.model, onnx_walk.shapes_at(program.signature.inputs, at), at)
    with quiet(*_LOGGERS), torch.no_grad():
        if isinstance(program, ExportedGraph):
            with contextlib.suppress(Exception):  # data-dependent sizes, an operator that knows real tensors only
                return _without_data(program, at)
        return _with_data(program, at)


def _without_data(program: ExportedGraph, sizes: dict[str, int]) -> Walk:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inputs = [
            torch.empty([sizes[n] if isinstance(n, str) else n for n in spec.shape], dtype=getattr(torch, spec.dtype))
            for spec in program.signature.inputs
        ]
        return _exported(program, inputs, sizes, mode.from_tensor)


def _with_data(program: ExportedGraph | ScriptGraph, sizes: dict[str, int]) -> Walk:
    """On synthetic inputs of these sizes; where the model does not take them, on its smallest reference call."""
    run = _exported if isinstance(program, ExportedGraph) else _script
    tried = [(graph.synthetic(program.signature, sizes, seed=0), sizes, ())]
    if program.reference:
        call = min(program.reference, key=lambda call: sum(array.size for array in call.inputs.values()))
        note = "the model does not take synthetic inputs: the figures are those of a reference call, at its sizes"
        tried.append((call.inputs, _sizes_of(program, call.inputs), (note,)))
    for inputs, at, notes in tried:
        try:
            return run(program, graph.to_tensors(program.signature, inputs), at, lambda tensor: tensor, notes)
        except Exception as why:
            failed = why
    raise StageError(
        f"the program does not run: {type(failed).__name__}: {first_line(failed)}",
        where="operators of the graph", todo="give `values` for its inputs in the project",
    ) from failed  # fmt: skip


def _sizes_of(program: ExportedGraph | ScriptGraph, inputs: dict[str, np.ndarray]) -> dict[str, int]:
    return {
        name: size
        for spec in program.signature.inputs
        for name, size in zip(spec.shape, inputs[spec.name].shape, strict=True)
        if isinstance(name, str)
    }


def _exported(
    program: ExportedGraph, inputs: list[torch.Tensor], sizes: dict[str, int],
    held: Callable[[torch.Tensor], torch.Tensor], notes: tuple[str, ...] = (),
) -> Walk:  # fmt: skip
    builder = Builder(sizes)
    with FlopCounterMode(display=False, custom_mapping=estimates.FORMULAS) as counter:
        walker = _Walker(program.module, builder, counter, held)
        results = walker.run(*inputs)
    notes = (*notes, *sorted(walker.notes))
    return _done(program, builder, walker.memory, inputs, tree_leaves(results), walker.made, notes)


def _script(
    program: ScriptGraph, inputs: list[torch.Tensor], sizes: dict[str, int],
    held: Callable[[torch.Tensor], torch.Tensor], notes: tuple[str, ...] = (),
) -> Walk:  # fmt: skip
    builder = Builder(sizes, by_memory=True)
    memory, results = _run_script(program.module, inputs, builder)
    return _done(program, builder, memory, inputs, tree_leaves(results), [], (*notes, _AS_RUN))


def _run_script(module: Any, inputs: list[torch.Tensor], builder: Builder) -> tuple[_Memory, Any]:
    memory = _Memory(builder)
    for tensor in inputs:
        memory.value(tensor)
    with FlopCounterMode(display=False, custom_mapping=estimates.FORMULAS) as counter, _Seen(builder, memory, counter):
        return memory, module(*inputs)


_AS_RUN = "a TorchScript program: the operators that its run dispatched, without the modules that they belong to"


def _done(program, builder: Builder, memory: _Memory, inputs, results, made: list[tuple[int, ...]], notes) -> Walk:
    given = {n: memory.value(t) for n, t in zip(program.signature.input_names, inputs, strict=True)}
    outputs = {}
    for index, (name, tensor) in enumerate(zip(program.signature.output_names, results, strict=True)):
        value = memory.value(tensor)
        outputs[name] = (value, made[index] if index < len(made) else builder.sources_of(value))
    return builder.done(given, outputs, notes)


class _Memory:
    """Tensors as values, their storages numbered. A number belongs to one storage, also after it was freed."""

    def __init__(self, builder: Builder):
        self._builder = builder
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self._stored: set[int] = set()  # storages of weights

    def knows(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._known

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count their memory as that of weights."""
        self._stored.update(self._number(tensor) for tensor in tensors)

    def weight(self, tensor: torch.Tensor, key: object) -> None:
        self._stored.add(self._number(tensor))
        self._builder.weight(key, _dtype(tensor), tensor.numel(), tensor.numel() * tensor.element_size())

    def value(self, tensor: torch.Tensor) -> Value:
        distinct = math.prod(n for n, step in zip(tensor.shape, _strides(tensor), strict=True) if step)
        size = distinct * tensor.element_size() if tensor.numel() else 0
        number = self._number(tensor)
        if number in self._stored:
            return Value(_dtype(tensor), tuple(tensor.shape), size, None)
        self._builder.storage(number, tensor.untyped_storage().nbytes())
        return Value(_dtype(tensor), tuple(tensor.shape), size, number)

    def _number(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:  # the weak reference keeps the address from being given again
            self._known[storage._cdata] = (StorageWeakRef(storage), len(self._known))
        return self._known[storage._cdata][1]


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout == torch.strided else (1,) * tensor.dim()


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class _Walker(Interpreter):
    """Runs a graph node by node and tells the builder of each."""

    def __init__(
        self, module: GraphModule, builder: Builder, counter: FlopCounterMode,
        held: Callable[[torch.Tensor], torch.Tensor],
    ):  # fmt: skip
        super().__init__(module)
        self.extra_traceback = False
        self.memory = _Memory(builder)
        self.notes: set[str] = set()
        self.made: list[tuple[int, ...]] = []  # the operators that make each output
        self._builder, self._counter, self._held = builder, counter, held
        self._needs: dict[Node, tuple[int, ...]] = {}  # node -> the operators whose results it carries

    def run_node(self, node: Node) -> Any:
        if node.op == "get_attr" and not node.users:  # a buffer that only training reads
            self._needs[node] = ()
            return None
        before = self._counter.get_total_flops()
        given = [self.memory.value(self.env[n]) for n in node.all_input_nodes if _is_tensor(self.env.get(n))]
        result = super().run_node(node)
        needs = {at for source in node.all_input_nodes for at in self._needs[source]}
        if node.op in ("call_function", "call_module", "call_method") and not node_words.is_item(node):
            needs = self._note(node, given, result, needs, self._counter.get_total_flops() - before)
        elif node.op == "output":
            self.made = [self._needs[n] if isinstance(n, Node) else () for n in tree_leaves(node.args[0])]
        self._needs[node] = tuple(needs)
        return result

    def _note(self, node: Node, given: list[Value], result: Any, needs: set[int], flops: int) -> set[int]:
        """Tell the builder of the node, where it makes tensors; the operators whose results it carries."""
        lists = [self.memory.value(t) for n in node.all_input_nodes for t in _listed(self.env.get(n))]
        tensors = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        if not tensors:
            return needs
        op, known = node_words.operator_name(node), node_words.is_known(node)
        if given and estimates.of_weight(op, stored=given[0].storage is None):
            self.memory.keep(tensors)
            made = [self.memory.value(t) for t in tensors]
            return {
                self._builder.add(op, node_words.path_of(node), given, made, flops=0, kind="constant", sources=needs)
            }
        made = [self.memory.value(t) for t in tensors]
        part = parts.part_of(node)
        if part is not None and not flops:
            flops = self._inside(part, [value.shape for value in given])
        kind, flops = _cost(op, known, [*given, *lists], made, flops, _writes(node.target), node.args)
        at = self._builder.add(
            op, node_words.path_of(node), [*given, *lists], made, flops=flops, kind=kind, sources=needs,
            writes=_writes(node.target), gathers=estimates.gathers(op),
        )  # fmt: skip
        return {at}

    def _inside(self, part: parts.Part, shapes: list[tuple[int, ...]]) -> int:
        """The FLOPs of one run of a scripted part on values made up, 0 where it fails; its weights are told."""
        draw = torch.Generator().manual_seed(0)
        inner = Builder({}, by_memory=True)
        with _disable_current_modes(), contextlib.suppress(Exception):
            tensors = [
                torch.rand(shape, generator=draw).to(getattr(torch, given.dtype))
                for shape, given in zip(shapes, part.inputs, strict=True)
            ]
            _run_script(part.module, tensors, inner)
        for number, tensor in enumerate((*part.module.parameters(), *part.module.buffers())):
            size = tensor.numel() * tensor.element_size()
            self._builder.weight((part.name, number), _dtype(tensor), tensor.numel(), size)
        self.notes.add("scripted parts: the FLOPs of one run on made-up values, since their loops depend on data")
        return sum(o.flops for o in inner.done({}, {}).operators)

    def get_attr(self, target: str, args: tuple, kwargs: dict) -> Any:
        stored = super().get_attr(target, args, kwargs)
        if not isinstance(stored, torch.Tensor):
            return stored
        held = self._held(stored)
        self.memory.weight(held, (stored.data_ptr(), tuple(stored.shape), stored.stride(), stored.dtype))
        return held


class _Seen(TorchDispatchMode):
    """Tells the builder of every operator that runs while it is on."""

    def __init__(self, builder: Builder, memory: _Memory, counter: FlopCounterMode):
        super().__init__()
        self._builder, self._memory, self._counter = builder, memory, counter

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [self._given(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        before = self._counter.get_total_flops()
        result = func(*args, **(kwargs or {}))
        made = [self._memory.value(t) for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        if made:
            op, known = func._schema.name.split("::")[1], func.namespace in node_words.KNOWN
            counted = self._counter.get_total_flops() - before
            kind, flops = _cost(op, known, given, made, counted, func._schema.is_mutable, args)
            self._builder.add(
                op, "", given, made, flops=flops, kind=kind, writes=func._schema.is_mutable,
                gathers=estimates.gathers(op),
            )  # fmt: skip
        return result

    def _given(self, tensor: torch.Tensor) -> Value:
        """An operator's argument: what no operator made and no caller gave is a weight."""
        if not self._memory.knows(tensor):
            self._memory.weight(tensor, (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype))
        return self._memory.value(tensor)


def _cost(
    op: str, known: bool, given: list[Value], made: list[Value], counted: int, writes: bool, args: tuple
) -> tuple[Kind, int]:
    if counted:
        return "contraction", counted
    shared = {value.storage for value in given}
    if given and not writes and all(value.storage in shared for value in made):
        return "view", 0
    if not known:
        return "unknown", 0
    read = max((math.prod(v.shape) for v in given), default=0)
    return "other", estimates.estimated(op, read, math.prod(made[0].shape), _window(args))


def _window(args: tuple) -> int:
    """The elements of a pooling window: the second argument of every pooling operator is its size by axis."""
    size = args[1] if len(args) > 1 else 1
    axes = len(size) if isinstance(size, list | tuple) else 0
    return math.prod(int(n) for n in size) if axes and all(isinstance(n, int) for n in size) else 1


def _writes(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _listed(value: Any) -> Iterable[torch.Tensor]:
    """Tensors in the list that a node gave, where another node takes the list as a whole."""
    return (t for t in tree_leaves(value) if _is_tensor(t)) if isinstance(value, list | tuple) else ()
