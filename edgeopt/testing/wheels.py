"""Old runtimes for the virtual device: aarch64 wheels from PyPI, unpacked into a layer that is laid over its root.

JetPack 5 has torch 2.1 for Python 3.8; of Debian's Pythons 3.9 is the nearest, and PyPI has 2.1.2 for it.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path

from edgeopt.digest import of_value
from edgeopt.testing.arm64_root import cached, run

# Dependencies are named here: pip would choose them for the machine that it runs on.
ONNXRUNTIME = ("onnxruntime==1.16.3", "numpy==1.26.4", "flatbuffers==23.5.26", "protobuf==4.25.3", "packaging==24.0")
TORCH = (
    "torch==2.1.2", "numpy==1.26.4", "typing_extensions==4.9.0", "filelock==3.13.1", "sympy==1.12", "mpmath==1.3.0",
    "networkx==3.2.1", "jinja2==3.1.4", "MarkupSafe==2.1.5", "fsspec==2024.3.1",
)  # fmt: skip
SITE = "usr/local/lib/python3.9/dist-packages"  # on the path of Debian's Python
_PLATFORMS = ("manylinux2014_aarch64", "manylinux_2_17_aarch64")


def layer(cache: Path, *requirements: str, python: str = "39") -> Path:
    """A cached folder with the packages where the device's Python finds them; for `layers` of virtual_device."""
    wanted = sorted(set(requirements))
    key = of_value({"requirements": wanted, "python": python, "site": SITE})
    return cached(cache / "wheels" / key[:16], lambda folder: _fill(folder, wanted, python))


def _fill(folder: Path, requirements: list[str], python: str) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as downloads:
        argv = [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
            "--only-binary=:all:", "--implementation", "cp", "--python-version", python, "--dest", downloads,
            *(f"--platform={name}" for name in _PLATFORMS), *requirements,
        ]  # fmt: skip
        run(argv, "the layer of old runtimes", todo="see that the package index can be reached")
        for wheel in sorted(Path(downloads).glob("*.whl")):
            with zipfile.ZipFile(wheel) as file:
                file.extractall(folder / SITE)
