"""The floors of the design: imports point down, rooms of one floor do not import each other, there is no cycle."""

from __future__ import annotations

import ast
from fnmatch import fnmatch
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "edgeopt"
FLOORS = {
    "onboard": 0, "errors": 0, "digest": 0, "progress": 0,
    "spec": 1, "profiles": 1,
    "ports": 2,
    "program": 3, "runtime": 3,
    "capture": 4, "passes": 4, "quant": 4, "backends": 4, "device": 4, "report": 4,
    "pipeline": 5, "rules": 5,
    "flows": 6, "qat": 6, "testing": 6,
    "cli": 7, "__main__": 8,
}  # fmt: skip
TORCH_FLOORS = {3, 4, 5}
CONFINED = {  # third-party module -> what the files that import it are called
    "paramiko": "ports/ssh*.py",
    "yaml": "spec/yaml_file.py",
}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imports(path: Path) -> list[tuple[str, int]]:
    """(module, line) of every import in the file, deferred ones included, `from edgeopt import x` as edgeopt.x."""
    found = []
    package = ("edgeopt", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            found += [(f"{base}.{alias.name}", node.lineno) for alias in node.names]
    return found


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    here = room(path)
    if here == "__init__":  # the package itself: `load`, deferred
        return
    for module, line in imports(path):
        parts = module.split(".")
        if parts[0] != "edgeopt" or len(parts) < 2:
            continue
        there = parts[1]
        if there in ("__version__", "__file__") or there == here:
            continue
        assert there in FLOORS, f"{path}:{line} imports {module}, a room that has no floor"
        assert FLOORS[there] < FLOORS[here] or FLOORS[here] == 0 == FLOORS[there] and here != "onboard", (
            f"{path}:{line}: {here} (floor {FLOORS[here]}) imports {module} (floor {FLOORS[there]})"
        )


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_third_party_imports_stay_in_their_rooms(path):
    name = path.relative_to(PACKAGE).as_posix()
    here = room(path)
    if here == "onboard":  # it finds its runtimes on the device
        return
    for module, line in imports(path):
        top = module.split(".")[0]
        assert fnmatch(name, CONFINED.get(top, name)), f"{path}:{line} imports {top}"
        if top in ("torch", "torchao"):
            assert FLOORS[here] in TORCH_FLOORS, f"{path}:{line} imports {top} on floor {FLOORS[here]}"


def test_there_is_no_import_cycle():
    """No file reaches itself through imports at module level and below, within a room as between rooms."""
    names = {".".join(("edgeopt", *p.relative_to(PACKAGE).with_suffix("").parts)): p for p in sources()}
    names |= {n.removesuffix(".__init__"): p for n, p in names.items() if n.endswith(".__init__")}
    edges = {}
    for path in sources():
        targets = set()
        for module, _ in imports(path):
            while module and module not in names:
                module = module.rpartition(".")[0]
            if module and module != "edgeopt" and names[module] != path:
                targets.add(names[module])
        edges[path] = targets
    done, active = set(), []

    def visit(path: Path) -> None:
        if path in active:
            cycle = [*active[active.index(path) :], path]
            pytest.fail("import cycle: " + " -> ".join(str(p.relative_to(PACKAGE)) for p in cycle))
        if path in done:
            return
        active.append(path)
        for target in sorted(edges[path]):
            # a package's __init__ that re-exports its own modules is no cycle
            if not (target.name == "__init__.py" and target.parent == path.parent):
                visit(target)
        active.pop()
        done.add(path)

    for path in sources():
        visit(path)


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_is_a_room_with_one_purpose(path):
    assert len(path.read_text().splitlines()) <= 400
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path} does not say what it is"
