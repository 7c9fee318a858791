"""The arguments of a TorchScript forward: its types as Python annotations, and the source that builds them.

TorchScript knows a named tuple of a file by its class's name alone, so its fields are read from the file's code.
"""

from __future__ import annotations

import inspect
import io
import itertools
import re
import types
import typing
from typing import Any

import torch

from edgeopt.capture.arguments import Arguments

_TYPES = {
    "dict": "Dict[str, torch.Tensor]", "tuple": "Tuple[torch.Tensor, torch.Tensor]", "list": "List[torch.Tensor]",
    "namedtuple": "the NamedTuple",
}  # fmt: skip
_FIELD = re.compile(r"^  (\w+) : ", re.MULTILINE)


def annotation(kind: Any, module: Any) -> Any:
    """A type of TorchScript as a Python annotation; named tuples become new ones with the same fields."""
    match kind.kind():
        case "TensorType":
            return torch.Tensor
        case "OptionalType":
            return typing.Optional[annotation(kind.getElementType(), module)]  # noqa: UP045  not known before it runs
        case "ListType":
            return list[annotation(kind.getElementType(), module)]
        case "DictType":
            return dict[annotation(kind.getKeyType(), module), annotation(kind.getValueType(), module)]
        case "TupleType":
            below = [annotation(t, module) for t in kind.elements()]
            fields = _fields(kind.annotation_str, module)
            if fields is None:
                return tuple[tuple(below)]
            name = kind.annotation_str.rpartition(".")[2]
            return typing.NamedTuple(name, list(zip(fields, below, strict=True)))
        case "StringType":
            return str
    return kind


def _fields(name: str, module: Any) -> list[str] | None:
    """The fields of the named tuple `name`, as the module's code lists them; None for a plain tuple."""
    if not name.startswith("__torch__."):
        return None
    place, _, last = name.rpartition(".")
    reader = torch._C.PyTorchFileReader(io.BytesIO(module.save_to_buffer()))
    code = reader.get_record(f"code/{place.replace('.', '/')}.py").decode()
    _, _, body = code.partition(f"class {last}(NamedTuple):\n")
    return _FIELD.findall(re.split(r"^\S", body, maxsplit=1, flags=re.MULTILINE)[0])


def annotations_to_add(module: Any, reach: Arguments) -> str:
    """What a user may write so that the compiler takes forward's parameters for what they are, or ''.

    It takes a parameter without annotation for a tensor, and knows no dataclasses that it has not compiled itself.
    """
    parameters = inspect.signature(module.forward).parameters
    bare = {name for name, p in parameters.items() if p.annotation is p.empty}
    nodes = reach.structure["items"] if reach.structure else dict.fromkeys(reach.names, {"kind": "tensor"})
    for name, node in nodes.items():
        if node["kind"] == "dataclass":
            return f"; TorchScript takes no dataclass: annotate '{name}' with a NamedTuple"
        if name in bare and node["kind"] != "tensor":
            return f"; annotate forward's '{name}', as in {name}: {_TYPES[node['kind']]}"
        if name in bare and parameters[name].default is None:
            return f"; annotate forward's '{name}', as in {name}: Optional[torch.Tensor] = None"
    return ""


def call_source(reach: Arguments, tensors: list[str], schema: Any) -> tuple[types.ModuleType, str]:
    """The arguments of a call of forward as source over the expressions `tensors`, and the classes that it names.

    `schema` is forward's own. The source calls a class `made.NAME`: TorchScript resolves that in the module given
    back. Arguments go by position as far as no default lies between: the compiler of source knows no keyword
    outside ASCII.
    """
    made = types.ModuleType("made")
    if reach.structure is None:
        values = dict(zip(reach.names, tensors, strict=True))
    else:
        nodes = reach.structure["items"].items()
        values = {key: _source(node, (key,), reach, tensors, made) for key, node in nodes}
    leading = itertools.takewhile(lambda a: a.name in values and not a.kwarg_only, schema.arguments[1:])
    placed = [values.pop(argument.name) for argument in leading]
    return made, ", ".join([*placed, *(f"{key}={value}" for key, value in values.items())])


def _source(node: dict, path: tuple[str, ...], reach: Arguments, tensors: list[str], made: types.ModuleType) -> str:
    kind = node["kind"]
    if kind == "tensor":
        return tensors[node["index"]]
    if kind == "none":
        return "None"
    if kind in ("tuple", "list"):
        items = [_source(item, (*path, str(i)), reach, tensors, made) for i, item in enumerate(node["items"])]
        return f"[{', '.join(items)}]" if kind == "list" else f"({', '.join(items)},)"
    below = {
        key: _source(node["items"][key], (*path, key), reach, tensors, made)
        for key in node["order"]
        if node["items"][key]["kind"] != "constant"
    }
    if kind == "dict":
        return "{" + ", ".join(f"{key!r}: {value}" for key, value in below.items()) + "}"
    name = f"Class{len(vars(made))}"
    setattr(made, name, reach.makers[path])
    return f"made.{name}({', '.join(f'{key}={value}' for key, value in below.items())})"
