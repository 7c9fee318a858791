"""Doctor's checks of what runs on the device: architecture, JetPack, Python, runtimes, TensorRT, opset, GPU."""

from __future__ import annotations

from edgeopt.device.doctor_case import MODULE_OF, Case, Said, fail, ok, skip, warn
from edgeopt.spec import jetpack
from edgeopt.spec.jetpack import version_tuple
from edgeopt.spec.profile_values import VNNI_FLAGS

OLDEST_PYTHON = (3, 6)
ILLEGAL_INSTRUCTION = 128 + 4
_ARMV8 = "echo OPENBLAS_CORETYPE=ARMV8 | sudo tee -a /etc/environment"
# onnxruntime -> newest opset: table of onnxruntime's docs/Versioning.md (H)
_ONNXRUNTIME_OPSETS = (
    ((1, 22), 23), ((1, 21), 22), ((1, 18), 21), ((1, 17), 20), ((1, 15), 19), ((1, 14), 18), ((1, 12), 17),
    ((1, 11), 16), ((1, 9), 15), ((1, 8), 14), ((1, 7), 13),
)  # fmt: skip
# Python -> the last onnxruntime with a wheel for it (classifiers on PyPI) (M)
_LAST_ONNXRUNTIME = {(3, 6): "1.10.0", (3, 7): "1.14.1", (3, 8): "1.19.2", (3, 9): "1.19.2"}


def architecture(case: Case) -> Said:
    there = case.facts.arch
    if case.profile is None or there is None:
        return skip("no profile is named" if case.profile is None else "the device does not say its architecture")
    wanted = case.profile.target.arch
    if there == wanted:
        return ok(f"{there}, as the profile")
    own = "arm64-cpu" if there == "aarch64" else "x86-cpu"
    return fail(
        f"the device is {there}, and profile {case.profile.name} is for {wanted}", f"edgeopt build --profile {own}"
    )


def module(case: Case) -> Said:
    if case.profile is None or case.profile.target.module is None:
        return skip("the profile is not of a Jetson module")
    wanted, target = case.profile.target.module, case.profile.target
    there, sm = case.facts.module, case.facts.sm
    if there == wanted:
        return ok(f"a {there}, as the profile")
    if there is None and sm is None:
        return skip("the device does not say which module it is")
    own = f"edgeopt build --profile {there}" if there else "edgeopt profiles list"
    if sm is not None and sm != target.sm:
        return fail(
            f"the device is {there or case.facts.model or 'another module'} with sm_{sm.replace('.', '')}, and the "
            f"profile is for {wanted} with sm_{(target.sm or '').replace('.', '')}",
            own,
        )
    return warn(f"the device is {there or case.facts.model or 'not known'}, and the profile is for {wanted}", own)


def release(case: Case) -> Said:
    """The JetPack line of the device against the profile's."""
    if not case.facts.l4t:
        return skip("the device has no L4T" if not case.jetson else "the device does not say its L4T")
    found = _row(case)
    if found is None:
        return warn(
            f"L4T {case.facts.l4t} is in no table of edgeopt: versions are taken from the device alone",
            f"edgeopt detect{f' {case.host}' if case.host else ''} --write profile.yaml",
        )
    row, known = found
    about = f"L4T {case.facts.l4t}, JetPack {row.jetpack}" + ("" if known else " or close to it")
    wanted = case.profile.jetpack if case.profile else None
    if wanted is None or wanted == row.jetpack:
        return ok(about)
    name = case.profile.name.partition("@")[0]
    return warn(f"{about}, and the profile is for JetPack {wanted}", f"edgeopt build --profile {name}@{row.jetpack}")


