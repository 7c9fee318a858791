"""Loading the user's Python code by name: 'file.py:name' or 'package.module:name'.

Every project may have a `model.py` and a `data.py`, and one process may build several projects. One project has its
turn at a time: its folder is on the path, and the modules that came from other projects' folders are put aside until
their project's code is asked for again.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from edgeopt import digest
from edgeopt.errors import EdgeoptError, ModelError, ProjectError
from edgeopt.spec.values import did_you_mean

_NAMED_BY_US = "_edgeopt_user_"  # a file whose own name another module has or had


@dataclass
class _Turn:
    """Whose modules `sys.modules` holds. The interpreter has one such table, so there is one of these beside it.

    What was imported `before` the folder's turn belongs to the process, wherever it lies. `aside`: folder -> the
    modules that were found in it, by name.
    """

    folder: str | None = None
    before: frozenset[str] = frozenset()
    aside: dict[str, dict[str, ModuleType]] = field(default_factory=dict)


_NOW = _Turn()


def load_attribute(spec: str, base: Path, *, key: str, error: type[EdgeoptError] = ProjectError) -> Any:
    """The object that `spec` names, its file taken relative to `base`.

    `key` is the project key that holds `spec`, for messages. The user's own folder is importable while and after
    the module loads, as it is when they run the file, until another project's code is asked for. Raises `error` that
    names the file and the user's own line.
    """
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise error(
            f"'{spec}' names no Python object", where=f"key '{key}'",
            todo="write file.py:name or package.module:name",
        )  # fmt: skip
    module = _module(where, base, key, error)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            near = did_you_mean(part, [n for n in dir(value) if not n.startswith("_")])
            hint = f"did you mean '{near}'?" if near else "check the name"
            raise error(f"'{where}' has no '{name}'", where=f"key '{key}': {spec}", todo=hint)
        value = getattr(value, part)
    return value


def _module(where: str, base: Path, key: str, error: type[EdgeoptError]) -> ModuleType:
    take_turn(base)
    try:
        if where.endswith(".py"):
            return _from_file((base / where).resolve(), key, error)
        return importlib.import_module(where)
    except EdgeoptError:
        raise
    except ModuleNotFoundError as why:
        raise error(
            f"cannot import '{why.name}' for '{where}'", where=f"key '{key}'",
            todo="install it in this environment, or correct the name",
        ) from why  # fmt: skip
    except Exception as why:
        raise error(
            f"'{where}' cannot be loaded: {type(why).__name__}: {why}", where=user_line(why, base) or f"key '{key}'",
            todo="run the file by itself to see the whole error, or use --debug",
        ) from why  # fmt: skip


def take_turn(base: Path) -> None:
    """Make the folder importable, and the modules of no other project's folder; its own are there as it left them."""
    folder = str(base.resolve())
    if folder != _NOW.folder:
        if _NOW.folder is not None:
            sys.path[:] = [entry for entry in sys.path if entry != _NOW.folder]
            own = [name for name in sys.modules if _is_of(_NOW.folder, name)]
            _NOW.aside[_NOW.folder] = {name: sys.modules.pop(name) for name in own}
        _NOW.folder, _NOW.before = folder, frozenset(sys.modules)
        sys.modules.update(_NOW.aside.pop(folder, {}))
        importlib.invalidate_caches()
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _is_of(folder: str, name: str) -> bool:
    """Whether the module, or the package that it is part of, was found in the folder since its turn began."""
    top = name.partition(".")[0]
    if top in _NOW.before or name.startswith(_NAMED_BY_US):  # those names are no other project's
        return False
    module = sys.modules.get(top)
    file = getattr(module, "__file__", None)
    if file is None:
        return any(os.path.dirname(place) == folder for place in getattr(module, "__path__", ()))
    inside = os.path.realpath(os.path.dirname(os.path.dirname(file) if hasattr(module, "__path__") else file))
    below = inside.startswith(folder + os.sep) and inside not in sys.path and not _is_installed(file)
    return inside == folder or below


def _is_installed(file: str | Path) -> bool:
    return "site-packages" in Path(file).parts


def _from_file(path: Path, key: str, error: type[EdgeoptError]) -> ModuleType:
    if not path.is_file():
        raise error(f"there is no file '{path.name}'", where=f"key '{key}': {path}", todo="correct the path")
    name = own = path.stem
    loaded = sys.modules.get(own)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    put_aside = any(own in modules for modules in _NOW.aside.values())
    if loaded is not None or put_aside:  # TorchScript knows NamedTuples by the name of their module, once a process
        name = f"{_NAMED_BY_US}{digest.of_value(str(path))[:16]}_{own}"
        if name in sys.modules:
            return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    names = (name, own) if loaded is None else (name,)  # another module keeps its name
    sys.modules.update(dict.fromkeys(names, module))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        for name in names:
            sys.modules.pop(name, None)
        raise
    return module


def user_line(why: BaseException, base: Path) -> str | None:
    """'file.py, line N' of the innermost frame below `base` in the traceback of `why`, or None."""
    found = None
    for frame in traceback.extract_tb(why.__traceback__):
        found = place(frame.filename, frame.lineno, base) or found
    if isinstance(why, SyntaxError) and why.filename:
        found = f"{why.filename}, line {why.lineno}"
    return found


def calling_line(base: Path) -> str | None:
    """'file.py, line N' of the innermost frame below `base` on the stack right now, or None."""
    frames = reversed(traceback.extract_stack())
    return next(filter(None, (place(frame.filename, frame.lineno, base) for frame in frames)), None)


def place(file: str | Path, line: int | None, base: Path) -> str | None:
    """'file.py, line N' for a file of the user's own code below `base`, None for any other file."""
    path, folder = Path(file), base.resolve()
    own = folder in path.parents and not _is_installed(path)
    return f"{path.relative_to(folder)}, line {line}" if own else None


def call(function: Any, *args: Any, key: str, base: Path, error: type[EdgeoptError] = ModelError) -> Any:
    """`function(*args)`; an exception of the user's code becomes `error` that names their file and line."""
    try:
        return function(*args)
    except EdgeoptError:
        raise
    except Exception as why:
        raise error(
            f"'{key}' failed: {type(why).__name__}: {why}", where=user_line(why, base) or f"key '{key}'",
            todo="correct it there; --debug shows the whole traceback",
        ) from why  # fmt: skip
