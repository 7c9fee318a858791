"""`usage/` of an artifact: its C++ compiles, its commands and its nvinfer file say what the artifact takes."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from edgeopt.backends import tensorrt
from edgeopt.pipeline import usage
from edgeopt.program import Signature
from edgeopt.spec.camera import Output
from edgeopt.spec.manifest import DTYPE_BYTES, Axis, Candidate, EngineRecipe, TensorSpec
from edgeopt.spec.profile import load_profile
from edgeopt.spec.project import project_for_model
from tests.conftest import absent

# The declarations of onnxruntime_cxx_api.h that the program uses, as onnxruntime's reference lists them
# (https://onnxruntime.ai/docs/api/c/namespace_ort.html): no package holds the header itself.
HEADER = """
#pragma once
#include <cstddef>
#include <cstdint>
struct OrtMemoryInfo;
enum ONNXTensorElementDataType {
  ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, ONNX_TENSOR_ELEMENT_DATA_TYPE_STRING,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE };
enum OrtLoggingLevel { ORT_LOGGING_LEVEL_VERBOSE, ORT_LOGGING_LEVEL_INFO, ORT_LOGGING_LEVEL_WARNING };
enum GraphOptimizationLevel {
  ORT_DISABLE_ALL = 0, ORT_ENABLE_BASIC = 1, ORT_ENABLE_EXTENDED = 2, ORT_ENABLE_ALL = 99 };
