"""Fused operators before quantization: layers are found as before, and what is fused stays one float operator."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edgeopt.program import ExportedGraph, graph
from edgeopt.quant import convert
from tests.passes.support import optimized, program
from tests.program.test_written_out import Hand
from tests.quant.programs import quantization, sqnr_db


@pytest.fixture(scope="module")
def quantized():
    torch.manual_seed(0)
    given = program(Hand(), ("N", 5, 16))
    rng = np.random.default_rng(0)
    data = [{"x0": rng.standard_normal((8, 5, 16)).astype(np.float32)} for _ in range(4)]
    made = {}
    for name, float_program in (("by hand", given), ("fused", optimized(given)[0])):
        made[name] = convert.from_batches(float_program, quantization(), data)
    return given, made


def test_every_linear_layer_is_found_as_before(quantized):
    _, made = quantized
    counts = {name: report.counts["linear"] for name, (_, report) in made.items()}
    assert counts["fused"] == counts["by hand"] == {"quantized": 3, "float": 0}


def test_attention_and_activations_stay_whole_and_the_answer_no_worse(quantized):
    given, made = quantized
    inputs = {"x0": np.random.default_rng(1).standard_normal((6, 5, 16)).astype(np.float32)}
    want = graph.run(given, inputs)["y0"]
    ratio = {name: sqnr_db(want, graph.run(integer, inputs)["y0"]) for name, (integer, _) in made.items()}
    assert ratio["fused"] > ratio["by hand"] - 1
    operators = operators_of(made["fused"][0])
    assert {"scaled_dot_product_attention", "gelu", "silu", "layer_norm", "rms_norm"} <= operators
    assert "matmul" not in operators and "matmul" in operators_of(made["by hand"][0])


def operators_of(integer: ExportedGraph) -> set[str]:
    nodes = integer.module.graph.nodes
    return {n.target._schema.name.partition("::")[2] for n in nodes if hasattr(n.target, "_schema")}