def python(case: Case) -> Said:
    version = case.facts.python
    if version is None:
        return fail(
            f"'{case.python}' does not run on the device: nothing can be validated or prepared there",
            case.on_device("sudo apt install -y python3") + "  # or name another with --python",
        )
    if version_tuple(version)[:2] < OLDEST_PYTHON:
        return fail(
            f"Python {version} is older than 3.6, which the runner needs",
            case.on_device("ls /usr/bin/python3* /usr/local/bin/python3*") + "  # and name one with --python",
        )
    row = _row(case)
    if row and _torch_wanted(case) and version_tuple(row[0].python) != version_tuple(version)[:2]:
        return warn(
            f"Python {version}: torch's wheels for JetPack {row[0].jetpack} are made for Python {row[0].python}",
            f"add --python /usr/bin/python{row[0].python}",
        )
    return ok(f"Python {version}")


def runtimes(case: Case) -> Said:
    """Which of the backends have their runtime there."""
    if not case.needs.backends:
        return skip("neither profile nor artifact is named")
    missing = [name for name in case.needs.backends if not _runs(case, name)]
    there = [name for name in case.needs.backends if name not in missing]
    if not missing:
        return ok("there: " + ", ".join(_with_version(case, name) for name in there))
    mend = "; ".join(dict.fromkeys(_install(case, name) for name in missing))
    if there:
        return warn(f"no runtime for {', '.join(missing)}: left is {', '.join(there)}", mend)
    return fail(f"no runtime is there: {', '.join(missing)} cannot be run", mend)


def torch(case: Case) -> Said:
    version = case.facts.packages.get("torch")
    if not _torch_wanted(case):
        return skip("nothing of it needs torch")
    if version is None:
        return skip("torch is not installed there")
    found, row = version_tuple(version)[:2], _row(case)
    low, high = _torch_range(case)
    if low and found < version_tuple(low)[:2] or high and found > version_tuple(high)[:2]:
        whose = f"JetPack {row[0].jetpack}" if row else f"profile {case.profile.name}"
        range_ = f"{low or 'the oldest'} to {high or 'the newest'}"
        return warn(f"torch {version} is outside of what {whose} has: {range_}", _install(case, "torchscript"))
    return ok(f"torch {version}")


def torch_cuda(case: Case) -> Said:
    """Whether that torch can use the GPU of the device."""
    facts = case.facts
    if "torch" not in facts.packages or not _gpu_wanted(case) or not _torch_wanted(case):
        return skip("no torch, or no GPU to use")
    if facts.torch_cuda is None:
        return warn(
            f"torch {facts.packages['torch']} does not say that it was built for CUDA: it may run on the CPU",
            case.on_device(f"{case.python} -c 'import torch; print(torch.version.cuda)'") + "; "
            + _install(case, "torchscript"),
        )  # fmt: skip
    built = version_tuple(facts.torch_cuda)
    if version_tuple(facts.sm or "0") >= (11,) and built < (13,):
        return fail(
            f"torch is built for CUDA {facts.torch_cuda}, which has no kernels for sm_{facts.sm.replace('.', '')}",
            _install(case, "torchscript"),
        )
    if facts.cuda and built[:1] != version_tuple(facts.cuda)[:1]:
        return fail(
            f"torch is built for CUDA {facts.torch_cuda}, and the device has {facts.cuda}",
            _install(case, "torchscript"),
        )
    return ok(f"torch is built for CUDA {facts.torch_cuda}")


def tensorrt(case: Case) -> Said:
    if "tensorrt" not in case.needs.backends:
        return skip("TensorRT is not among the backends")
    there, wanted = case.facts.tensorrt, case.profile.target.tensorrt if case.profile else None
    if there is None:
        return _lacking(case, "TensorRT is not installed on the device", _install(case, "tensorrt"))
    found = version_tuple(there)
    if wanted is None or found[:2] == version_tuple(wanted)[:2]:
        return ok(f"TensorRT {there}")
    name = case.profile.name.partition("@")[0]
    mend = f"edgeopt build --profile {name} --set profile.target.tensorrt={'.'.join(map(str, (*found, 0, 0)[:3]))}"
    if (found >= (11,)) != (version_tuple(wanted) >= (11,)) or (found >= (8,)) != (version_tuple(wanted) >= (8,)):
        return fail(f"TensorRT {there} takes precision in another way than {wanted}, which the profile is for", mend)
    return warn(f"TensorRT {there}, and the profile is for {wanted}", mend)


