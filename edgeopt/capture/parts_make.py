"""One module of the user's as a part: scripted, its sizes found, and equal to eager before anything relies on it."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from edgeopt import digest
from edgeopt.capture import guard, script
from edgeopt.capture.declined import Declined
from edgeopt.capture.eager import Answer
from edgeopt.capture.parts_calls import Key, Recorded, flatten, rebuild, source
from edgeopt.capture.parts_sizes import inputs_of, outputs_of
from edgeopt.program.parts import Output, Part, variants
from edgeopt.program.reexport import equal
from edgeopt.program.tracing import plain_attention
from edgeopt.spec.manifest import DTYPE_BYTES

_PROBED_SHAPES = 4  # of the shapes that the model calls a module with, so many are called with other values too
_KEPT_ELEMENTS = 1 << 18  # of the example inputs that a part carries for the check of its files
_NAME_CHARACTERS = 20  # of a sha256: 80 bits

Tensors = Sequence[torch.Tensor]


def forms(label: str, module: nn.Module, calls: list[Recorded]) -> dict[Key, tuple[Part, Key]]:
    """For each form in which the model calls the module: its part, and the structure that the module returns.

    `calls` are all calls of the model at several sizes. Declined where one cannot be made, or would not be equal.
    """
    if not calls:
        raise Declined("the model does not call it as a module")
    if reason := next((call.declined for call in calls if call.declined), None):
        raise Declined(reason)
    if module._forward_hooks or module._forward_pre_hooks:
        raise Declined("it has hooks, which would run twice")
    by_form: dict[Key, list[Recorded]] = {}
    for call in calls:
        by_form.setdefault(call.takes, []).append(call)
    return {takes: (_part(label, module, same), same[0].gives) for takes, same in by_form.items()}


def _part(label: str, module: nn.Module, calls: list[Recorded]) -> Part:
    takes, gives = calls[0].takes, calls[0].gives
    if not calls[0].inputs or not calls[0].outputs:
        raise Declined("it takes or gives no tensor")
    if any(call.gives != gives for call in calls):
        raise Declined("what it gives changes its structure, dtype or rank between calls")
    if any(call.wrote for call in calls):
        raise Declined("it writes to the tensors that it is given")
    inputs, outputs = inputs_of(calls), outputs_of(calls)
    for tensor in (*inputs, *outputs):
        if tensor.dtype not in DTYPE_BYTES or tensor.dtype == "bfloat16":
            raise Declined(f"it takes or gives {tensor.dtype}")
    # torch's recurrent layers give new tensors; what other code returns may be what it was given, or a view of it
    forward = source(takes, gives, copied=not isinstance(module, nn.RNNBase))
    scripted = script.part(copy.deepcopy(module), forward)
    frozen = script.frozen(scripted)
    if script.writes_to_inputs(frozen):
        raise Declined("it may write to the tensors that it is given")
    _check(module, scripted, calls, outputs)
    content = [label, script.digest_of(frozen), *(dataclasses.asdict(t) for t in (*inputs, *outputs))]
    name = f"part_{digest.of_value(content)[:_NAME_CHARACTERS]}"
    return Part(name, label, scripted, inputs, outputs, tuple(_examples(calls)))


def _check(module: nn.Module, scripted: torch.jit.ScriptModule, calls: list[Recorded], outputs: tuple[Output, ...]):
    """Declined where the script differs from eager, or sizes do, for the model's own values or for others."""
    for call in calls:
        _compare(call.outputs, _answer(scripted, call.inputs), call.inputs)
    for call in _by_shape(calls)[:_PROBED_SHAPES]:
        for tensors in variants(call.inputs):
            eager = _eager(module, call, tensors)
            if eager is None:
                continue  # such values are no valid input of the module
            for index, (got, wanted) in enumerate(zip(eager, outputs, strict=True)):
                sizes = [size.of(tensors) for size in wanted.shape]
                if list(got.shape) != sizes:
                    raise Declined(
                        f"the size of its output {index} depends on values: {list(got.shape)} and {sizes} "
                        f"for inputs of equal sizes"
                    )
            _compare(eager, _answer(scripted, tensors), tensors)


def _eager(module: nn.Module, call: Recorded, tensors: Tensors) -> tuple[torch.Tensor, ...] | None:
    """What the module gives; None where it fails."""
    given = [t.clone() for t in tensors]
    args, kwargs = rebuild(call.takes, given)
    try:
        with torch.no_grad(), plain_attention():
            gives, outputs = flatten(copy.deepcopy(module)(*args, **kwargs))
    except Declined:
        raise
    except Exception:  # the user's own code, given values that the model may never give
        return None
    if not equal(tensors, given):
        raise Declined("it writes to the tensors that it is given")
    if gives != call.gives:
        raise Declined("what it gives changes its structure, dtype or rank with the values")
    return tuple(outputs)


def _answer(scripted: torch.jit.ScriptModule, tensors: Tensors) -> tuple[torch.Tensor, ...]:
    try:
        with torch.no_grad():
            return scripted(*(t.clone() for t in tensors))
    except Exception as why:  # whatever the script's operators raise
        raise Declined(f"as TorchScript it fails for {_shapes(tensors)}: {str(why).strip().splitlines()[-1]}") from why


def _compare(wanted: Tensors, got: Tensors, tensors: Tensors) -> None:
    eager, scripted = ({str(i): t.numpy() for i, t in enumerate(given)} for given in (wanted, got))
    _, reason = guard.difference(Answer(eager, None, False), Answer(scripted, None, False))
    if reason:
        raise Declined(f"as TorchScript it differs from eager for {_shapes(tensors)}: output {reason}")


def _by_shape(calls: list[Recorded]) -> list[Recorded]:
    """A call of each combination of input shapes, the smallest first."""
    found = {_shapes(call.inputs): call for call in reversed(calls)}
    return sorted(found.values(), key=_elements)


def _examples(calls: list[Recorded]) -> Iterator[tuple[torch.Tensor, ...]]:
    total = 0
    for number, call in enumerate(_by_shape(calls)[:_PROBED_SHAPES]):
        total += _elements(call)
        if number and total > _KEPT_ELEMENTS:
            return
        yield tuple(t.contiguous() for t in call.inputs)


def _elements(call: Recorded) -> int:
    return sum(math.prod(t.shape) for t in call.inputs)


def _shapes(tensors: Tensors) -> str:
    return " and ".join(str(list(t.shape)) for t in tensors)
