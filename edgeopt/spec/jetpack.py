"""What each Jetson module is, and what each JetPack brings: one table, every row with source and confidence.

Confidence: H read in source or measured; M one public source; L general knowledge, unverified.
JetPack and L4T numbers: tables in rbonghi/jetson_stats and dusty-nv/jetson-containers (H where listed there).
"""

from __future__ import annotations

import re
from typing import NamedTuple

Version = tuple[int, ...]


def version_tuple(version: str) -> Version:
    """'8.5.2' -> (8, 5, 2); a suffix such as 'a0+nv23.06' is left out. () where no number leads."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


class Release(NamedTuple):
    """One JetPack line. `torch_min` and `torch_max`: NVIDIA's (or the community's) wheels for its Python."""

    jetpack: str
    l4t_first: str
    l4t: str  # the last revision of the line
    python: str
    cuda: str
    cudnn: str
    tensorrt: str
    torch_min: str | None
    torch_max: str | None
    base_image: str
    confidence: str


class Module(NamedTuple):
    """A Jetson module. `memory_gb`: the smallest variant sold, so that a limit drawn from it holds on all."""

    name: str
    soc: str
    sm: str
    memory_gb: int
    dla_cores: int
    jetpacks: tuple[str, ...]  # keys of RELEASES, oldest first


_IMAGE = "nvidia/l4t-"  # in the catalogue of NVIDIA, whose host a Dockerfile adds

# Oldest first. TensorRT 7 (JetPack 4.5 and older) reads no explicit Q/DQ and only opset 11: it starts at 4.6.
# jetpack, l4t_first, l4t, python, cuda, cudnn, tensorrt / torch_min, torch_max, base_image, confidence
# fmt: off
RELEASES = (
    # TensorRT 8.0.1 (torch-tensorrt 1.0 names it, M); torch <= 1.10, cp36 (H)
    Release("4.6.0", "32.6.1", "32.6.1", "3.6", "10.2", "8.2.1", "8.0.1",
            "1.7", "1.10", _IMAGE + "base:r32.6.1", "M"),
    # R32.7.x are compatible; torch 1.11 needs Python 3.7; the base takes CUDA from the host (H)
    Release("4.6", "32.7.1", "32.7.6", "3.6", "10.2", "8.2.1", "8.2.1",
            "1.7", "1.10", _IMAGE + "base:r32.7.1", "H"),
    # JetPack 5.0.2 is R35.1 (H); CUDA 11.4, cuDNN 8.4.1, TensorRT 8.4.1 (L)
    Release("5.0", "35.1.0", "35.1.0", "3.8", "11.4", "8.4.1", "8.4.1",
            "1.11", "1.13", _IMAGE + "jetpack:r35.1.0", "L"),
    # wheels 1.11 to 2.1.0a0+nv23.06, cp38 (H); no image is newer than r35.4.1, which runs on all R35 (H)
    Release("5.1", "35.2.1", "35.6.4", "3.8", "11.4", "8.6.0", "8.5.2",
            "1.11", "2.1", _IMAGE + "jetpack:r35.4.1", "H"),
    # the two tables disagree on CUDA (12.2, 12.4); TensorRT 8.6.2 (L); wheels from 2.2, cp310 (H)
    Release("6.0", "36.3.0", "36.3.0", "3.10", "12.2", "8.9.4", "8.6.2",
            "2.2", "2.4", "ubuntu:22.04", "L"),
    # R36 splits at minor 4: images of older minors do not run from here on (M)
    Release("6.1", "36.4.0", "36.4.2", "3.10", "12.6", "9.3", "10.3",
            "2.2", "2.8", _IMAGE + "jetpack:r36.4.0", "M"),
    # the tables disagree on 36.5.0; wheels to 2.5.0a0+nv24.08, the index up to 2.8 (H)
    Release("6.2", "36.4.3", "36.5.0", "3.10", "12.6", "9.3", "10.3",
            "2.2", "2.8", _IMAGE + "jetpack:r36.4.0", "H"),
    # R38 is Thor's alone: cu130 SBSA wheels, cp312 (cu128 wheels have no sm_110) (H); TensorRT as in 7.1 (L)
    Release("7.0", "38.0.0", "38.2.2", "3.12", "13.0", "9.12", "10.13",
            "2.9", "2.13", "ubuntu:24.04", "L"),
    # CUDA 13.0, TensorRT 10.13 (M); that it begins at R38.4 (L)
    Release("7.1", "38.4.0", "38.4.0", "3.12", "13.0", "9.12", "10.13",
            "2.9", "2.13", "ubuntu:24.04", "M"),
    # the stack by roboflow/inference#2531 (M); community torch 2.12 on Orin (H)
    Release("7.2", "39.2.0", "39.2.1", "3.12", "13.2", "9.20", "10.16.2",
            "2.9", "2.13", "ubuntu:24.04", "M"),
)
# fmt: on

_XAVIER = ("4.6.0", "4.6", "5.0", "5.1")
_ORIN = ("5.0", "5.1", "6.0", "6.1", "6.2", "7.2")

# SM by rbonghi/jetson_stats' CUDA_TABLE (H); memory L/M; DLA cores L, none on Orin Nano (L), none on Thor
MODULES = (
    Module("nano", "tegra210", "5.3", 4, 0, ("4.6.0", "4.6")),
    Module("tx2", "tegra186", "6.2", 8, 0, ("4.6.0", "4.6")),
    Module("xavier-nx", "tegra194", "7.2", 8, 2, _XAVIER),
    Module("xavier", "tegra194", "7.2", 32, 2, _XAVIER),
    Module("orin-nano", "tegra234", "8.7", 4, 0, _ORIN[1:]),
    Module("orin-nx", "tegra234", "8.7", 8, 1, _ORIN[1:]),
    Module("orin-agx", "tegra234", "8.7", 32, 2, _ORIN),
    Module("thor", "tegra264", "11.0", 128, 0, ("7.0", "7.1", "7.2")),
)


def module(name: str) -> Module | None:
    """The module called `name`, or None."""
    return next((m for m in MODULES if m.name == name), None)


def release(jetpack: str, of: Module | None = None) -> Release | None:
    """The row for a JetPack version, among those of the module `of` where given; None where there is none.

    A point release that has no row of its own belongs to its line: '4.6.6' is '4.6', '5.1.2' is '5.1'.
    """
    wanted = version_tuple(jetpack)
    rows = [r for r in RELEASES if of is None or r.jetpack in of.jetpacks]
    exact = [r for r in rows if r.jetpack == jetpack]
    line = [r for r in rows if len(r.jetpack.split(".")) == 2 and version_tuple(r.jetpack) == wanted[:2]]
    return (exact or line or [None])[0]


def release_for_l4t(l4t: str, of: Module | None = None) -> tuple[Release, bool] | None:
    """(row, known) for an L4T version such as '35.6.1' or 'R36.4.3'; None where its major has no row.

    Public tables disagree on the newest revisions, so a version between or beyond the rows (`known` False)
    falls back within its major: to the newest row that is not newer, else to the oldest.
    """
    wanted = version_tuple(l4t.lstrip("rR"))
    rows = [r for r in RELEASES if of is None or r.jetpack in of.jetpacks]
    rows = [r for r in rows if version_tuple(r.l4t)[:1] == wanted[:1]]
    if not wanted or not rows:
        return None
    row = [r for r in rows if version_tuple(r.l4t_first) <= wanted or r is rows[0]][-1]
    return row, version_tuple(row.l4t_first) <= wanted <= version_tuple(row.l4t)


def opset_max(tensorrt: str) -> int:
    """The newest ONNX opset that the TensorRT version's parser reads.

    8.0 and 8.2: 13, 8.4 to 8.6: 17, 9.0: 19, 10.0 and 10.1: 20 (H). Later ones read at least that (L).
    """
    version = version_tuple(tensorrt)
    for least, opset in (((10,), 20), ((9,), 19), ((8, 4), 17), ((8,), 13)):
        if version >= least:
            return opset
    return 11  # TensorRT 7.x (L)


class Capability(NamedTuple):
    """What a GPU generation computes: precision -> None where it can, else the reason why not."""

    fp16: str | None
    int8: str | None
    bf16: str | None
    fp8: str | None


def capability(sm: str) -> Capability:
    """What a GPU of compute capability `sm` ('7.2') has.

    fp16 from 5.3; int8 (dp4a) from 6.1 but not on 6.2 (M), none on 5.3 (L); bf16 from 8.0 (M), none on 7.2
    (L); fp8 from 8.9, none on 8.7 (H).
    """
    version = version_tuple(sm)
    name = "sm_" + sm.replace(".", "")
    no_int8 = version < (6, 1) or version == (6, 2)
    return Capability(
        fp16=None if version >= (5, 3) else f"{name} has no fp16 arithmetic",
        int8=f"the GPU {name} has no int8 arithmetic" if no_int8 else None,
        bf16=None if version >= (8, 0) else f"the GPU {name} has no bf16: it came with sm_80",
        fp8=None if version >= (8, 9) else f"the GPU {name} has no fp8: it came with sm_89",
    )
