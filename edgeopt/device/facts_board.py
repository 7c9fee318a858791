"""Pure parsers: what the board is and which of NVIDIA's software it has. Text -> fields of DeviceFacts.

A parser takes what its sources answered (None where a device has no such thing), and never raises: what it cannot
understand is not there. Formats: rbonghi/jetson_stats, dusty-nv/jetson-containers, NvInferVersion.h, cudnn_version.h.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from edgeopt.onboard import device_facts
from edgeopt.spec import jetpack

Fields = dict[str, Any]

# part numbers of modules, as in `nvidia,p3737-0000+p3701-0005`: rbonghi/jetson_stats' table of modules
_PARTS = (
    (r"p3448-\d", "nano"),
    (r"p3310-\d|p3489-\d|p3636-\d", "tx2"),
    (r"p3668-\d", "xavier-nx"),
    (r"p2888-\d", "xavier"),
    (r"p3767-000[345]", "orin-nano"),
    (r"p3767-\d", "orin-nx"),
    (r"p3701-\d", "orin-agx"),
    (r"p3834-\d", "thor"),
)
# where a carrier of its own hides the part number: the model's words, and the SoC that they must go with
_WORDS = (
    (r"orin\W*nano", "tegra234", "orin-nano"),
    (r"orin\W*nx", "tegra234", "orin-nx"),
    (r"agx\W*orin", "tegra234", "orin-agx"),
    (r"xavier\W*nx", "tegra194", "xavier-nx"),
    (r"agx|xavier", "tegra194", "xavier"),
    (r"nano", "tegra210", "nano"),
    (r"", "tegra186", "tx2"),  # a TX2's model is 'quill'
    (r"", "tegra264", "thor"),
)
# include/soc/tegra/fuse.h of Linux: TEGRA210 0x21, TEGRA186 0x18, TEGRA194 0x19, TEGRA234 0x23, TEGRA264 0x26
_CHIPS = {33: "tegra210", 24: "tegra186", 25: "tegra194", 35: "tegra234", 38: "tegra264"}
_SYNTHESIZED = "12345678"  # the GCID of a release file that was made up in a container
_PLACEHOLDERS = re.compile(r"to be filled|system product name|system manufacturer|default string|o\.e\.m", re.I)


def model(text: str | None) -> Fields:
    return _said(model=device_facts.parse_model(text))


def desktop_model(small: Mapping[str, str]) -> Fields:
    """Maker and product by DMI; nothing where the maker left the words of a board that nobody named."""
    vendor, product = (small.get(f"/sys/class/dmi/id/{key}", "").strip() for key in ("sys_vendor", "product_name"))
    if not product or _PLACEHOLDERS.search(product):
        return {}
    return {"model": f"{vendor} {product}" if vendor and not product.startswith(vendor) else product}


def soc(compatible: str | None, chip_id: str | None, soc_id: str | None) -> Fields:
    """Tegra's name from the device tree, else from its chip's number; elsewhere the last item: 'bcm2712'."""
    found = device_facts.parse_soc(compatible) or _chip(chip_id) or _chip(soc_id)
    if found is None and compatible:
        vendor, comma, name = compatible.rstrip("\0").rpartition("\0")[2].partition(",")
        found = name if comma and name.isprintable() and vendor != "linux" else None
    return _said(soc=found, sm=device_facts.SM_OF_SOC.get(found or ""))


def module(model_text: str | None, compatible: str | None, chip_id: str | None, soc_id: str | None) -> Fields:
    """The Jetson module by its part number, else by the model's words where they fit the SoC; a TX1 is none of ours."""
    chip = soc(compatible, chip_id, soc_id).get("soc")
    if chip not in device_facts.SM_OF_SOC or "p2180" in (compatible or ""):
        return {}
    for pattern, name in _PARTS:
        if re.search(pattern, compatible or ""):
            return {"module": name}
    for pattern, of, name in _WORDS:
        if chip == of and re.search(pattern, model_text or "", re.I):
            return {"module": name}
    return {}


def l4t_release(release: str | None) -> Fields:
    """/etc/nv_tegra_release, its first line only; not where the file was made up in a container."""
    return {} if _SYNTHESIZED in _first(release) else l4t_synthesized(release)


def l4t_package(dpkg: str | None) -> Fields:
    version = packages(dpkg).get("nvidia-l4t-core")
    return _said(l4t=device_facts.parse_l4t_package(version))


def l4t_synthesized(release: str | None) -> Fields:
    """Any release file: better than nothing."""
    return _said(l4t=device_facts.parse_l4t(_first(release)))


def jetpack_line(l4t: str | None, module_name: str | None) -> str | None:
    """The line of spec.jetpack.RELEASES, of the module where it is known. Unknown ones fall back in their major."""
    found = jetpack.release_for_l4t(l4t or "", of=jetpack.module(module_name or ""))
    found = found or jetpack.release_for_l4t(l4t or "")
    return found[0].jetpack if found else None


