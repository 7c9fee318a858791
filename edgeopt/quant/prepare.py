"""A program made ready for calibration or training: observers or fake-quantizers where the profile wants integers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch._subclasses import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from edgeopt.program import ExportedGraph, graph
from edgeopt.quant import annotations, batch_norms, even_weights, frames, pt2e, rewrites, scheme
from edgeopt.quant.quantizer import PlacementQuantizer
from edgeopt.quant.report import QuantReport, report_of
from edgeopt.spec.profile import ResolvedQuantization


@dataclass(frozen=True)
class Prepared:
    """`module` is a copy of the program's with observers (`qat` false) or fake-quantizers (`qat` true)."""

    program: ExportedGraph
    quantization: ResolvedQuantization
    module: torch.fx.GraphModule
    report: QuantReport
    qat: bool


def prepare(
    program: ExportedGraph,
    quantization: ResolvedQuantization,
    *,
    qat: bool = False,
    keep_float: tuple[str, ...] = (),
) -> Prepared:
    """Observers or fake-quantizers at the edges that the placement's rules choose.

    Deterministic: the same program and settings give the same names, so that a state_dict of one preparation loads
    into another. Where weights get one scale a tensor, their channels are made even first. ProjectError where
    `keep_float` names nothing of the model.
    """
    module = graph.copied(program.module)
    complete_metadata(module, program)
    annotations.keep_float(module, keep_float)
    folded = batch_norms.fold(module)
    if not quantization.per_channel and even_weights.even(module):
        program = dataclasses.replace(program, module=graph.copied(module))
    batch_norms.hide(module)
    if quantization.placement != "tensorrt":
        rewrites.global_pooling(module)
        if quantization.activations == "uint8-asymmetric":
            frames.as_integers(module)
        rewrites.separate_biases(module, copied=not qat)
    quantizer = PlacementQuantizer(quantization.placement, scheme.scheme_for(quantization, qat=qat))
    with torch.random.fork_rng(devices=()):  # torchao traces its patterns with random inputs
        module = (pt2e.prepare_qat_pt2e if qat else pt2e.prepare_pt2e)(module, quantizer)
    batch_norms.show(module)
    report = report_of(in_words(quantization), quantizer.decisions, batch_norms_folded=folded)
    return Prepared(program, quantization, module, report, qat)


def complete_metadata(module: torch.fx.GraphModule, program: ExportedGraph) -> None:
    """Rules read dtypes and ranks from `meta['val']`; stored tensors and nodes of graph passes may lack it."""
    nodes = [node for node in module.graph.nodes if node.op in ("call_function", "placeholder", "get_attr")]
    if all("val" in node.meta for node in nodes):
        return
    axes = graph.sizes(program.signature, "example")
    example = graph.to_tensors(program.signature, graph.synthetic(program.signature, axes, seed=0))
    FakeTensorProp(module, FakeTensorMode(allow_non_fake_inputs=True)).propagate(*example)


def in_words(quantization: ResolvedQuantization) -> str:
    """What a report calls the scheme."""
    per = "channel" if quantization.per_channel else "tensor"
    return (
        f"{quantization.placement}: activations {quantization.activations} per tensor ({quantization.ranges}), "
        f"weights {quantization.weight_bits}-bit symmetric per {per}"
    )
