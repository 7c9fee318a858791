"""The manifest of an artifact: only what the inputs of the build determine, so that its sha256 names the artifact.

Written as canonical JSON to `manifest.json`; `digest(manifest)` is the artifact's digest. Tensors lie as raw
little-endian bytes, C order, at an offset of a file, so that a device reads them without numpy.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from edgeopt import digest as _digest
from edgeopt.errors import ArtifactError
from edgeopt.spec import json_file
from edgeopt.spec.adaptive import Adaptive
from edgeopt.spec.values import Value, validate

SCHEMA = 1
FILE_NAME = "manifest.json"
SELECTION_NAME = "selection.json"  # which candidate was chosen, where and by which figures; outside the digest
BUILD_NAME = "build.json"  # timings, stage records, tool versions, candidate table; outside the digest, not pushed
REPORTS_DIR = "reports"  # outside the digest, not pushed
STATEMENT_NAME = "manifest.signed"  # what is signed, see spec/statement.py; outside the digest
SIGNATURE_NAME = "manifest.sig"  # the signature of it, as ssh-keygen writes it; outside the digest
MAX_MANIFEST_BYTES = 64 << 20
MAX_SIGNATURE_BYTES = 1 << 16
MAX_FILE_BYTES = 1 << 40
MAX_PATH_BYTES, MAX_PART_BYTES = 1000, 200  # below what file systems take, with room for '.part' and a folder before
_MAX_RANK = 64

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip

Dtype = Literal["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
ArtifactName = Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]


def safe_path(path: str) -> str:
    """`path` when it is relative, normal, printable and stays inside the artifact's folder; else ValueError."""
    pure = PurePosixPath(path)
    if (
        not path or pure.is_absolute() or ".." in pure.parts or str(pure) != path
        or "\\" in path or not path.isprintable()  # no control, no bidirectional mark, no half of a surrogate pair
    ):  # fmt: skip
        raise ValueError(f"the path {path[:200]!r} is not a plain path inside the artifact")
    if len(path.encode()) > MAX_PATH_BYTES or any(len(part.encode()) > MAX_PART_BYTES for part in pure.parts):
        raise ValueError(f"the path {path[:200]!r}... is too long")
    return path


def _distinct(paths: Iterable[str]) -> None:
    """ValueError where two paths cannot stand side by side on every disk: macOS, Windows and vfat fold names."""
    seen: dict[str, str] = {}
    for path in paths:
        parts = path.split("/")
        for end in range(1, len(parts) + 1):
            part = "/".join(parts[:end])
            folded = unicodedata.normalize("NFC", unicodedata.normalize("NFC", part).casefold())
            if seen.setdefault(folded, part) != part:
                raise ValueError(f"{part!r} and {seen[folded]!r} are one name on some disks")
    files = set(paths)
    for path in files:
        for parent in list(PurePosixPath(path).parents)[:-1]:
            if str(parent) in files:
                raise ValueError(f"{str(parent)!r} is a file and a folder")


FilePath = Annotated[str, pydantic.AfterValidator(safe_path)]


def belongs_to(path: str, file: str) -> bool:
    """Whether `path` is the model file `file`, or external data of it: beside it, with its name as a prefix."""
    return path == file or path.startswith(file + ".")


class Axis(Value):
    """A named dynamic axis: sizes from min to max, opt the size to tune for."""

    min: int = Field(ge=1)
    opt: int = Field(ge=1)
    max: int = Field(ge=1)

    @pydantic.model_validator(mode="after")
    def _ordered(self) -> Axis:
        if not self.min <= self.opt <= self.max:
            raise ValueError(f"min <= opt <= max does not hold: {self.min}, {self.opt}, {self.max}")
        return self


class TensorSpec(Value):
    """A tensor by name: dtype, and a shape of sizes and of axis names."""

    name: str
    dtype: Dtype
    shape: tuple[int | str, ...] = Field(max_length=_MAX_RANK)


class File(Value):
    sha256: Sha256
    size: int = Field(ge=0, le=MAX_FILE_BYTES)


class TensorRef(Value):
    """A tensor's place in a file: raw little-endian, C order, `offset` in bytes."""

    file: FilePath
    offset: int = Field(ge=0, le=MAX_FILE_BYTES)
    dtype: Dtype
    shape: tuple[Annotated[int, Field(ge=0, le=MAX_FILE_BYTES)], ...] = Field(max_length=_MAX_RANK)

    @pydantic.model_validator(mode="after")
    def _bounded(self) -> TensorRef:
        if math.prod(max(1, size) for size in self.shape) > MAX_FILE_BYTES:  # numpy counts so for an empty one too
            raise ValueError(f"a tensor of shape {self.shape} is absurdly large")
        return self

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class Feed(Value):
    """One call of the model: named inputs, and the outputs of the unoptimised model where they are kept."""

    inputs: dict[str, TensorRef]
    outputs: dict[str, TensorRef] = {}


