"""The operator `edgeopt::foreign`: a node of a foreign ONNX domain in a graph, beside what it computes.

    foreign(Tensor[] outputs, Tensor[] inputs, str node) -> Tensor[]

gives `outputs`, which torch computes; an ONNX file holds the nodes of `node` on `inputs` in their place. `node` is the
text of an ONNX GraphProto whose inputs and outputs are the tensors in order. The passes see one opaque operator, so
that both stay what they are; TorchScript and every other reader take the outputs.
"""

from __future__ import annotations

import torch
from torch.fx import Node

SCHEMA = "(Tensor[] outputs, Tensor[] inputs, str node) -> Tensor[]"
_NAME = "edgeopt::foreign"


def operator() -> torch._ops.OpOverload:
    """The operator, defined at the first call."""
    if not hasattr(torch.ops.edgeopt, "foreign"):
        torch.library.define(_NAME, SCHEMA)
        torch.library.impl(_NAME, "CompositeExplicitAutograd", _outputs)
        torch.library.register_fake(_NAME, _outputs)
        torch.library.register_autograd(_NAME, _gradients)
    return torch.ops.edgeopt.foreign.default


def is_foreign(node: Node) -> bool:
    return node.op == "call_function" and str(node.target) == "edgeopt.foreign.default"


def _outputs(outputs: list[torch.Tensor], inputs: list[torch.Tensor], node: str) -> list[torch.Tensor]:
    return [value.clone() for value in outputs]


def _gradients(ctx, grads: list[torch.Tensor]) -> tuple:
    """The gradient goes through what torch computes."""
    return grads, None, None
