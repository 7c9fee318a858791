"""Flat tensors as the keyword arguments of forward: dicts, tuples, lists, named tuples and dataclasses of them.

The project names the parts of a parameter with dots ('batch.ids', 'pair.0'). Numbers make a tuple, or a list where
forward's annotation says so; other parts make a dict, or the annotated named tuple, dataclass or kind of dict.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from edgeopt.errors import ProjectError
from edgeopt.spec.input_tree import Tree, has_parts, input_tree, is_sequence
from edgeopt.spec.values import did_you_mean

Path = tuple[str, ...]
_ANYTHING = (Any, object)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """How the tensors of `names`, in that order, become forward's arguments.

    `structure` is the JSON that signature and manifest hold, None where every input is a parameter of its own;
    `makers` gives the user's class for the path of a named tuple, a dataclass or a kind of dict.
    """

    names: tuple[str, ...]
    structure: Any = None
    makers: dict[Path, Callable[..., Any]] = dataclasses.field(default_factory=dict)

    def of(self, tensors: Sequence[Any]) -> dict[str, Any]:
        """forward's keyword arguments; containers are new at each call. Raises what the user's classes raise."""
        if self.structure is None:
            return dict(zip(self.names, tensors, strict=True))
        return {key: self._make(node, (key,), tensors) for key, node in self.structure["items"].items()}

    def _make(self, node: dict[str, Any], path: Path, tensors: Sequence[Any]) -> Any:
        kind = node["kind"]
        if kind == "tensor":
            return tensors[node["index"]]
        if kind == "none":
            return None
        if kind in ("tuple", "list"):
            made = [self._make(item, (*path, str(i)), tensors) for i, item in enumerate(node["items"])]
            return tuple(made) if kind == "tuple" else made
        given = {
            key: self._make(item, (*path, key), tensors)
            for key, item in ((key, node["items"][key]) for key in node["order"])
            if item["kind"] != "constant"  # the class's own defaults
        }
        maker = self.makers.get(path)
        if maker is None:
            return given
        return maker(given) if kind == "dict" else maker(**given)


def arguments(
    parameters: list[inspect.Parameter], names: Sequence[str], annotation: Callable[[str], Any], *, where: str
) -> Arguments:
    """The arguments that `names` describe. `annotation` gives the type of the parameter of that name.

    ProjectError where the names and forward's annotations contradict each other; `where` names the model.
    """
    makers: dict[Path, Callable[..., Any]] = {}
    nodes = {}
    known = {p.name for p in parameters}
    for name, tree in input_tree(names).items():
        said = annotation(name) if name in known else inspect.Parameter.empty
        nodes[name] = _node(tree, said, (name,), makers, where)
    if not has_parts(names):
        return Arguments(tuple(names))
    return Arguments(tuple(names), {"kind": "dict", "items": nodes, "order": list(nodes)}, makers)


def named_parts(name: str, said: Any) -> list[str]:
    """The dotted names that the annotation `said` of the parameter `name` tells of, or the name alone.

    A class tells its fields without default, a tuple of a fixed length its items; the keys of a dict stand nowhere.
    """
    options = _members(said)
    option = options[0] if len(options) == 1 else Any
    kind, inner = typing.get_origin(option) or option, typing.get_args(option)
    if _has_fields(kind):
        below = [(key, field.type) for key, field in _fields(kind).items() if field.required]
    elif kind is tuple and inner and inner[-1] is not Ellipsis:
        below = [(str(i), part) for i, part in enumerate(inner)]
    else:
        return [name]
    return [part for key, type_ in below for part in named_parts(f"{name}.{key}", type_)]


def annotations_of(forward: Callable[..., Any]) -> Callable[[str], Any]:
    """The annotation of a parameter of a Python forward, text resolved to types."""
    plain = inspect.unwrap(forward)
    scope = getattr(plain, "__globals__", {})

    def annotation(name: str) -> Any:
        said = inspect.signature(forward).parameters[name].annotation
        try:
            return typing.get_type_hints(types.SimpleNamespace(__annotations__={name: said}), scope).get(name, said)
        except Exception as why:  # a name that exists for type checkers only, or inside a function
            if isinstance(said, str):
                return _Unresolved(said, str(why))
            return said

    return annotation


@dataclasses.dataclass(frozen=True)
class _Unresolved:
    text: str
    why: str


def _node(tree: Tree | int, said: Any, path: Path, makers: dict[Path, Any], where: str) -> dict[str, Any]:
    if isinstance(tree, int):
        _require_tensor(said, path, where)
        return {"kind": "tensor", "index": tree}
    if isinstance(said, _Unresolved):
        raise _refused(
            path, f"is annotated '{said.text}', which cannot be resolved ({said.why})", where,
            "define the class at the top of the model's file, not inside a function or under TYPE_CHECKING",
        )  # fmt: skip
    options = _members(said)
    make = _sequence if is_sequence(tree) else _named
    if not options or any(option in _ANYTHING or isinstance(option, typing.TypeVar) for option in options):
        return make(tree, tuple if is_sequence(tree) else dict, path, makers, where)
    fitting = next((option for option in options if _takes(option, is_sequence(tree))), None)
    if fitting is None:
        raise _refused(path, f"is {_words(options)}, and the project names its parts as {_parts(tree)}", where,
                       _advice(options, path))  # fmt: skip
    return make(tree, fitting, path, makers, where)


def _sequence(tree: Tree, said: Any, path: Path, makers: dict[Path, Any], where: str) -> dict[str, Any]:
    kind, inner = typing.get_origin(said) or said, typing.get_args(said)
    fixed = kind is tuple and inner and inner[-1] is not Ellipsis
    if fixed and len(inner) != len(tree):
        raise _refused(path, f"is a tuple of {len(inner)}, and the project gives {len(tree)} items", where,
                       f"name {path[-1]}.0 to {path[-1]}.{len(inner) - 1}")  # fmt: skip
    items = [
        _node(tree[str(i)], inner[i] if fixed else inner[0] if inner else Any, (*path, str(i)), makers, where)
        for i in range(len(tree))
    ]
    return {"kind": "list" if kind is list else "tuple", "items": items}


def _named(tree: Tree, said: Any, path: Path, makers: dict[Path, Any], where: str) -> dict[str, Any]:
    kind = typing.get_origin(said) or said
    if _is_dict(kind):
        inner = (typing.get_args(said) or (str, Any))[-1]
        if not inspect.isabstract(kind) and kind is not dict:
            makers[path] = kind
        items = {key: _node(below, inner, (*path, key), makers, where) for key, below in tree.items()}
        return {"kind": "dict", "items": items, "order": list(items)}
    fields = _fields(kind)
    unknown = next((key for key in tree if key not in fields), None)
    if unknown is not None:
        near = did_you_mean(unknown, list(fields))
        hint = f", did you mean '{near}'?" if near else ""
        raise _refused((*path, unknown), f"is no field of {kind.__name__}{hint}", where,
                       "its fields are: " + ", ".join(fields))  # fmt: skip
    lacking = next((key for key, field in fields.items() if key not in tree and field.required), None)
    if lacking is not None:
        raise _refused((*path, lacking), f"is a field of {kind.__name__} that the project does not give", where,
                       f"add '{'.'.join((*path, lacking))}' with its shape and dtype to 'inputs'")  # fmt: skip
    items = {}
    for key, field in fields.items():
        if key in tree:
            items[key] = _node(tree[key], field.type, (*path, key), makers, where)
        elif field.otherwise is not None:
            items[key] = field.otherwise
    if typing.is_typeddict(kind):
        return {"kind": "dict", "items": items, "order": list(items)}
    makers[path] = kind
    shape = "dataclass" if dataclasses.is_dataclass(kind) else "namedtuple"
    return {"kind": shape, "name": kind.__name__, "items": items, "order": list(items)}


@dataclasses.dataclass(frozen=True)
class _Field:
    type: Any
    required: bool
    otherwise: dict[str, Any] | None = None  # the node where the project does not give it, if JSON can hold that


def _fields(kind: type) -> dict[str, _Field]:
    """The fields that the project may give of a dataclass, a named tuple or a TypedDict."""
    try:
        hints = typing.get_type_hints(kind)
    except Exception:  # names that exist for type checkers only: the fields are taken to be tensors
        hints = {}
    if typing.is_typeddict(kind):
        return {key: _Field(hints.get(key, Any), key in kind.__required_keys__) for key in kind.__annotations__}
    missing = dataclasses.MISSING
    if dataclasses.is_dataclass(kind):
        given = [(f.name, f.default, f.default_factory is not missing) for f in dataclasses.fields(kind) if f.init]
    else:
        given = [(name, kind._field_defaults.get(name, missing), False) for name in kind._fields]
    return {name: _field(hints.get(name, Any), default, made) for name, default, made in given}


def _field(said: Any, default: Any, made: bool) -> _Field:
    """A field with its `default`, or with one that is `made` at each call; one that may be None is None by itself."""
    missing = default is dataclasses.MISSING
    if default is None or missing and not made and _may_be_none(said):
        return _Field(said, False, {"kind": "none"})
    if isinstance(default, bool | int | float | str):
        return _Field(said, False, {"kind": "constant", "value": default})
    return _Field(said, missing and not made)


def _may_be_none(said: Any) -> bool:
    return typing.get_origin(said) in (typing.Union, types.UnionType) and type(None) in typing.get_args(said)


def _members(said: Any) -> list[Any]:
    """The members of a union without None; one type is a union of one."""
    if said is inspect.Parameter.empty:
        return []
    if typing.get_origin(said) in (typing.Union, types.UnionType):
        return [found for part in typing.get_args(said) if part is not type(None) for found in _members(part)]
    return [said]


def _takes(said: Any, sequence: bool) -> bool:
    """Whether a value of the type `said` can be made of numbered (`sequence`) or named parts."""
    kind = typing.get_origin(said) or said
    if not isinstance(kind, type):
        return False
    if sequence:
        return kind in (tuple, list) or (inspect.isabstract(kind) and issubclass(tuple, kind))
    return _is_dict(kind) or _has_fields(kind)


def _is_dict(kind: type) -> bool:
    return issubclass(kind, Mapping) and not typing.is_typeddict(kind)


def _has_fields(kind: Any) -> bool:
    """Whether it is a dataclass, a named tuple or a TypedDict."""
    return isinstance(kind, type) and (
        dataclasses.is_dataclass(kind) or typing.is_typeddict(kind) or _is_named_tuple(kind)
    )


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _require_tensor(said: Any, path: Path, where: str) -> None:
    """Refuse a tensor for a parameter that can only be something with parts."""
    options = _members(said)
    if options and all(_has_parts(option) for option in options):
        raise _refused(path, f"is {_words(options)}, and the project gives one tensor", where, _advice(options, path))


def _has_parts(said: Any) -> bool:
    kind = typing.get_origin(said) or said
    return kind in (dict, list, tuple, Mapping, Sequence) or _has_fields(kind)


def _words(options: list[Any]) -> str:
    named = [getattr(o, "__name__", str(o)) if typing.get_origin(o) is None else str(o) for o in options]
    return "annotated " + " or ".join(named)


def _parts(tree: Tree) -> str:
    return ", ".join(f"'{part}'" for part in tree)


def _advice(options: list[Any], path: Path) -> str:
    name = ".".join(path)
    for option in options:
        kind = typing.get_origin(option) or option
        if _has_fields(kind):
            return "name its fields: " + ", ".join(f"{name}.{field}" for field in _fields(kind))
        if kind in (tuple, list):
            return f"name its items: {name}.0, {name}.1, ..."
        if kind is torch.Tensor:
            return f"name '{name}' alone, or correct the annotation"
        if _takes(option, sequence=False):
            return f"name its keys: {name}.KEY"
    return "make it a tensor, a tuple, a dict, a named tuple or a dataclass, or wrap the model"


def _refused(path: Path, what: str, where: str, todo: str) -> ProjectError:
    name = ".".join(path)
    return ProjectError(f"the input '{name}' {what}", where=f"key 'inputs.{name}'; {where}", todo=todo)
