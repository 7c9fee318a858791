"""The table of modules and JetPacks: consistent in itself, and tolerant of releases that it does not know."""

import pytest

from edgeopt.spec import jetpack


def test_every_module_names_rows_of_the_table_and_rows_are_ordered():
    keys = [r.jetpack for r in jetpack.RELEASES]
    for module in jetpack.MODULES:
        assert set(module.jetpacks) <= set(keys)
        assert list(module.jetpacks) == [k for k in keys if k in module.jetpacks]
    firsts = [jetpack.version_tuple(r.l4t_first) for r in jetpack.RELEASES]
    assert firsts == sorted(firsts)
    for row in jetpack.RELEASES:
        assert jetpack.version_tuple(row.l4t_first) <= jetpack.version_tuple(row.l4t)
        assert row.confidence in ("H", "M", "L")


@pytest.mark.parametrize(
    ("asked", "row"),
    [("4.6", "4.6"), ("4.6.0", "4.6.0"), ("4.6.6", "4.6"), ("5.1.2", "5.1"), ("5.0.2", "5.0"), ("6.2.1", "6.2"),
     ("4.5", None), ("5", None), ("9.9", None), ("", None)],
)  # fmt: skip
def test_a_point_release_belongs_to_its_line(asked, row):
    found = jetpack.release(asked)
    assert (found.jetpack if found else None) == row


@pytest.mark.parametrize(
    ("l4t", "row", "known"),
    [
        ("R32.7.2", "4.6", True), ("32.6.1", "4.6.0", True), ("35.6.1", "5.1", True), ("35.1.0", "5.0", True),
        ("36.4.3", "6.2", True), ("36.4.0", "6.1", True), ("38.2.2", "7.0", True), ("39.2.1", "7.2", True),
        ("35.9.0", "5.1", False), ("36.5.9", "6.2", False), ("32.5.1", "4.6.0", False), ("39.9.9", "7.2", False),
    ],
)  # fmt: skip
def test_an_l4t_version_finds_its_row_and_an_unknown_one_falls_back_to_its_major(l4t, row, known):
    found, is_known = jetpack.release_for_l4t(l4t)
    assert (found.jetpack, is_known) == (row, known)


@pytest.mark.parametrize("l4t", ["40.1.0", "28.2.1", "", "unknown"])
def test_an_l4t_major_without_a_row_has_no_answer(l4t):
    assert jetpack.release_for_l4t(l4t) is None


def test_the_fallback_stays_within_the_releases_that_the_module_has_had():
    nano = jetpack.module("nano")
    assert jetpack.release_for_l4t("35.6.1", nano) is None
    assert jetpack.release_for_l4t("32.7.9", nano)[0].jetpack == "4.6"


@pytest.mark.parametrize(
    ("tensorrt", "opset"),
    [("7.1.3", 11), ("8.0.1", 13), ("8.2.1", 13), ("8.4.1", 17), ("8.5.2", 17), ("8.6.2", 17), ("9.0", 19),
     ("10.3", 20), ("10.16.2", 20), ("11.0", 20)],
)  # fmt: skip
def test_opset_of_each_tensorrt(tensorrt, opset):
    assert jetpack.opset_max(tensorrt) == opset


@pytest.mark.parametrize(
    ("sm", "has"),
    [("5.3", "fp16"), ("6.1", "fp16 int8"), ("6.2", "fp16"), ("7.2", "fp16 int8"), ("8.6", "fp16 int8 bf16"),
     ("8.7", "fp16 int8 bf16"), ("8.9", "fp16 int8 bf16 fp8"), ("11.0", "fp16 int8 bf16 fp8"), ("5.0", "")],
)  # fmt: skip
def test_what_each_gpu_computes(sm, has):
    able = jetpack.capability(sm)
    assert [p for p in able._fields if getattr(able, p) is None] == has.split()


def test_versions_compare_as_numbers():
    assert jetpack.version_tuple("10.3") > jetpack.version_tuple("8.6.2")
    assert jetpack.version_tuple("2.1.0a0+nv23.06") == (2, 1, 0)
    assert jetpack.version_tuple("nonsense") == ()
