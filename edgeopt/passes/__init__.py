"""The ordered table of graph passes; each is checked against the program before it, and dropped where it fails."""

from edgeopt.passes.rules_load import load_rules
from edgeopt.passes.run import PassRecord, Run, optimize, reoptimize, steps

__all__ = ["PassRecord", "Run", "load_rules", "optimize", "reoptimize", "steps"]
