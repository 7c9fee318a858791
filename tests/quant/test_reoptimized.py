"""The light second pass over what the quantizer made: no integer kernel fewer in the runtime, no value changed."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from edgeopt.backends import integer_kernels, onnx_legacy
from edgeopt.passes import reoptimize
from edgeopt.program import Call, graph
from edgeopt.program.tracing import quiet
from edgeopt.quant import convert
from tests.passes.support import PROFILE
from tests.quant import models
from tests.quant.programs import batches, kernels_of, outputs, program, quantization, quantize_count, sqnr_db

MODELS = {
    "residual": (models.Net, (3, 16, 16)),
    "padded": (models.Padded, (3, 16, 16)),
    "excited": (models.Excited, (3, 8, 8)),
    "upsampled": (models.Upsampled, (3, 8, 8)),
    "shuffled": (models.Shuffled, (3, 8, 8)),
    "pooled": (models.Pooled, (3, 8, 8)),
    "branches": (models.Branches, (3, 8, 8)),
    "smooth": (lambda: models.Gated(nn.SiLU()), (3, 8, 8)),
    "attention": (models.Mixer, (6, 16)),
}


def both(make, sizes, placement: str = "onnxruntime-x86"):
    torch.manual_seed(0)
    p = program(make(), *sizes)
    integer, _ = convert.from_batches(p, quantization(placement), batches(*sizes))
    x = batches(*sizes, seed=3, size=2)[0]
    integer = dataclasses.replace(integer, reference=(Call(x, graph.run(integer, x)),))
    after, records = reoptimize(integer, PROFILE, {})
    assert not [r for r in records if r.status == "dropped"]
    return integer, after


@pytest.mark.parametrize("make, sizes", MODELS.values(), ids=MODELS.keys())
def test_no_integer_kernel_is_lost_and_no_value_changes(make, sizes, tmp_path):
    before, after = both(make, sizes)
    x = batches(*sizes, seed=8)[0]["x"]
    np.testing.assert_array_equal(outputs(before, x), outputs(after, x))
    found = [kernels_of(p, tmp_path / name) for p, name in ((before, "before"), (after, "after"))]
    assert found[1].integer_count >= found[0].integer_count > 0
    assert found[1].integer_products == found[0].integer_products
    assert len(found[1].boundaries) <= len(found[0].boundaries)


@pytest.mark.parametrize("make, sizes", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("placement", ["onnxruntime-arm", "tensorrt"])
def test_nothing_changes_for_other_placements_either(make, sizes, placement):
    before, after = both(make, sizes, placement)
    x = batches(*sizes, seed=8)[0]["x"]
    np.testing.assert_array_equal(outputs(before, x), outputs(after, x))
    assert quantize_count(after) <= quantize_count(before)


def test_pairs_around_pooling_and_layout_are_gone():
    before, after = both(models.Pooled, (3, 8, 8))
    assert quantize_count(after) == quantize_count(before) - 2  # around max_pool2d and flatten
    before, after = both(models.Shuffled, (3, 8, 8))
    assert quantize_count(after) == quantize_count(before) - 3  # two views and a transpose


def test_a_tied_table_is_stored_once_and_read_row_by_row(tmp_path):
    torch.manual_seed(0)
    p = program(models.TiedTokens(), 7, dtype="int64", values=(0, 19))
    rng = np.random.default_rng(0)
    data = [{"x": rng.integers(0, 20, (8, 7))} for _ in range(4)]
    integer, report = convert.from_batches(p, quantization(), data)
    assert report.counts["embedding"] == {"quantized": 1, "float": 0}
    integer = dataclasses.replace(integer, reference=(Call(data[0], graph.run(integer, data[0])),))
    after, _ = reoptimize(integer, PROFILE, {})
    np.testing.assert_array_equal(outputs(integer, data[1]["x"]), outputs(after, data[1]["x"]))
    stored = [v for v in after.module.state_dict().values() if tuple(v.shape) == (20, 8)]
    assert [v.dtype for v in stored] == [torch.int8]
    kernels = kernels_of(after, tmp_path)
    assert kernels.integer_products == 2 and kernels.integer["Gather"] == 1
    assert not kernels.quantizes.get("DequantizeLinear")


@pytest.mark.parametrize("name", ["pooled", "shuffled", "residual"])
def test_the_older_exporter_writes_what_was_moved_too(name, tmp_path):
    """It knows Q/DQ as fake-quantize operators only, with no integers between the two."""
    make, sizes = MODELS[name]
    before, after = both(make, sizes)
    kernels = []
    for program_ in (before, after):
        with quiet("torch.onnx"):
            onnx.save(onnx_legacy.exported(program_, 13), tmp_path / "int8.onnx")
        kernels.append(integer_kernels.kernels(tmp_path / "int8.onnx"))
    assert kernels[1].integer_count == kernels[0].integer_count > 0
    session = onnxruntime.InferenceSession(str(tmp_path / "int8.onnx"), providers=["CPUExecutionProvider"])
    x = batches(*sizes, seed=8)[0]["x"]
    assert sqnr_db(outputs(after, x), session.run(None, {"x": x})[0]) > 35
