"""ONNX files that take frames: at the opsets of old and new targets, and at other sizes of the frame."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from edgeopt.backends import onnx_export
from edgeopt.program import Call, ExportedGraph, Signature, graph
from edgeopt.program.frames import Frames, reference
from edgeopt.spec.camera import Camera
from edgeopt.spec.manifest import Axis, TensorSpec

SHAPE = ("n", 3, 12, 10)
NORM = {"scale": "1/255", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "color": "BGR"}
AXES = {"n": Axis(min=1, opt=1, max=4), "h": Axis(min=5, opt=20, max=64), "w": Axis(min=5, opt=31, max=64)}


def program(camera: Camera) -> ExportedGraph:
    """Frames alone as a program."""
    shape = camera.frame_shape(SHAPE)
    axes = {name: AXES[name] for name in shape if isinstance(name, str)}
    spec = TensorSpec(name="image", dtype=camera.dtype, shape=shape)
    signature = Signature(
        (spec,), (TensorSpec(name="y", dtype="float32", shape=SHAPE),), axes, None, {"image": (0.0, 255.0)}
    )
    example = graph.to_tensors(signature, graph.synthetic(signature, graph.sizes(signature, "example"), 0))

    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.frames = Frames(camera, SHAPE)

        def forward(self, image):
            return (self.frames(image),)

    exported = torch.export.export(Flat(), tuple(example), dynamic_shapes=graph.dynamic_shapes(signature), strict=False)
    found = ExportedGraph(signature=signature, reference=(), module=exported.module(check_guards=False))
    x = graph.synthetic(signature, graph.sizes(signature, "opt"), 1)
    return ExportedGraph(signature=signature, reference=(Call(x, graph.run(found, x)),), module=found.module)


@pytest.mark.parametrize(
    ("camera", "opset"),
    [
        ({"size": (20, 31), "fit": "letterbox"}, 13),
        ({"size": ("h", "w")}, 17),
        ({"size": ("h", 31), "resize": "nearest", "layout": "CHW"}, 20),
    ],
)
def test_a_file_prepares_frames_as_the_reference_does(camera, opset, tmp_path):
    camera = Camera(**NORM, **camera)
    file = onnx_export.write(program(camera), tmp_path, opset_max=opset)
    assert file.opset <= opset
    session = onnxruntime.InferenceSession(str(tmp_path / file.name), providers=["CPUExecutionProvider"])
    model = onnx.load(tmp_path / file.name)
    assert not {"Resize", "Upsample"} & {node.op_type for node in model.graph.node}  # whose places are in float32
    rng = np.random.default_rng(0)
    for height, width in ((20, 31), (64, 5), (7, 50)):
        sizes = {"h": height, "w": width, "n": 2}
        shape = [sizes.get(size, size) for size in camera.frame_shape(SHAPE)]
        x = rng.integers(0, 256, shape).astype(np.uint8)
        found = session.run(None, {"image": x})[0]
        np.testing.assert_allclose(found, reference(x, camera, SHAPE), atol=1e-5)
