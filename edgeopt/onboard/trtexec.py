"""trtexec: where it is, which TensorRT it belongs to, and its command line for that version.

Options by version (samples/common/sampleOptions.cpp of each release): --workspace until 8.3, --memPoolSize from 8.4;
--buildOnly until 8.5, --skipInference from 8.6; --plugins until 8.5, --staticPlugins from 8.6; --stronglyTyped in 9
and 10, whose default is weak; 11 knows strong typing alone. A static model takes no shapes.
"""

import os
import re
import shutil
import subprocess

from . import device_facts
from .failures import Failure

USUAL = "/usr/src/tensorrt/bin/trtexec"
_BANNER = re.compile(r"\[TensorRT v(\d+)\]")
_SIMULATED = re.compile(r"^simulated: (.+)$", re.MULTILINE)

# newest ONNX opset that the parser reads: as spec/jetpack.py, which tests compare with
OPSETS = (((10,), 20), ((9,), 19), ((8, 4), 17), ((8,), 13))
_DLA_SMS = ("7.2", "8.7")
_DLA_BACK = (11, 4, 1)  # TensorRT 11.0 to 11.3 have no DLA; 11.4.1 has it again, strongly typed

# A build needs TensorRT's own libraries (cuBLAS +158 and cuDNN +241 MiB in a Nano's log, triton-inference-server
# issue 4087) and holds the weights as read, as parsed, as tried and as written. A rule of thumb, not a measurement.
_LIBRARIES_MB, _COPIES = 400, 4
_LEAST_WORKSPACE_MB = 16


class Trtexec:
    """A trtexec: `path`, `version` of its TensorRT ('8.5.2'), and what a stand-in says of itself, else None."""

    def __init__(self, path, version, simulated):
        self.path = path
        self.version = version
        self.simulated = simulated

    def at_least(self, *version):
        return device_facts.version_tuple(self.version) >= version


