"""Digests of values: equal values give equal bytes, and JSON holds only numbers that JSON has."""

from __future__ import annotations

import math

import pytest

from edgeopt import digest


def test_equal_values_give_equal_bytes_whatever_their_order():
    assert digest.of_value({"b": [1, 2.5], "a": "\u00e9"}) == digest.of_value({"a": "\u00e9", "b": [1, 2.5]})
    assert digest.canonical_json({"b": 1, "a": None}) == b'{"a":null,"b":1}'


def test_what_json_has_no_number_for_is_refused_or_made_none():
    value = {"a": math.inf, "b": [math.nan, 1.5, {"c": (-math.inf, True, "x")}]}
    with pytest.raises(ValueError):
        digest.canonical_json(value)
    assert digest.finite(value) == {"a": None, "b": [None, 1.5, {"c": [None, True, "x"]}]}