class Agreement(Value):
    """The least share of the choices of an output that are the reference's; along `axis` their order does not count."""

    least: float = Field(ge=0, le=1)
    axis: int | None = Field(None, ge=-_MAX_RANK, lt=_MAX_RANK)


class Tolerance(Value):
    """What a candidate's outputs may differ by from the reference: all must hold that are given.

    `sqnr_db`: least ratio of signal to error, 10 log10(sum r^2 / sum (r - x)^2). `max_abs`: largest
    |r - x| / max(1, max |r|). Integer and bool outputs of float candidates are compared exactly, but for those that
    choose classes: `agreement`, by the output's name.
    """

    sqnr_db: float | None = None
    max_abs: float | None = None
    agreement: dict[str, Agreement] = {}


class Candidate(Value):
    """A runtime with a file that it loads; the device runs the one that `selection.json` names, else the first."""

    name: ArtifactName
    runtime: Literal["onnxruntime", "openvino", "torchscript", "aoti", "tensorrt"]
    precision: Literal["fp32", "fp16", "bf16", "int8"]
    file: FilePath
    flags: dict[str, Any] = {}  # fuser flags or session options; applied by the runner, each checked by trying it
    opset: int | None = None  # read back from the file
    tolerance: Tolerance = Tolerance()


class EngineRecipe(Value):
    """What the device needs to build a TensorRT engine: `candidate` names the Candidate whose file is its ONNX."""

    candidate: ArtifactName
    shapes: dict[str, dict[Literal["min", "opt", "max"], tuple[int, ...]]]
    typing: Literal["weak", "strong"]
    flags: tuple[str, ...] = ()  # builder flags as trtexec names them: fp16, int8
    plugins: tuple[FilePath, ...] = ()  # libraries of plugins, loaded before the file is parsed and the engine run
    dla: bool = False  # layers run on the DLA where it takes them, on the GPU otherwise
    onnx: FilePath | None = None  # what the engine is built from, where that is not the candidate's file
    calibration: FilePath | None = None  # scales of its tensors, for a TensorRT that quantizes by itself

    @property
    def files(self) -> tuple[str, ...]:
        """The files that the recipe needs beside the candidate's own."""
        return (*self.plugins, *filter(None, (self.onnx, self.calibration)))


class Refusal(Value):
    """A candidate that the artifact does not hold, and why: part of the answer, so part of the manifest."""

    candidate: ArtifactName
    reason: str


class _Node(Value):
    """A node of the structure around the outputs or the inputs, as runtime/structure describes it."""

    kind: Literal["tensor", "none", "constant", "tuple", "list", "dict", "dataclass", "namedtuple"]
    index: int | None = Field(None, ge=0)
    value: int | float | str | bool | None = None
    name: str | None = None
    items: list[_Node] | dict[str, _Node] | None = None
    order: list[str] | None = None

    @pydantic.model_validator(mode="after")
    def _whole(self) -> _Node:
        if self.kind == "tensor" and self.index is None:
            raise ValueError("a tensor of the structure has no index")
        if self.kind in ("tuple", "list") and not isinstance(self.items, list):
            raise ValueError(f"a {self.kind} of the structure has no items")
        named = self.items if isinstance(self.items, dict) else {}
        fields = self.kind in ("dict", "dataclass", "namedtuple")
        if fields and (self.order is None or sorted(self.order) != sorted(named)):
            raise ValueError(f"a {self.kind} of the structure does not have the items of its order")
        return self

    def tensors(self) -> list[int]:
        """The indices of the tensors below."""
        below = self.items.values() if isinstance(self.items, dict) else self.items or ()
        return ([self.index] if self.kind == "tensor" else []) + [i for node in below for i in node.tensors()]


