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


def open_program(folder, candidate, inputs, outputs, op_libraries, threads, fixed=None):
    """Open the session. Raises what onnxruntime raises, and Failure for what it can never run.

    `fixed`: {name of a dimension in the file: its size}, for a session of one size.
    """
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
    for name, size in (fixed or {}).items():
        options.add_free_dimension_override_by_name(name, size)
    if fixed:  # each session has threads of its own: those of one are not to spin while another works
        options.add_session_config_entry("session.force_spinning_stop", "1")
    providers, provider_records = _providers(onnxruntime, flags)
    session = onnxruntime.InferenceSession(
        os.path.join(folder, candidate["file"]), options, providers=providers,
        disabled_optimizers=list(flags.get("disabled_optimizers") or ()),
    )  # fmt: skip
    _check_names(session, inputs, outputs)
    again = (folder, candidate, inputs, outputs, op_libraries, threads)
    return Program(session, inputs, outputs, records + provider_records, again)


class Program:
    """A session that is called with arrays in the order of the manifest's inputs."""

    concurrent = True  # a session may run in several threads at once

    def __init__(self, session, inputs, outputs, records, again):
        self.records = records
        self._again, self._specs = again, inputs
        self.size_bytes = file_bytes(again[0], again[1]["file"])
        self._session = session
        self._inputs = [spec["name"] for spec in inputs]
        self._outputs = [spec["name"] for spec in outputs]

    def call(self, arrays):
        return self._session.run(self._outputs, dict(zip(self._inputs, arrays)))

    def at(self, sizes):
        """The same candidate for one size of every axis ({axis: size}), as a session of its own."""
        symbols = {value.name: value.shape for value in self._session.get_inputs()}
        fixed = {
            symbol: sizes[axis]
            for spec in self._specs
            for axis, symbol in zip(spec["shape"], symbols[spec["name"]])
            if not isinstance(axis, int) and not isinstance(symbol, int)
        }
        return open_program(*self._again, fixed=fixed)

    def close(self):
        self._session = None


def file_bytes(folder, file):
    """Bytes of a model file and of the external data beside it, whose names start with the file's."""
    whole = os.path.join(folder, file)
    beside = [name for name in os.listdir(os.path.dirname(whole)) if name.startswith(os.path.basename(file) + ".")]
    paths = [whole] + [os.path.join(os.path.dirname(whole), name) for name in beside]
    return sum(os.path.getsize(path) for path in paths)


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
