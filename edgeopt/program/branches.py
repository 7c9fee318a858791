"""How much of a graph could run at once: its longest chain against the whole, and the branches beside it.

Time is counted in FLOPs, as if every operator ran alone on one of endlessly many equal processors, each started as
soon as what it reads is there. The figure is an upper bound: it knows no memory, no cores that share a bus, and no
operator that fills the machine by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeopt.program.operators import Operator, Walk


@dataclass(frozen=True)
class Region:
    """Contractions that could run at once. `branches`: the operators of each branch, in order, with their FLOPs."""

    at_once: int
    branches: tuple[tuple[tuple[str, ...], int], ...]
    saved_flops: int  # that the longest of the branches hides


@dataclass(frozen=True)
class Branches:
    """`critical_flops` of the longest chain, `at_once`: the most contractions that could run at the same time."""

    total_flops: int
    critical_flops: int
    at_once: int
    critical: tuple[str, ...]  # the chain's contractions, in order
    regions: tuple[Region, ...]  # the ones that save most first

    @property
    def times_faster(self) -> float:
        """The most that running the branches at once could give."""
        return self.total_flops / self.critical_flops if self.critical_flops else 1.0


def branches(found: Walk) -> Branches:
    """The branches of a walked program."""
    operators = found.operators
    starts, ends, before = _schedule(operators)
    total = sum(operator.flops for operator in operators)
    regions = _regions(operators, starts, ends)
    return Branches(
        total_flops=total,
        critical_flops=max(ends, default=0),
        at_once=max((region.at_once for region in regions), default=1 if total else 0),
        critical=_chain(operators, ends, before),
        regions=tuple(sorted(regions, key=lambda region: -region.saved_flops)),
    )


def _schedule(operators: tuple[Operator, ...]) -> tuple[list[int], list[int], list[int | None]]:
    """When each starts and ends, and the one that it waits for longest."""
    starts, ends, before = [], [], []
    for operator in operators:
        latest = max(operator.sources, key=ends.__getitem__, default=None)
        starts.append(ends[latest] if latest is not None else 0)
        ends.append(starts[-1] + operator.flops)
        before.append(latest)
    return starts, ends, before


def _chain(operators: tuple[Operator, ...], ends: list[int], before: list[int | None]) -> tuple[str, ...]:
    at = max(range(len(ends)), key=ends.__getitem__, default=None)
    names = []
    while at is not None:
        if operators[at].kind == "contraction":
            names.append(operators[at].name)
        at = before[at]
    return tuple(reversed(names))


def _regions(operators: tuple[Operator, ...], starts: list[int], ends: list[int]) -> list[Region]:
    """Stretches of time in which contractions run beside each other, whole: until none of them runs any more."""
    heavy = [at for at, operator in enumerate(operators) if operator.kind == "contraction"]
    events = sorted([(starts[at], 1, at) for at in heavy] + [(ends[at], 0, at) for at in heavy])  # ends before starts
    regions: list[Region] = []
    running: set[int] = set()
    members: dict[int, None] = {}
    most = 0
    for _, opens, at in events:
        if opens:
            running.add(at)
            if len(running) > 1:
                members.update(dict.fromkeys(running))
                most = max(most, len(running))
        else:
            running.discard(at)
            if members and running.isdisjoint(members):
                regions.append(_region(operators, list(members), most))
                members, most = {}, 0
    return regions


def _region(operators: tuple[Operator, ...], members: list[int], at_once: int) -> Region:
    """The members as branches: those that one reads of another, directly or through others, belong together."""
    members.sort()
    inside = set(members)
    branch_of: dict[int, int] = {}
    reached: dict[int, set[int]] = {}  # operator -> members that its result comes from
    root = {at: at for at in members}

    def top(at: int) -> int:
        while root[at] != at:
            at = root[at]
        return at

    for at in range(members[0], members[-1] + 1):
        from_members = {m for source in operators[at].sources for m in reached.get(source, ())}
        if at in inside:
            for other in from_members:
                root[top(other)] = top(at)
            from_members = {at}
        if from_members:
            reached[at] = from_members
    for at in members:
        branch_of[at] = top(at)
    groups: dict[int, list[int]] = {}
    for at in members:
        groups.setdefault(branch_of[at], []).append(at)
    made = [
        (tuple(operators[at].name for at in group), sum(operators[at].flops for at in group))
        for group in groups.values()
    ]
    flops = [count for _, count in made]
    return Region(at_once, tuple(made), sum(flops) - max(flops))
