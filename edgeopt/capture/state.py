"""What a module keeps in plain attributes, and the user's line that writes one."""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edgeopt.ports.user_code import place

_WRITERS = {"append", "extend", "insert", "pop", "update", "setdefault", "add", "clear", "remove", "popleft"}


def attributes(module: nn.Module) -> dict[str, Any]:
    """Dotted name -> a value to compare, for what the modules below hold beside parameters, buffers and modules."""
    own = vars(nn.Module())
    return {
        f"{path}.{name}" if path else name: _value(value)
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if name not in own
    }


def _value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        held = value.detach().cpu().contiguous().reshape(-1)
        return (tuple(value.shape), str(value.dtype), held.view(torch.uint8).numpy().tobytes() if len(held) else b"")
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(_value, value)]
    if isinstance(value, dict):
        return {str(key): _value(item) for key, item in value.items()}
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    return type(value).__name__  # of other objects only the kind is compared


def written(module: nn.Module, name: str, folder: Path) -> str | None:
    """'model.py, line 9' where the class of the owner of the attribute `name` writes it, outside __init__."""
    path, _, attribute = name.rpartition(".")
    owner = dict(module.named_modules()).get(path)
    while owner is not None:
        found = _line(type(owner), attribute, folder)
        if found or not path:
            return found
        attribute, path = path.rpartition(".")[2], path.rpartition(".")[0]  # the module above may write it
        owner = dict(module.named_modules()).get(path)
    return None


def forward_line(module: nn.Module, folder: Path) -> str | None:
    """'model.py, line 7' where the module's forward begins, or None where it is not the user's Python."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return place(code.co_filename, code.co_firstlineno, folder) if code else None


def _line(cls: type, attribute: str, folder: Path) -> str | None:
    try:
        lines, start = inspect.getsourcelines(cls)
        file = Path(inspect.getsourcefile(cls) or "")
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return None
    methods = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name != "__init__"]
    nodes = [n for method in methods for n in ast.walk(method)]
    found = next((n for n in nodes if _writes(n, attribute)), None)
    found = found or next(
        (n for n in nodes if isinstance(n, ast.Call) and any(_is(a, attribute) for a in n.args)), None
    )
    return place(file, start + found.lineno - 1, folder) if found else None


def _writes(node: ast.AST, attribute: str) -> bool:
    match node:
        case ast.Assign(targets=targets):
            return any(_is(target, attribute) for target in targets)
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            return _is(target, attribute)
        case ast.Call(func=ast.Attribute(value=value, attr=called)):
            return _is(value, attribute) and (called in _WRITERS or called.endswith("_") or called == "train")
    return False


def _is(node: ast.AST, attribute: str) -> bool:
    """Whether it is self.ATTRIBUTE, or a part of it such as self.ATTRIBUTE[0] or self.ATTRIBUTE.data."""
    while isinstance(node, ast.Subscript | ast.Attribute):
        if isinstance(node, ast.Attribute) and node.attr == attribute and isinstance(node.value, ast.Name):
            return True
        node = node.value
    return False
