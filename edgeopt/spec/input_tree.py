"""Dotted input names as the tree of forward's parameters: 'batch.ids' is the part 'ids' of the parameter 'batch'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Tree = dict[str, Any]  # part -> position among the names, or the Tree below


def input_tree(names: Sequence[str]) -> Tree:
    """Each parameter of forward -> its position among `names`, or the tree of its parts.

    Parts that are numbers are the items of a tuple or list, others the keys of a dict or the fields of a class.
    ValueError says which name does not fit: an empty part, one that is a tensor and has parts as well, numbers
    beside names, and numbers that do not run from 0 without a gap.
    """
    tree: Tree = {}
    for position, name in enumerate(names):
        parts = name.split(".")
        if not all(parts):
            raise ValueError(f"the name '{name}' has an empty part between its dots")
        here = tree
        for at, part in enumerate(parts[:-1], start=1):
            here = here.setdefault(part, {})
            if isinstance(here, int):
                raise ValueError(f"'{'.'.join(parts[:at])}' is a tensor, and '{name}' names a part of it")
        if isinstance(here.get(parts[-1]), dict):
            raise ValueError(f"'{name}' is a tensor, and other inputs name parts of it")
        here[parts[-1]] = position
    for parameter, below in tree.items():
        _check_items(below, parameter)
    return tree


def is_sequence(tree: Tree) -> bool:
    """Whether the parts are the items of a tuple or list."""
    return all(part.isdecimal() for part in tree)


def has_parts(names: Sequence[str]) -> bool:
    return any("." in name for name in names)


def _check_items(tree: Tree | int, path: str) -> None:
    if isinstance(tree, int):
        return
    numbers = [part for part in tree if part.isdecimal()]
    if numbers and len(numbers) < len(tree):
        other = next(part for part in tree if not part.isdecimal())
        raise ValueError(f"'{path}.{numbers[0]}' is an item of a tuple, and '{path}.{other}' a key of a dict")
    wanted = [str(i) for i in range(len(numbers))]
    missing = [part for part in wanted if part not in tree]
    if missing:
        odd = next(part for part in numbers if part not in wanted)
        raise ValueError(f"'{path}.{odd}' is given and '{path}.{missing[0]}' is not: a tuple's items have no gap")
    for part, below in tree.items():
        _check_items(below, f"{path}.{part}")
