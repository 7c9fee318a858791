"""`load(release)`: the chosen candidate of a release as a function of named numpy arrays."""

import os

from . import adaptors, tuning
from .failures import Failure, of_exception
from .inputs import check_inputs, numpy_dtype
from .release import read_json, read_manifest
from .serving import serve
from .structure import flat_inputs, restore

__all__ = ["Predictor", "check_inputs", "check_outputs", "load"]


def load(release, candidate=None, threads=None, check_finite=False):
    """Open a release (or an artifact's folder) and return a Predictor of one candidate.

    `candidate` names it; else `selection.json` does; else it is the first that the runner has an adaptor for.
    `threads` None: the settings that were measured to be best here, where selection.json has them.
    The fuser flags of a TorchScript candidate hold for the whole process until the predictor is closed.
    `check_finite`: refuse inputs that hold NaN or infinity; off, since it reads every element once more.
    Where the manifest has `adaptive`, its sizes are made ready here.
    Raises ValueError where the folder or the name is wrong, and Failure where the candidate cannot be loaded.
    """
    release = os.path.realpath(os.path.expanduser(str(release)))  # 'current' may be switched while we read
    manifest = read_manifest(release)
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
    try:
        serving = serve(program, manifest)
    except Exception as error:  # the candidate does not run at a size that its manifest declares
        program.close()
        raise of_exception(error, "run") from error
    return Predictor(program, chosen["name"], manifest, serving, check_finite)


class Predictor:
    """A loaded candidate; `close` gives the memory back.

    One thread at a time may call `predict`; where the manifest has `adaptive`, any number may.
    """

    def __init__(self, program, candidate, manifest, serving=None, check_finite=False):
        self.candidate = candidate
        self._serving, self._check_finite = serving, check_finite
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
        (bfloat16 inputs are given as float32). NaN and infinity are allowed, unless `check_finite` was given.
        """
        return restore(self._structure, self._call(inputs))

    def outputs(self, inputs):
        """As `predict`, but a dict of the model's named output tensors without the user's structure."""
        return {spec["name"]: array for spec, array in zip(self._outputs, self._call(inputs))}

    def _call(self, inputs):
        program, serving = self._program, self._serving
        if program is None:
            raise ValueError("this predictor is closed")
        flat = flat_inputs(self._input_structure, self._names, inputs)
        given = check_inputs(flat, self._inputs, self._axes, self._check_finite)
        arrays = program.call(given) if serving is None else serving(*given)
        check_outputs(arrays, self._outputs)
        return arrays

    def statistics(self):
        """Statistics of the sizes served so far (see adaptive.py); None where the manifest has no `adaptive`."""
        return None if self._serving is None else self._serving.statistics()

    def close(self):
        """Release the model and restore process-wide flags. May be called twice."""
        program, self._program = self._program, None
        if self._serving is not None:
            self._serving.close()
        if program is not None:
            program.close()

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.close()


def check_outputs(arrays, specs):
    """Failure where an output is not what the manifest records: an int64 that comes as int32, another rank or size."""
    for array, spec in zip(arrays, specs):
        if array.dtype.name != numpy_dtype(spec):
            raise Failure(
                "run", "output '%s' is %s, the manifest says %s" % (spec["name"], array.dtype.name, spec["dtype"])
            )
        wanted = spec["shape"]
        sizes = [want if isinstance(want, int) else size for size, want in zip(array.shape, wanted)]
        if len(wanted) != array.ndim or list(array.shape) != sizes:
            said = ", ".join(str(size) for size in wanted)
            raise Failure("run", "output '%s' has shape %s, the manifest says (%s)" % (spec["name"], array.shape, said))


def _choose(release, manifest, name):
    candidates = manifest["candidates"]
    selection = os.path.join(release, "selection.json")
    if name is None and os.path.isfile(selection):
        name = read_json(selection)["candidate"]
    if name is None:
        runnable = [c for c in candidates if c["runtime"] in adaptors.RUNTIMES]
        return (runnable or candidates)[0]
    for candidate in candidates:
        if candidate["name"] == name:
            return candidate
    known = ", ".join(c["name"] for c in candidates)
    raise ValueError("%s has no candidate %r; it has: %s" % (release, name, known))