enum OrtAllocatorType { OrtInvalidAllocator = -1, OrtDeviceAllocator = 0, OrtArenaAllocator = 1 };
enum OrtMemType { OrtMemTypeCPUInput = -2, OrtMemTypeCPUOutput = -1, OrtMemTypeDefault = 0 };
namespace Ort {
struct Env { Env(OrtLoggingLevel level, const char* logid); Env(const Env&) = delete; };
struct SessionOptions {
  SessionOptions();
  SessionOptions& SetIntraOpNumThreads(int threads);
  SessionOptions& SetGraphOptimizationLevel(GraphOptimizationLevel level);
  SessionOptions& AddConfigEntry(const char* key, const char* value);
  SessionOptions& RegisterCustomOpsLibrary(const char* name);
};
struct RunOptions { explicit RunOptions(std::nullptr_t) {} };
struct MemoryInfo {
  static MemoryInfo CreateCpu(OrtAllocatorType type, OrtMemType mem_type);
  operator const OrtMemoryInfo*() const;
};
struct TensorTypeAndShapeInfo { size_t GetElementCount() const; };
struct Value {
  Value(Value&&); Value& operator=(Value&&); Value(const Value&) = delete;
  template <typename T>
  static Value CreateTensor(const OrtMemoryInfo* info, T* data, size_t count, const int64_t* shape, size_t rank);
  static Value CreateTensor(const OrtMemoryInfo* info, void* data, size_t bytes, const int64_t* shape, size_t rank,
                            ONNXTensorElementDataType type);
  template <typename T> T* GetTensorMutableData();
  TensorTypeAndShapeInfo GetTensorTypeAndShapeInfo() const;
};
}  // namespace Ort
#include <vector>
namespace Ort {
struct Session {
  Session(const Env& env, const char* path, const SessionOptions& options);
  std::vector<Value> Run(const RunOptions& options, const char* const* input_names, const Value* inputs, size_t count,
                         const char* const* output_names, size_t output_count);
};
}  // namespace Ort
"""
AXES = {"n": Axis(min=1, opt=2, max=8)}
CAMERA = {"color": "BGR", "scale": "1/255", "mean": [0.4, 0.5, 0.6], "std": [0.1, 0.2, 0.3]}


def spec(name: str, dtype: str = "float32", shape: tuple = ("n", 3, 24, 20)) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def shipped(*inputs: TensorSpec, camera=None, runtimes=("onnxruntime",), precision="fp32", **changes) -> usage.Shipped:
    """What an artifact would hold for one ONNX file of each runtime."""
    given = {"shape": ["n", 3, 24, 20], **({"camera": camera} if camera else {})}
    axes = {"n": AXES["n"].model_dump(), **changes.pop("axes", {})}
    project = project_for_model("a.b:c", inputs={"image": given}, axes=axes)
    if changes.get("heads"):
        project = project.model_copy(update={"outputs": changes.pop("heads")})
    inputs = inputs or (spec("image", project.inputs["image"].given_dtype, tuple(project.inputs["image"].given_shape)),)
    outputs = changes.pop("outputs", (spec("scores", shape=("n", 4)),))
    signature = Signature(inputs, outputs, {name: Axis(**axis) for name, axis in axes.items()}, None, {})
    file = {"int8": "int8.onnx"}.get(precision, "float.onnx")
    candidates = tuple(
        Candidate(name=f"{r}-{precision}", runtime=r, precision=precision, file=file, flags=changes.get("flags", {}))
        for r in runtimes
    )
    profile = load_profile("orin-nano")
    recipes = tuple(
        tensorrt.recipe(c.name, c.precision, signature, profile) for c in candidates if c.runtime == "tensorrt"
    )
    libraries = changes.get("libraries", ())
    return usage.Shipped(project, "orin-nano", profile.target.tensorrt, signature, candidates, recipes, libraries)


def written(folder: Path, given: usage.Shipped) -> dict[str, str]:
    names = usage.write(given, folder)
    assert names == {f"usage/{path.name}" for path in (folder / "usage").iterdir()}
    return {path.name: path.read_text() for path in (folder / "usage").iterdir()}


def compiles(folder: Path) -> None:
    if shutil.which("g++") is None:
        absent("there is no g++")
    (folder / "include").mkdir(exist_ok=True)
    (folder / "include" / "onnxruntime_cxx_api.h").write_text(HEADER)
    argv = ["g++", "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-I", str(folder / "include")]
    done = subprocess.run([*argv, str(folder / "usage" / "onnxruntime.cpp")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_program_compiles_for_every_type_and_for_names_that_are_no_identifiers(tmp_path):
    names = ["int", "a.b", "a_b", 'quo"te\\', "größe", "line\nbreak", "a_b_shape", "7", "??/"]
    types = [name for name in DTYPE_BYTES if name != "bfloat16"]
    inputs = [spec(name, dtype) for name, dtype in zip(names, types, strict=True)]
    outputs = tuple(spec(f"out {dtype}", dtype, ("n", "dim_0")) for dtype in types)
    flags = {"intra_op_threads": 2, "graph_optimization": "basic", "disabled_optimizers": ["A", "B"]}
    written(tmp_path, shipped(*inputs, outputs=outputs, flags=flags, libraries=("ops/x86/libo.so",)))
    compiles(tmp_path)


def test_the_program_calls_the_best_file_with_its_options(tmp_path):
    given = shipped(camera=CAMERA, precision="int8", flags={"disabled_optimizers": ["A", "B"]}, libraries=("o.so",))
    text = written(tmp_path, given)["onnxruntime.cpp"]
    compiles(tmp_path)
    for line in (
        '(folder + "/int8.onnx")',
        'AddConfigEntry("optimization.disable_specified_optimizers", "A;B")',
        'RegisterCustomOpsLibrary((folder + "/o.so").c_str())',
        "const std::vector<int64_t> in_image_shape{2, 24, 20, 3};",
        "std::vector<uint8_t> in_image(elements(in_image_shape));",
        'const char* output_names[] = {"scores"};',
        "ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8",
    ):
        assert line in text
    assert "frames HWC, channels BGR, values 0 to 255" in text
    assert "channels to RGB; (x * 0.00392156863 - [0.4, 0.5, 0.6]) / [0.1, 0.2, 0.3]" in text


def test_trtexec_is_told_the_recipe_s_shapes_and_flags(tmp_path):
    text = written(tmp_path, shipped(camera=CAMERA, runtimes=("tensorrt",), precision="fp16"))["trtexec.sh"]
    assert subprocess.run(["sh", "-n"], input=text, text=True, capture_output=True).returncode == 0
    argv = shlex.split(text.replace("\\\n", "").splitlines()[-1])
    assert argv[:2] == ["trtexec", "--onnx=float.onnx"]
    assert {"--fp16", "--saveEngine=tensorrt-fp16.engine", "--optShapes=image:2x24x20x3"} <= set(argv)
    assert {"--minShapes=image:1x24x20x3", "--maxShapes=image:8x24x20x3"} <= set(argv)


def test_a_file_of_fixed_sizes_is_given_no_shapes():
    fixed = {which: (1, 3) for which in ("min", "opt", "max")}
    recipe = EngineRecipe(candidate="t", shapes={"x": fixed}, typing="strong")
    assert usage._build(recipe, "float16.onnx", "10.3") == [
        "trtexec", "--onnx=float16.onnx", "--saveEngine=t.engine", "--timingCacheFile=timing.cache", "--stronglyTyped",
    ]  # fmt: skip


def nvinfer(text: str) -> dict[str, str]:
    lines = text.splitlines()
    assert lines.count("[property]") == 1
    body = lines[lines.index("[property]") + 1 :]
    assert all(line.startswith("#") for line in lines[: lines.index("[property]")])
    return dict(line.split("=", 1) for line in body)


@pytest.mark.parametrize("color", ["RGB", "BGR"])
def test_nvinfer_leaves_the_normalisation_to_the_artifact(color, tmp_path):
    camera = {**CAMERA, "dtype": "float32", "layout": "CHW", "color": color}
    text = written(tmp_path, shipped(camera=camera, runtimes=("tensorrt",), precision="fp16"))[
        "config_infer_primary.txt"
    ]
    assert nvinfer(text) == {
        "gpu-id": "0", "gie-unique-id": "1", "onnx-file": "../float.onnx",
        "model-engine-file": "../float.onnx_b8_gpu0_fp16.engine", "batch-size": "8", "network-mode": "2",
        "infer-dims": "3;24;20", "network-input-order": "0", "model-color-format": {"RGB": "0", "BGR": "1"}[color],
        "net-scale-factor": "1.0", "offsets": "0.0;0.0;0.0", "network-type": "100", "output-tensor-meta": "1",
        "output-blob-names": "scores",
    }  # fmt: skip
    assert "a std for each channel included" in text


def test_nvinfer_is_told_of_bytes_and_of_integers(tmp_path):
    camera = {**CAMERA, "size": [48, 64]}
    text = written(tmp_path, shipped(camera=camera, runtimes=("tensorrt",), precision="int8"))[
        "config_infer_primary.txt"
    ]
    keys = nvinfer(text)
    assert (keys["input-tensor-from-meta"], keys["network-input-order"]) == ("1", "1")
    assert (keys["infer-dims"], keys["network-mode"]) == ("3;48;64", "1")
    assert "nvdspreprocess" in text
    assert "build by trtexec.sh first" in text


def test_without_a_camera_nvinfer_s_limit_is_said(tmp_path):
    text = written(tmp_path, shipped(runtimes=("tensorrt",)))["config_infer_primary.txt"]
    assert "cannot express a std for each" in text
    assert nvinfer(text)["net-scale-factor"] == "1.0"


def test_what_is_no_picture_has_no_nvinfer_file(tmp_path):
    given = shipped(spec("ids", "int64", ("n", 16)), runtimes=("tensorrt", "onnxruntime"))
    assert set(written(tmp_path, given)) == {"README.md", "trtexec.sh", "onnxruntime.cpp"}


def test_torchscript_alone_has_no_usage(tmp_path):
    assert usage.write(shipped(runtimes=("torchscript",)), tmp_path) == set()
    assert not (tmp_path / "usage").exists()


def test_the_page_tells_inputs_and_outputs(tmp_path):
    heads = {"scores": Output(head="topk", k=2)}
    outputs = (spec("scores.values", shape=("n", 2)), spec("scores.indices", "int32", ("n", 2)))
    text = written(tmp_path, shipped(camera=CAMERA, heads=heads, outputs=outputs))["README.md"]
    assert "| `image` | uint8 | [n (1 to 8), 24, 20, 3] | frames HWC, channels BGR" in text
    assert "| `scores.indices` | int32 | [n (1 to 8), 2] | top 2 over axis 1 of the model's 'scores' |" in text
