"""Small real programs: exported modules with their signature, and the eager module to compare with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import edgeopt.quant.pt2e  # noqa: F401  registers torch.ops.quantized_decomposed
from edgeopt.program import Call, ExportedGraph, Signature, graph
from edgeopt.spec.manifest import Axis, TensorSpec

Q = torch.ops.quantized_decomposed


@dataclass(frozen=True)
class Case:
    """A program and the eager module that it came from."""

    program: ExportedGraph
    eager: nn.Module

    def expected(self, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        """The eager module's outputs, flat."""
        with torch.no_grad():
            outputs = self.eager(*graph.to_tensors(self.program.signature, inputs))
        return [value.numpy() for value in (outputs if isinstance(outputs, tuple) else (outputs,))]

    def inputs(self, **sizes: int) -> dict[str, np.ndarray]:
        return graph.synthetic(self.program.signature, sizes, seed=11)


def case(
    module: nn.Module,
    inputs: dict[str, tuple],
    outputs: dict[str, tuple],
    *,
    axes: dict[str, tuple[int, int, int]] | None = None,
    values: dict[str, tuple[float, float]] | None = None,
    integer: bool = False,
) -> Case:
    """`inputs` and `outputs`: name -> (dtype, *shape); `axes`: name -> (min, opt, max)."""
    module.eval()
    signature = Signature(
        inputs=tuple(TensorSpec(name=n, dtype=d, shape=tuple(s)) for n, (d, *s) in inputs.items()),
        outputs=tuple(TensorSpec(name=n, dtype=d, shape=tuple(s)) for n, (d, *s) in outputs.items()),
        axes={n: Axis(min=a, opt=b, max=c) for n, (a, b, c) in (axes or {}).items()},
        output_structure=None,
        values=values or {},
    )
    example = graph.synthetic(signature, graph.sizes(signature, "example"), seed=0)
    flat = Flat(module).eval()
    with torch.no_grad():
        exported = torch.export.export(
            flat,
            tuple(graph.to_tensors(signature, example)),
            dynamic_shapes=(graph.dynamic_shapes(signature),),
            strict=False,
        )
    program = ExportedGraph(signature=signature, reference=(), module=exported.module(), integer=integer)
    call = Call(example, graph.run(program, example))
    return Case(replace(program, reference=(call,)), module)


class Flat(nn.Module):
    """A module whose outputs are a flat tuple, as a program's are."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        outputs = self.inner(*args)
        return outputs if isinstance(outputs, tuple) else (outputs,)


class Residual(nn.Module):
    """[n, 3, 16, 16] -> [n, 10]: strided conv, a residual block, mean over height and width, linear."""

    def __init__(self, channels: int = 32):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, stride=2, padding=1)
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.head = nn.Linear(channels, 10)

    def forward(self, image):
        x = F.relu(self.stem(image))
        x = F.relu(x + self.second(F.relu(self.first(x))))
        return self.head(x.mean((2, 3)))


class Integer(nn.Module):
    """Residual with int8 weights per channel and Q/DQ around convs, add and linear, as pt2e leaves it."""

    def __init__(self, residual: Residual, unsigned: bool):
        super().__init__()
        self.unsigned = unsigned
        for name in ("stem", "first", "second", "head"):
            layer = getattr(residual, name)
            weight = layer.weight.detach()
            scale = weight.abs().amax(tuple(range(1, weight.dim()))) / 127
            zero = torch.zeros(len(scale), dtype=torch.int64)
            stored = Q.quantize_per_channel(weight, scale, zero, 0, -127, 127, torch.int8)
            self.register_buffer(f"{name}_weight", stored)
            self.register_buffer(f"{name}_scale", scale)
            self.register_buffer(f"{name}_zero", zero)
            self.register_buffer(f"{name}_bias", layer.bias.detach())

    def weight(self, name: str):
        stored = (getattr(self, f"{name}_{part}") for part in ("weight", "scale", "zero"))
        return Q.dequantize_per_channel(*stored, 0, -127, 127, torch.int8)

    def rounded(self, x, scale: float):
        low, high, dtype = (0, 255, torch.uint8) if self.unsigned else (-128, 127, torch.int8)
        zero = 100 if self.unsigned else 0
        stored = Q.quantize_per_tensor(x, scale, zero, low, high, dtype)
        return Q.dequantize_per_tensor(stored, scale, zero, low, high, dtype)

    def conv(self, name: str, x, stride: int = 1):
        return F.conv2d(x, self.weight(name), getattr(self, f"{name}_bias"), stride, 1)

    def forward(self, image):
        x = self.rounded(F.relu(self.conv("stem", self.rounded(image, 0.01), 2)), 0.01)
        y = self.rounded(F.relu(self.conv("first", x)), 0.01)
        x = self.rounded(F.relu(x + self.rounded(self.conv("second", y), 0.01)), 0.01)
        pooled = self.rounded(x.mean((2, 3)), 0.005)
        return F.linear(pooled, self.weight("head"), self.head_bias)


class Transformer(nn.Module):
    """ids [n, t] -> [n, t, 32]: embedding, LayerNorm, attention of 4 heads, GELU."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.before, self.after = nn.LayerNorm(32), nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, ids):
        x = self.embedding(ids)
        n, t, width = x.shape
        q, k, v = (part.reshape(n, t, 4, 8).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1))
        heads = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(heads.transpose(1, 2).reshape(n, t, width))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Resizing(nn.Module):
    """x [n, 3, h, 10] and an unused input -> three outputs: pads, interpolation, split, pools, reductions."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x, unused):
        y = F.interpolate(self.conv(F.pad(x, (1, 1, 1, 1), mode="reflect")), scale_factor=2, mode="bilinear")
        y = F.pad(y, (1, 2, 0, 0))
        left, right = torch.split(y, 4, 1)
        return torch.cat([F.max_pool2d(left, 2), F.avg_pool2d(right, 2)], 1), y.amax((2, 3)), y.sum(1)


def build(name: str) -> Case:
    """The program of that name, the same in every process."""
    torch.manual_seed(0)
    image = {"image": ("float32", "batch", 3, 16, 16)}
    logits = {"logits": ("float32", "batch", 10)}
    if name == "residual":
        return case(Residual(), image, logits, axes={"batch": (1, 1, 8)})
    if name in ("integer", "unsigned"):
        module = Integer(Residual(), unsigned=name == "unsigned")
        return case(module, image, logits, axes={"batch": (1, 1, 8)}, integer=True)
    if name == "transformer":
        return case(
            Transformer(),
            {"ids": ("int64", "batch", "time")},
            {"hidden": ("float32", "batch", "time", 32)},
            axes={"batch": (1, 1, 8), "time": (2, 6, 16)},
            values={"ids": (0, 49)},
        )
    return case(
        Resizing(),
        {"x": ("float32", "batch", 3, "h", 10), "unused": ("float32", 3)},
        {
            "y": ("float32", "batch", 8, "dim_0", 11),
            "most": ("float32", "batch", 8),
            "total": ("float32", "batch", "dim_1", 23),
        },
        axes={"batch": (1, 1, 8), "h": (4, 8, 32)},
    )
