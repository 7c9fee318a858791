"""What a lowered candidate is beside what it measures: its size, its kernels, and its distance from the simulation.

The simulation is the integer program run by torch, Q/DQ by Q/DQ. A runtime that fuses it into integer kernels may
round to a neighbouring step (case Q07); what differs by more is the runtime's fault and not the quantizer's.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edgeopt.backends import integer_kernels, openvino_kernels
from edgeopt.device.runner import Response
from edgeopt.errors import DataError, LoweringError
from edgeopt.program import ExportedGraph, Program
from edgeopt.program.custom_ops import NONE, CustomOps
from edgeopt.program.predict import predictor
from edgeopt.progress import log
from edgeopt.runtime import tensors
from edgeopt.runtime.compare import Error, output_errors
from edgeopt.spec.manifest import Candidate, Feed, belongs_to
from edgeopt.spec.profile import Profile
from edgeopt.spec.report import Check

# operators of onnxruntime, and layer types of OpenVINO, which are the same on integers and in float
_INTEGER_PRODUCTS = integer_kernels.INTEGER_PRODUCTS | openvino_kernels.PRODUCTS
_FLOAT_PRODUCTS = integer_kernels.FLOAT_PRODUCTS | openvino_kernels.PRODUCTS
MOST_COMPARED = 8  # calls that the simulation is run on


@dataclass(frozen=True)
class Facts:
    """`integer` and `floats`: operator -> count in the runtime's own optimized graph, None where it was not read.

    `meant`: convolutions and matrix products that the program computes on integers; `simulated`: the largest error
    of an output against the simulation. All four are None for a float candidate.
    """

    size_bytes: int
    integer: dict[str, int] | None = None
    floats: dict[str, int] | None = None
    meant: int | None = None
    simulated: Error | None = None
    runtime: str = "onnxruntime"

    @property
    def stayed_float(self) -> int:
        """Of the contractions that were meant to be integers, those that the runtime runs in float."""
        return max(0, (self.meant or 0) - self.integer_contractions) if self.integer is not None else 0

    @property
    def integer_contractions(self) -> int:
        return sum((self.integer or {}).get(name, 0) for name in _INTEGER_PRODUCTS)

    @property
    def float_contractions(self) -> int:
        return sum((self.floats or {}).get(name, 0) for name in _FLOAT_PRODUCTS)


def size_bytes(folder: Path, file: str) -> int:
    """Bytes of a model file in `folder`, with its external data."""
    return sum(path.stat().st_size for path in folder.iterdir() if belongs_to(path.name, file))


def facts_of(
    candidate: Candidate, folder: Path, profile: Profile, program: Program | None, simulated: Error | None = None
) -> Facts:
    """The facts of a candidate whose file lies in `folder`; `program` is what it was lowered from, where known."""
    size = size_bytes(folder, candidate.file)
    if candidate.precision != "int8":
        return Facts(size)
    integer, floats = _kernels(candidate, folder, profile, program.custom_ops if program is not None else NONE)
    if not isinstance(program, ExportedGraph):
        return Facts(size, integer, floats, runtime=candidate.runtime)
    meant = _meant(program) if integer is not None else None
    return Facts(size, integer, floats, meant, simulated, candidate.runtime)


def against_simulation(
    candidate: Candidate, folder: Path, program: Program | None, feeds: Mapping[str, Feed], response: Response
) -> Error | None:
    """The error of an integer candidate's answers against its program as torch runs it, of the worst output.

    `feeds`: id -> call that the response answers, of which the first few count; the tensors lie below `folder`.
    """
    if candidate.precision != "int8" or not isinstance(program, ExportedGraph):
        return None
    if response.runs[candidate.name].failure is not None:
        return None
    predict, judged = predictor(program), list(feeds.items())[:MOST_COMPARED]
    given = [predict({n: tensors.read(folder, ref) for n, ref in feed.inputs.items()}) for _, feed in judged]
    found = [response.outputs(candidate.name, name) for name, _ in judged]
    try:
        chosen = dict(program.signature.decisions)  # classes, which a step may turn
        errors = [error for name, error in output_errors(given, found).items() if name not in chosen]
    except DataError:  # an output of another shape, which the candidate's own checks say
        return None
    return min(errors, key=lambda error: error.sqnr_db, default=None)


def integer_check(facts: Facts) -> tuple[Check, ...]:
    """Fails where most of what was meant to run on integers runs in float (case Q11: 49 of 49 convolutions).

    Nothing where the kernels are not known: a target of another architecture fuses by itself.
    """
    if facts.integer is None or not facts.meant:
        return ()
    ran = facts.meant - facts.stayed_float
    evidence = f"{ran} of {facts.meant} convolutions and matrix products run on integers"
    if facts.stayed_float:
        floats = {name: count for name, count in (facts.floats or {}).items() if name in _FLOAT_PRODUCTS}
        named = ", ".join(f"{count} {name}" for name, count in floats.items())
        evidence = (
            f"{facts.stayed_float} of {facts.meant} convolutions and matrix products that were quantized stayed float "
            f"in {facts.runtime}'s own graph" + (f" ({named})" if named else "")
        )
    verdict = "pass" if 2 * ran >= facts.meant else "fail"
    return (Check(name="integer kernels", verdict=verdict, value=ran, limit=facts.meant / 2, evidence=evidence),)


def _kernels(
    candidate: Candidate, folder: Path, profile: Profile, operators: CustomOps
) -> tuple[dict[str, int] | None, dict[str, int] | None]:
    """What the runtime runs on a CPU of this machine's architecture, where that is the target's too.

    Of OpenVINO's float candidates nothing is counted: it costs a process, and all of their kernels are float.
    """
    on_cpu = profile.target.arch == platform.machine() and profile.target.kind == "cpu"
    of_openvino = candidate.runtime == "openvino" and candidate.precision == "int8"
    if not (candidate.runtime == "onnxruntime" or of_openvino) or not on_cpu:
        return None, None
    try:
        path = folder / candidate.file
        found = openvino_kernels.kernels(path) if of_openvino else integer_kernels.kernels(path, operators)
    except LoweringError as why:
        log.debug("%s: its kernels are not counted: %s", candidate.name, why.what)
        return None, None
    return found.integer, found.floats


def _meant(program: ExportedGraph) -> int:
    from edgeopt.errors import StageError
    from edgeopt.program.costs import costs

    try:
        return costs(program).integer_contractions
    except StageError:
        return 0
