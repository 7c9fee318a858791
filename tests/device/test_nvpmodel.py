"""nvpmodel's answers: both orders, complaints around them, lists of modes in both forms, and any text at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeopt.device.nvpmodel import asks_for_a_reboot, parse_modes, parse_query
from edgeopt.spec.facts import PowerMode

QUERIES = {
    "plain": ("NV Power Mode: MODE_15W_6CORE\n2\n", "MODE_15W_6CORE", 2),
    "fan first": ("NV Fan Mode:quiet\nNV Power Mode: MAXN_SUPER\n0\n", "MAXN_SUPER", 0),
    "fan after": ("NV Power Mode: 10W\n1\nNV Fan Mode:cool\n", "10W", 1),
    "complaints": (
        "NVPM ERROR: failed to read PARAM GPU: ARG FREQ_TABLE: PATH /sys/x\nNVPM WARN: fan mode is not set!\n"
        "NV Power Mode: MODE_30W\n3\n", "MODE_30W", 3,
    ),
    "without id": ("NV Power Mode: MAXN\n", "MAXN", None),
    "digits in front": ("7\nNV Power Mode: 5W\n1\n", "5W", 1),
}  # fmt: skip


@pytest.mark.parametrize("text, name, number", QUERIES.values(), ids=QUERIES)
def test_the_present_mode(text, name, number):
    assert parse_query(text) == PowerMode(name=name, id=number)


@pytest.mark.parametrize("text", ["", "NVPM ERROR: Error opening /var/lib/nvpmodel/status", "NV Power Mode:\n\n"])
def test_no_mode_is_none(text):
    assert parse_query(text) is None


def test_modes_of_both_lists_each_once():
    listed = "POWER_MODEL: ID=0 NAME=MAXN\n  CPU_A57 CORE_0: 1\nPOWER_MODEL: ID=1 NAME=5W\n"
    conf = "# comment\n< POWER_MODEL ID=0 NAME=MAXN >\nCPU_ONLINE CORE_0 1\n< POWER_MODEL ID=1 NAME=5W >\n< PM_CONFIG DEFAULT=0 >\n"  # noqa: E501
    modes = (PowerMode(name="MAXN", id=0), PowerMode(name="5W", id=1))
    assert parse_modes(listed) == parse_modes(conf) == parse_modes(listed + conf) == modes


def test_a_mode_that_comes_with_a_reboot():
    assert asks_for_a_reboot("NVPM WARN: Reboot required for changing to this power mode: 0")
    assert not asks_for_a_reboot("NVPM VERB: setting CPU_ONLINE")


@given(st.one_of(st.text(), st.text(alphabet="NV Power Mode:\n0123456789POWER_MODEL ID=NAME=<>\u0663")))
def test_any_text_is_an_answer_and_no_exception(text):
    parse_query(text), parse_modes(text), asks_for_a_reboot(text)
