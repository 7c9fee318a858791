"""The process that compiles a program by AOTInductor: its caches lie beside the result, and go with them."""

from __future__ import annotations

import os
from pathlib import Path

# The weights are constants, so oneDNN's layouts are made once, when it compiles. The number of threads is otherwise
# written into the code as it is here. Precompiled headers would be left in the system's folder for temporary files.
_CONFIG = {
    "freezing": True,
    "cpp.dynamic_threads": True,
    "aot_inductor.precompile_headers": False,
    "compile_threads": 1,
}


def main(given: str, made: str) -> None:
    """Read the exported program at `given` and write its package to `made`."""
    folder = Path(made).parent
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")  # read by torch, and by no code of ours
    os.environ["TMPDIR"] = str(folder)
    import torch

    exported = torch.export.load(given)
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(exported, package_path=made, inductor_configs=_CONFIG)
