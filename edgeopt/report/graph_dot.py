"""A walked program as a drawing for graphviz: chains of operators as one box, boxes in frames of their modules.

Every operator is a line of its box: name, the shape of its result, its share of the graph's FLOPs, which is its colour
as well. Weights, and what only changes how memory is read, are not drawn: edges go through them and say so.
"""

from __future__ import annotations

import html
import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from edgeopt.program.operators import Operator, Value, Walk
from edgeopt.report.figures import count, percent

_DEPTH = 2  # module names in a frame's path, below those that all operators share
_MOST_LINES = 12  # of one box; longer chains are cut
_FAST_FROM = 1500  # boxes from which graphviz draws straight lines, which it places quickly
# From nothing to the whole, of the ColorBrewer scheme OrRd (colorbrewer2.org), whose dark end is left out: text on it
_COLOURS = ("#ffffff", "#fff7ec", "#fee8c8", "#fdd49e", "#fdbb84", "#fc8d59")
_STEPS = (0.0, 0.002, 0.01, 0.03, 0.06, 0.12)  # share of the FLOPs from which each colour is taken


@dataclass
class _Box:
    """Operators that run one after the other, by position; `frame` is the module that they are drawn in."""

    operators: list[int]
    frame: tuple[str, ...]
    sources: dict[tuple[int | str, str], None] = field(default_factory=dict)  # (box or input, views on the way)


def dot(found: Walk, title: str, *, depth: int = _DEPTH) -> str:
    """The drawing as text in graphviz's language; `depth`: names in a frame's path below the common ones."""
    return _Drawing(found, title, depth).text()