def opset(case: Case) -> Said:
    """What is written against what the device's parsers read."""
    written = case.needs.onnx_opset
    if written is None:
        return skip("no ONNX file is written")
    readers = {}
    if "tensorrt" in case.needs.backends and case.facts.tensorrt:
        readers[f"TensorRT {case.facts.tensorrt}"] = jetpack.opset_max(case.facts.tensorrt)
    runtime = case.facts.packages.get("onnxruntime")
    newest = onnxruntime_opset(runtime) if runtime and "onnxruntime" in case.needs.backends else None
    if newest:
        readers[f"onnxruntime {runtime}"] = newest
    if not readers:
        return skip("no reader of ONNX whose version is known is there")
    most = min(readers.values())
    if written <= most:
        return ok(f"opset {written}; " + ", ".join(f"{name} reads up to {most}" for name, most in readers.items()))
    who = ", ".join(f"{name} up to {reads}" for name, reads in readers.items() if reads < written)
    up_to = "" if case.needs.exact else "up to "
    profile = case.profile.name if case.profile else "NAME"
    return fail(
        f"ONNX of opset {up_to}{written} is written, and the device reads {who}",
        f"edgeopt build --profile {profile} --set profile.target.onnx_opset_max={most}",
    )


def onnxruntime_opset(version: str) -> int | None:
    """The newest ONNX opset that this onnxruntime reads; None where its version is not known."""
    found = version_tuple(version)
    return next((opset for least, opset in _ONNXRUNTIME_OPSETS if found >= least), None)


def trtexec(case: Case) -> Said:
    if "tensorrt" not in case.needs.backends:
        return skip("no engine is to be built")
    path = case.probe.trtexec or case.facts.commands.get("trtexec")
    if path:
        return ok(f"trtexec is {path}")
    what = "there is no trtexec, which builds the engines"
    return _lacking(case, what, case.on_device("sudo apt install -y libnvinfer-bin"))


def gpu(case: Case) -> Said:
    if not _gpu_wanted(case):
        return skip("the profile uses no GPU")
    probe, user = case.probe, case.facts.user or "$USER"
    if probe.gpu_node is False:
        return fail(
            f"user {user} may not open the GPU: not in group video",
            case.on_device(f"sudo usermod -aG video,render {user}") + "  # and log in again",
        )
    if "libcuda" not in probe.libraries and not case.facts.cuda:
        mend = "sudo apt install -y nvidia-jetpack" if case.jetson else "sudo apt install -y nvidia-driver"
        return fail("the device has no CUDA driver library", case.on_device(mend))
    return ok("the GPU can be opened: " + (", ".join(case.facts.gpus) or f"CUDA {case.facts.cuda or 'there'}"))


def numpy(case: Case) -> Said:
    version, status = case.facts.packages.get("numpy"), case.probe.numpy_status
    mend = case.on_device(_ARMV8) + "  # and log in again"
    if status == ILLEGAL_INSTRUCTION:
        return fail(f"numpy {version or ''} dies of an illegal instruction, and torch with it".replace("  ", " "), mend)
    if version is None:
        return skip("numpy is not installed there; the runner needs none")
    if status == 0:
        return ok(f"numpy {version}")
    if status is None:
        if (case.facts.l4t or "").startswith("32.") and version_tuple(version) >= (1, 19, 5):
            return warn(f"numpy {version} dies of an illegal instruction on JetPack 4", mend)
        return skip("not tried")
    return warn(
        f"numpy {version} cannot be imported (status {status})",
        case.on_device(f"{case.python} -m pip install --force-reinstall numpy"),
    )


