"""What an engine depends on beside its file: GPU, SM, L4T, CUDA, TensorRT. Read from the device, parsed by functions.

Sources of the formats: rbonghi/jetson_stats and dusty-nv/jetson-containers (release files, device tree), cuda.h
(numbers of the driver's attributes), NvInferVersion.h (how a version becomes one number).
"""

import ctypes
import re
import subprocess

_COMPUTE_MAJOR, _COMPUTE_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR of cuda.h
_TREE = ("/sys/firmware/devicetree/base/", "/proc/device-tree/")
_DPKG_L4T = ["dpkg-query", "-W", "-f", "${Version}", "nvidia-l4t-core"]

# SoC -> compute capability: CUDA_TABLE of rbonghi/jetson_stats
SM_OF_SOC = {"tegra210": "5.3", "tegra186": "6.2", "tegra194": "7.2", "tegra234": "8.7", "tegra264": "11.0"}


def describe(tensorrt=None, simulated=None):
    """{"model", "gpu", "sm", "l4t", "cuda", "tensorrt", "simulated"}; None where the device has no such thing.

    `tensorrt` is the version of whoever builds or loads the engine, `simulated` what a stand-in says of itself.
    """
    soc = parse_soc(_read(["compatible"]))
    gpu = _gpu() or {}
    return {
        "model": parse_model(_read(["model"])),
        "gpu": gpu.get("gpu") or soc,
        "sm": gpu.get("sm") or SM_OF_SOC.get(soc),
        "l4t": parse_l4t(_first_line("/etc/nv_tegra_release")) or parse_l4t_package(_said(_DPKG_L4T)),
        "cuda": gpu.get("cuda"),
        "tensorrt": tensorrt,
        "simulated": simulated,
    }


def parse_l4t(line):
    """'# R35 (release), REVISION: 6.1, GCID: ...' -> '35.6.1'; None for anything else."""
    found = re.search(r"R(\d+).*?REVISION:\s*([\d.]+)", line or "")
    return "%s.%s" % found.groups() if found else None


def parse_l4t_package(version):
    """'35.6.1-20250304201132' -> '35.6.1'."""
    found = re.match(r"\d+(\.\d+)+", version or "")
    return found.group() if found else None


def parse_model(text):
    """The device tree's `model`, which ends with a NUL: 'NVIDIA Jetson AGX Orin Developer Kit'; None where empty."""
    return (text or "").replace("\0", " ").strip() or None


def parse_soc(text):
    """The SoC of the device tree's `compatible`, NUL-separated: 'tegra234'. A TX2's model says only 'quill'."""
    found = re.findall(r"tegra\d{3}(?!\w)", text or "")
    return found[-1] if found else None


def version_of_number(number):
    """TensorRT's version from its number: 8502 -> '8.5.2', 101602 -> '10.16.2' (from 10.0 on two digits a part)."""
    base = 10000 if number >= 100000 else 1000
    return "%d.%d.%d" % (number // base, number % base // 100, number % 100)


def number_of_version(version):
    """The reverse: '8.5.2' -> 8502, '10.16.2' -> 101602."""
    major, minor, patch = (version_tuple(version) + (0, 0))[:3]
    return major * (10000 if major >= 10 else 1000) + minor * 100 + patch


def version_of_cuda(number):
    """11040 -> '11.4' (cuDriverGetVersion)."""
    return "%d.%d" % (number // 1000, number % 1000 // 10)


def version_tuple(version):
    """'8.5.2' -> (8, 5, 2); () where no number leads."""
    found = re.match(r"\d+(?:\.\d+)*", version or "")
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def available_mb():
    """(MiB that a new process can have without swapping, MiB of free swap); a Jetson's GPU shares that memory."""
    return parse_meminfo(_whole("/proc/meminfo"))


def parse_meminfo(text):
    """(MemAvailable, SwapFree) of /proc/meminfo in MiB; (None, 0) where the kernel does not say."""
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB", text or "", re.MULTILINE))
    available = found.get("MemAvailable")
    return (int(available) // 1024 if available else None), int(found.get("SwapFree", 0)) // 1024


def gpu_free_mb():
    """Free memory of a GPU that has its own, by nvidia-smi; None on a Jetson, which shares the CPU's."""
    text = _said(["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"])
    found = re.match(r"\s*(\d+)\s*$", (text or "").split("\n")[0])
    return int(found.group(1)) if found else None


def _gpu():
    """GPU 0 by the CUDA driver, without making a context; None where there is no driver or no GPU."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, number = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return None
    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGetName(name, 256, device)
    capability = []
    for attribute in (_COMPUTE_MAJOR, _COMPUTE_MINOR):
        cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        capability.append(str(number.value))
    cuda.cuDriverGetVersion(ctypes.byref(number))
    return {
        "gpu": name.value.decode("utf-8", "replace"), "sm": ".".join(capability), "cuda": version_of_cuda(number.value),
    }  # fmt: skip


def _read(names):
    for folder in _TREE:
        for name in names:
            text = _whole(folder + name)
            if text:
                return text
    return None


def _whole(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            return f.read()
    except OSError:
        return None


def _first_line(path):
    return (_whole(path) or "").split("\n")[0]


def _said(argv):
    """What a command prints; None where it is not there or fails."""
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None