def find():
    """The device's trtexec. Failure of kind 'missing-runtime' where there is none or it does not run."""
    path = shutil.which("trtexec") or (USUAL if os.access(USUAL, os.X_OK) else None)
    if path is None:
        raise Failure(
            "missing-runtime", "the device has no trtexec on its PATH or in /usr/src/tensorrt/bin: install TensorRT"
            " (on a Jetson: sudo apt install tensorrt)",
        )  # fmt: skip
    try:
        done = subprocess.run(
            [path, "--help"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failure("missing-runtime", "%s does not run: %s" % (path, error)) from None
    said = done.stdout.decode("utf-8", "replace")
    version = parse_version(said)
    if version is None:
        last = (said.strip().splitlines() or ["nothing"])[-1]
        raise Failure("missing-runtime", "%s does not say its version; it said: %s" % (path, last[:300]))
    return Trtexec(path, version, parse_simulated(said))


def parse_version(text):
    """'&&&& RUNNING TensorRT.trtexec [TensorRT v8502] # ...' -> '8.5.2'."""
    found = _BANNER.search(text)
    return device_facts.version_of_number(int(found.group(1))) if found else None


def parse_simulated(text):
    """What follows 'simulated: ' on a line of its own, which only a stand-in prints; else None."""
    found = _SIMULATED.search(text)
    return found.group(1).strip() if found else None


def renumbered(calibration, version):
    """A calibration file's text with its first line for TensorRT `version`: 'TRT-8502-EntropyCalibration2'."""
    first, _, rest = calibration.partition("\n")
    number = device_facts.number_of_version(version)
    return "%s\n%s" % (re.sub(r"^TRT-\d+-", "TRT-%d-" % number, first), rest)


def opset_max(version):
    """The newest ONNX opset that TensorRT `version` reads."""
    return next((opset for least, opset in OPSETS if device_facts.version_tuple(version) >= least), 11)


def refusal(recipe, opset, facts):
    """Why this device cannot build the recipe, found before the build; None where it can."""
    version, sm = device_facts.version_tuple(facts["tensorrt"]), device_facts.version_tuple(facts["sm"])
    if not sm and not facts["simulated"]:
        return "the device has no NVIDIA GPU that its driver finds"
    if recipe["typing"] == "weak" and version >= (11,):
        return "TensorRT %s is strongly typed only: build the artifact for a target with it" % facts["tensorrt"]
    if recipe["typing"] == "strong" and version < (9, 1):
        return "TensorRT %s has no strong typing: build the artifact for a target with it" % facts["tensorrt"]
    if opset and opset > opset_max(facts["tensorrt"]):
        return "the file has opset %d and TensorRT %s reads up to %d" % (
            opset, facts["tensorrt"], opset_max(facts["tensorrt"]),
        )  # fmt: skip
    if sm and "int8" in recipe["flags"] and (sm < (6, 1) or sm == (6, 2)):
        return "the GPU (sm %s) has no int8 arithmetic" % facts["sm"]
    if "bf16" in recipe["flags"] and ((sm and sm < (8,)) or version < (9,)):
        return "bf16 needs a GPU of sm 8.0 and TensorRT 9.0, this is sm %s with %s" % (facts["sm"], facts["tensorrt"])
    return _refusal_of_dla(recipe, version, facts) if recipe.get("dla") else None


def _refusal_of_dla(recipe, version, facts):
    if facts["sm"] not in _DLA_SMS and not facts["simulated"]:
        return "the device has no DLA (sm %s)" % facts["sm"]
    if (11,) <= version < _DLA_BACK:
        return "TensorRT %s has no DLA: it comes back with 11.4.1" % facts["tensorrt"]
    if recipe.get("calibration") and version >= (11,):
        return "TensorRT %s takes no calibration file" % facts["tensorrt"]
    return None


def memory_refusal(onnx_bytes, available_mb, swap_mb):
    """Why the memory cannot suffice for a build, in words; None where it may (case D03: builds killed for memory)."""
    if available_mb is None:
        return None
    needed = _LIBRARIES_MB + _COPIES * onnx_bytes // (1 << 20)
    if available_mb + swap_mb >= needed:
        return None
    return (
        "not enough memory to build the engine: %d MiB and %d MiB of swap are free, about %d MiB are needed: stop "
        "other programs or the desktop, or add a swap file" % (available_mb, swap_mb, needed)
    )


def workspace_mb(onnx_bytes, free_mb):
    """MiB that tactics may use: half of what the build leaves free. None leaves it to TensorRT."""
    if free_mb is None:
        return None
    return max(_LEAST_WORKSPACE_MB, (free_mb - _LIBRARIES_MB - _COPIES * onnx_bytes // (1 << 20)) // 2)


def build_argv(tool, job, onnx, engine, timing_cache, workspace):
    """The command that builds job["recipe"] into the file `engine`; plugins and calibration are paths in `job`."""
    recipe = job["recipe"]
    argv = [tool.path, "--onnx=" + onnx, "--saveEngine=" + engine, "--timingCacheFile=" + timing_cache, "--verbose"]
    argv.append("--skipInference" if tool.at_least(8, 6) else "--buildOnly")
    if workspace is not None:
        argv.append(("--memPoolSize=workspace:%d" if tool.at_least(8, 4) else "--workspace=%d") % workspace)
    argv += shape_options(recipe["shapes"])
    argv += ["--" + flag for flag in recipe["flags"]]
    if recipe["typing"] == "strong" and not tool.at_least(11):
        argv.append("--stronglyTyped")
    if job["calibration"]:
        argv.append("--calib=" + job["calibration"])
    return argv + _dla(recipe) + (["--allowGPUFallback"] if recipe.get("dla") else []) + plugins(tool, job["plugins"])


def run_argv(tool, job, engine, shapes):
    """The command that loads `engine` and runs it at `shapes` (moving input -> sizes), without its counts."""
    argv = [tool.path, "--loadEngine=" + engine]
    if shapes:
        argv.append("--shapes=" + ",".join(_shape(name, sizes) for name, sizes in sorted(shapes.items())))
    return argv + _dla(job["recipe"]) + plugins(tool, job["plugins"])


def plugins(tool, paths):
    option = "--staticPlugins=" if tool.at_least(8, 6) else "--plugins="
    return [option + path for path in paths]


def shape_options(shapes):
    return [
        "--%sShapes=%s" % (which, ",".join(_shape(name, shapes[name][which]) for name in sorted(shapes)))
        for which in ("min", "opt", "max") if shapes
    ]  # fmt: skip


def quoted(name):
    """A tensor's name in a list of trtexec, which splits at ':' and ',' outside of single quotes."""
    return "'%s'" % name if re.search(r"[:,]", name) else name


def _dla(recipe):
    return ["--useDLACore=0"] if recipe.get("dla") else []


def _shape(name, sizes):
    return "%s:%s" % (quoted(name), "x".join(str(size) for size in sizes))
