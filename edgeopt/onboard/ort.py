"""onnxruntime: an ONNX file as a session.

Candidate flags: "intra_op_threads" (int or null), "graph_optimization" ("all", "extended", "basic", "off"),
"disabled_optimizers" (names of graph optimizers that must not run; one that this version does not have is no loss),
"allow_spinning" (whether idle threads keep looking for work) and "providers" (names in order of preference).
`threads` of the request wins over the flag.
"""

import os

from .failures import Failure
from .fuser import record

MODULE = "onnxruntime"
PIP_NAMES = "onnxruntime (onnxruntime-gpu for CUDA)"

_LEVELS = {
    "all": "ORT_ENABLE_ALL", "extended": "ORT_ENABLE_EXTENDED",
    "basic": "ORT_ENABLE_BASIC", "off": "ORT_DISABLE_ALL",
}  # fmt: skip
_KNOWN = ("intra_op_threads", "graph_optimization", "disabled_optimizers", "allow_spinning", "providers")


def open_program(folder, candidate, inputs, outputs, op_libraries, threads):
    """Open the session. Raises what onnxruntime raises, and Failure for what it can never run."""
    import onnxruntime

    for spec in list(inputs) + list(outputs):
        if spec["dtype"] == "bfloat16":
            raise Failure(
                "load",
                "onnxruntime hands tensors over as numpy arrays, which have no bfloat16: %s" % spec["name"],
            )
    flags = candidate.get("flags") or {}
    options, records = _options(onnxruntime, flags, threads)
    for library in op_libraries:
        path = os.path.join(folder, library)
        if is_ort_library(path):
            options.register_custom_ops_library(path)
    providers, provider_records = _providers(onnxruntime, flags)
    session = onnxruntime.InferenceSession(
        os.path.join(folder, candidate["file"]), options, providers=providers,
        disabled_optimizers=list(flags.get("disabled_optimizers") or ()),
    )  # fmt: skip
    _check_names(session, inputs, outputs)
    return Program(session, inputs, outputs, records + provider_records)


class Program:
    """A session that is called with arrays in the order of the manifest's inputs."""

    def __init__(self, session, inputs, outputs, records):
        self.records = records
        self._session = session
        self._inputs = [spec["name"] for spec in inputs]
        self._outputs = [spec["name"] for spec in outputs]

    def call(self, arrays):
        return self._session.run(self._outputs, dict(zip(self._inputs, arrays)))

    def close(self):
        self._session = None


def is_ort_library(path):
    """Whether the file is a custom-op library of onnxruntime: those export RegisterCustomOps."""
    if not path.endswith(".so"):
        return False
    with open(path, "rb") as f:
        return b"RegisterCustomOps" in f.read()


def _options(onnxruntime, flags, threads):
    options, records = onnxruntime.SessionOptions(), []
    options.log_severity_level = 3  # errors only: warnings about shapes are no news on the device
    count = threads or flags.get("intra_op_threads")
    if count:
        options.intra_op_num_threads = count
    for flag, value in flags.items():
        if flag not in _KNOWN:
            records.append(record(flag, value, "missing", "the runner does not know this flag"))
    if "intra_op_threads" in flags:
        given = flags["intra_op_threads"]  # null leaves the number open, so that nothing is overruled
        overruled = bool(threads and given and threads != given)
        message = "the request asks for %d threads" % threads if overruled else ""
        records.append(record("intra_op_threads", given, "refused" if overruled else "applied", message))
    if "graph_optimization" in flags:
        level = flags["graph_optimization"]
        if level not in _LEVELS:
            records.append(record("graph_optimization", level, "refused", "not one of: " + ", ".join(sorted(_LEVELS))))
        else:
            options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, _LEVELS[level])
            records.append(record("graph_optimization", level, "applied"))
    if "allow_spinning" in flags:
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if flags["allow_spinning"] else "0")
        records.append(record("allow_spinning", flags["allow_spinning"], "applied"))
    if flags.get("disabled_optimizers"):
        records.append(record("disabled_optimizers", flags["disabled_optimizers"], "applied"))
    return options, records


def _providers(onnxruntime, flags):
    """The providers to use, and a record where "providers" was given; 'missing' names what is not there."""
    available = onnxruntime.get_available_providers()
    wanted = flags.get("providers")
    if not wanted:
        return ["CPUExecutionProvider"], []
    used = [name for name in wanted if name in available] or ["CPUExecutionProvider"]
    lacking = [name for name in wanted if name not in available]
    if not lacking:
        return used, [record("providers", wanted, "applied")]
    message = "this onnxruntime lacks %s and runs on %s" % (", ".join(lacking), ", ".join(used))
    return used, [record("providers", wanted, "missing", message)]


def _check_names(session, inputs, outputs):
    for what, there, specs in (
        ("input", session.get_inputs(), inputs),
        ("output", session.get_outputs(), outputs),
    ):
        names = [value.name for value in there]
        wanted = [spec["name"] for spec in specs]
        if sorted(names) != sorted(wanted):
            raise Failure("load", "the model's %ss are %s and the manifest's are %s" % (what, names, wanted))
