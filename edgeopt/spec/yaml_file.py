"""The one place where YAML is read: profiles, projects and the values of `--set`.

Nothing is constructed by tag: the text is composed to nodes, and only text, numbers, booleans, null, lists
and mappings come out, so a file can name no class. Deviations from YAML 1.1, each of which has bitten people:
keys are always text (`on:` is 'on', `5.1:` is '5.1'), a duplicate key is an error, `1e-4` is a number, dates
and `1:30` are text, `010` is ten, merge keys (`<<`) are unknown keys. `on/off/yes/no` are booleans.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from edgeopt.errors import EdgeoptError

MAX_BYTES = 256 << 10
MAX_NODES = 20_000  # after aliases are expanded: a 'billion laughs' file is small until it is walked

_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9]*|0[0-9]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$")
_BOOL = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
_NULL = {"", "~", "null", "Null", "NULL"}
_TAG = "tag:yaml.org,2002:"


class _Refused(Exception):
    """A node that is no plain data: the reason and the line, counted from 1."""

    def __init__(self, reason: str, node: yaml.Node):
        super().__init__(reason)
        self.reason = reason
        self.line = node.start_mark.line + 1


def read_mapping(path: Path, *, error: type[EdgeoptError]) -> dict[str, Any]:
    """The mapping in the YAML file `path`; `error` names file and line where it is not one."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as why:
        raise error(
            f"the file cannot be read: {why.strerror}",
            where=str(path),
            todo="check the path and its permissions",
        ) from None
    return parse_mapping(data, source=str(path), error=error)


def parse_mapping(data: bytes | str, *, source: str, error: type[EdgeoptError]) -> dict[str, Any]:
    """The mapping in a YAML text; `source` is the name that messages give it. An empty text is {}."""
    value = parse_value(data, source=source, error=error)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise error(
            f"the file holds {_kind(value)}, not 'key: value' lines", where=source,
            todo="write it as a mapping, one 'key: value' a line",
        )  # fmt: skip
    return value


def parse_value(data: bytes | str, *, source: str, error: type[EdgeoptError]) -> Any:
    """The value in a YAML text: a scalar, a list or a mapping (flow style as well)."""
    if len(data) > MAX_BYTES:
        raise error(
            f"the file is larger than {MAX_BYTES >> 10} KiB",
            where=source,
            todo="check that it is the file you meant",
        )
    try:
        text = data.decode("utf-8-sig") if isinstance(data, bytes) else data
    except UnicodeDecodeError as why:
        line = data[: why.start].count(b"\n") + 1
        raise error("the file is not UTF-8 text", where=f"{source}:{line}", todo="save it as UTF-8") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            return None
        _count(node, {})
        return _value(node)
    except _Refused as why:
        raise error(why.reason, where=f"{source}:{why.line}", todo="correct this line") from None
    except yaml.MarkedYAMLError as why:
        mark = why.problem_mark or why.context_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        raise error(f"this is not YAML: {why.problem or why.context}", where=where, todo=_syntax_hint(text)) from None
    except yaml.YAMLError as why:
        reason = str(why).splitlines()[0]
        raise error(f"this is not YAML: {reason}", where=source, todo="save it as plain UTF-8 text") from None
    except RecursionError:
        raise error("the file is nested too deeply", where=source, todo="write it flatter") from None


def to_yaml(data: Any) -> str:
    """`data` (plain JSON values) as YAML text in the given order, which the readers above read back equal."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def to_flow(data: Any) -> str:
    """`data` as one line of YAML in flow style: `{shape: [batch, 3], dtype: float32}`."""
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**20, default_flow_style=True)
    return text.removesuffix("\n").removesuffix("\n...")


class _Dumper(yaml.SafeDumper):
    """No anchors for values that occur twice, and quotes where text would be read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    quotes = None if isinstance(_plain(text), str) else "'"
    return dumper.represent_scalar(_TAG + "str", text, style=quotes)


_Dumper.add_representer(str, _text_node)


def _syntax_hint(text: str) -> str:
    if re.search(r"^[ ]*\t", text, re.MULTILINE):
        return "indent with spaces: YAML allows no tabs"
    return "correct the syntax near this line (a missing space after ':' or an unclosed bracket or quote?)"


def _count(node: yaml.Node, sizes: dict[int, int | None]) -> int:
    """How many nodes `node` stands for with its aliases expanded; _Refused when recursive or too many."""
    if id(node) in sizes:
        known = sizes[id(node)]
        if known is None:
            raise _Refused("an alias (*) refers to the value that contains it", node)
        return known
    sizes[id(node)] = None
    total = 1
    if isinstance(node, yaml.MappingNode):
        total += sum(_count(key, sizes) + _count(value, sizes) for key, value in node.value)
    elif isinstance(node, yaml.SequenceNode):
        total += sum(_count(item, sizes) for item in node.value)
    if total > MAX_NODES:
        raise _Refused(f"the file stands for more than {MAX_NODES} values, aliases (*) expanded", node)
    sizes[id(node)] = total
    return total


def _value(node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _mapping(node)
    if isinstance(node, yaml.SequenceNode):
        if node.tag != _TAG + "seq":
            raise _Refused(f"the tag {node.tag!r} is not allowed", node)
        return [_value(item) for item in node.value]
    return _scalar(node)


def _mapping(node: yaml.MappingNode) -> dict[str, Any]:
    if node.tag != _TAG + "map":
        raise _Refused(f"the tag {node.tag!r} is not allowed", node)
    out: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise _Refused("a key must be text, not a list or a mapping", key_node)
        key = key_node.value
        if key in out:
            raise _Refused(f"the key '{key}' stands twice, first on line {lines[key]}", key_node)
        lines[key] = key_node.start_mark.line + 1
        out[key] = _value(value_node)
    return out


def _scalar(node: yaml.ScalarNode) -> Any:
    text = node.value
    if node.style in ("'", '"', "|", ">"):
        return text
    if not node.tag.startswith(_TAG):
        raise _Refused(f"the tag {node.tag!r} is not allowed", node)
    try:
        return _plain(text)
    except ValueError:  # Python refuses integers of thousands of digits
        raise _Refused("the number is too long", node) from None


def _plain(text: str) -> Any:
    """What unquoted text means."""
    if text in _NULL:
        return None
    if text.lower() in _BOOL and text in (text.lower(), text.upper(), text.capitalize()):
        return _BOOL[text.lower()]
    if _INT.match(text):
        return int(text, 16) if "x" in text else int(text)
    if _FLOAT.match(text):
        return float(text)
    return text


def _kind(value: Any) -> str:
    return {list: "a list", str: "text", bool: "a boolean"}.get(type(value), "a number")
