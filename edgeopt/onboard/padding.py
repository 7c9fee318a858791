"""Sizes that are not known bucketed by padding: zeros behind the inputs, and the outputs cut back.

Only for axes on which the model was found, or is said, to give the same answer with zeros behind its inputs.
"""

MOST_WORK = 1.5  # a padded call has at most so many times the elements of the call itself


class Padding:
    """Called with arrays in the order of `inputs`; gives (larger arrays, {}, undo) or None, as AdaptiveModel takes it.

    `inputs`, `outputs`: the manifest's; `axes`: {axis: {min, max}}; `multiples`: {axis that may be padded: multiple};
    `ready`: [{axis: size}] of the sizes that have entries, which are preferred to the next multiple.
    """

    def __init__(self, inputs, outputs, axes, multiples, ready=()):
        self._inputs, self._outputs, self._axes = inputs, outputs, axes
        self._multiples, self._ready = multiples, [dict(sizes) for sizes in ready]

    def __call__(self, *arrays):
        sizes = sizes_of(arrays, self._inputs)
        target = self._target(sizes)
        if target is None:
            return None
        larger = tuple(_padded(array, spec["shape"], target) for array, spec in zip(arrays, self._inputs))
        return larger, {}, lambda outputs: self._cut(outputs, sizes, target)

    def _target(self, sizes):
        """The sizes to pad to; None where there are none within the limits, or the sizes are a bucket's already."""
        found = [ready for ready in self._ready if self._reaches(sizes, ready)]
        found = found or [{name: self._rounded(name, size) for name, size in sizes.items()}]
        best = min(found, key=lambda target: _work(target, sizes))
        return best if best != sizes and _work(best, sizes) <= MOST_WORK else None

    def _reaches(self, sizes, target):
        same = all(target[name] == size for name, size in sizes.items() if name not in self._multiples)
        larger = all(target[name] >= sizes[name] for name in self._multiples if name in sizes)
        return same and larger and _work(target, sizes) <= MOST_WORK

    def _rounded(self, name, size):
        multiple = self._multiples.get(name, 1)
        return min(-(-size // multiple) * multiple, self._axes[name]["max"])

    def _cut(self, outputs, sizes, target):
        return [_cut(array, spec["shape"], sizes, target) for array, spec in zip(outputs, self._outputs)]


def sizes_of(arrays, inputs):
    """{axis: size} of arrays that were checked against the manifest's inputs."""
    return {
        name: size
        for array, spec in zip(arrays, inputs)
        for name, size in zip(spec["shape"], array.shape)
        if not isinstance(name, int)
    }


def _work(target, sizes):
    out = 1.0
    for name, size in sizes.items():
        out *= target[name] / float(size)
    return out


def _padded(array, shape, target):
    import numpy

    wanted = tuple(size if isinstance(size, int) else target[size] for size in shape)
    if wanted == array.shape:
        return array
    out = numpy.zeros(wanted, array.dtype)
    out[tuple(slice(0, size) for size in array.shape)] = array
    return out


def _cut(array, shape, sizes, target):
    """The output without what the padding added; a copy, so that the padded one is not kept alive."""
    cut = [slice(0, sizes[name]) if name in sizes and sizes[name] != target[name] else slice(None) for name in shape]
    return array[tuple(cut)].copy() if any(part != slice(None) for part in cut) else array
