"""Inspect what lies on disk: the candidates of an artifact, and model files by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeopt.errors import ModelError, UsageError
from edgeopt.flows.inspect import Asked, Inspected, differ, no_points
from edgeopt.runtime.artifact import Artifact
from edgeopt.spec.manifest import DTYPE_BYTES, Axis, Candidate, TensorSpec
from edgeopt.spec.values import did_you_mean


def inspect_artifact(artifact: Artifact, asked: Asked) -> Inspected:
    """An artifact's candidates, or the difference of two of them; `shown` is the one that runs first.

    UsageError for a name that is no candidate and no file of it.
    """
    no_points(asked, "an artifact")
    manifest, selection = artifact.manifest, artifact.selection()
    if asked.diff:
        before, shown = (_candidate(artifact, _named(artifact, text)) for text in asked.diff)
        return differ(before, shown, name=manifest.name, profile=manifest.profile)
    first = selection.candidate if selection else manifest.candidates[0].name
    described: dict[str, Any] = {}
    for candidate in manifest.candidates:
        if candidate.file not in described:
            described[candidate.file] = _candidate(artifact, candidate)
    files = {
        c.name: {
            "description": described[c.file], "file": c.file, "runtime": c.runtime, "precision": c.precision,
            "size_bytes": manifest.size_bytes(c), "first": c.name == first,
        }
        for c in manifest.candidates
    }  # fmt: skip
    file = manifest.candidate(first).file
    usage = tuple(str(artifact.path(name)) for name in sorted(manifest.files) if name.startswith("usage/"))
    return Inspected(
        manifest.name, manifest.profile, shown=described[file], files=files, path=artifact.path(file), usage=usage
    )


def inspect_file(path: Path, asked: Asked) -> Inspected:
    """An ONNX or TorchScript file by itself. ModelError where it cannot be read."""
    no_points(asked, "a model file")
    if asked.diff:
        before, shown = (_file(_near(path, text)) for text in asked.diff)
        return differ(before, shown, name=path.name, profile=None)
    return Inspected(path.name, None, shown=_file(path), path=path)


def inspect_two(first: str, second: str) -> Inspected:
    """The difference of two model files."""
    before, shown = (_file(Path(text).expanduser()) for text in (first, second))
    return differ(before, shown, name=f"{first} and {second}", profile=None)


def _near(path: Path, text: str) -> Path:
    """A file named beside the one that is inspected, or where it is."""
    beside = path.parent / text
    return beside if beside.is_file() else Path(text).expanduser()


def _named(artifact: Artifact, text: str) -> Candidate:
    by_name: dict[str, Candidate] = {}
    for candidate in artifact.manifest.candidates:
        by_name.setdefault(candidate.file, candidate)
    by_name |= {c.name: c for c in artifact.manifest.candidates}
    if text not in by_name:
        near = did_you_mean(text, list(by_name))
        raise UsageError(
            f"the artifact has no candidate or file '{text}'" + (f", did you mean '{near}'?" if near else ""),
            where="--diff", todo="one of: " + ", ".join(by_name),
        )  # fmt: skip
    return by_name[text]


def _candidate(artifact: Artifact, candidate: Candidate) -> Any:
    """The description of a candidate's file, its sizes and reference calls taken from the manifest.

    A file that this process cannot load, as one whose operators are the user's own, is described by name with why.
    """
    from edgeopt.program import Call, Signature
    from edgeopt.program.description import Description
    from edgeopt.runtime import tensors

    manifest = artifact.manifest
    calls = tuple(
        Call(*({n: tensors.read(artifact.folder, ref) for n, ref in named.items()} for named in (f.inputs, f.outputs)))
        for f in manifest.reference
    )
    signature = Signature(manifest.inputs, manifest.outputs, manifest.axes, manifest.output_structure, {})
    path = artifact.path(candidate.file)
    try:
        if path.suffix == ".onnx":
            return _onnx(path, candidate.file, signature, calls)
        return _script(path, candidate.file, signature, calls)
    except ModelError as why:
        return Description(
            candidate.file, candidate.runtime, manifest.inputs, manifest.outputs, manifest.axes, (), None, None,
            why_not=why.what,
        )  # fmt: skip


def _file(path: Path) -> Any:
    """The description of a file without a manifest: ONNX tells its inputs, TorchScript only how many there are."""
    if not path.is_file():
        raise ModelError("there is no such model file", where=str(path), todo="check the path")
    if path.suffix.lower() == ".onnx":
        signature, notes = _declared(path)
        return _onnx(path, path.name, signature, (), notes)
    return _script(path, path.name, None, ())


def _onnx(path: Path, name: str, signature: Any, calls: tuple, notes: tuple[str, ...] = ()) -> Any:
    from edgeopt.capture import onnx_file
    from edgeopt.program import OnnxGraph
    from edgeopt.program.description import describe

    program = OnnxGraph(signature=signature, reference=calls, model=onnx_file.read(path))
    return describe(program, name, notes=notes)


def _script(path: Path, name: str, signature: Any, calls: tuple) -> Any:
    from edgeopt.capture import script
    from edgeopt.program import ScriptGraph
    from edgeopt.program.description import describe, describe_script

    module = script.read(path)
    if signature is None:
        return describe_script(module, name)
    return describe(ScriptGraph(signature=signature, reference=calls, module=module, how="file"), name)


def _declared(path: Path) -> tuple[Any, tuple[str, ...]]:
    """The signature that an ONNX file declares, and a note of the sizes that it leaves open."""
    import onnx

    from edgeopt.flows.init import infer
    from edgeopt.program import Signature

    found = infer(path.name, path.parent)
    inputs = tuple(TensorSpec(name=name, **spec) for name, spec in found.inputs.items())
    axes = {name: Axis(**axis) for name, axis in found.axes.items()}
    graph = onnx.load(str(path), load_external_data=False).graph
    outputs = tuple(spec for value in graph.output if (spec := _spec(value)) is not None)
    notes = [f"the input {name}: {why}" for name, why in found.unknown.items()]
    if axes:
        sizes = ", ".join(f"{name}={axis.opt}" for name, axis in axes.items())
        notes.append(f"the file leaves sizes open, and {sizes} was taken; a project says which count")
    return Signature(inputs, outputs, axes, None, {}), tuple(notes)


def _spec(value: Any) -> TensorSpec | None:
    from edgeopt.program.onnx_walk import dtype_name

    tensor = value.type.tensor_type
    dtype = dtype_name(tensor.elem_type)
    if dtype not in DTYPE_BYTES:
        return None
    shape = [d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in tensor.shape.dim]
    return TensorSpec(name=value.name, dtype=dtype, shape=tuple(shape))
