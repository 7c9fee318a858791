from __future__ import annotations
from edgeopt.backends.backend import Lowered
runtime = "tensorrt"
def refusals(program, profile): return ("soon",)
def lower(program, profile, out, *, target_python=None): return Lowered()
