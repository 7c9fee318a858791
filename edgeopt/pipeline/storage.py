"""A stage's result as files of the stage cache, and back."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from edgeopt import digest
from edgeopt.program import ExportedGraph, Program

_DETAILS = "details.json"
_QAT_STATE = "qat_state.pt"


def save(program: Program, details: dict[str, Any], folder: Path) -> None:
    """Write the program and the details of its stage into `folder`.

    Of a QAT result only the learned state is kept: its graph is that of the stage before, and observer graphs
    are never serialised.
    """
    (folder / _DETAILS).write_bytes(digest.canonical_json(digest.finite(details)))
    if isinstance(program, ExportedGraph) and program.qat_state is not None and not program.integer:
        import torch

        buffer = io.BytesIO()
        torch.save(program.qat_state, buffer)  # to a file, a full disk would be torch's own error without a number
        (folder / _QAT_STATE).write_bytes(buffer.getbuffer())
        return
    from edgeopt.capture import serialise

    serialise.save(program, folder)


def load(folder: Path, before: Program | None) -> tuple[Program, dict[str, Any]]:
    """The program and details that `save` wrote; `before` is the program that the stage was given."""
    details = json.loads((folder / _DETAILS).read_bytes())
    if (folder / _QAT_STATE).exists():
        import torch

        state = torch.load(folder / _QAT_STATE, map_location="cpu", weights_only=True)
        return before.after("qat", qat_state=state), details
    from edgeopt.capture import serialise

    return serialise.load(folder), details
