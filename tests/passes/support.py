"""Programs from modules, without a project: what the passes take."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from edgeopt.passes import PassRecord, optimize
from edgeopt.program import Call, ExportedGraph, Signature, graph
from edgeopt.spec.manifest import Axis, TensorSpec
from edgeopt.spec.profile import Profile, load_profile
from edgeopt.spec.profile_values import PassSetting

PROFILE: Profile = load_profile("x86-cpu")


def program(module: nn.Module, *shapes: tuple[int | str, ...], dtype: str = "float32") -> ExportedGraph:
    """The module in eval mode as a program with a batch axis N of 1 to 8 where a shape names it."""
    specs = tuple(TensorSpec(name=f"x{i}", dtype=dtype, shape=shape) for i, shape in enumerate(shapes))
    used = any("N" in shape for shape in shapes)
    axes = {"N": Axis(min=1, opt=3, max=8)} if used else {}
    values = {spec.name: (-2.0, 2.0) for spec in specs}
    signature = Signature(specs, (), axes, None, values)
    inputs = graph.synthetic(signature, graph.sizes(signature, "opt"), seed=1)
    module = _Flat(module.eval())
    with torch.no_grad():
        outputs = module(*graph.to_tensors(signature, inputs))
        exported = torch.export.export(
            module,
            tuple(graph.to_tensors(signature, graph.synthetic(signature, graph.sizes(signature, "example"), 0))),
            dynamic_shapes=(graph.dynamic_shapes(signature),),
            strict=False,
        )
    named = {f"y{i}": value.numpy() for i, value in enumerate(outputs)}
    out = tuple(TensorSpec(name=k, dtype=v.dtype.name, shape=v.shape) for k, v in named.items())
    return ExportedGraph(
        signature=Signature(specs, out, axes, None, values),
        reference=(Call(inputs, named),),
        module=exported.module(check_guards=False),
    )


class _Flat(nn.Module):
    def __init__(self, module: nn.Module):
        super().__init__()
        self.inner = module

    def forward(self, *tensors):
        returned = self.inner(*tensors)
        return returned if isinstance(returned, tuple) else (returned,)


def optimized(given: ExportedGraph, **switches: PassSetting) -> tuple[ExportedGraph, dict[str, PassRecord]]:
    result, records = optimize(given, PROFILE, switches)
    return result, {record.name: record for record in records}


def assert_equal(result: ExportedGraph, given: ExportedGraph, atol: float = 1e-5) -> None:
    """The result's outputs on fresh inputs of another size against those of the module before any pass."""
    axis_sizes = graph.sizes(given.signature, "max")
    for seed, sizes in ((5, graph.sizes(given.signature, "min")), (6, axis_sizes)):
        inputs = graph.synthetic(given.signature, sizes, seed)
        want, got = graph.run(given, inputs), graph.run(result, inputs)
        for name in want:
            np.testing.assert_allclose(got[name], want[name], atol=atol, rtol=1e-5, err_msg=name)


def targets(result: ExportedGraph) -> list[str]:
    return [str(node.target) for node in result.module.graph.nodes if node.op == "call_function"]
