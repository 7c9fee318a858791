"""onnxruntime sessions on the machine that builds: the CPU, the model's own operators, failures as exceptions."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeopt.program.custom_ops import NONE, CustomOps

if TYPE_CHECKING:
    import onnxruntime


def open_session(
    model: bytes | str | Path,
    custom_ops: CustomOps = NONE,
    *,
    as_written: bool = False,
    disabled: Sequence[str] = (),
    options: Any = None,
) -> onnxruntime.InferenceSession:
    """A session of a serialized model or a file, with the libraries that hold its operators for onnxruntime.

    `as_written` switches the runtime's graph optimizations off; `disabled`: names of optimizers to leave out;
    `options`: more of onnxruntime's SessionOptions. Raises what onnxruntime raises, which has no base of its own.
    """
    import onnxruntime

    options = options or onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what it would log is raised as well
    if as_written:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    for library in custom_ops.for_onnxruntime(platform.machine()):
        options.register_custom_ops_library(str(library.path))
    model = model if isinstance(model, bytes) else str(model)
    return onnxruntime.InferenceSession(
        model, options, providers=["CPUExecutionProvider"], disabled_optimizers=list(disabled)
    )
