"""What a lowered file really is: kernels that run, size, and the distance from what was simulated (case Q11)."""

from __future__ import annotations

import json
import math
import platform

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn

from edgeopt.device import judge
from edgeopt.pipeline.lowered_facts import Facts, facts_of, integer_check, size_bytes
from edgeopt.quant import convert
from edgeopt.spec.manifest import Candidate
from edgeopt.spec.profile import load_profile
from tests.quant.programs import batches, program, quantization

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the profile and its kernels are x86's")
PROFILE = load_profile("x86-cpu") if platform.machine() == "x86_64" else None


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4)))

    def forward(self, x):
        return self.convs(x)


@pytest.fixture(scope="module")
def integer():
    torch.manual_seed(0)
    return convert.from_batches(program(Chain(), 4, 8, 8), quantization(), batches(4, 8, 8))[0]


def lowered(integer, folder, *, padded: int = 0, mode: str = "reflect") -> Candidate:
    """int8.onnx; before the first `padded` convolutions stands a Pad in float, which no kernel of integers takes.

    Explicit pads are what kept 49 of 49 convolutions of a model in float.
    """
    from edgeopt.backends import onnxruntime

    candidate = onnxruntime.lower(integer, PROFILE, folder).candidates[0]
    model = onnx.load(folder / candidate.file)
    pads = numpy_helper.from_array(np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64), "explicit_pads")
    model.graph.initializer.append(pads)
    nodes = list(model.graph.node)
    for node in [n for n in nodes if n.op_type == "Conv"][:padded]:
        for attribute in node.attribute:
            if attribute.name == "pads":
                attribute.ints[:] = [0, 0, 0, 0]
        name = f"{node.name}_padded"
        nodes.insert(
            nodes.index(node), helper.make_node("Pad", [node.input[0], "explicit_pads"], [name], name=name, mode=mode)
        )
        node.input[0] = name
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.checker.check_model(model)
    onnx.save(model, folder / candidate.file)
    return candidate


def facts(candidate: Candidate, folder, integer) -> Facts:
    return facts_of(candidate, folder, PROFILE, integer)


def test_convolutions_that_run_on_integers_are_counted(integer, tmp_path):
    found = facts(lowered(integer, tmp_path), tmp_path, integer)
    assert (found.meant, found.integer_contractions, found.float_contractions) == (4, 4, 0)
    assert found.size_bytes == size_bytes(tmp_path, "int8.onnx") == (tmp_path / "int8.onnx").stat().st_size
    (check,) = integer_check(found)
    assert check.verdict == "pass" and check.evidence.startswith("4 of 4 ")


def test_convolutions_that_silently_stay_float_fail_with_a_sentence(integer, tmp_path):
    found = facts(lowered(integer, tmp_path, padded=4), tmp_path, integer)
    assert (found.meant, found.stayed_float) == (4, 4)
    (check,) = integer_check(found)
    assert check.verdict == "fail"
    assert "4 of 4 convolutions and matrix products that were quantized stayed float" in judge.failures([check])


def test_a_few_that_stay_float_are_said_and_do_not_fail(integer, tmp_path):
    found = facts(lowered(integer, tmp_path, padded=1), tmp_path, integer)
    (check,) = integer_check(found)
    assert (found.stayed_float, check.verdict) == (1, "pass")
    assert "1 of 4" in check.evidence


def test_layers_that_were_left_float_on_purpose_are_not_missed(tmp_path):
    torch.manual_seed(0)
    keep = ("model.convs.1", "model.convs.2", "model.convs.3")
    made, _ = convert.from_batches(program(Chain(), 4, 8, 8), quantization(), batches(4, 8, 8), keep_float=keep)
    found = facts(lowered(made, tmp_path), tmp_path, made)
    assert (found.meant, found.integer_contractions, found.float_contractions) == (1, 1, 3)
    assert integer_check(found)[0].verdict == "pass"


def test_of_another_target_the_kernels_are_not_claimed(integer, tmp_path):
    candidate = lowered(integer, tmp_path)
    for profile in ("arm64-cpu", "xavier"):
        found = facts_of(candidate, tmp_path, load_profile(profile), integer)
        assert found.integer is None and integer_check(found) == ()


def test_the_facts_are_json(integer, tmp_path):
    import dataclasses

    from edgeopt import digest

    data = digest.finite(dataclasses.asdict(facts(lowered(integer, tmp_path), tmp_path, integer)))
    assert json.loads(json.dumps(data))["meant"] == 4 and not math.isnan(data["size_bytes"])


def test_openvinos_kernels_are_counted_by_its_own_graph(integer, tmp_path):
    candidate = lowered(integer, tmp_path).model_copy(update={"runtime": "openvino", "name": "openvino-int8"})
    found = facts(candidate, tmp_path, integer)
    assert (found.runtime, found.meant, found.integer_contractions, found.stayed_float) == ("openvino", 4, 4, 0)
    (check,) = integer_check(found)
    assert check.verdict == "pass"


def test_quantized_layers_that_openvino_runs_in_float_fail_in_its_name():
    found = Facts(1, {"Pooling": 1}, {"Convolution": 3, "FullyConnected": 1, "Eltwise": 2}, 4, None, "openvino")
    (check,) = integer_check(found)
    assert check.verdict == "fail" and (found.stayed_float, found.float_contractions) == (4, 4)
    assert "in openvino's own graph (3 Convolution, 1 FullyConnected)" in check.evidence