def cpu(case: Case) -> Said:
    """Instructions that the build counts on."""
    flags = set(case.facts.cpu_flags)
    if case.profile is None or not flags:
        return skip("no profile is named" if case.profile is None else "the device does not name its instructions")
    name = case.profile.name
    lacking = [flag for flag in case.profile.target.cpu_features if flag not in flags]
    if lacking:
        return fail(
            f"the CPU lacks {', '.join(lacking)}, which the profile counts on",
            f"edgeopt build --profile {name} --set 'profile.target.cpu_features=[]'",
        )
    if case.profile.target.vnni and case.facts.arch == "x86_64" and not flags & VNNI_FLAGS:
        return fail(
            "the CPU has no VNNI: int8 weights of 8 bits saturate there",
            f"edgeopt build --profile {name} --set profile.target.vnni=false",
        )
    return ok("the CPU has the instructions of the profile")


def _lacking(case: Case, what: str, mend: str) -> Said:
    """What keeps TensorRT from running: a failure where nothing else is left to run."""
    others = [name for name in case.needs.backends if name != "tensorrt" and _runs(case, name)]
    return warn(f"{what}: left is {', '.join(others)}", mend) if others else fail(what, mend)


def _row(case: Case) -> tuple[jetpack.Release, bool] | None:
    of = jetpack.module(case.facts.module) if case.facts.module else None
    return jetpack.release_for_l4t(case.facts.l4t, of) if case.facts.l4t else None


def _torch_wanted(case: Case) -> bool:
    return bool({"torchscript", "aoti"} & set(case.needs.backends))


def _gpu_wanted(case: Case) -> bool:
    if case.profile is None:
        return case.jetson
    return case.profile.target.sm is not None


def _torch_range(case: Case) -> tuple[str | None, str | None]:
    """The device's own JetPack decides; the profile's range where the device has none."""
    row = _row(case)
    if row:
        return row[0].torch_min, row[0].torch_max
    range_ = case.profile.target.torch if case.profile else None
    return (range_.min, range_.max) if range_ else (None, None)


def _runs(case: Case, backend: str) -> bool:
    if backend == "tensorrt":
        return bool(case.facts.tensorrt or case.facts.packages.get("tensorrt"))
    return MODULE_OF.get(backend, backend) in case.facts.packages


def _with_version(case: Case, backend: str) -> str:
    name = MODULE_OF.get(backend, backend)
    version = case.facts.packages.get(name) or (case.facts.tensorrt if name == "tensorrt" else None)
    return f"{backend} ({name} {version})" if name != backend else f"{name} {version}"


def _install(case: Case, backend: str) -> str:
    """The command that installs what `backend` runs by, for the device's Python and JetPack."""
    name, row = MODULE_OF.get(backend, backend), _row(case)
    if name == "tensorrt":
        package = "tensorrt" if case.jetson else "libnvinfer-bin"
        return case.on_device(f"sudo apt install -y {package}")
    if name == "torch" and row:
        low, high = _torch_range(case)
        wheel = f"torch-{low}..{high}-cp{row[0].python.replace('.', '')}-linux_aarch64.whl"
        return (
            case.on_device(f"{case.python} -m pip install {wheel}") + f"  # NVIDIA's wheel for JetPack {row[0].jetpack}"
        )
    if name == "torch" and case.profile and case.profile.target.torch:
        return case.on_device(f"{case.python} -m pip install '{_range_of_pip(*_torch_range(case))}'")
    pinned = _LAST_ONNXRUNTIME.get(version_tuple(case.facts.python or "")[:2]) if name == "onnxruntime" else None
    return case.on_device(f"{case.python} -m pip install {name}" + (f"=={pinned}" if pinned else ""))


def _range_of_pip(low: str | None, high: str | None) -> str:
    """('1.11', '2.1') -> 'torch>=1.11,<=2.1.99': every patch release of the newest."""
    bounds = [f">={low}"] if low else []
    return "torch" + ",".join(bounds + ([f"<={high}.99"] if high else []))
