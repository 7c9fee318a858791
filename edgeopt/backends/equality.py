"""Whether a lowered file computes what the program does: the calls to compare, and the tolerance."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from edgeopt.backends.backend import precision_of
from edgeopt.errors import LoweringError, first_line
from edgeopt.program import ExportedGraph, Program, ScriptGraph, Signature, graph
from edgeopt.program.parts import parts_of
from edgeopt.runtime import compare
from edgeopt.spec.half_formats import FORMATS
from edgeopt.spec.manifest import Tolerance

# Kernels add in another order than torch does: so much may a float output differ from the same graph's.
FLOAT = Tolerance(max_abs=1e-3)
OTHER_VALUES = "gives other values than the model"  # in the reason against a file whose answers are wrong
# Rounding makes chaos: a shift by the fraction d of a quantization step moves about d of the values by a whole step,
# which is sqrt(d) in the mean square, so that after a few layers the last bits of two engines differ like two draws of
# rounding noise (MobileNetV2 at 7 bits: 15.3 dB between torch and onnxruntime, 14.1 dB of quantization noise). An
# integer file may therefore differ by as much as quantization itself does, and a margin; a small net by 30 dB.
INTEGER_SQNR_DB = 30.0
INTEGER_MARGIN_DB = 6.0
INTEGER_OUTPUT_AGREEMENT = 0.99  # of the indices that an integer program gives, a step may flip some

MOST_ELEMENTS = 1 << 20  # of the inputs of a call that a file is tried with: a picture of 591 x 591 in colour


@dataclass(frozen=True)
class Case:
    """Named inputs, and words that say which they are, such as 'at batch=2, time=6'."""

    inputs: dict[str, np.ndarray]
    words: str


def cases(program: Program) -> Iterator[Case]:
    """The reference's inputs, then random ones at the least size of every axis, at one in use, and at the largest.

    Where inputs of the largest sizes would be huge, each axis is the largest by itself, as far as that is not.
    A program with control flow inside also gets floats of both signs, for the branches that the others do not take.
    """
    signature = program.signature
    for call in program.reference:
        yield Case(call.inputs, "on the reference inputs")
    smallest, example = graph.sizes(signature, "min"), graph.sizes(signature, "example")
    for seed, sizes in enumerate((smallest, example, *_largest(signature, example)) if signature.axes else ({},)):
        words = "at " + ", ".join(f"{k}={v}" for k, v in sizes.items()) if sizes else "on random inputs"
        yield Case(graph.synthetic(signature, sizes, seed), words)
    if isinstance(program, ScriptGraph) or isinstance(program, ExportedGraph) and parts_of(program.module):
        yield Case(_both_signs(signature, example), "for values of both signs")


def _largest(signature: Signature, example: dict[str, int]) -> list[dict[str, int]]:
    """Sizes up to the largest that the axes may have, whose inputs hold no more than MOST_ELEMENTS."""
    largest, smallest = graph.sizes(signature, "max"), graph.sizes(signature, "min")
    if _elements(signature, largest) <= MOST_ELEMENTS:
        return [largest]
    larger = {name: min(axis.max, 2 * example[name] + 1) for name, axis in signature.axes.items()}
    each = [{**smallest, name: size} for name, size in largest.items() if size > larger[name]]
    return [larger, *(sizes for sizes in each if _elements(signature, sizes) <= MOST_ELEMENTS)]


def _elements(signature: Signature, sizes: dict[str, int]) -> int:
    return sum(math.prod(sizes.get(size, size) for size in spec.shape) for spec in signature.inputs)


def _both_signs(signature: Signature, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Normal values for the floats whose range the project does not declare."""
    rng = np.random.default_rng(0)
    return {
        name: rng.normal(0, 2, array.shape).astype(array.dtype)
        if array.dtype.kind == "f" and name not in signature.values
        else array
        for name, array in graph.synthetic(signature, sizes, seed=3).items()
    }


def expected(program: ExportedGraph | ScriptGraph, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs of the program's own module. LoweringError where it fails for these sizes, which capture allowed."""
    signature = program.signature
    try:
        with torch.no_grad():
            return graph.to_arrays(signature, program.module(*graph.to_tensors(signature, inputs)))
    except Exception as why:  # whatever the graph's operators raise
        shapes = ", ".join(f"{name}{list(value.shape)}" for name, value in inputs.items())
        raise LoweringError(f"the program itself fails for {shapes}: {first_line(why)}") from why


def tolerance(program: Program) -> Tolerance:
    """How close a lowered file must be to the program: for an integer one as its own quantization noise has it.

    A 16-bit one rounds as often as the program does, elsewhere and in another order: it gets the format's bound.
    """
    if precision_of(program) in FORMATS:
        return Tolerance(sqnr_db=FORMATS[precision_of(program)].least_sqnr_db)
    if precision_of(program) != "int8":
        return FLOAT
    least = INTEGER_SQNR_DB
    if isinstance(program, ExportedGraph) and program.reference:
        given = [call.outputs for call in program.reference]
        errors = compare.output_errors(given, [expected(program, call.inputs) for call in program.reference])
        noise_db = min((error.sqnr_db for error in errors.values() if not error.mismatches), default=least)
        least = min(least, noise_db - INTEGER_MARGIN_DB)
    return Tolerance(sqnr_db=least)


def require(
    reference: dict[str, np.ndarray], found: dict[str, np.ndarray], within: Tolerance, *, words: str, file: str,
    decisions: Container[str] = (),
) -> None:  # fmt: skip
    """LoweringError that names the output where `found` is not `reference`: shapes, dtypes, values.

    Integer outputs of a float program are compared exactly. `decisions` choose between values that may be near: of a
    float program nearly all must be equal; of one that rounds, on inputs that are noise, as many as turn say nothing,
    and the gates judge them on the user's data.
    """
    for name, wanted in reference.items():
        rounds, chooses = within != FLOAT, name in decisions
        reason = _difference(name, wanted, found[name], within, exact=not rounds and not chooses)
        alike = (found[name].shape, found[name].dtype) == (wanted.shape, wanted.dtype)
        if reason and not (rounds and chooses and alike):
            raise LoweringError(f"the file {OTHER_VALUES} {words}: {reason}", where=file)


def _difference(name: str, reference: np.ndarray, value: np.ndarray, within: Tolerance, *, exact: bool) -> str | None:
    if (reference.shape, reference.dtype) != (value.shape, value.dtype):
        there, wanted = (f"{a.dtype}{list(a.shape)}" for a in (value, reference))
        return f"output '{name}' is {there} instead of {wanted}"
    error = compare.output_error([reference], [value])
    if not exact and error.mismatches:
        agreement = 1 - error.mismatches / reference.size
        return None if agreement >= INTEGER_OUTPUT_AGREEMENT else f"output '{name}': only {agreement:.1%} agree"
    reasons = compare.reasons_against({name: error}, within)
    return "; ".join(reasons) or None
