"""`load(release)`: the chosen candidate of a release as a function of named numpy arrays."""

import json
import os

from . import adaptors, tuning
from .failures import Failure, of_exception
from .structure import flat_inputs, restore


def load(release, candidate=None, threads=None):
    """Open a release (or an artifact's folder) and return a Predictor of one candidate.

    `candidate` names it; else `selection.json` does; else it is the first that the runner has an adaptor for.
    `threads` None: the settings that were measured to be best here, where selection.json has them.
    The fuser flags of a TorchScript candidate hold for the whole process until the predictor is closed.
    Raises ValueError where the folder or the name is wrong, and Failure where the candidate cannot be loaded.
    """
    release = os.path.realpath(os.path.expanduser(str(release)))  # 'current' may be switched while we read
    manifest = _read_json(os.path.join(release, "manifest.json"))
    chosen = _choose(release, manifest, candidate)
    chosen, threads = tuning.chosen_for(release, chosen, threads)
    adaptor = adaptors.find(chosen)
    try:
        program = adaptor.open_program(
            release,
            chosen,
            manifest["inputs"],
            manifest["outputs"],
            manifest.get("op_libraries", []),
            threads,
        )
    except Exception as error:
        raise of_exception(error, "load") from error
    return Predictor(program, chosen["name"], manifest)


class Predictor:
    """A loaded candidate. One thread at a time may call `predict`; `close` gives the memory back."""

    def __init__(self, program, candidate, manifest):
        self.candidate = candidate
        self.flags = program.records  # [{"flag", "value", "status", "message"}]
        self._program = program
        self._inputs = manifest["inputs"]
        self._names = [spec["name"] for spec in self._inputs]
        self._outputs = manifest["outputs"]
        self._axes = manifest.get("axes", {})
        self._structure = manifest["output_structure"]
        self._input_structure = manifest.get("input_structure")

    def predict(self, inputs):
        """Run the model on {input name: array}; returns the user's output structure, filled with arrays.

        A parameter with parts is given as the model's forward takes it ({"pair": (a, b)}) or by its parts
        ({"pair.0": a, "pair.1": b}). Names, dtypes and sizes must be those of the manifest, else ValueError
        (bfloat16 inputs are given as float32). NaN and infinity are allowed.
        """
        return restore(self._structure, self._call(inputs))

    def outputs(self, inputs):
        """As `predict`, but a dict of the model's named output tensors without the user's structure."""
        return {spec["name"]: array for spec, array in zip(self._outputs, self._call(inputs))}

    def _call(self, inputs):
        if self._program is None:
            raise ValueError("this predictor is closed")
        flat = flat_inputs(self._input_structure, self._names, inputs)
        arrays = self._program.call(check_inputs(flat, self._inputs, self._axes))
        check_outputs(arrays, self._outputs)
        return arrays

    def close(self):
        """Release the model and restore process-wide flags. May be called twice."""
        program, self._program = self._program, None
        if program is not None:
            program.close()

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.close()


def check_inputs(inputs, specs, axes):
    """The arrays in the order of `specs`, contiguous, in native byte order. ValueError says what is wrong."""
    import numpy

    names = [spec["name"] for spec in specs]
    unknown = sorted(str(name) for name in inputs if name not in names)
    missing = [name for name in names if name not in inputs]
    if unknown or missing:
        parts = ["missing: " + ", ".join(missing)] if missing else []
        parts += ["unknown: " + ", ".join(unknown)] if unknown else []
        raise ValueError("wrong inputs (%s); the model takes: %s" % ("; ".join(parts), ", ".join(names)))
    sizes, arrays = {}, []
    for spec in specs:
        array = numpy.asarray(inputs[spec["name"]])
        _check_dtype(array, spec)
        _check_shape(array.shape, spec, axes, sizes)
        arrays.append(numpy.asarray(array, array.dtype.newbyteorder("="), order="C"))
    return arrays


def check_outputs(arrays, specs):
    """Failure where an output is not what the manifest records: an int64 that comes as int32, another rank or size."""
    for array, spec in zip(arrays, specs):
        if array.dtype.name != _numpy_dtype(spec):
            raise Failure(
                "run", "output '%s' is %s, the manifest says %s" % (spec["name"], array.dtype.name, spec["dtype"])
            )
        wanted = spec["shape"]
        sizes = [want if isinstance(want, int) else size for size, want in zip(array.shape, wanted)]
        if len(wanted) != array.ndim or list(array.shape) != sizes:
            said = ", ".join(str(size) for size in wanted)
            raise Failure("run", "output '%s' has shape %s, the manifest says (%s)" % (spec["name"], array.shape, said))


def _check_dtype(array, spec):
    if array.dtype.name != _numpy_dtype(spec):
        raise ValueError("input '%s' must be %s, given: %s" % (spec["name"], _numpy_dtype(spec), array.dtype.name))


def _check_shape(shape, spec, axes, sizes):
    """Check one shape; `sizes` collects the size of each named axis, which is one for all inputs."""
    wanted = spec["shape"]
    said = "input '%s' has shape %s, the model takes (%s)" % (
        spec["name"], tuple(shape), ", ".join(str(size) for size in wanted),
    )  # fmt: skip
    if len(shape) != len(wanted):
        raise ValueError(said)
    for position, (size, want) in enumerate(zip(shape, wanted)):
        if isinstance(want, int):
            if size != want:
                raise ValueError("%s: axis %d must be %d" % (said, position, want))
            continue
        if want in axes and not axes[want]["min"] <= size <= axes[want]["max"]:
            raise ValueError("%s with %s from %d to %d" % (said, want, axes[want]["min"], axes[want]["max"]))
        if sizes.setdefault(want, size) != size:
            raise ValueError("%s: %s is %d in another input" % (said, want, sizes[want]))


def _numpy_dtype(spec):
    return "float32" if spec["dtype"] == "bfloat16" else spec["dtype"]


def _choose(release, manifest, name):
    candidates = manifest["candidates"]
    selection = os.path.join(release, "selection.json")
    if name is None and os.path.isfile(selection):
        name = _read_json(selection)["candidate"]
    if name is None:
        runnable = [c for c in candidates if c["runtime"] in adaptors.RUNTIMES]
        return (runnable or candidates)[0]
    for candidate in candidates:
        if candidate["name"] == name:
            return candidate
    known = ", ".join(c["name"] for c in candidates)
    raise ValueError("%s has no candidate %r; it has: %s" % (release, name, known))


def _read_json(path):
    try:
        with open(path, encoding="utf-8") as f:
            return json.load(f)
    except OSError as error:
        raise ValueError("not a release: %s: %s" % (path, error.strerror)) from None
    except ValueError as error:
        raise ValueError("%s is not JSON: %s" % (path, error)) from None
