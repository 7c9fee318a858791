"""A program made ready for calibration or training: observers or fake-quantizers where the profile wants integers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from edgeopt.program import ExportedGraph, fakes, graph, stored
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
    """Rules read dtypes, ranks and sizes from `meta['val']`; stored tensors and nodes of graph passes may lack it.

    What is there stays, and what is missing is worked out from it, so that sizes that vary stay expressions. Where
    that cannot be, as in a graph without any, the inputs get expressions for the signature's axes first.
    """
    missing = [n for n in module.graph.nodes if n.op in ("call_function", "placeholder", "get_attr") and _lacks(n)]
    if any(node.op == "placeholder" for node in missing):
        missing = [n for n in module.graph.nodes if n.op in ("call_function", "placeholder", "get_attr")]
        for node in missing:  # of another fake mode
            node.meta.pop("val", None)
        _give_inputs_values(module, program)
    for node in missing:
        if node.op == "call_function":
            node.meta["val"] = fakes.result(node.target, node.args, node.kwargs)
        elif node.op == "get_attr" and stored.is_stored(module, node):
            node.meta["val"] = stored.fake(module.graph, stored.tensor(module, node))


def _lacks(node: torch.fx.Node) -> bool:
    return "val" not in node.meta


def _give_inputs_values(module: torch.fx.GraphModule, program: ExportedGraph) -> None:
    """Fake tensors whose dynamic axes are symbols, in place of what the inputs have."""
    signature = program.signature
    axes = graph.sizes(signature, "example")
    example = graph.to_tensors(signature, graph.synthetic(signature, axes, seed=0))
    mode, inputs = FakeTensorMode(shape_env=ShapeEnv()), [n for n in module.graph.nodes if n.op == "placeholder"]
    for node, spec, tensor in zip(inputs, signature.inputs, example, strict=True):
        sizes = [DimDynamic.DYNAMIC if isinstance(size, str) else DimDynamic.STATIC for size in spec.shape]
        node.meta["val"] = mode.from_tensor(
            tensor, source=ConstantSource(node.name), symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes)
        )


def in_words(quantization: ResolvedQuantization) -> str:
    """What a report calls the scheme."""
    per = "channel" if quantization.per_channel else "tensor"
    return (
        f"{quantization.placement}: activations {quantization.activations} per tensor ({quantization.ranges}), "
        f"weights {quantization.weight_bits}-bit symmetric per {per}"
    )
