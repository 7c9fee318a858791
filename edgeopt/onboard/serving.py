"""A loaded program served as its manifest's `adaptive` says: sizes made ready, others padded, built or left dynamic.

An adaptor whose program has `at(sizes) -> program` makes entries: the same candidate for one size of every axis.
"""

from .adaptive import AdaptiveModel
from .padding import Padding, sizes_of

TRIAL_CALLS = 5  # of an entry and the dynamic graph in turns; a wrong verdict on two that are close costs little


def serve(program, manifest):
    """An AdaptiveModel of the program's arrays, its declared sizes warm; None where the manifest declares nothing."""
    plan = manifest.get("adaptive")
    if plan is None:
        return None
    inputs, at = manifest["inputs"], getattr(program, "at", None)
    build = (lambda *arrays: _Entry(at(sizes_of(arrays, inputs)))) if at is not None else None
    pad = None
    if plan["pad"]:
        pad = Padding(inputs, manifest["outputs"], manifest.get("axes", {}), plan["pad"], plan["specialise"])
    model = AdaptiveModel(
        lambda *arrays: program.call(list(arrays)), build,
        entries=plan["entries"], size_bytes=plan["memory_mb"] << 20, build_after=plan["build_after"], pad=pad,
        trial_calls=TRIAL_CALLS, concurrent=getattr(program, "concurrent", False),
    )  # fmt: skip
    try:
        for sizes in plan["specialise"]:
            model.warm(*_zeros(inputs, sizes))
    except BaseException:
        model.close()
        raise
    return model


class _Entry:
    """A program of one size as AdaptiveModel calls it."""

    def __init__(self, program):
        self._program = program
        self.size_bytes = getattr(program, "size_bytes", 0)
        self.concurrent = getattr(program, "concurrent", False)

    def __call__(self, *arrays):
        return self._program.call(list(arrays))

    def close(self):
        self._program.close()


def _zeros(inputs, sizes):
    import numpy

    return [
        numpy.zeros(
            tuple(size if isinstance(size, int) else sizes[size] for size in spec["shape"]),
            "float32" if spec["dtype"] == "bfloat16" else spec["dtype"],
        )
        for spec in inputs
    ]
