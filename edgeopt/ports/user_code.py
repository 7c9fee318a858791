"""Loading the user's Python code by name: 'file.py:name' or 'package.module:name'."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from edgeopt.errors import EdgeoptError, ModelError, ProjectError
from edgeopt.spec.values import did_you_mean


def load_attribute(spec: str, base: Path, *, key: str, error: type[EdgeoptError] = ProjectError) -> Any:
    """The object that `spec` names, its file taken relative to `base`.

    `key` is the project key that holds `spec`, for messages. The user's own folder is importable while and after
    the module loads, as it is when they run the file. Raises `error` that names the file and the user's own line.
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
    folder = str(base.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
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


def _from_file(path: Path, key: str, error: type[EdgeoptError]) -> ModuleType:
    if not path.is_file():
        raise error(f"there is no file '{path.name}'", where=f"key '{key}': {path}", todo="correct the path")
    name = path.stem
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    if loaded is not None:  # another module has the name: do not replace it
        name = f"_edgeopt_user_{abs(hash(str(path)))}_{path.stem}"
        if name in sys.modules:
            return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
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
    own = folder in path.parents and "site-packages" not in path.parts
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
