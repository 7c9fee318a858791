"""A file with operators of the user's own: what it is, and for which machine, read from the file and never run."""

from __future__ import annotations

import ast
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edgeopt.errors import ProjectError
from edgeopt.onboard.ort import is_ort_library

Kind = Literal["python", "torch", "onnxruntime", "tensorrt"]

# e_machine of the ELF header: https://refspecs.linuxfoundation.org/elf/gabi4+/ch4.eheader.html and the processors'
# supplements
_MACHINES = {62: "x86_64", 183: "aarch64", 3: "i386", 40: "arm", 243: "riscv64", 21: "ppc64"}
_SHARED_OBJECT = 3  # e_type
_ARCH_IN_NAME = re.compile(r"[-_.]?(x86[-_]64|amd64|aarch64|arm64)", re.IGNORECASE)
_NOT_ON_DEVICE = ("edgeopt", "onnx", "onnxscript")


@dataclass(frozen=True)
class OpLibrary:
    """`arch` as `uname -m` prints it, None for a Python file. `given` is the path as the project has it."""

    path: Path
    given: str
    kind: Kind
    arch: str | None

    @property
    def name(self) -> str:
        """What the files of one library for several architectures have in common."""
        return _ARCH_IN_NAME.sub("", self.path.name) if self.arch else self.path.name

    @property
    def artifact_path(self) -> str:
        """Where it lies in an artifact: plain ASCII, which a device without a locale reads too."""
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", self.path.name)
        return f"ops/{self.arch}/{plain}" if self.arch else f"ops/{plain}"

    def runs_on(self, arch: str) -> bool:
        return self.arch in (None, arch)


def read(path: Path, given: str, *, key: str, kind: Kind | None = None) -> OpLibrary:
    """The facts of one file. ProjectError, which names `key`, for what is neither Python nor a shared library.

    `kind` where the key says it; else a shared library is onnxruntime's where it has its entry point, and torch's.
    """
    where = f"key '{key}': {given}"
    if path.suffix == ".py":
        if kind is not None:
            raise ProjectError(f"{kind} loads shared libraries, not Python files", where=where, todo="give a .so")
        return OpLibrary(path, given, "python", None)
    arch = _arch(path, where)
    if kind == "onnxruntime" and not is_ort_library(str(path)):
        raise ProjectError(
            "the library has no RegisterCustomOps, the entry point that onnxruntime calls", where=where,
            todo='export it: extern "C" OrtStatus* RegisterCustomOps(OrtSessionOptions*, const OrtApiBase*)',
        )  # fmt: skip
    return OpLibrary(path, given, kind or ("onnxruntime" if is_ort_library(str(path)) else "torch"), arch)


def _arch(path: Path, where: str) -> str:
    try:
        with path.open("rb") as f:
            head = f.read(20)
    except OSError as why:
        raise ProjectError(f"cannot read the library: {why.strerror}", where=where, todo="check the path") from None
    if head[:4] != b"\x7fELF" or len(head) < 20:
        raise ProjectError(
            "an operator library is a Python file (.py) or a shared library for Linux (ELF), and this is neither",
            where=where, todo="build it with -shared -fPIC; a static library or an object file is linked first",
        )  # fmt: skip
    order = "<" if head[5] == 1 else ">"
    kind, machine = struct.unpack(order + "HH", head[16:20])
    if kind != _SHARED_OBJECT:
        raise ProjectError(
            "the file is ELF but no shared library", where=where, todo="link it with -shared -fPIC"
        )  # fmt: skip
    return _MACHINES.get(machine, f"machine {machine}")


def check_together(libraries: Iterable[OpLibrary], *, key: str) -> None:
    """ProjectError where two files are one library for one architecture, or would be one file of the artifact."""
    seen: dict[tuple, OpLibrary] = {}
    for library in libraries:
        same = seen.setdefault((library.name, library.arch), library)
        if same.path != library.path:
            machine = f" for {library.arch}" if library.arch else ""
            raise ProjectError(
                f"{same.given} and {library.given} are the same library{machine}: names are compared without the "
                "architecture's", where=f"key '{key}'", todo="keep one of them, or rename it",
            )  # fmt: skip
        other = seen.setdefault((library.artifact_path,), library)
        if other.path != library.path:
            raise ProjectError(
                f"{other.given} and {library.given} have one name in plain letters: {library.artifact_path}",
                where=f"key '{key}'", todo="rename one of them",
            )  # fmt: skip


def missing_for(libraries: Iterable[OpLibrary], arch: str) -> str | None:
    """Why the shared libraries cannot be loaded on a machine of `arch`, or None: each needs a file for it."""
    machines: dict[str, list[OpLibrary]] = {}
    for library in libraries:
        machines.setdefault(library.name, []).append(library)
    for files in machines.values():
        if not any(library.runs_on(arch) for library in files):
            held = ", ".join(f"{library.given} is for {library.arch}" for library in files)
            return f"there is no library for {arch}: {held}"
    return None


def foreign_imports(path: Path) -> list[tuple[str, int]]:
    """(module, line) of what the Python file imports, outside of functions, and no device has."""
    found = []
    pending: list[ast.AST] = [ast.parse(path.read_bytes(), filename=path.name)]
    while pending:
        node = pending.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = ["." * node.level + (node.module or "")]
        found += [(n, node.lineno) for n in names if n.startswith(".") or n.split(".")[0] in _NOT_ON_DEVICE]
        pending += ast.iter_child_nodes(node)
    return found
