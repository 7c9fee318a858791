"""What training learned, loaded again; also into the same program with more layers left float.

A layer that is left float has no fake-quantizers, and those that stay are numbered anew. Each is found again by the
node that it observes, since both preparations start from the same graph.
"""

from __future__ import annotations

import torch

from edgeopt.program import ExportedGraph
from edgeopt.quant import findings
from edgeopt.quant import state as state_dict
from edgeopt.quant.prepare import prepare
from edgeopt.spec.profile import ResolvedQuantization


def partial_state(
    program: ExportedGraph,
    quantization: ResolvedQuantization,
    *,
    trained_with: tuple[str, ...],
    keep_float: tuple[str, ...],
) -> dict[str, torch.Tensor]:
    """`program.qat_state`, learned with `trained_with` left float, as the state of a preparation with `keep_float`.

    `keep_float` holds `trained_with`, so that every fake-quantizer of the result was trained.
    """
    whole = prepare(program, quantization, qat=True, keep_float=trained_with).module
    state_dict.load(whole, program.qat_state)
    part = prepare(program, quantization, qat=True, keep_float=keep_float).module
    learned = {_place(node): fake.state_dict() for node, fake in findings.observations(whole)}
    observed = {id(fake): node for node, fake in findings.observed(part)}
    state, given = part.state_dict(), whole.state_dict()
    state |= {name: given[name] for name, _ in part.named_parameters()}
    for name, module in part.named_modules(remove_duplicate=False):  # a shared one has several names
        if id(module) in observed:
            state |= {f"{name}.{key}": value for key, value in _at(observed[id(module)], learned).items()}
    return state


def _at(node: torch.fx.Node, learned: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What was learned at the node; a zero pad that was float when training ran has the range of what it pads."""
    while _place(node) not in learned:
        node = node.args[0]
    return learned[_place(node)]


def _place(node: torch.fx.Node) -> str:
    """What is observed: a stored tensor by its name, since its node is numbered anew, another value by its node."""
    return f"stored {node.target}" if node.op == "get_attr" else node.name
