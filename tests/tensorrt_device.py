"""A device with a recorded trtexec on its PATH, and an artifact with engines for it."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from edgeopt.runtime.artifact import Artifact
from edgeopt.spec.manifest import Candidate, EngineRecipe, Tolerance
from edgeopt.testing import recorded_trtexec
from tests.tiny import candidate, tiny_artifact

STAND_IN = Path(recorded_trtexec.__file__)
SHAPES = {"x": {"min": (1, 4), "opt": (2, 4), "max": (8, 4)}}


def install(folder: Path, **settings) -> Path:
    """`folder`/bin with a trtexec in it; `settings` as recorded_trtexec.py has them. May be called again."""
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    (folder / "trtexec.json").write_text(json.dumps({"version": "8.5.2", "until": None, "fail": None, **settings}))
    words = shlex.join([sys.executable, str(STAND_IN), str(folder / "trtexec.json")])
    path = folder / "bin" / "trtexec"
    path.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    path.chmod(0o755)
    return folder / "bin"


def engine(name: str = "tensorrt-fp16", **changes) -> tuple[Candidate, EngineRecipe]:
    """A candidate that an engine is built for, from float.onnx, and its recipe with `changes`."""
    fields = {"candidate": name, "shapes": SHAPES, "typing": "weak", "flags": ("fp16",), **changes}
    made = Candidate(
        name=name, runtime="tensorrt", precision="fp16", file="float.onnx", opset=13, tolerance=Tolerance(sqnr_db=30)
    )
    return made, EngineRecipe(**fields)


def with_engines(folder: Path, *names: str, cpu: bool = False, recipe: dict | None = None, **changes) -> Artifact:
    """The tiny artifact with these TensorRT candidates, and with `cpu` onnxruntime's as well."""
    pairs = [engine(name, **(recipe or {})) for name in names or ("tensorrt-fp16",)]
    held = [candidate("onnxruntime-fp32", "onnxruntime", "float.onnx", opset=13)] if cpu else []
    fields = {
        "candidates": [*held, *(made for made, _ in pairs)], "engine_recipes": tuple(found for _, found in pairs),
        "metrics": {}, "torchscript": False, **changes,
    }  # fmt: skip
    return tiny_artifact(folder, **fields)
