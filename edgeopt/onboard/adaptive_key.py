"""What an entry of an AdaptiveModel is made for: shape, dtype and device of each array of a call, and its constants."""

from collections import namedtuple
from collections.abc import Mapping

Leaf = namedtuple("Leaf", "path shape dtype device")  # of an array, `path` such as 'image' or '0.ids'
Constant = namedtuple("Constant", "path value")  # of anything else, which a traced entry has taken in

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def key_of(args, kwargs):
    """The arrays and constants of a call in depth-first order: numpy arrays, tensors of torch, or what looks alike.

    Keys of dicts count by name and not by order. TypeError names a part that is neither an array nor a plain value.
    """
    found = []
    for position, value in enumerate(args):
        _collect(str(position), value, found)
    for name in sorted(kwargs):
        _collect(name, kwargs[name], found)
    return tuple(found)


def words(key):
    """The key for people: 'image float32 (1, 3, 224, 224)'."""
    said = []
    for part in key:
        if isinstance(part, Constant):
            said.append("%s = %s" % part)
        else:
            place = "" if part.device == "cpu" else " on %s" % part.device
            said.append("%s %s %s%s" % (part.path, part.dtype, part.shape, place))
    return ", ".join(said) or "a call without arguments"


def _collect(path, value, found):
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        dtype = getattr(value.dtype, "name", None) or str(value.dtype).replace("torch.", "")
        found.append(Leaf(path, tuple(int(size) for size in value.shape), dtype, str(getattr(value, "device", "cpu"))))
    elif isinstance(value, Mapping):
        found.append(Constant(path, "dict of %d" % len(value)))
        for name in sorted(value, key=str):
            _collect("%s.%s" % (path, name), value[name], found)
    elif isinstance(value, (tuple, list)):
        found.append(Constant(path, "%s of %d" % (type(value).__name__, len(value))))
        for position, item in enumerate(value):
            _collect("%s.%d" % (path, position), item, found)
    elif hasattr(value, "__dataclass_fields__"):
        found.append(Constant(path, type(value).__name__))
        for name in value.__dataclass_fields__:
            _collect("%s.%s" % (path, name), getattr(value, name), found)
    elif isinstance(value, _PLAIN):
        # a float that is NaN is not equal to itself, and 1 is equal to True and to 1.0
        found.append(Constant(path, "%s %r" % (type(value).__name__, value)))
    else:
        raise TypeError("'%s' is a %s, neither an array nor a plain value" % (path, type(value).__name__))
