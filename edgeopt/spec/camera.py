"""What a camera gives in place of a model's input, and what is done to it: `camera:` of an input in `edgeopt.yaml`.

The exact arithmetic, which the reference follows in float64 and the artifact within float32's rounding, stands in
docs/camera.md and in program/frames.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, StrictInt, StrictStr

from edgeopt.spec.values import Value

DARKEST, BRIGHTEST = 0, 255
_FRACTION = re.compile(r"^\s*(\d+(?:\.\d*)?)\s*/\s*(\d+(?:\.\d*)?)\s*$")


def _dimension(value: Any) -> Any:
    size = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not size and not (isinstance(value, str) and value.isidentifier()):
        raise ValueError(f"{value!r} is neither a size of 1 or more nor the name of an axis")
    return value


Dimension = Annotated[StrictInt | StrictStr, pydantic.BeforeValidator(_dimension)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


def _number(value: Any) -> Any:
    """'1/255' as the number that it is."""
    found = _FRACTION.match(value) if isinstance(value, str) else None
    if found is None:
        return value
    if float(found[2]) == 0:
        raise ValueError(f"{value!r} divides by 0")
    return float(found[1]) / float(found[2])


def _each_channel(value: Any) -> Any:
    return (value,) if isinstance(value, int | float) and not isinstance(value, bool) else value


Scale = Annotated[Number, pydantic.BeforeValidator(_number)]
EachChannel = Annotated[tuple[Number, ...], pydantic.BeforeValidator(_each_channel), Field(min_length=1)]


class Camera(Value):
    """Frames that the artifact takes, and how they become the model's input: (scale * frame - mean) / std."""

    dtype: Literal["uint8", "float32"] = Field("uint8", description="element type of a frame, of values 0 to 255")
    layout: Literal["HWC", "CHW"] = Field("HWC", description="the frame's axes behind the batch")
    color: Literal["RGB", "BGR"] | None = Field(None, description="order of the frame's channels")
    model_color: Literal["RGB", "BGR"] = Field("RGB", description="order that the model was trained with")
    scale: Scale = Field(1.0, description="multiplies the frame first; 1/255 is read as a fraction")
    mean: EachChannel = Field((0.0,), description="subtracted then; one number, or one a channel of the model's order")
    std: EachChannel = Field((1.0,), description="divides last; one number, or one a channel of the model's order")
    size: tuple[Dimension, Dimension] | None = Field(
        None, description="height and width of the frame, numbers or axes, where it is resized"
    )
    resize: Literal["bilinear", "nearest"] = Field("bilinear", description="interpolation, without antialiasing")
    fit: Literal["stretch", "letterbox", "crop"] = Field(
        "stretch", description="what becomes of another aspect ratio; the last two need a fixed size"
    )
    fill: StrictInt = Field(114, ge=DARKEST, le=BRIGHTEST, description="the frame's value beside a letterbox")

    @pydantic.model_validator(mode="after")
    def _possible(self) -> Camera:
        if 0 in self.std:
            raise ValueError("std: it divides, so it cannot be 0")
        if self.scale == 0:
            raise ValueError("scale: 0 would make every frame the same")
        return self

    @property
    def swaps(self) -> bool:
        """Whether the model wants the channels in the opposite order."""
        return self.color is not None and self.color != self.model_color

    @property
    def axes(self) -> tuple[str, ...]:
        """The named axes of the frame's size."""
        return tuple(size for size in self.size or () if isinstance(size, str))

    def frame_shape(self, shape: tuple[int | str, ...]) -> tuple[int | str, ...]:
        """The shape of a batch of frames for the model's input of `shape`, [N, C, H, W]."""
        batch, channels, *model_size = shape
        size = self.size or tuple(model_size)
        return (batch, *size, channels) if self.layout == "HWC" else (batch, channels, *size)

    def reasons_against(self, shape: tuple[int | str, ...], dtype: str) -> Iterator[tuple[str, str, str]]:
        """(key below `camera`, reason, what to do) for what does not fit the model's input."""
        if dtype != "float32":
            reason = f"frames become float32, and the model's input is {dtype}"
            yield "dtype", reason, "declare the input's dtype as float32, and convert it in forward"
        if len(shape) != 4 or not isinstance(shape[1], int):
            reason = f"frames become [batch, channels, height, width], and the model's input is {list(shape)}"
            yield "layout", reason, "declare such a shape with a fixed number of channels, or remove camera"
            return
        channels, model_size = shape[1], shape[2:]
        for key in ("mean", "std"):
            if len(getattr(self, key)) not in (1, channels):
                reason = f"{len(getattr(self, key))} numbers for {channels} channels"
                yield key, reason, f"give one number, or {channels}"
        if self.color is not None and channels != 3:
            yield "color", f"{self.color} has 3 channels, and the model's input {channels}", "remove it"
        if self.size is None:
            for key in ("fit", "resize", "fill"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    yield key, "the frame is not resized", "give 'size', the frame's height and width, or remove it"
        elif not all(isinstance(size, int) for size in model_size):
            reason = f"a frame is resized to a fixed size, and the model takes {list(model_size)}"
            yield "size", reason, "write the model's height and width as numbers, or remove size"
        elif self.axes and self.fit != "stretch":
            reason = f"'{self.fit}' is worked out when the artifact is built, and the size is {list(self.size)}"
            yield "fit", reason, "give the frame's size as numbers, or write stretch"


class Output(Value):
    """What is done to an output of the model in the artifact: its head."""

    head: Literal["softmax", "argmax", "topk"] = Field(description="what the artifact gives in its place")
    axis: StrictInt = Field(1, description="the axis of the classes")
    k: StrictInt | None = Field(None, ge=1, description="of topk: how many of the largest")

    @pydantic.model_validator(mode="after")
    def _whole(self) -> Output:
        if (self.head == "topk") != (self.k is not None):
            raise ValueError("topk needs k, as in {head: topk, k: 5}" if self.k is None else "k belongs to head: topk")
        return self