class _Drawing:
    def __init__(self, found: Walk, title: str, depth: int):
        self._walk, self._title, self._depth = found, title, depth
        self._total = sum(o.flops for o in found.operators) or 1
        self._inputs = {value.storage: name for name, value in found.inputs.items()}
        self._common = len(_common_prefix(o.path.split(".") for o in found.operators if o.path))
        self._drawn = [o.kind not in ("view", "constant") for o in found.operators]
        self._inside: Counter[tuple[str, ...]] = Counter()  # operators drawn below each path
        for at in range(len(found.operators)):
            parts = self._parts(at) if self._drawn[at] else ()
            self._inside.update(parts[:length] for length in range(1, len(parts) + 1))
        self._boxes = self._made_boxes()

    def text(self) -> str:
        lines = [
            "digraph edgeopt {",
            f"  label={_quoted(self._title)}; labelloc=t; fontsize=14; fontname=Helvetica;",
            "  rankdir=TB; ranksep=0.25; nodesep=0.3; newrank=true;"
            + (" splines=line; nslimit=1; mclimit=1;" if len(self._boxes) > _FAST_FROM else ""),
            "  node [shape=plain, fontname=Helvetica, fontsize=10];",
            '  edge [arrowsize=0.6, color="#606060", fontname=Helvetica, fontsize=8, fontcolor="#808080"];',
        ]
        for number, (name, value) in enumerate(self._walk.inputs.items()):
            lines.append(_end(f"in{number}", name, value))
        for number, (name, (value, _)) in enumerate(self._walk.outputs.items()):
            lines.append(_end(f"out{number}", name, value))
        lines += self._frames()
        return "\n".join([*lines, *self._edges(), "}"]) + "\n"

    def _made_boxes(self) -> dict[int, _Box]:
        """Box number (its first operator's position) -> box: an operator joins the box of the only one it reads."""
        readers = self._readers()
        boxes: dict[int, _Box] = {}
        box_of: dict[int, int] = {}
        for at, operator in enumerate(self._walk.operators):
            if not self._drawn[at]:
                continue
            sources = self._sources(operator.sources, operator)
            frame = self._frame(at)
            into = self._joined(sources, readers, boxes, box_of, frame)
            if into is None:
                into = at
                boxes[at] = _Box([], frame)
                for source, views in sources.items():
                    boxes[at].sources[(box_of.get(source, source), views)] = None
            boxes[into].operators.append(at)
            box_of[at] = into
        self._box_of = box_of
        return boxes

    def _joined(self, sources, readers, boxes, box_of, frame) -> int | None:
        if len(sources) != 1:
            return None
        ((source, views),) = sources.items()
        if isinstance(source, str) or views or readers.get(source, 0) != 1:
            return None
        box = boxes[box_of[source]]
        fits = box.operators[-1] == source and box.frame == frame and len(box.operators) < _MOST_LINES
        return box_of[source] if fits else None

    def _readers(self) -> dict[int, int]:
        """How many drawn operators and outputs read each."""
        counts: dict[int, int] = {}
        for at, operator in enumerate(self._walk.operators):
            for source in self._sources(operator.sources, operator) if self._drawn[at] else ():
                if isinstance(source, int):
                    counts[source] = counts.get(source, 0) + 1
        for _, sources in self._walk.outputs.values():
            for source in self._sources(sources, None):
                if isinstance(source, int):
                    counts[source] = counts.get(source, 0) + 2  # an output is no line of a box
        return counts

    def _sources(self, sources: Iterable[int], operator: Operator | None) -> dict[int | str, str]:
        """What is read, behind views: operator or the name of an input -> the views on the way, in words."""
        found: dict[int | str, str] = {}
        for value in operator.inputs if operator else ():
            if value.storage in self._inputs:
                found.setdefault(self._inputs[value.storage], "")
        pending = [(source, ()) for source in sources]
        while pending:
            at, views = pending.pop()
            operator = self._walk.operators[at]
            if self._drawn[at]:
                found.setdefault(at, ", ".join(reversed(views)))
                continue
            if operator.kind == "view":
                views = (*views, operator.op)
                for value in operator.inputs:
                    if value.storage in self._inputs:
                        found[self._inputs[value.storage]] = ", ".join(reversed(views))
                pending += [(source, views) for source in operator.sources]
        return found

    def _frame(self, at: int) -> tuple[str, ...]:
        """The frame of an operator; one of no module stands in that of what it reads."""
        seen = set()
        while not self._walk.operators[at].path and self._walk.operators[at].sources and at not in seen:
            seen.add(at)
            at = self._walk.operators[at].sources[-1]
        path = self._parts(at)[: self._common + self._depth]
        while path and self._inside[path] < 2:  # a frame around one operator would only repeat it
            path = path[:-1]
        return path

    def _parts(self, at: int) -> tuple[str, ...]:
        return tuple(part for part in self._walk.operators[at].path.split(".") if part)

    def _frames(self) -> list[str]:
        """The boxes inside their frames."""
        tree: dict = {}
        for number, box in self._boxes.items():
            node = tree
            for part in box.frame:
                node = node.setdefault(part, {})
            node.setdefault("", []).append(number)
        return self._frame_lines(tree, (), "  ")

    def _frame_lines(self, node: dict, path: tuple[str, ...], indent: str) -> list[str]:
        lines = [self._box_line(number, indent) for number in node.get("", [])]
        for part, below in node.items():
            if not part:
                continue
            inside = self._frame_lines(below, (*path, part), indent + "  ")
            name = ".".join((*path, part))
            lines += [
                f"{indent}subgraph {_quoted('cluster_' + name)} {{",
                f'{indent}  label={_quoted(name)}; labeljust=l; fontsize=10; color="#b0b0b0"; style=rounded;',
                *inside,
                f"{indent}}}",
            ]
        return lines

    def _box_line(self, number: int, indent: str) -> str:
        rows = "".join(self._row(at) for at in self._boxes[number].operators)
        return (
            f'{indent}op{number} [label=<<table border="1" color="#808080" cellborder="0" cellspacing="0" '
            f'cellpadding="3">{rows}</table>>];'
        )

    def _row(self, at: int) -> str:
        operator = self._walk.operators[at]
        share = operator.flops / self._total
        cells = (
            ("left", html.escape(operator.op)),
            ("left", _shapes(operator.outputs)),
            ("right", percent(share) if share >= _STEPS[1] else ("?" if operator.kind == "unknown" else " ")),
        )
        tip = f"{operator.name}, {count(operator.flops, 'FLOPs')}, {operator.moved_bytes:,} bytes moved"
        made = "".join(
            f'<td align="{side}" href="#" tooltip={_quoted(html.escape(tip))}>{text}</td>' for side, text in cells
        )
        return f"<tr>{made.replace('<td ', f'<td bgcolor={_quoted(_colour(share))} ')}</tr>"

    def _edges(self) -> list[str]:
        numbers = {name: f"in{number}" for number, name in enumerate(self._walk.inputs)}
        lines = []
        for number, box in self._boxes.items():
            lines += [self._edge(source, f"op{number}", views, numbers) for source, views in box.sources]
        for number, (_, sources) in enumerate(self._walk.outputs.values()):
            for source, views in self._sources(sources, None).items():
                at = self._box_of.get(source, source) if isinstance(source, int) else source
                lines.append(self._edge(at, f"out{number}", views, numbers))
        return lines

    def _edge(self, source: int | str, to: str, views: str, numbers: dict[str, str]) -> str:
        start = numbers[source] if isinstance(source, str) else f"op{source}"
        words = f" [label={_quoted(' ' + views)}]" if views else ""
        return f"  {start} -> {to}{words};"


def _common_prefix(paths: Iterable[list[str]]) -> list[str]:
    common: list[str] | None = None
    for path in paths:
        pairs = zip(common, path, strict=False) if common is not None else [(part, part) for part in path]
        common = [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return common or []


def _end(identity: str, name: str, value: Value) -> str:
    label = _quoted(f"{name}\n{value.dtype} {_sizes(value)}")
    return f'  {identity} [shape=box, style="rounded,filled", fillcolor="#e5f0fa", label={label}];'


def _colour(share: float) -> str:
    return next(colour for colour, step in zip(reversed(_COLOURS), reversed(_STEPS), strict=True) if share >= step)


def _shapes(values: tuple[Value, ...]) -> str:
    shown = ", ".join(_sizes(value) for value in values[:2]) + (" ..." if len(values) > 2 else "")
    integer = values[0].dtype if values and values[0].dtype in ("int8", "uint8", "float16", "bfloat16") else ""
    return f'<font color="#606060">{shown}{" " + integer if integer else ""}</font>'


def _sizes(value: Value) -> str:
    return "\u00d7".join(str(size) for size in value.shape) or "scalar"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
