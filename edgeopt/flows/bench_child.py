"""The runner's adaptor for the contenders of `edgeopt bench`: found by name, in the process that is measured.

Candidate flags: "kind" (see pipeline.peers), "model", "project" and "overrides" as `find_project` takes them, and
"example" (a feed of the request, whose sizes are measured).
"""

from __future__ import annotations

from pathlib import Path

from edgeopt.flows.project import find_project
from edgeopt.onboard import tensors
from edgeopt.onboard.torchscript import MODULE, PIP_NAMES

__all__ = ["MODULE", "PIP_NAMES", "open_program"]


def open_program(folder, candidate, inputs, outputs, op_libraries, threads):
    """Open the contender; `threads` is left to it. Raises what its library raises."""
    from edgeopt.pipeline.peers import PEERS, open_peer

    flags = candidate["flags"]
    project = find_project(flags["model"], Path(flags["project"]), flags["overrides"])
    example = [tensors.read(folder, flags["example"][spec["name"]]) for spec in inputs]
    names = [spec["name"] for spec in inputs], [spec["name"] for spec in outputs]
    file = Path(folder, candidate["file"]) if PEERS[flags["kind"]] else None
    return Program(open_peer(flags["kind"], project, file, example, names))


class Program:
    """An open contender, as the runner calls it."""

    records = ()

    def __init__(self, call):
        self.call = call

    def close(self):
        self.call = None
