"""Which TensorRT's parser has which ONNX operator: an opset that it reads does not mean every operator of it (O04).

From onnx-tensorrt: docs/Changelog.md up to 10.6 says with which version an operator came; docs/operators.md of 8.4 and
8.5 has those that are not there. What neither names is taken for there. A device finds out after minutes, and in
other words ("No importer registered for op"); here it is a refusal before anything is pushed.
"""

from __future__ import annotations

from pathlib import Path

import onnx

from edgeopt.backends.opset_rewrites import nodes_of
from edgeopt.spec.jetpack import version_tuple

# operator -> the first TensorRT whose parser has it
FIRST = {
    **dict.fromkeys(
        ("Einsum", "GatherND", "IsNaN", "Round", "Scatter", "ScatterElements", "ScatterND", "Sign"), "8.2",
    ),
    **dict.fromkeys(("Shrink", "Xor"), "8.4"),
    **dict.fromkeys(
        (
            "GridSample", "MeanVarianceNormalization", "Mod", "NonZero", "OneHot", "RandomNormal", "RandomNormalLike",
            "RoiAlign", "Trilu",
        ),
        "8.5",
    ),
    **dict.fromkeys(("GroupNormalization", "IsInf", "LayerNormalization"), "8.6"),
    "Hardmax": "9.2",
    "DeformConv": "10.1",
    **dict.fromkeys(("BlackmanWindow", "HammingWindow", "HannWindow"), "10.4"),
    "STFT": "10.5",
}  # fmt: skip
# Up to LAST_KNOWN in none; what later ones have is not known here.
NONE = {
    "Bernoulli", "BitShift", "Compress", "ConcatFromSequence", "ConvInteger", "DFT", "Det", "DynamicQuantizeLinear",
    "MatMulInteger", "MaxRoiPool", "MaxUnpool", "MelWeightMatrix", "Multinomial", "NegativeLogLikelihoodLoss",
    "Optional", "OptionalGetElement", "OptionalHasElement", "QLinearConv", "QLinearMatMul", "SequenceAt",
    "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength", "SequenceMap",
    "SoftmaxCrossEntropyLoss", "SplitToSequence", "StringNormalizer", "TfIdfVectorizer", "Unique",
}  # fmt: skip
LAST_KNOWN = "10.6"
_INPUTS = {onnx.TensorProto.UINT8: ("uint8", "8.5")}  # types of inputs and outputs that came later
_DOMAINS = ("", "ai.onnx")


def missing(file: Path, tensorrt: str) -> str | None:
    """Why the parser of that TensorRT version cannot read the ONNX file, naming operators and nodes; else None."""
    version, model = version_tuple(tensorrt), onnx.load(file, load_external_data=False)
    reasons: dict[str, str] = {}
    for node in (*nodes_of(model.graph), *(n for f in model.functions for n in f.node)):
        if node.domain in _DOMAINS and node.op_type not in reasons and (when := _when(node.op_type, version)):
            reasons[node.op_type] = f"the operator '{node.op_type}' (node '{node.name or node.output[0]}') {when}"
    for value in (*model.graph.input, *model.graph.output):
        name, first = _INPUTS.get(value.type.tensor_type.elem_type, ("", "0"))
        if version < version_tuple(first):
            reasons[value.name] = f"{name} of '{value.name}' came with {first}"
    return f"TensorRT {tensorrt} cannot read the file: {'; '.join(reasons.values())}" if reasons else None


def _when(operator: str, version: tuple[int, ...]) -> str | None:
    if operator in FIRST and version < version_tuple(FIRST[operator]):
        return f"came with {FIRST[operator]}"
    if operator in NONE and version[:2] <= version_tuple(LAST_KNOWN):
        return f"is in no TensorRT up to {LAST_KNOWN}"
    return None
