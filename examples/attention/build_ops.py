"""Compiles ops.cpp for the torch of this Python: libfused_attention-ARCH.so beside it, or where an argument says.

Run it on each kind of machine that loads the operator, with the Python that has its torch. It needs a C++ compiler:
c++, or what CXX names. The library links against torch's own libraries by name, so it holds no path of this machine.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

HERE = Path(__file__).resolve().parent


def command(out):
    release = tuple(int(number) for number in torch.__version__.split(".")[:2])
    standard = "-std=c++20" if release >= (2, 12) else "-std=c++17" if release >= (2, 1) else "-std=c++14"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    return [
        os.environ.get("CXX", "c++"), "-O3", "-shared", "-fPIC", standard, abi, "ops.cpp",
        *("-isystem" + path for path in include_paths()), *("-L" + path for path in library_paths()),
        "-lc10", "-ltorch_cpu", "-ltorch", "-o", str(out),
    ]  # fmt: skip


def main():
    default = HERE / f"libfused_attention-{platform.machine()}.so"
    out = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else default
    part = out.with_suffix(".part")  # a library that a process has loaded is never written into
    subprocess.run(command(part), cwd=str(HERE), check=True)
    part.replace(out)
    print(out)


if __name__ == "__main__":
    main()
