"""Whether the target's torch has an operator that a pass would write."""

from __future__ import annotations

from edgeopt.spec.jetpack import version_tuple
from edgeopt.spec.profile import Profile

# The first release whose notes or documentation name the operator in this form (torch's release notes).
SINCE = {
    "hardswish": "1.6",
    "hardsigmoid": "1.6",
    "silu": "1.7",
    "mish": "1.9",
    "gelu with approximate='tanh'": "1.12",
    "scaled_dot_product_attention": "2.0",
    "scaled_dot_product_attention with a scale": "2.1",
    "rms_norm": "2.4",
}


def lacks(profile: Profile, operator: str) -> str | None:
    """Why `operator`, a key of `SINCE`, is not written: a TorchScript file calls it by name on the target."""
    known = profile.target.torch
    if "torchscript" not in profile.backends or known is None or known.min is None:
        return None
    since = SINCE.get(operator)
    if since is None or version_tuple(known.min)[:2] >= version_tuple(since):
        return None
    return f"the target may run torch {known.min}, and {operator} came with {since}"


def left_out(profile: Profile, pattern: str) -> str | None:
    """Why nothing of a fusing pattern is written where the profile does not allow it."""
    return None if pattern in profile.fusion.patterns else f"the profile's fusion.patterns leave out {pattern}"
