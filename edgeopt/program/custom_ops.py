"""The user's own operators: the libraries that hold them, and how they reach each runtime.

A program carries this with it. `of` reads files and runs nothing; `load` brings the operators into this process's
torch, after a trial in a process of its own: a library whose operators are defined already ends the process.
"""

from __future__ import annotations

import functools
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeopt.errors import EdgeoptError, ModelError, ProjectError
from edgeopt.ports import op_library, user_code
from edgeopt.ports.op_library import OpLibrary
from edgeopt.spec.custom_ops import CustomOp, node_of
from edgeopt.spec.project import Project

_KEY = "op_libraries"
_TRIAL_S = 300
_LINE_CHARACTERS = 300
# Loads each library as the build will; what it was about to load stands on its last line of output.
_TRIAL = """
import sys, torch
sys.path.insert(0, sys.argv[1])
for kind, path in zip(sys.argv[2::2], sys.argv[3::2]):
    print(path, flush=True)
    if kind == "torch":
        torch.ops.load_library(path)
    elif kind == "python":
        exec(compile(open(path, "rb").read(), path, "exec"), {"__name__": "trial", "__file__": path})
    else:
        import onnxruntime
        onnxruntime.SessionOptions().register_custom_ops_library(path)
"""


@dataclass(frozen=True)
class CustomOps:
    """`libraries` of the key op_libraries in their order; `ops` of the key custom_ops.

    `onnxruntime` and `tensorrt` are the libraries that `ops` names, by the node that they run (domain::Type).
    """

    libraries: tuple[OpLibrary, ...] = ()
    ops: Mapping[str, CustomOp] = field(default_factory=dict)
    onnxruntime: Mapping[str, tuple[OpLibrary, ...]] = field(default_factory=dict)
    tensorrt: Mapping[str, tuple[OpLibrary, ...]] = field(default_factory=dict)
    folder: Path = Path(".")

    def for_torch(self, arch: str) -> tuple[OpLibrary, ...]:
        """What torch loads on a machine of `arch`, in order."""
        return tuple(o for o in self.libraries if o.kind in ("python", "torch") and o.runs_on(arch))

    def for_onnxruntime(self, arch: str, nodes: Iterable[str] | None = None) -> tuple[OpLibrary, ...]:
        """What onnxruntime loads on a machine of `arch` for these nodes, or for all that are known."""
        named = [library for node in self._wanted(nodes) for library in self.onnxruntime.get(node, ())]
        general = [o for o in self.libraries if o.kind == "onnxruntime"]
        return _once(o for o in (*general, *named) if o.runs_on(arch))

    def for_tensorrt(self, arch: str, nodes: Iterable[str] | None = None) -> tuple[OpLibrary, ...]:
        """What holds the plugins of these nodes on a machine of `arch`."""
        return _once(o for node in self._wanted(nodes) for o in self.tensorrt.get(node, ()) if o.runs_on(arch))

    def _wanted(self, nodes: Iterable[str] | None) -> list[str]:
        return sorted({*self.onnxruntime, *self.tensorrt} if nodes is None else set(nodes))

    def missing_in_torch(self, arch: str) -> str | None:
        """Why torch on a machine of `arch` cannot load the operators, or None."""
        return op_library.missing_for((o for o in self.libraries if o.kind == "torch"), arch)

    def op_of_node(self, node: str) -> CustomOp | None:
        """What the project says of an ONNX node, domain::Type."""
        return next((op for key, op in self.ops.items() if node_of(key, op) == node), None)


def _once(libraries: Iterable[OpLibrary]) -> tuple[OpLibrary, ...]:
    return tuple({library.path: library for library in libraries}.values())


NONE = CustomOps()


def of(project: Project) -> CustomOps:
    """The project's operator libraries, their headers read. ProjectError for a file that is no library."""
    libraries = tuple(op_library.read(project.path(given), given, key=_KEY) for given in project.op_libraries)
    for library in libraries:
        _check_place(library, project)
    named: dict[str, dict[str, tuple[OpLibrary, ...]]] = {"onnxruntime": {}, "tensorrt": {}}
    for name, op in project.custom_ops.items():
        for runtime, of_runtime in named.items():
            key = f"custom_ops.{name}.{runtime}"
            files = tuple(
                op_library.read(project.path(given), given, key=key, kind=runtime) for given in getattr(op, runtime)
            )
            op_library.check_together(files, key=key)
            if files:
                of_runtime[node_of(name, op)] = files
    every = [o for files in (*named["onnxruntime"].values(), *named["tensorrt"].values()) for o in files]
    op_library.check_together((*libraries, *every), key=_KEY)
    return CustomOps(libraries, project.custom_ops, named["onnxruntime"], named["tensorrt"], project.folder)


def _check_place(library: OpLibrary, project: Project) -> None:
    """A Python file is the project's own code: what it imports counts for the stage cache, which looks there."""
    if library.kind == "python" and project.folder not in library.path.resolve().parents:
        raise ProjectError(
            "a Python operator library must lie in the project's folder", where=f"key '{_KEY}': {library.given}",
            todo=f"move it below {project.folder}; a shared library may lie anywhere",
        )  # fmt: skip


