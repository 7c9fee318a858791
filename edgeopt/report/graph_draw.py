"""A drawing on disk: FILE.dot as text, FILE.svg, .png and .pdf by graphviz's program `dot`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from edgeopt.errors import EdgeoptError, UsageError
from edgeopt.program.operators import Walk
from edgeopt.report.graph_dot import dot
from edgeopt.runtime.artifact import replace_file

DRAWN = (".svg", ".png", ".pdf")
_TIMEOUT_S = 300


def check(path: Path) -> None:
    """UsageError for a suffix that no drawing has; EdgeoptError where the program that draws it is not installed."""
    suffix = path.suffix.lower()
    if suffix not in (*DRAWN, ".dot"):
        raise UsageError(
            f"a graph is not drawn as '{path.suffix or path.name}'", where=f"--graph {path}",
            todo="name a file that ends in " + ", ".join((*DRAWN, ".dot")),
        )  # fmt: skip
    if suffix != ".dot" and shutil.which("dot") is None:
        raise EdgeoptError(
            "the program dot, which draws graphs, is not installed", where=f"--graph {path}",
            todo=f"apt-get install graphviz, or write {path.with_suffix('.dot').name}, which needs nothing",
        )  # fmt: skip


def draw(found: Walk, path: Path, title: str) -> None:
    """Write the drawing of the walked program to `path`, as its suffix says. Raises what `check` raises."""
    check(path)
    text = dot(found, title)
    if path.suffix.lower() == ".dot":
        replace_file(path, text.encode())
        return
    part = path.with_name(f".{path.name}.part")
    argv = ["dot", f"-T{path.suffix.lower()[1:]}", "-o", str(part)]
    try:
        done = subprocess.run(argv, input=text.encode(), capture_output=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        part.unlink(missing_ok=True)
        raise EdgeoptError(
            f"dot does not draw the graph within {_TIMEOUT_S} s: it has {len(found.operators)} operators",
            where=str(path), todo=f"write {path.with_suffix('.dot').name} and lay it out by another program, as sfdp",
        ) from None  # fmt: skip
    if done.returncode or not part.is_file():
        part.unlink(missing_ok=True)
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise EdgeoptError(f"dot cannot draw the graph: {said[-1]}", where=str(path), todo="write a .dot file instead")
    part.replace(path)
