"""Running and re-exporting an ExportedGraph: the few things that every room does with one."""

from __future__ import annotations

import copy
import math
import operator
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule, Node

from edgeopt.program import reexport
from edgeopt.program.program import ExportedGraph, ScriptGraph, Signature


def copied(module: GraphModule) -> GraphModule:
    """A copy of the module with tensors of its own, of which no two that the graph reads share memory.

    A weight that the model has under two names is two: what scales or rounds one for its layer leaves the other.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own pytree warns when a graph is copied
        made = copy.deepcopy(module)
    seen: set[int] = set()
    for node in made.graph.nodes:
        value = _read_only(made, node)
        if value is not None and value.untyped_storage().data_ptr() in seen:
            owner, _, leaf = str(node.target).rpartition(".")
            own = value.detach().clone()
            own = torch.nn.Parameter(own, value.requires_grad) if isinstance(value, torch.nn.Parameter) else own
            setattr(made.get_submodule(owner), leaf, own)
        elif value is not None:
            seen.add(value.untyped_storage().data_ptr())
    return made


def _read_only(module: GraphModule, node: Node) -> torch.Tensor | None:
    """The strided tensor that the node reads and nothing writes to, else None."""
    if node.op != "get_attr" or not node.users:
        return None
    value = operator.attrgetter(str(node.target))(module)
    schemas = [getattr(user.target, "_schema", None) for user in node.users]
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or not value.numel():
        return None
    return None if any(getattr(schema, "is_mutable", False) for schema in schemas) else value


def shared(module: GraphModule) -> GraphModule:
    """A copy of the graph over the same tensors: passes replace tensors, and never write to them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        again = GraphModule(module, copy.deepcopy(module.graph))
    again.meta = dict(module.meta)
    return again


def last_uses(nodes: Iterable[Node]) -> dict[Node, list[Node]]:
    """Node -> the values that it is the last to read, which may go after it."""
    seen: set[Node] = set()
    out: dict[Node, list[Node]] = {}
    for node in reversed(list(nodes)):
        for used in node.all_input_nodes:
            if used not in seen:
                seen.add(used)
                out.setdefault(node, []).append(used)
    return out


def remove_unused(module: GraphModule) -> int:
    """Drop the parameters and buffers that no node reads; how many tensors went."""
    used = {node.target for node in module.graph.nodes if node.op == "get_attr"}
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    unused = [name for name, _ in named if name not in used]
    for name in unused:
        path, _, leaf = name.rpartition(".")
        delattr(module.get_submodule(path), leaf)
    return len(unused)


def to_tensors(signature: Signature, inputs: dict[str, np.ndarray]) -> list[torch.Tensor]:
    """The named arrays as positional tensors, copied, so that a model which writes to its inputs changes nothing."""
    return [torch.from_numpy(np.array(inputs[name], copy=True, order="C")) for name in signature.input_names]


def to_arrays(signature: Signature, outputs: Any) -> dict[str, np.ndarray]:
    """A flat tuple of tensors as named arrays."""
    return {
        name: value.detach().cpu().resolve_conj().resolve_neg().contiguous().numpy()
        for name, value in zip(signature.output_names, outputs, strict=True)
    }


def run(program: ExportedGraph, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The program's outputs for named inputs, without gradients."""
    with torch.no_grad():
        return to_arrays(program.signature, program.module(*to_tensors(program.signature, inputs)))


def run_script(program: ScriptGraph, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A TorchScript program's outputs for named inputs, without gradients."""
    with torch.no_grad():
        outputs = program.module(*to_tensors(program.signature, inputs))
    return to_arrays(program.signature, outputs if isinstance(outputs, tuple) else (outputs,))


def dynamic_shapes(signature: Signature) -> tuple[dict[int, Any], ...]:
    """`torch.export`'s dynamic shapes, one entry a positional input, from the signature's named axes."""
    dims = {
        name: torch.export.Dim(name, min=axis.min, max=axis.max)
        for name, axis in signature.axes.items()
        if axis.min != axis.max
    }
    return tuple(
        {i: dims[size] for i, size in enumerate(spec.shape) if isinstance(size, str) and size in dims}
        for spec in signature.inputs
    )


def sizes(signature: Signature, which: str) -> dict[str, int]:
    """Axis sizes for synthetic inputs: `which` is 'min', 'opt', 'max', or 'example'.

    'example' avoids 0 and 1, which torch.export specialises, and gives different axes different sizes where the
    ranges allow it, so that two axes are not taken for one.
    """
    if which != "example":
        return {name: getattr(axis, which) for name, axis in signature.axes.items()}
    chosen: dict[str, int] = {}
    for name, axis in signature.axes.items():
        size = max(2, axis.opt) if axis.max >= 2 else axis.max
        step = math.gcd(axis.min, axis.opt, axis.max)  # a model may take multiples of it only
        while size in chosen.values() and size + step <= axis.max:
            size += step
        chosen[name] = size
    return chosen


def synthetic(signature: Signature, axis_sizes: dict[str, int], seed: int) -> dict[str, np.ndarray]:
    """Random named inputs of the given axis sizes, within each input's value range, the same for the same seed."""
    rng = np.random.default_rng(seed)
    out = {}
    for spec in signature.inputs:
        shape = tuple(axis_sizes[s] if isinstance(s, str) else s for s in spec.shape)
        low, high = signature.values.get(spec.name, (0.0, 1.0))
        if spec.dtype == "bool":
            out[spec.name] = rng.random(shape) < 0.5
        elif spec.dtype.startswith("float"):
            out[spec.name] = rng.uniform(low, high, shape).astype(spec.dtype)
        else:
            out[spec.name] = rng.integers(int(low), int(high), shape, endpoint=True).astype(spec.dtype)
    return {name: np.asarray(value) for name, value in out.items()}  # numpy draws a scalar for the shape ()


def export(program: ExportedGraph) -> torch.export.ExportedProgram:
    """The program's module exported again, with its dynamic axes: what writers of files take. Made once a program."""
    if not program.exported:
        program.exported.append(_exported(program))
    return program.exported[0]


def _exported(program: ExportedGraph) -> torch.export.ExportedProgram:
    signature = program.signature

    def at(which: str) -> list[torch.Tensor]:
        return to_tensors(signature, synthetic(signature, sizes(signature, which), seed=0))

    example, shapes = at("example"), dynamic_shapes(signature)
    try:
        with torch.no_grad():
            return torch.export.export(program.module, tuple(example), dynamic_shapes=shapes, strict=False)
    except Exception:  # torch's own UserError, or what its shape analysis raises
        made = reexport.deferred(program.module, example, shapes, [at("min"), at("opt")])
        if made is None:
            raise
        return made
