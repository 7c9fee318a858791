"""A unified diff of two graphs' lines, the old and the new line of one operator next to each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

_CONTEXT = 1


def unified(before: Sequence[str], after: Sequence[str], name_before: str, name_after: str) -> tuple[str, ...]:
    """The lines that differ, in the format of `diff -u`; none where the graphs are equal.

    Lines start with the operator's name: where many lines in a row have changed, those of one name are paired.
    """
    matcher = SequenceMatcher(None, before, after, autojunk=False)
    lines: list[str] = []
    for group in matcher.get_grouped_opcodes(_CONTEXT):
        first, last = group[0], group[-1]
        lines.append(f"@@ -{_range(first[1], last[2])} +{_range(first[3], last[4])} @@")
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                lines += [f" {line}" for line in before[i1:i2]]
            else:
                lines += _paired(before[i1:i2], after[j1:j2])
    return (f"--- {name_before}", f"+++ {name_after}", *lines) if lines else ()


def _paired(old: Sequence[str], new: Sequence[str]) -> Iterator[str]:
    names = SequenceMatcher(None, [_name(line) for line in old], [_name(line) for line in new], autojunk=False)
    for tag, i1, i2, j1, j2 in names.get_opcodes():
        if tag == "equal":
            for before, after in zip(old[i1:i2], new[j1:j2], strict=True):
                yield from (f"-{before}", f"+{after}") if before != after else (f" {before}",)
        else:
            yield from (f"-{line}" for line in old[i1:i2])
            yield from (f"+{line}" for line in new[j1:j2])


def _name(line: str) -> str:
    words = line.split(" ", 2)
    return " ".join(words[:2]) if words[0] in ("input", "output") else words[0]


def _range(start: int, stop: int) -> str:
    """A range of lines as `diff -u` writes it, counted from 1."""
    length = stop - start
    return f"{start + 1 if length else start},{length}"
