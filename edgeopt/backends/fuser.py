"""TorchScript's fuser flags on the host: applied in a `with` block, each checked by trying it, and restored.

The flags are process-wide and do not travel inside a TorchScript file, so the manifest carries them and the runner
applies them on the device by the same code, `onboard.fuser`. `VARIANTS` are the combinations that are candidates
beside the profile's own flags.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from edgeopt.onboard import fuser as onboard_fuser
from edgeopt.spec.jetpack import version_tuple
from edgeopt.spec.profile import Profile


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

_NNC = {"texpr_fuser": True, "texpr_reductions": True, "onednn_fusion": None, "nvfuser": None}


class Variant(NamedTuple):
    """A combination of flags that is a candidate: laid over the profile's own, None takes one of those out.

    `since`, `until`: the torch versions that have it, `until` excluded. `on`: where it can gain.
    """

    name: str
    flags: dict[str, Any]
    on: str  # 'x86', 'gpu', 'llvm' or 'any'
    since: tuple[int, int] = (1, 10)
    until: tuple[int, int] = (99, 0)
    unasked: bool = True  # tried without being named


# oneDNN graph and optimize_for_inference exclude each other: together the first call fails (torch 2.13: 'vector::
# _M_range_check'). Depths matter to NNC, which compiles a kernel for each size (STATIC) or one for all (DYNAMIC).
VARIANTS: tuple[Variant, ...] = (
    Variant(
        "onednn",
        {"onednn_fusion": True, "optimize_for_inference": None, "profiling_executor": True, "profiling_mode": True},
        on="x86", since=(2, 1),
    ),
    Variant("nnc", {**_NNC, "fuse_on_gpu": True}, on="gpu"),
    Variant(
        "nnc-dynamic", {**_NNC, "fuse_on_gpu": True, "fusion_strategy": [["DYNAMIC", 10]]}, on="gpu", since=(1, 11)
    ),
    Variant("nnc-cpu", {**_NNC, "fuse_on_cpu": True}, on="llvm"),
    Variant(
        "nnc-cpu-dynamic", {**_NNC, "fuse_on_cpu": True, "fusion_strategy": [["DYNAMIC", 10]]}, on="llvm", since=(1, 11)
    ),
    Variant(
        "nvfuser", {"nvfuser": True, "texpr_fuser": False, "fuse_on_gpu": True}, on="gpu", since=(1, 11), until=(2, 2)
    ),
    Variant("unprofiled", {"profiling_executor": False, "profiling_mode": False}, on="any", unasked=False),
)  # fmt: skip


def trials(profile: Profile) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Variants to try on the profile's target: name -> flags; and name -> why not, of those that it names itself."""
    asked = profile.fuser_trials
    named = asked if isinstance(asked, tuple) else ()
    tried, declined = {}, {}
    for variant in VARIANTS:
        if not (variant.name in named or asked is True and variant.unasked):
            continue
        reason = _cannot(variant, profile)
        if reason is None:
            flags = {**profile.fuser_flags, **variant.flags}
            tried[variant.name] = {flag: value for flag, value in flags.items() if value is not None}
        elif named:
            declined[variant.name] = reason
    return tried, declined


def _cannot(variant: Variant, profile: Profile) -> str | None:
    """Why the variant is none for the target: its torch, no GPU, another architecture, no LLVM; None where it is."""
    target = profile.target
    newest = version_tuple((target.torch.max if target.torch else None) or torch.__version__)[:2]
    if not variant.since <= newest < variant.until:
        last = f" and is gone from {_dotted(variant.until)} on" if variant.until < (99, 0) else ""
        return f"it came with torch {_dotted(variant.since)}{last}; the target has {_dotted(newest)}"
    if variant.on == "gpu" and target.sm is None:
        return "it fuses on a GPU, and the target has none"
    if variant.on == "x86" and (target.arch != "x86_64" or target.sm is not None):
        return "oneDNN graph fuses on x86 CPUs"
    if variant.on == "llvm" and not _has_llvm(target.arch, newest):
        return "it needs a torch with LLVM: without it fusion on the CPU fails or runs a thousand times slower"
    return None


def _has_llvm(arch: str, version: tuple[int, ...]) -> bool:
    """Whether the target's torch has LLVM: this machine's is asked, of others the x86 wheels up to 1.10 are known."""
    if version == version_tuple(torch.__version__)[:2]:
        return torch._C._llvm_enabled()
    return arch == "x86_64" and version <= (1, 10)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


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