def load(custom: CustomOps) -> None:
    """Bring the operators into this process's torch; what is loaded already stays.

    ProjectError where there is no library for this machine, ModelError, with the user's line, for one that does not
    load or defines an operator that another defined.
    """
    arch = platform.machine()
    if reason := custom.missing_in_torch(arch):
        raise ProjectError(
            reason, where=f"key '{_KEY}', on the machine that builds",
            todo=f"build it for {arch} as well and add the file: the model runs here before it runs there",
        )  # fmt: skip
    libraries = custom.for_torch(arch)
    _try_out(custom, [*libraries, *custom.for_onnxruntime(arch)])
    before: dict[str, tuple[Any, str]] = {}
    for library in libraries:
        if library.kind == "torch":
            import torch

            torch.ops.load_library(str(library.path))
        else:
            _load_python(library, custom.folder)
        _check_redefined(library, before)


def _try_out(custom: CustomOps, libraries: list[OpLibrary]) -> None:
    """Load everything in a process of its own, where there is a shared library: an abort there is an answer.

    What this process has loaded comes first, since a copy of a library defines its operators a second time.
    """
    import torch

    if all(o.kind == "python" for o in libraries):
        return
    new = [o for o in libraries if o.kind != "torch" or str(o.path) not in torch.ops.loaded_libraries]
    loaded = [("torch", path, 0) for path in sorted(torch.ops.loaded_libraries)]
    status, at, said = _trial(
        str(custom.folder), (*loaded, *((o.kind, str(o.path), o.path.stat().st_mtime_ns) for o in new))
    )
    failed = next((o for o in libraries if str(o.path) == at), None)
    if status == 0 or failed is None or failed.kind == "python":
        return  # the user's own line is found when a Python file is loaded here
    raise ModelError(
        f"the operator library does not load: {said}", where=failed.given,
        todo="link it against the libraries of this torch, with its compiler flags; each operator has one definition",
    )  # fmt: skip


@functools.cache
def _trial(folder: str, libraries: tuple[tuple[str, str, int], ...]) -> tuple[int, str, str]:
    """Exit status, the library that was being loaded at the end, and what was said. Once for the same files."""
    argv = [sys.executable, "-W", "ignore", "-c", _TRIAL, folder]
    for kind, path, _ in libraries:
        argv += [kind, path]
    try:
        done = subprocess.run(argv, capture_output=True, timeout=_TRIAL_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as why:
        return 1, _last_line(why.stdout or b""), f"it takes longer than {_TRIAL_S} s"
    return done.returncode, _last_line(done.stdout), _said(done.stderr.decode(errors="replace"))


def _last_line(text: bytes) -> str:
    return (text.decode(errors="replace").splitlines() or [""])[-1]


def _said(text: str) -> str:
    """What a failed process says of its end: C++ exceptions after 'what():', Python's on the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    what = next((line.partition("what():")[2].strip() for line in lines if "what():" in line), None)
    python = next((line.partition(": ")[2] for line in lines if line.startswith(("OSError: ", "RuntimeError: "))), None)
    return (what or python or (lines or ["it ended without a word"])[-1])[:_LINE_CHARACTERS]


def _load_python(library: OpLibrary, folder: Path) -> None:
    """Import the file under the name that the model's own code imports it by, so that it runs once."""
    relative = library.path.resolve().relative_to(folder.resolve())
    dotted = ".".join(relative.with_suffix("").parts)
    spec = f"{relative}:__name__"
    if len(relative.parts) > 1 and all(part.isidentifier() for part in relative.with_suffix("").parts):
        loaded = _module_at(dotted, folder)
        if loaded == library.path.resolve():
            spec = f"{dotted}:__name__"
    try:
        user_code.load_attribute(spec, folder, key=_KEY, error=ModelError)
    except ModelError as why:
        raise _explained(why, library) from why


def _module_at(dotted: str, folder: Path) -> Path | None:
    """The file that the name would be imported from."""
    import importlib.util

    user_code.take_turn(folder)
    try:
        found = importlib.util.find_spec(dotted)
    except Exception:  # a package's own code may fail in any way
        return None
    return Path(found.origin).resolve() if found is not None and found.origin else None


def _explained(why: ModelError, library: OpLibrary) -> EdgeoptError:
    """torch's words for a second definition of an operator, in ours."""
    if "multiple times" not in why.what and "Only a single TORCH_LIBRARY" not in why.what:
        return why
    return ModelError(
        f"{library.given} defines what was defined before: {why.what.partition(': ')[2][:_LINE_CHARACTERS]}",
        where=why.where, todo="define each operator in one library, and let the others import it",
    )  # fmt: skip


def _check_redefined(library: OpLibrary, before: dict[str, tuple[Any, str]]) -> None:
    """ModelError where a Python operator of an earlier library was replaced: torch says nothing."""
    for name, definition in _definitions():
        known = before.setdefault(name, (definition, library.given))
        if known[0] is not definition:
            raise ModelError(
                f"the operator {name} is defined twice: by {known[1]} and by {library.given}", where=f"key '{_KEY}'",
                todo="define it in one of them, and let the other import it",
            )  # fmt: skip


def _definitions() -> Iterator[tuple[str, Any]]:
    """The operators made by torch.library.custom_op in this process: torch's own table of them."""
    from torch._library import custom_ops

    yield from list(custom_ops.OPDEFS.items())
