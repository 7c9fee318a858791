"""TorchScript's fuser flags on the host: applied in a `with` block, each checked by trying it, and restored.

The flags are process-wide and do not travel inside a TorchScript file, so the manifest carries them and the runner
applies them on the device by the same code, `onboard.fuser`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from edgeopt.onboard import fuser as onboard_fuser


class Flag(NamedTuple):
    """What a flag does, and the torch versions that have it (read in the aarch64 wheels 1.10.2 to 2.13)."""

    does: str
    torch: str


FLAGS: dict[str, Flag] = {
    "profiling_executor": Flag("records shapes in the first runs and specialises for them", "all"),
    "profiling_mode": Flag("lets the executor record those profiles", "all"),
    "texpr_fuser": Flag("fuses element-wise chains by TensorExpr (NNC)", "all"),
    "texpr_reductions": Flag("lets that fuser take in sums and means", "all"),
    "fuse_on_cpu": Flag(
        "fuses on the CPU; only where torch was built with LLVM", "all; LLVM in the x86 wheel of 1.10.2"
    ),
    "fuse_on_gpu": Flag("fuses on the GPU", "all"),
    "nvfuser": Flag("fuses by nvFuser on CUDA", "1.11 to 2.1; a no-op with a warning later"),
    "fusion_strategy": Flag("how many static, then dynamic, specialisations are made", "1.11 and later"),
    "onednn_fusion": Flag("fuses by oneDNN Graph on x86 CPUs", "2.1 and later"),
}


@contextlib.contextmanager
def applied(flags: Mapping[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Set `flags` (name -> value, as a TorchScript candidate carries them) and restore all of them at the end.

    Gives a record for each: {"flag", "value", "status", "message"} with status 'applied'; 'missing' where this
    torch does not have the flag; 'refused' where it does not take the value. Nothing is raised for a flag.
    """
    records, undo = onboard_fuser.apply(torch, dict(flags))
    try:
        yield records
    finally:
        undo()
