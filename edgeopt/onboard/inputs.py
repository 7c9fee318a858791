"""The arrays of a call checked against the manifest's inputs, before the model sees them."""


def check_inputs(inputs, specs, axes, check_finite=False):
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
        array = _array(inputs[spec["name"]], spec["name"])
        _check_dtype(array, spec)
        _check_shape(array.shape, spec, axes, sizes)
        if check_finite and array.dtype.kind == "f":
            _check_finite(array, spec["name"])
        arrays.append(numpy.asarray(array, array.dtype.newbyteorder("="), order="C"))
    return arrays


def numpy_dtype(spec):
    """The name of the dtype that numpy hands the tensor over in: it has no bfloat16."""
    return "float32" if spec["dtype"] == "bfloat16" else spec["dtype"]


def _array(value, name):
    import numpy

    device = str(getattr(value, "device", "cpu"))
    if not device.startswith("cpu"):
        raise ValueError("input '%s' lies on the device %s, the CPU's arrays are taken: copy it first" % (name, device))
    try:
        return numpy.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # a ragged list; a tensor of torch that requires gradients
        said = str(error).split("\n")[0]
        raise ValueError("input '%s' is no array, but a %s: %s" % (name, type(value).__name__, said)) from None


def _check_dtype(array, spec):
    if array.dtype.name != numpy_dtype(spec):
        raise ValueError("input '%s' must be %s, given: %s" % (spec["name"], numpy_dtype(spec), array.dtype.name))


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
                raise ValueError("%s: axis %d must be %d%s" % (said, position, want, _layout(shape, wanted)))
            continue
        if want in axes and not axes[want]["min"] <= size <= axes[want]["max"]:
            raise ValueError("%s with %s from %d to %d" % (said, want, axes[want]["min"], axes[want]["max"]))
        if sizes.setdefault(want, size) != size:
            raise ValueError("%s: %s is %d in another input" % (said, want, sizes[want]))


def _layout(shape, wanted):
    """Words for an image whose channels lie on the other side than the model has them."""
    if len(wanted) == 4 and isinstance(wanted[1], int) and shape[3] == wanted[1]:
        return "; the channels seem to be last, and are wanted first: array.transpose(0, 3, 1, 2)"
    if len(wanted) == 4 and isinstance(wanted[3], int) and shape[1] == wanted[3]:
        return "; the channels seem to be first, and are wanted last: array.transpose(0, 2, 3, 1)"
    return ""


def _check_finite(array, name):
    import numpy

    wrong = array.size - int(numpy.count_nonzero(numpy.isfinite(array)))
    if wrong:
        raise ValueError("input '%s' holds NaN or infinity in %d of %d elements" % (name, wrong, array.size))
