"""The user's structure around the model's tensors: the manifest's `output_structure` and `input_structure`."""

from collections.abc import Mapping


def restore(node, tensors):
    """The structure `node` with `tensors` (in the order of the manifest's outputs) in their places.

    A dataclass comes back as a dict of its fields in order: its class lives in the user's code, not here.
    """
    kind = node["kind"]
    if kind == "tensor":
        return tensors[node["index"]]
    if kind == "none":
        return None
    if kind == "constant":
        return node["value"]
    if kind in ("dict", "dataclass"):
        return {key: restore(node["items"][key], tensors) for key in node["order"]}
    if kind in ("tuple", "list"):
        items = [restore(item, tensors) for item in node["items"]]
        return tuple(items) if kind == "tuple" else items
    raise ValueError("unknown kind of output structure: %r" % kind)


def flat_inputs(node, names, inputs):
    """{flat name: value} of `inputs`, given by flat names ('batch.ids'), nested as forward takes them, or both.

    `node` is the manifest's `input_structure`, None where every input is a parameter of its own; then `inputs` is
    the answer. A part that is lacking is left out, and one that the model does not have is there under its dotted
    name, so that the check of the names tells of both. ValueError for a part of another kind, for one that is given
    twice, and for a constant that is not the one the model was built with.
    """
    if node is None:
        return inputs
    if not isinstance(inputs, Mapping):
        raise ValueError("the inputs must be a dict by name, given: %s" % type(inputs).__name__)
    found = {}
    for key, value in inputs.items():
        if key in node["items"]:
            _collect(node["items"][key], value, key, names, found)
        else:
            _put(found, key, value)
    return found


def _collect(node, value, path, names, found):
    kind = node["kind"]
    if kind == "tensor":
        if value is not None:
            _put(found, names[node["index"]], value)
    elif kind in ("none", "constant"):
        built = node.get("value")
        if value is not built and not (isinstance(value, (bool, int, float, str)) and value == built):
            raise ValueError("input '%s' was %r when the model was built" % (path, built))
    else:
        parts = _items(value) if kind in ("tuple", "list") else _fields(node, value)
        if parts is None:
            raise ValueError("input '%s' must be %s, given: %s" % (path, _words(node), type(value).__name__))
        below = dict(enumerate(node["items"])) if kind in ("tuple", "list") else node["items"]
        for key, item in parts:
            if key in below:
                _collect(below[key], item, "%s.%s" % (path, key), names, found)
            else:
                _put(found, "%s.%s" % (path, key), item)


def _items(value):
    return list(enumerate(value)) if isinstance(value, (tuple, list)) else None


def _fields(node, value):
    """(field or key, value) of a dict, a named tuple or an object with attributes; None for anything else."""
    if isinstance(value, Mapping):
        return list(value.items())
    if node["kind"] == "dict":
        return None
    if node["kind"] == "namedtuple" and type(value) in (tuple, list):
        return list(zip(node["order"], value)) + [(i, v) for i, v in enumerate(value) if i >= len(node["order"])]
    names = getattr(value, "_fields", None) or list(getattr(value, "__dataclass_fields__", ()))
    return [(name, getattr(value, name)) for name in names] if names else None


def _put(found, name, value):
    if name in found:
        raise ValueError("input '%s' is given twice" % name)
    found[name] = value


def _words(node):
    if node["kind"] in ("tuple", "list"):
        return "a %s of %d" % (node["kind"], len(node["items"]))
    names = ", ".join(key for key in node["order"] if node["items"][key]["kind"] not in ("none", "constant"))
    return "a dict with %s" % names if node["kind"] == "dict" else "%s or a dict with %s" % (node["name"], names)