class Manifest(Value):
    schema_version: int = SCHEMA
    name: ArtifactName
    profile: str  # as asked for: NAME or NAME@JETPACK
    target: dict[str, Any]  # the profile's Target, as JSON data
    root: str | None = None  # where releases live on the device, else ~/.edgeopt
    after_activate: tuple[str, ...] = ()  # argv run after a switch
    health: tuple[str, ...] = ()  # argv whose exit status decides whether the switch stays
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    axes: dict[str, Axis] = {}
    adaptive: Adaptive | None = None  # sizes to serve fast
    input_structure: Any = None  # forward's arguments around the inputs; None where each input is one of its own
    output_structure: Any  # see runtime/structure: the user's tuple, dict, dataclass or None around the tensors
    files: dict[FilePath, File]
    candidates: tuple[Candidate, ...] = Field(min_length=1)
    refused: tuple[Refusal, ...] = ()
    engine_recipes: tuple[EngineRecipe, ...] = ()
    op_libraries: tuple[FilePath, ...] = ()
    reference: tuple[Feed, ...] = Field(min_length=1)
    cases: tuple[Feed, ...] = ()
    cases_complete: bool = False  # the cases are all that `evaluate` asked for, so that the metric can be replayed
    limits: dict[str, Any] = {}  # Limits as JSON data
    metrics: dict[str, dict[str, float]] = {}  # 'reference' and each candidate: what `evaluate` gave at build time

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Manifest:
        used = [c.file for c in self.candidates] + list(self.op_libraries)
        used += [file for recipe in self.engine_recipes for file in recipe.files]
        for feed in (*self.reference, *self.cases):
            used += [ref.file for ref in (*feed.inputs.values(), *feed.outputs.values())]
        for path in used:
            if path not in self.files:
                raise ValueError(f"the file {path!r} is used but not listed in 'files'")
        for feed in (*self.reference, *self.cases):
            for ref in (*feed.inputs.values(), *feed.outputs.values()):
                if ref.offset + ref.size_bytes > self.files[ref.file].size:
                    raise ValueError(f"a tensor reaches past the end of {ref.file!r}")
        structure = _Node.model_validate(self.output_structure)
        if any(index >= len(self.outputs) for index in structure.tensors()):
            raise ValueError("the output structure names an output that is not there")
        if self.input_structure is not None:
            given = _Node.model_validate(self.input_structure)
            if given.kind != "dict" or sorted(given.tensors()) != list(range(len(self.inputs))):
                raise ValueError("the input structure does not hold every input once")
        names = [c.name for c in self.candidates]
        if len(set(names)) != len(names):
            raise ValueError("two candidates have one name")
        reserved = {FILE_NAME, SELECTION_NAME, BUILD_NAME, REPORTS_DIR, STATEMENT_NAME, SIGNATURE_NAME}
        for path in self.files:
            top = path.split("/")[0].casefold()
            # what is replaced is written beside its name first, as `.part` or `.new`
            if any(top == name or top.startswith(name + ".") for name in reserved):
                raise ValueError(f"{path!r} is a reserved name")
        _distinct(self.files)
        return self

    def size_bytes(self, candidate: Candidate) -> int:
        """Bytes of the candidate's file and of its external data."""
        return sum(file.size for path, file in self.files.items() if belongs_to(path, candidate.file))

    def candidate(self, name: str) -> Candidate:
        for c in self.candidates:
            if c.name == name:
                return c
        raise ArtifactError(
            f"the artifact has no candidate '{name}'", where=self.name,
            todo="choose one of: " + ", ".join(c.name for c in self.candidates),
        )  # fmt: skip


class Selection(Value):
    """`selection.json`: the candidate that was chosen, by whom, and the figures that it was chosen by."""

    candidate: ArtifactName
    decided_by: Literal["build", "validate"]
    where: str  # host label, 'this machine'
    reason: str
    verdict: Literal["faster", "only", "undecided"]
    figures: dict[str, Any] = {}  # candidate -> {"p50_ms": ..., "metrics": {...}}
    mode: Literal["latency", "throughput"] = "latency"  # what it was chosen by; `validate` decides by the same
    settings: dict[str, Any] | None = None  # of the candidate, tuned: {"cores", "threads", "streams", "flags"}


def encode(manifest: Manifest) -> bytes:
    """The manifest as the canonical bytes that its digest is taken of."""
    data = manifest.model_dump(mode="json")
    if manifest.input_structure is None:  # as manifests were before they had the key, whose digests stay
        del data["input_structure"]
    for candidate in data["candidates"]:
        if not candidate["tolerance"]["agreement"]:
            del candidate["tolerance"]["agreement"]
    if manifest.adaptive is None:
        del data["adaptive"]
    for recipe in data["engine_recipes"]:
        for key in ("plugins", "dla", "onnx", "calibration"):
            if not recipe[key]:
                del recipe[key]
    return _digest.canonical_json(data)


def digest(manifest: Manifest) -> str:
    """The artifact's digest: sha256 of `encode(manifest)`."""
    return _digest.of_bytes(encode(manifest))


def decode(data: bytes, *, source: str) -> Manifest:
    """`manifest.json` read and checked; ArtifactError names `source` and the first thing that is wrong."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise ArtifactError("the manifest is absurdly large", where=source, todo="build the artifact again")
    todo = "build or copy the artifact again"
    value = json_file.read(data, what="the manifest", source=source, error=ArtifactError, todo=todo)
    version = value.get("schema_version") if isinstance(value, dict) else None
    if isinstance(version, int) and version > SCHEMA:
        raise ArtifactError(
            f"the artifact has schema {version}; this edgeopt reads up to {SCHEMA}", where=source,
            todo="update edgeopt, or build the artifact with this version",
        )  # fmt: skip
    return validate(Manifest, value, source=source, error=ArtifactError)
