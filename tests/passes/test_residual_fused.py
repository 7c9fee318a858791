"""What the runtimes fuse: convolution, addition and activation of a residual block are one kernel of onnxruntime."""

from __future__ import annotations

import collections

import onnx
import onnxruntime
import torch
from torch import nn

from edgeopt.backends import onnx_export
from tests.passes.support import optimized, program
from tests.passes.test_batch_norm import filled

CHANNELS = 16  # a multiple of the blocks in which onnxruntime lays channels out


class Residual(nn.Module):
    """A block as ResNets have it: an addition in place, one ReLU module called twice."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = filled(nn.BatchNorm2d(CHANNELS), 1), filled(nn.BatchNorm2d(CHANNELS), 2)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        y += x
        return self.relu(y)


def test_onnxruntime_fuses_the_whole_residual_block(tmp_path):
    """Two blocks: their convolutions take in the additions and activations, and the layout changes once, at the end."""
    torch.manual_seed(0)
    given = program(nn.Sequential(nn.Conv2d(3, CHANNELS, 3), nn.ReLU(), Residual(), Residual()), ("N", 3, 9, 9))
    result, records = optimized(given)
    assert records["conv_bn"].changed == 4
    file = onnx_export.write(result, tmp_path, opset_max=17)
    written = collections.Counter(node.op_type for node in onnx.load(tmp_path / file.name).graph.node)
    assert written == {"Conv": 5, "Relu": 5, "Add": 2}
    options = onnxruntime.SessionOptions()  # all optimisations are its default, and what the runner leaves it at
    options.optimized_model_filepath = str(tmp_path / "fused.onnx")
    options.log_severity_level = 3  # the file is for this machine only, it says
    onnxruntime.InferenceSession(tmp_path / file.name, options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(tmp_path / "fused.onnx").graph.node
    assert collections.Counter(node.op_type for node in nodes) == {"Conv": 5, "ReorderOutput": 1}
    fused = [node for node in nodes if node.op_type == "Conv"]
    assert all(any(a.name == "activation" for a in node.attribute) for node in fused)
    assert sum(len(node.input) == 4 for node in fused) == 2  # the fourth input is what is added
