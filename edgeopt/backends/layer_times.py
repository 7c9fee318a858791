"""How long each convolution and matrix product of an ONNX file takes in onnxruntime, by its own profiler.

onnxruntime renames what it fuses: a node of its optimized graph has the name of the convolution, of the value behind
the activation that it took along, or one of these with an ending of its own. Each is traced back to the file's nodes.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from edgeopt.backends.integer_kernels import DISABLED_FOR_INT8
from edgeopt.program.custom_ops import NONE, CustomOps
from edgeopt.program.onnx_session import open_session

KINDS = {"Conv": "convolution", "ConvTranspose": "convolution", "Gemm": "product", "MatMul": "product"}
_TAKEN_ALONG = ("Relu", "Clip", "LeakyRelu", "HardSigmoid", "Sigmoid", "Tanh", "Add", "QuantizeLinear")
_ENDING = re.compile(r"(_kernel_time|_nchwc|_token_\d+)+$")
_WARM_UP = 3


def layer_times(
    file: Path, inputs: Mapping[str, np.ndarray], *, custom_ops: CustomOps = NONE, runs: int = 20
) -> dict[str, list[float | None]]:
    """Kind ('convolution' or 'product') -> median ms of each of that kind, in the file's order.

    None for one that the profile does not tell apart, as where several were fused into one kernel. Raises what
    onnxruntime raises.
    """
    import onnx

    nodes = onnx.load(file, load_external_data=False).graph.node
    names, kinds = _names(nodes)
    spent: dict[int, list[float]] = defaultdict(list)
    for event in _events(file, inputs, custom_ops, runs):
        at = names.get(_ENDING.sub("", event["name"]))
        if at is not None:
            spent[at].append(event["dur"] / 1e3)
    times: dict[str, list[float | None]] = {kind: [] for kind in KINDS.values()}
    for at, kind in enumerate(kinds):
        times[kind].append(statistics.median(spent[at][_WARM_UP:]) if len(spent[at]) > _WARM_UP else None)
    return times


def _names(nodes) -> tuple[dict[str, int], list[str]]:
    """Name of a node or value -> the number of the contraction that it stands for, and each contraction's kind."""
    readers = defaultdict(list)
    for node in nodes:
        for name in node.input:
            readers[name].append(node)
    names: dict[str, int] = {}
    kinds: list[str] = []
    for node in nodes:
        if node.op_type not in KINDS:
            continue
        at, end = len(kinds), node
        kinds.append(KINDS[node.op_type])
        while True:
            for name in (end.name, end.output[0]):
                names.setdefault(name, at)
            following = readers[end.output[0]]
            if len(following) != 1 or following[0].op_type not in _TAKEN_ALONG:
                break
            end = following[0]
    return names, kinds


def _events(file: Path, inputs: Mapping[str, np.ndarray], custom_ops: CustomOps, runs: int) -> list[dict]:
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.enable_profiling = True
        options.profile_file_prefix = f"{folder}/profile"
        session = open_session(file, custom_ops, disabled=DISABLED_FOR_INT8, options=options)
        for _ in range(runs + _WARM_UP):
            session.run(None, dict(inputs))
        events = json.loads(Path(session.end_profiling()).read_bytes())
    return [e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
