"""What a recipe of an engine adds to a manifest: its files, and nothing to the digests of artifacts without them."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from edgeopt.spec import manifest as spec
from tests.tensorrt_device import with_engines


def test_a_plain_recipe_is_written_as_it_was_before_it_had_these_keys(tmp_path):
    (held,) = json.loads(spec.encode(with_engines(tmp_path).manifest))["engine_recipes"]
    assert sorted(held) == ["candidate", "flags", "shapes", "typing"]


def test_a_recipe_for_the_dla_keeps_what_it_says(tmp_path):
    recipe = {"dla": True, "onnx": "float.onnx", "calibration": "scales.calib"}
    manifest = with_engines(tmp_path, extra={"scales.calib": b"TRT-8502-"}, recipe=recipe).manifest
    assert spec.decode(spec.encode(manifest), source="a test") == manifest
    assert manifest.engine_recipes[0].files == ("float.onnx", "scales.calib")


@pytest.mark.parametrize("key", ["onnx", "calibration"])
def test_a_file_that_is_not_there_is_refused(tmp_path, key):
    with pytest.raises(ValidationError, match="'gone' is used but not listed"):
        with_engines(tmp_path, recipe={key: "gone"})
