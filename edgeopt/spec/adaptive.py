"""Sizes that an artifact is to serve fast: ready when it is loaded, bucketed by padding, or built when seen often."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictInt, StrictStr

from edgeopt.spec.values import Value, did_you_mean

Sizes = dict[StrictStr, Annotated[StrictInt, Field(ge=1)]]


class Adaptive(Value):
    """In a project as the user writes it; in a manifest with every axis of `specialise` given, and `pad` as proven."""

    specialise: tuple[Sizes, ...] = Field((), description="sizes to make ready on loading, each {axis: size}")
    pad: dict[StrictStr, Annotated[StrictInt, Field(ge=2)]] = Field(
        {}, description="axis -> multiple that other sizes are padded to with zeros, where the model allows it"
    )
    pad_check: StrictBool = Field(True, description="off: take your word that padding changes no answer")
    build_after: StrictInt | None = Field(
        None, ge=1, description="calls of another size after which it is made ready too; none for never"
    )
    entries: StrictInt = Field(16, ge=1, le=1024, description="the most sizes that are kept ready")
    memory_mb: StrictInt = Field(512, ge=1, description="the most memory that they may take, in MiB")


def inconsistent(adaptive: Adaptive, axes: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(key, reason, what to do) for each thing that the project's axes contradict."""
    for i, sizes in enumerate(adaptive.specialise):
        key = f"adaptive.specialise.{i}"
        for name, size in sizes.items():
            if name not in axes:
                yield key, _unknown(name, axes), "use the names under 'axes'"
            elif not axes[name].min <= size <= axes[name].max:
                reason = f"{name} is {size}, and its axis goes from {axes[name].min} to {axes[name].max}"
                yield key, reason, "give a size within, or widen the axis"
    for name in adaptive.pad:
        if name not in axes:
            yield f"adaptive.pad.{name}", _unknown(name, axes), "use the names under 'axes'"
    if len(adaptive.specialise) > adaptive.entries:
        reason = f"{len(adaptive.specialise)} sizes are to be ready, and {adaptive.entries} may be kept"
        yield "adaptive.entries", reason, "keep more, or declare fewer sizes"


def _unknown(name: str, axes: Mapping[str, Any]) -> str:
    near = did_you_mean(name, list(axes))
    return f"there is no axis '{name}'" + (f", did you mean '{near}'?" if near else "")
