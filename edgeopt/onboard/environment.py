"""Facts of this machine for the report, read without importing any runtime: torch takes seconds."""

import glob
import os
import platform
import re
from importlib import machinery

# runtime -> the module that it is imported by
RUNTIMES = {
    "onnxruntime": "onnxruntime", "openvino": "openvino", "torch": "torch", "tensorrt": "tensorrt", "numpy": "numpy",
}  # fmt: skip


def describe():
    """Python, machine, CPU, memory, and the version of each runtime (None where it is not installed)."""
    cpu = _cpu_info()
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.platform(),
        "cpu_model": cpu.get("model name") or cpu.get("Hardware") or cpu.get("Processor"),
        "cpu_flags": sorted((cpu.get("flags") or cpu.get("Features") or "").split()),
        "cpu_count": os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "runtimes": {name: version(module) for name, module in sorted(RUNTIMES.items())},
    }


def version(module):
    """The installed version of `module`: 'unknown' where it does not say, None where it is not there."""
    # PathFinder and not importlib.util.find_spec: that one raises for half-removed packages
    spec = machinery.PathFinder.find_spec(module)
    if spec is None or not spec.origin:
        return None
    site = os.path.dirname(os.path.dirname(spec.origin))
    for name in (module, module + "_gpu", module + "-gpu"):  # onnxruntime's GPU build is another distribution
        for folder in sorted(glob.glob(os.path.join(glob.escape(site), name + "-*.dist-info"))):
            found = _metadata_version(os.path.join(folder, "METADATA"))
            if found:
                return found
    return "unknown"


def torch_cuda():
    """The CUDA that this Python's torch was built for, as in '12.6', from torch/version.py; None where it has none."""
    spec = machinery.PathFinder.find_spec("torch")
    if spec is None or not spec.origin:
        return None
    try:
        with open(os.path.join(os.path.dirname(spec.origin), "version.py"), encoding="utf-8", errors="replace") as f:
            found = re.search(r"""^cuda\b[^=\n]*=\s*['"]([0-9.]+)['"]""", f.read(), re.MULTILINE)
    except OSError:
        return None
    return found.group(1) if found else None


def _metadata_version(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            for line in f:
                if line.startswith("Version:"):
                    return line.split(":", 1)[1].strip()
                if not line.strip():  # the description follows
                    return None
    except OSError:
        return None
    return None


def _cpu_info():
    """The first processor's lines of /proc/cpuinfo, and those that ARM kernels put after the processors."""
    facts = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
            for line in f:
                key, colon, value = line.partition(":")
                if colon:
                    facts.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    return facts


def _memory_bytes():
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
