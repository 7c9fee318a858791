"""A C++ program that calls an artifact's ONNX file by onnxruntime's C++ API, names, shapes, types and options inside.

The calls are those of onnxruntime_cxx_api.h (https://onnxruntime.ai/docs/api/c/namespace_ort.html), which are the same
from 1.8 on; custom operator libraries need 1.14.
"""

from __future__ import annotations

import re

from edgeopt.program import Signature
from edgeopt.spec.manifest import Candidate, TensorSpec

_C_TYPES = {
    "float64": "double", "float32": "float", "float16": "uint16_t", "int64": "int64_t", "int32": "int32_t",
    "int16": "int16_t", "int8": "int8_t", "uint8": "uint8_t", "bool": "uint8_t",
}  # fmt: skip
_ONNX_TYPES = {
    "float64": "DOUBLE", "float32": "FLOAT", "float16": "FLOAT16", "int64": "INT64", "int32": "INT32", "int16": "INT16",
    "int8": "INT8", "uint8": "UINT8", "bool": "BOOL",
}  # fmt: skip
_LEVELS = {"off": "ORT_DISABLE_ALL", "basic": "ORT_ENABLE_BASIC", "extended": "ORT_ENABLE_EXTENDED"}


def program(
    title: str, candidate: Candidate, signature: Signature, words: dict[str, str], libraries: tuple[str, ...]
) -> str:
    """The source. `words` say what each input holds; `libraries` are paths of operator libraries in the artifact."""
    names = _identifiers(signature)
    lines = [
        f"// {_comment(title)}: one call of {candidate.file} by onnxruntime's C++ API.",
        "// g++ -std=c++17 onnxruntime.cpp -IONNXRUNTIME/include -LONNXRUNTIME/lib -lonnxruntime",
        "// Run as: ./a.out ARTIFACT", "#include <onnxruntime_cxx_api.h>", "",
        "#include <cstddef>", "#include <cstdint>", "#include <cstdio>", "#include <string>", "#include <vector>", "",
        "static size_t elements(const std::vector<int64_t>& shape) {", "  size_t count = 1;",
        "  for (int64_t size : shape) count *= static_cast<size_t>(size);", "  return count;", "}", "",
        "template <typename T>",
        "static Ort::Value tensor(std::vector<T>& data, const std::vector<int64_t>& shape,",
        "                         ONNXTensorElementDataType type) {",
        "  auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);",
        "  return Ort::Value::CreateTensor(memory, data.data(), data.size() * sizeof(T), shape.data(), shape.size(),",
        "                                  type);",
        "}", "", "int main(int argc, char** argv) {", '  const std::string folder = argc > 1 ? argv[1] : "..";',
        f"  Ort::Env env(ORT_LOGGING_LEVEL_WARNING, {_literal(title)});", "  Ort::SessionOptions options;",
        *_options(candidate, libraries),
        f"  Ort::Session session(env, (folder + {_literal('/' + candidate.file)}).c_str(), options);", "",
    ]  # fmt: skip
    for spec in signature.inputs:
        lines += _input(spec, signature, names[spec.name], words.get(spec.name, ""))
    lines += _call(signature, names)
    return "\n".join([*lines, "  return 0;", "}"]) + "\n"


def _options(candidate: Candidate, libraries: tuple[str, ...]) -> list[str]:
    flags = candidate.flags
    threads = flags.get("intra_op_threads")
    level = _LEVELS.get(flags.get("graph_optimization", "all"), "ORT_ENABLE_ALL")
    lines = [
        f"  options.SetIntraOpNumThreads({threads or 0});" + ("" if threads else "  // 0: a thread a core"),
        f"  options.SetGraphOptimizationLevel(GraphOptimizationLevel::{level});",
    ]
    if disabled := flags.get("disabled_optimizers"):
        joined = _literal(";".join(disabled))
        lines.append(f'  options.AddConfigEntry("optimization.disable_specified_optimizers", {joined});')
    lines += [f"  options.RegisterCustomOpsLibrary((folder + {_literal('/' + path)}).c_str());" for path in libraries]
    return lines


def _input(spec: TensorSpec, signature: Signature, name: str, words: str) -> list[str]:
    sizes = [signature.axes[size].opt if isinstance(size, str) else size for size in spec.shape]
    said = [f"{axis} from {signature.axes[axis].min} to {signature.axes[axis].max}" for axis in _axes(spec)]
    about = "; ".join(part for part in (", ".join(said), words) if part)
    return [
        f"  // {_comment(spec.name)}: {_comment(about)}",
        f"  const std::vector<int64_t> {name}_shape{{{', '.join(map(str, sizes))}}};",
        f"  std::vector<{_C_TYPES[spec.dtype]}> {name}(elements({name}_shape));  // fill it",
        "",
    ]


def _axes(spec: TensorSpec) -> list[str]:
    return list(dict.fromkeys(size for size in spec.shape if isinstance(size, str)))


def _call(signature: Signature, names: dict[str, str]) -> list[str]:
    inputs, outputs = signature.inputs, signature.outputs
    lines = [
        f"  const char* input_names[] = {{{', '.join(_literal(spec.name) for spec in inputs)}}};",
        f"  const char* output_names[] = {{{', '.join(_literal(spec.name) for spec in outputs)}}};",
        "  std::vector<Ort::Value> inputs;",
    ]
    for spec in inputs:
        kind = f"ONNX_TENSOR_ELEMENT_DATA_TYPE_{_ONNX_TYPES[spec.dtype]}"
        lines.append(f"  inputs.push_back(tensor({names[spec.name]}, {names[spec.name]}_shape, {kind}));")
    lines += [
        "  std::vector<Ort::Value> outputs = session.Run(Ort::RunOptions{nullptr}, input_names, inputs.data(),",
        f"                                                inputs.size(), output_names, {len(outputs)});",
    ]
    for i, spec in enumerate(outputs):
        shape = ", ".join(str(size) for size in spec.shape)
        lines += [
            f"  // {_comment(spec.name)}: {spec.dtype} [{_comment(shape)}]",
            f"  const {_C_TYPES[spec.dtype]}* out_{i} = outputs[{i}].GetTensorMutableData<{_C_TYPES[spec.dtype]}>();",
            f"  const size_t out_{i}_count = outputs[{i}].GetTensorTypeAndShapeInfo().GetElementCount();",
            f'  std::printf("%s: %zu values, the first %g\\n", output_names[{i}], out_{i}_count,',
            f"              out_{i}_count ? static_cast<double>(out_{i}[0]) : 0.0);",
        ]
    return lines


def _identifiers(signature: Signature) -> dict[str, str]:
    """A C++ identifier for each input, all different."""
    found: dict[str, str] = {}
    for spec in signature.inputs:
        name = "in_" + re.sub(r"_+", "_", re.sub(r"[^A-Za-z0-9]", "_", spec.name)).strip("_")
        while any(name in (other, f"{other}_shape") or other == f"{name}_shape" for other in found.values()):
            name += "x"
        found[spec.name] = name
    return found


def _literal(text: str) -> str:
    """A C++ string literal: what is not plain ASCII as octal bytes of UTF-8, three digits each."""
    plain = "".join(
        chr(byte) if 32 <= byte < 127 and chr(byte) not in '"\\?' else f"\\{byte:03o}" for byte in text.encode()
    )
    return f'"{plain}"'


def _comment(text: str) -> str:
    """Text for one line of comment: without line ends, and no backslash that would join the next line to it."""
    return re.sub(r"\s+", " ", text).replace("\\", "/").replace("??/", "/")