def cuda_file(text: str | None) -> Fields:
    """version.json (CUDA 11 and later) or 'CUDA Version 10.2.300' (version.txt) -> '10.2'."""
    try:
        version = str(json.loads(text or "")["cuda"]["version"])
    except (ValueError, KeyError, TypeError, RecursionError):
        version = _group(r"CUDA Version\s+([\d.]+)", text)
    return _said(cuda=_group(r"(\d{1,4}\.\d{1,4})", version))


def cuda_package(dpkg: str | None) -> Fields:
    found = [tuple(map(int, m.groups())) for name in packages(dpkg)
             if (m := re.fullmatch(r"cuda-cudart-(\d{1,4})-(\d{1,4})", name))]  # fmt: skip
    return _said(cuda=".".join(map(str, max(found))) if found else None)


def cuda_driver(smi: str | None) -> Fields:
    """The newest CUDA that the driver runs, from nvidia-smi's heading."""
    return _said(cuda=_group(r"CUDA Version:\s*(\d{1,4}\.\d{1,4})", smi))


def cudnn_package(dpkg: str | None) -> Fields:
    return _said(cudnn=_three(_newest(dpkg, r"libcudnn\d+(-cuda-\d+)?")))


def cudnn_header(text: str | None) -> Fields:
    numbers = [_group(rf"#define\s+CUDNN_{part}\s+(\d{{1,6}})", text) for part in ("MAJOR", "MINOR", "PATCHLEVEL")]
    return _said(cudnn=".".join(numbers) if all(numbers) else None)


def tensorrt_package(dpkg: str | None) -> Fields:
    return _said(tensorrt=_three(_newest(dpkg, r"libnvinfer\d+|libnvinfer-bin")))


def tensorrt_header(text: str | None) -> Fields:
    """NvInferVersion.h; from 10.13 on its numbers are TRT_..._ENTERPRISE."""
    parts = ("MAJOR", "MINOR", "PATCH")
    numbers = [_group(rf"#define\s+(?:NV_TENSORRT_{p}|TRT_{p}_ENTERPRISE)\s+(\d{{1,6}})", text) for p in parts]
    return _said(tensorrt=".".join(numbers) if all(numbers) else None)


def libraries(names: str | None) -> Fields:
    """From the names of shared libraries, of which one carries the whole version: libnvinfer.so.8.5.2."""
    return _said(
        tensorrt=_three(_group(r"/libnvinfer\.so\.(\d+\.\d+\.\d+)", names)),
        cudnn=_three(_group(r"/libcudnn\.so\.(\d+\.\d+\.\d+)", names)),
    )


def gpus(smi: str | None) -> Fields:
    """nvidia-smi's lines of `name, compute_cap, ...`; drivers before 510 refuse the question."""
    rows = [[cell.strip() for cell in line.split(",")] for line in (smi or "").splitlines()]
    rows = [row for row in rows if len(row) == 7 and row[0]]
    sm = next((row[1] for row in rows if re.fullmatch(r"\d{1,3}\.\d", row[1])), None)
    return _said(gpus=tuple(row[0] for row in rows) or None, sm=sm)


def gpu_names(smi: str | None) -> Fields:
    """What an old driver's nvidia-smi says of `name` alone; its failures are sentences."""
    lines = [line.strip() for line in (smi or "").splitlines() if "," not in line]
    bad = any(word in (smi or "").lower() for word in ("failed", "error", "not found", "no devices"))
    return _said(gpus=tuple(line for line in lines if line) if not bad and any(lines) else None)


def packages(dpkg: str | None) -> dict[str, str]:
    """{package: version} of dpkg-query's lines 'ii  NAME VERSION', of those that are installed."""
    return {name: version for name, version in re.findall(r"^ii\s+(\S+) (\S+)$", dpkg or "", re.MULTILINE)}


def _newest(dpkg: str | None, pattern: str) -> str | None:
    versions = [version for name, version in packages(dpkg).items() if re.fullmatch(pattern, name)]
    return max(versions, key=device_facts.version_tuple, default=None)


def _three(version: str | None) -> str | None:
    """'8.6.0.166-1+cuda11.4' -> '8.6.0'."""
    return _group(r"^(?:\d+:)?(\d{1,6}\.\d{1,6}\.\d{1,6})", version)


def _chip(text: str | None) -> str | None:
    number = _group(r"^\s*(\d{1,4})\s*$", text)
    return _CHIPS.get(int(number)) if number else None


def _first(text: str | None) -> str:
    return (text or "").split("\n")[0]


def _group(pattern: str, text: str | None) -> str | None:
    found = re.search(pattern, text or "", re.ASCII)
    return found.group(1) if found else None


def _said(**fields: Any) -> Fields:
    return {name: value for name, value in fields.items() if value is not None}
