"""openvino: an ONNX file compiled for the CPU by OpenVINO.

Candidate flags: "intra_op_threads" (int or null), "performance_hint" ("latency" or "throughput"),
"inference_precision" ("f32", which is what it is without the flag too, "bf16" or "f16": left alone, OpenVINO computes
an fp32 file in bf16 where the CPU has AMX) and "streams" (int or null). `threads` of the request wins over the flag.
"""

import os

from .failures import Failure
from .fuser import record
from .ort import file_bytes

MODULE = "openvino"
PIP_NAMES = "openvino"

# flag -> (OpenVINO's property, the values it may have; None: a number)
_PROPERTIES = {
    "intra_op_threads": ("INFERENCE_NUM_THREADS", None),
    "performance_hint": ("PERFORMANCE_HINT", {"latency": "LATENCY", "throughput": "THROUGHPUT"}),
    "inference_precision": ("INFERENCE_PRECISION_HINT", {"f32": "f32", "bf16": "bf16", "f16": "f16"}),
    "streams": ("NUM_STREAMS", None),
}


def open_program(folder, candidate, inputs, outputs, op_libraries, threads, fixed=None):
    """Compile the file. Raises what OpenVINO raises, and Failure for what it can never run.

    `fixed`: {name of an input: its shape}, for a program of one size.
    """
    import openvino

    for spec in list(inputs) + list(outputs):
        if spec["dtype"] == "bfloat16":
            raise Failure(
                "load", "OpenVINO hands tensors over as numpy arrays, which have no bfloat16: " + spec["name"]
            )
    properties, records = _properties(candidate.get("flags") or {}, threads)
    core = openvino.Core()
    model = core.read_model(os.path.join(folder, candidate["file"]))
    if fixed:
        model.reshape(fixed)
    compiled = core.compile_model(model, "CPU", properties)
    _check_names(compiled, inputs, outputs)
    records = [_read_back(compiled, entry) for entry in records]
    if candidate.get("precision") == "bf16" and _precision_of(compiled) != "bf16":
        raise Failure("load", "OpenVINO computes in %s on this CPU, not in bf16" % _precision_of(compiled))
    return Program(compiled, inputs, outputs, records, (folder, candidate, inputs, outputs, op_libraries, threads))


class Program:
    """A compiled model that is called with arrays in the order of the manifest's inputs."""

    def __init__(self, compiled, inputs, outputs, records, again):
        self.records = records
        self._again = again
        self.size_bytes = file_bytes(again[0], again[1]["file"])
        self._request = compiled.create_infer_request()
        self._inputs = [spec["name"] for spec in inputs]
        self._outputs = [compiled.output(spec["name"]) for spec in outputs]

    def call(self, arrays):
        # the results are copies: the request's own tensors are written again by the next call
        found = self._request.infer(dict(zip(self._inputs, arrays)), share_inputs=True)
        return [found[port] for port in self._outputs]

    def at(self, sizes):
        """The same candidate for one size of every axis ({axis: size}), compiled for it."""
        shapes = {
            spec["name"]: [size if isinstance(size, int) else sizes[size] for size in spec["shape"]]
            for spec in self._again[2]
        }
        return open_program(*self._again, fixed=shapes)

    def close(self):
        self._request = self._outputs = None


def _properties(flags, threads):
    properties, records = {"INFERENCE_PRECISION_HINT": "f32"}, []
    for flag, value in flags.items():
        if flag not in _PROPERTIES:
            records.append(record(flag, value, "missing", "the runner does not know this flag"))
            continue
        key, values = _PROPERTIES[flag]
        if flag == "intra_op_threads" and threads and value and threads != value:
            records.append(record(flag, value, "refused", "the request asks for %d threads" % threads))
        elif value is None:  # leaves it to OpenVINO
            records.append(record(flag, value, "applied"))
        elif values is None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            records.append(record(flag, value, "refused", "not a number of 1 or more"))
        elif values is not None and value not in values:
            records.append(record(flag, value, "refused", "not one of: " + ", ".join(sorted(values))))
        else:
            properties[key] = value if values is None else values[value]
            records.append(record(flag, value, "applied"))
    if threads:
        properties["INFERENCE_NUM_THREADS"] = threads
    return properties, records


def _read_back(compiled, entry):
    """The record, refused where OpenVINO went on with another precision than the one that was asked for."""
    if entry["flag"] != "inference_precision" or entry["status"] != "applied" or entry["value"] is None:
        return entry
    now = _precision_of(compiled)
    if now == entry["value"]:
        return entry
    return record(entry["flag"], entry["value"], "refused", "OpenVINO computes in %s on this CPU" % now)


def _precision_of(compiled):
    return compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()


def _check_names(compiled, inputs, outputs):
    for what, ports, specs in (("input", compiled.inputs, inputs), ("output", compiled.outputs, outputs)):
        names = [name for port in ports for name in port.get_names()]
        missing = [spec["name"] for spec in specs if spec["name"] not in names]
        if missing or len(ports) != len(specs):
            wanted = [spec["name"] for spec in specs]
            raise Failure("load", "the model's %ss are %s and the manifest's are %s" % (what, sorted(names), wanted))
