"""A short run of tests/fuzz.py with a fixed seed, and what hypothesis makes of JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeopt import digest
from edgeopt.errors import ArtifactError
from edgeopt.spec import json_file
from edgeopt.spec import manifest as spec
from tests import fuzz

ROUNDS = {"archive": 60, "artifact": 60}
NAMES = ("manifest", "artifact", "archive", "statement", "policy", "response", "survey", "state", "journal", "status",
         "known_hosts")  # fmt: skip


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    found = fuzz.targets(tmp_path_factory.mktemp("fuzz"))
    assert set(found) == set(NAMES)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_damaged_is_answered_in_words(targets, name):
    target = targets[name]
    for valid in target.valid:
        target.read(valid)  # what is not damaged is taken
    wrong = fuzz.attack(target, seed=1, rounds=ROUNDS.get(name, 300))
    assert wrong is None, wrong


def test_the_fuzzer_finds_a_reader_that_breaks():
    assert "KeyError" in fuzz.attack(fuzz.Target((b'{"a": 1}',), lambda data: {}[data]), 1, 5)


def read(data: bytes):
    return json_file.read(data, what="it", source="a test", error=ArtifactError, todo="-")


_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
_NUMBER = st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
_JSON = st.recursive(
    st.none() | st.booleans() | _NUMBER | _TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4),
    max_leaves=20,
)


@given(_JSON)
def test_what_we_write_is_what_we_read(value):
    assert read(digest.canonical_json(value)) == value


@given(st.binary(max_size=200))
def test_bytes_are_json_that_can_be_written_again_or_an_error(data):
    try:
        value = read(data)
    except ArtifactError:
        return
    assert read(digest.canonical_json(value)) == value


@pytest.mark.parametrize(
    ("text", "why"),
    [('{"a": NaN}', "no number"), ("[-Infinity]", "no number"), ("[1e999]", "too large"),
     ("[" + "9" * 5000 + "]", "large"), ("[9223372036854775808]", "too large"), ('{"a": 1, "a": 2}', "twice"),
     ('["\\ud800"]', "surrogates"), ('{"\\udfff": 1}', "surrogates"), ("[" * 65 + "]" * 65, "nested"),
     ("[" * 100_000, "nested|JSON"), ("\ufeff[]", "BOM")],
)  # fmt: skip
def test_json_that_means_two_things_or_none_is_refused(text, why):
    with pytest.raises(ArtifactError, match=why):
        read(text.encode())


@settings(max_examples=200)
@given(st.text(min_size=1, max_size=60))
def test_a_path_stays_in_its_folder_or_is_refused(tmp_path_factory, text):
    folder = tmp_path_factory.getbasetemp() / "inside"
    try:
        path = spec.safe_path(text)
    except ValueError:
        return
    assert (folder / path).resolve().is_relative_to(folder.resolve())
    assert json.loads(json.dumps(path)) == path and "\n" not in path and path.splitlines() == [path]


@given(st.integers(), st.lists(st.integers(), max_size=5))
def test_a_tensors_place_is_bounded_or_refused(offset, shape):
    try:
        ref = spec.TensorRef(file="x", offset=offset, dtype="float64", shape=tuple(shape))
    except ValueError:
        return
    assert 0 <= ref.offset <= spec.MAX_FILE_BYTES and 0 <= ref.size_bytes <= 8 * spec.MAX_FILE_BYTES
