"""TensorRT's plugins for operators of the user's own: in the recipe, or refused with the key."""

from __future__ import annotations

import shutil

import onnx
import pytest
from onnx import helper

from edgeopt.backends import tensorrt
from edgeopt.spec.manifest import EngineRecipe
from edgeopt.spec.profile import load_profile
from tests.backends.custom_op_models import AXES, FUNCTION, HERE, INPUTS
from tests.capture.support import captured
from tests.native import ort_library


def test_tensorrts_plugins_travel_in_the_recipe(tmp_path):
    """As data: no TensorRT is here. The file is judged by onnxruntime's library of the same node."""
    shutil.copy(ort_library("aarch64"), tmp_path / "libplugin.so")  # any shared library for the target
    plugin = "tensorrt: libplugin.so, plugin: Scale, plugin_version: '2'"
    mapped = f"{{'acme::Scale': {{onnxruntime: {ort_library()}, {plugin}}}}}"
    program = captured(tmp_path, FUNCTION, INPUTS, AXES, custom_ops=mapped)
    lowered = tensorrt.lower(program, load_profile("xavier"), tmp_path)
    assert {c.precision for c in lowered.candidates} == {"fp32", "fp16"}
    assert all(recipe.plugins == ("ops/aarch64/libplugin.so",) for recipe in lowered.recipes)
    (node, _) = [n for n in onnx.load(tmp_path / "float.onnx").graph.node if n.op_type == "Scale"]
    held = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    assert held == {"alpha": 3.0, "plugin_version": b"2"}


@pytest.mark.parametrize(
    ("version", "option"),
    [("8.2.1", "--plugins"), ("8.5.2", "--plugins"), ("8.6.1", "--staticPlugins"), ("10.3", "--staticPlugins")],
)
def test_what_trtexec_is_told_of_plugins(version, option):
    recipe = EngineRecipe(
        candidate="tensorrt-fp32", shapes={}, typing="weak", plugins=("ops/aarch64/a.so", "ops/aarch64/b.so")
    )
    assert tensorrt.plugin_arguments(recipe, version) == (f"{option}=ops/aarch64/a.so", f"{option}=ops/aarch64/b.so")


def test_without_a_plugin_the_engine_is_refused_with_the_key_to_add(tmp_path):
    mapped = f"{{'acme::Scale': {{onnxruntime: {ort_library()}}}}}"
    program = captured(tmp_path, FUNCTION, INPUTS, AXES, custom_ops=mapped)
    lowered = tensorrt.lower(program, load_profile("xavier"), tmp_path)
    assert not lowered.candidates and "custom_ops: {'acme::Scale': {tensorrt:" in lowered.refused[0].reason


def test_a_plugin_for_another_machine_is_refused(tmp_path):
    shutil.copy(ort_library("x86_64"), tmp_path / "libplugin.so")
    mapped = f"{{'acme::Scale': {{onnxruntime: {ort_library()}, tensorrt: libplugin.so}}}}"
    program = captured(tmp_path, FUNCTION, INPUTS, AXES, custom_ops=mapped)
    lowered = tensorrt.lower(program, load_profile("xavier"), tmp_path)
    assert "there is no library for aarch64: libplugin.so is for x86_64" in lowered.refused[0].reason


def test_a_plugin_that_tensorrt_has_itself_needs_no_library(tmp_path):
    mapped = f"{{'acme::Scale': {{onnxruntime: {ort_library()}, plugin: Scale}}}}"
    program = captured(tmp_path, FUNCTION, INPUTS, AXES, custom_ops=mapped)
    lowered = tensorrt.lower(program, load_profile("xavier"), tmp_path)
    assert lowered.candidates and all(recipe.plugins == () for recipe in lowered.recipes)


def test_a_file_that_nothing_here_can_run_is_refused(tmp_path):
    shutil.copy(ort_library("aarch64"), tmp_path / "libplugin.so")
    program = captured(tmp_path, FUNCTION, INPUTS, AXES, custom_ops="{'acme::Scale': {tensorrt: libplugin.so}}")
    lowered = tensorrt.lower(program, load_profile("xavier"), tmp_path)
    assert "cannot be judged on this machine" in lowered.refused[0].reason and HERE in lowered.refused[0].reason
