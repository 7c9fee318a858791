"""The user's output structure around the model's tensors: the manifest's `output_structure`."""


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
