"""Operator libraries compiled for the tests, each once a session: torch's and onnxruntime's, for two machines."""

from __future__ import annotations

import atexit
import functools
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.conftest import absent

COMPILERS = {"x86_64": "x86_64-linux-gnu-g++", "aarch64": "aarch64-linux-gnu-g++"}

# native_ops::twice(x) = x + x
TORCH_CODE = """
#include <torch/library.h>
#include <ATen/core/Tensor.h>
static at::Tensor twice(const at::Tensor& x) { return x.add(x); }
TORCH_LIBRARY(native_ops, m) {
  m.def("twice(Tensor x) -> Tensor");
  m.impl("twice", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(twice));
}
"""

# The operator acme::Scale of onnxruntime's C interface: y = alpha * x in float, alpha an attribute. The interface is a
# table of functions that only ever grows (ORT_API_VERSION), called by their places in it, since no package holds its
# header: https://onnxruntime.ai/docs/api/c/struct_ort_api.html lists them in their order.
ORT_CODE = r"""
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
typedef void* (*fn)();
typedef struct { const fn* (*get)(uint32_t); const char* (*version)(void); } Base;
enum { CREATE_DOMAIN = 26, ADD_OP = 27, ADD_DOMAIN = 28, DATA = 51, RANK = 61, SIZES = 62, COUNT = 64, SHAPE = 65,
       FLOAT_ATTRIBUTE = 85, INPUT = 90, OUTPUT = 91 };
static const fn* api;
typedef struct Op {
  uint32_t version;
  void* (*create)(const struct Op*, const void*, const void*);
  const char* (*name)(const struct Op*);
  const char* (*provider)(const struct Op*);
  int (*input_type)(const struct Op*, size_t);
  size_t (*inputs)(const struct Op*);
  int (*output_type)(const struct Op*, size_t);
  size_t (*outputs)(const struct Op*);
  void (*compute)(void*, void*);
  void (*destroy)(void*);
  int (*input_kind)(const struct Op*, size_t);
  int (*output_kind)(const struct Op*, size_t);
  int (*input_memory)(const struct Op*, size_t);
  void* later[32]; /* of newer versions, which look whether they are there */
} Op;
static void* create(const Op* op, const void* unused, const void* info) {
  float* alpha = malloc(sizeof(float));
  api[FLOAT_ATTRIBUTE](info, "alpha", alpha);
  return alpha;
}
static const char* name(const Op* op) { return "Scale"; }
static const char* provider(const Op* op) { return NULL; }
static int type(const Op* op, size_t i) { return 1; }
static int plain(const Op* op, size_t i) { return 0; }
static size_t one(const Op* op) { return 1; }
static void destroy(void* kernel) { free(kernel); }
static void compute(void* kernel, void* context) {
  const void* input; void* output; void* shape; float *x, *y; int64_t sizes[8]; size_t rank, count;
  api[INPUT](context, (size_t)0, &input);
  api[SHAPE](input, &shape);
  api[RANK](shape, &rank);
  api[SIZES](shape, sizes, rank);
  api[COUNT](shape, &count);
  api[OUTPUT](context, (size_t)0, sizes, rank, &output);
  api[DATA](input, &x);
  api[DATA](output, &y);
  for (size_t i = 0; i < count; i++) y[i] = FACTOR * *(float*)kernel * x[i];
}
static const Op scale = {13, create, name, provider, type, one, type, one, compute, destroy, plain, plain, plain};
void* RegisterCustomOps(void* options, const Base* base) {
  void* domain;
  api = base->get(16);
  api[CREATE_DOMAIN]("acme", &domain);
  api[ADD_OP](domain, &scale);
  return api[ADD_DOMAIN](options, domain);
}
"""


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="edgeopt-native-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def compiler(arch: str, language: str = "c++") -> str:
    names = [COMPILERS[arch].replace("g++", "gcc" if language == "c" else "g++")]
    if arch == platform.machine():
        names.append("gcc" if language == "c" else "g++")
    found = next((name for name in names if shutil.which(name)), None)
    if found is None:
        absent(f"no compiler for {arch} (Debian: g++ and g++-aarch64-linux-gnu)")
    return found


def compiled(code: str, path: Path, argv: list[str]) -> Path:
    source = path.with_suffix(".cpp" if argv[0].endswith("g++") else ".c")
    source.write_text(code)
    done = subprocess.run([*argv, str(source), "-o", str(path), "-shared", "-fPIC"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return path


@functools.cache
def torch_library(arch: str = platform.machine()) -> Path:
    """A library of the operator native_ops::twice; for another machine it is not linked against torch."""
    import torch

    home = Path(torch.__file__).parent
    argv = [compiler(arch), "-O0", "-std=c++20", f"-I{home / 'include'}"]
    if arch == platform.machine():
        argv += [f"-L{home / 'lib'}", "-Wl,--no-as-needed", "-lc10", "-ltorch_cpu"]
    return compiled(TORCH_CODE, _folder() / f"libnative_ops-{arch}.so", argv)


@functools.cache
def ort_library(arch: str = platform.machine(), factor: str = "1.0f") -> Path:
    """A library of onnxruntime's with the operator acme::Scale; with another `factor` it is a wrong one."""
    argv = [compiler(arch, "c"), f"-DFACTOR={factor}", "-Wno-incompatible-pointer-types"]
    return compiled(ORT_CODE, _folder() / f"libort_{factor.replace('.', '_')}-{arch}.so", argv)
