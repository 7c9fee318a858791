"""What a pass is given, and what it says it did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch.fx import GraphModule, Node

from edgeopt.passes import aliases
from edgeopt.spec.profile import Profile


@dataclass(frozen=True)
class Changed:
    """`count` places that a pass changed, and why it left others alone."""

    count: int
    declined: tuple[str, ...] = ()


@dataclass
class Context:
    """The graph that a pass may change, the profile it is for, and the pass's own settings, complete with defaults."""

    module: GraphModule
    profile: Profile
    settings: Mapping[str, bool | int | float | str] = field(default_factory=dict)

    @cached_property
    def mutated(self) -> set[Node]:
        """Every node whose memory some operator may write to, found once: a rewrite of such a node is not safe."""
        return aliases.mutated(self.module.graph)

    def writes(self, *nodes: Node) -> str | None:
        """The reason to leave the nodes alone where the model may write to the memory of one of them."""
        return "the model writes to its memory" if any(node in self.mutated for node in nodes) else None
