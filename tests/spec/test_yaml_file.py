"""YAML: what a user writes is what is read, and every mistake is an answer with file and line."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edgeopt.errors import ProfileError, ProjectError
from edgeopt.spec.yaml_file import (
    MAX_BYTES,
    MAX_NODES,
    parse_mapping,
    parse_value,
    read_mapping,
    to_flow,
    to_yaml,
)


def value(text):
    return parse_value(text, source="x.yaml", error=ProfileError)


def refusal(text) -> ProfileError:
    with pytest.raises(ProfileError) as caught:
        parse_mapping(text, source="x.yaml", error=ProfileError)
    return caught.value


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("on", True), ("off", False), ("yes", True), ("No", False), ("TRUE", True), ("oN", "oN"), ("y", "y"),
        ("3.10", 3.1), ("'3.10'", "3.10"), ("8.5.2", "8.5.2"), ("1e-4", 1e-4), ("2.0e-4", 2e-4), (".5", 0.5),
        ("010", 10), ("0x1F", 31), ("-3", -3), ("1_000", "1_000"), ("1:30", "1:30"), ("2026-11-30", "2026-11-30"),
        ("~", None), ("", None), (".nan", ".nan"), (".inf", ".inf"), ("[fp32, off]", ["fp32", False]),
        ("{on: off, 5.1: a}", {"on": False, "5.1": "a"}), ("model.py:build", "model.py:build"),
    ],
)  # fmt: skip
def test_plain_text_means_what_it_looks_like(text, meant):
    got = value(text)
    assert got == meant
    assert type(got) is type(meant)


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "the key 'a' stands twice, first on line 1"),
        ("x:\n  on: 1\n  on: 2\n", 3, "the key 'on' stands twice, first on line 2"),
        ("a: 1\nb: [1, 2\n", 3, "not YAML"),
        ("a: 1\n\tb: 2\n", 2, "not YAML"),
        ("a: !!python/object/apply:os.system [ls]\n", 1, "tag"),
        ("a: !custom 3\n", 1, "tag"),
        ("? [1, 2]\n: 3\n", 1, "a key must be text"),
        ("a: &a [*a]\n", 1, "refers to the value that contains it"),
        ("a: *missing\n", 1, "not YAML"),
        ("a: 1\n---\nb: 2\n", 2, "not YAML"),
        ("a: " + "9" * 5000 + "\n", 1, "too long"),
    ],
)
def test_a_mistake_is_answered_with_its_line(text, line, part):
    why = refusal(text)
    assert part in why.what
    assert why.where == f"x.yaml:{line}"
    assert why.todo


def test_tabs_are_named():
    assert "spaces" in refusal("a:\n\tb: 2\n").todo


@pytest.mark.parametrize(
    ("text", "part"), [("- 1\n", "a list"), ("hello", "text"), ("3", "a number"), ("on", "a boolean")]
)
def test_a_file_that_is_no_mapping_is_refused(text, part):
    assert part in refusal(text).what


def test_an_empty_file_is_an_empty_mapping():
    assert parse_mapping("# only a comment\n", source="x", error=ProfileError) == {}


def test_bytes_that_are_not_utf8_name_their_line():
    why = refusal(b"a: 1\nb: \xff\n")
    assert "UTF-8" in why.what
    assert why.where == "x.yaml:2"


def test_a_byte_order_mark_is_no_part_of_the_first_key():
    assert parse_mapping(b"\xef\xbb\xbfname: x\n", source="x", error=ProfileError) == {"name": "x"}


def test_aliases_work_and_a_bomb_does_not():
    assert value("{a: &x [1, 2], b: *x}") == {"a": [1, 2], "b": [1, 2]}
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
    assert f"more than {MAX_NODES} values" in refusal("\n".join(levels)).what


def test_deep_nesting_is_answered():
    assert "nested too deeply" in refusal("a: " + "[" * 20_000 + "]" * 20_000).what


def test_a_file_past_the_cap_is_refused_without_being_parsed(tmp_path):
    big = tmp_path / "big.yaml"
    big.write_bytes(b"a: " + b"x" * MAX_BYTES)
    with pytest.raises(ProjectError, match="larger than 256 KiB"):
        read_mapping(big, error=ProjectError)


def test_a_file_that_cannot_be_read_is_answered(tmp_path):
    for path in (tmp_path / "missing.yaml", tmp_path):
        with pytest.raises(ProjectError) as caught:
            read_mapping(path, error=ProjectError)
        assert caught.value.where == str(path)


@given(st.binary(max_size=400) | st.text(max_size=400))
@example(b"a: !!int x")
@example(b"a: !!timestamp x")
@example(b"? {a: b}\n: c")
@example("a: \ud800")
def test_any_text_gives_a_mapping_or_the_error_that_was_asked_for(data):
    try:
        assert isinstance(parse_mapping(data, source="x.yaml", error=ProfileError), dict)
    except ProfileError as why:
        assert why.what and why.where and why.todo


_TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=12)
_DATA = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXT | st.sampled_from(["on", "1e-4", "08", "3.10", "null", "0x1", "a: b", "- x", "#"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3), max_leaves=8,
)  # fmt: skip


@given(_DATA)
def test_what_is_written_reads_back_equal(data):
    for write in (to_yaml, to_flow):
        back = value(write(data))
        assert back == data
        if isinstance(data, float):
            assert math.copysign(1, back) == math.copysign(1, data)
    assert "\n" not in to_flow(data)
