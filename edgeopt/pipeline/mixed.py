"""The search for a program that keeps the limits where int8 as it stands does not: as few layers float as it takes.

In this order, each step a try that is built, lowered and judged like any candidate: weights per channel instead of per
tensor; calibration or training, whichever was not tried; int8 with some layers float; then fp16 and fp32, which the
first gate has judged.

Which layers: what a layer costs is its share of the noise at the outputs, and with it its share of the metric that int8
lost (of a few hundred samples the metric itself says nothing of a single layer); what it gains is the time that int8
saves in it. The layers that gain least for what they cost are left float first. A first try leaves nearly all of them
float, so that there is something to ship; then the shortest beginning of the list that passes is found by doubling and
halving, and of that each layer that turns out not to be needed goes back to int8.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edgeopt.pipeline.gates import GateRow
from edgeopt.pipeline.tries import Setup, Tries, Try, margin
from edgeopt.progress import log

if TYPE_CHECKING:
    from edgeopt.quant.sensitivity import Layer

DEFAULT_BUDGET_MIN = 10.0
LEAST_GAIN = 0.1  # of what int8 gains in all layers: a program that gains less is float by another name
NEGLIGIBLE = 0.1  # of the mean share of the noise


@dataclass(frozen=True)
class Ranked:
    """A layer as the search sees it: `gain` in ms, or in multiply-accumulates where nothing could be timed."""

    layer: Layer
    gain: float
    lost: float  # its share of the noise, 0 to 1

    @property
    def worth(self) -> float:
        """What int8 gains in it for what it costs."""
        return self.gain / self.lost if self.lost else float("inf")


@dataclass(frozen=True)
class Found:
    """What a search came to. `setup` is None where no try passed; `ended` is '' where it came to its end."""

    setup: Setup | None
    tries: tuple[Try, ...]
    ranked: tuple[Ranked, ...] = ()
    ended: str = ""
    seconds: float = 0.0


class OutOfTime(Exception):
    """The budget has no time left for another try."""


@dataclass
class Budget:
    """Minutes for a search. A try begins only where the time that is left is at least what the longest one took."""

    minutes: float
    started: float = field(default_factory=time.monotonic)

    def need(self, seconds: float) -> None:
        """OutOfTime where less than `seconds` are left."""
        if time.monotonic() + seconds > self.started + 60 * self.minutes:
            raise OutOfTime


def search(
    tries: Tries, first: Setup, failed: GateRow, budget: Budget, *,
    steps: tuple[Setup | Try, ...], gains: Callable[[tuple[Layer, ...]], dict[str, float]], unranked: str = "",
) -> Found:  # fmt: skip
    """Search from `first`, which came to the row `failed`; the best so far where the budget ends or Ctrl-C is pressed.

    `steps` are whole int8 setups to try before layers are left float, or why there is none. `gains`: layers -> node
    -> what int8 gains in it. `unranked`: why the program's layers cannot be told apart; then none is left float.
    """
    run = _Search(tries, budget, gains, unranked)
    ended = ""
    try:
        run.whole(first, failed, steps)
    except OutOfTime:
        ended = f"the budget of {budget.minutes:g} min ended"
    except KeyboardInterrupt:
        ended = "interrupted"
    if ended:
        log.warning("the search is not at its end: %s; building again goes on with it", ended)
    seconds = round(time.monotonic() - budget.started, 3)
    return Found(tries.best(), tuple(tries.done), run.ranked, ended, seconds)


class _Search:
    def __init__(
        self, tries: Tries, budget: Budget, gains: Callable[[tuple[Layer, ...]], dict[str, float]], unranked: str
    ):
        self._tries, self._budget, self._gains, self._unranked = tries, budget, gains, unranked
        self.ranked: tuple[Ranked, ...] = ()

    def whole(self, first: Setup, failed: GateRow, steps: tuple[Setup | Try, ...]) -> None:
        """The setups with every layer on integers; where none passes, the nearest of them with layers float."""
        nearest, best_margin = first, margin(failed)
        for step in steps:
            if isinstance(step, Try):
                self._tries.note(step)
                continue
            made = self._run(step)
            if made.passed:
                return
            if made.margin is not None and (best_margin is None or made.margin > best_margin):
                nearest, best_margin = step, made.margin
        self._budget.need(0)
        self._mixed(nearest)

    def _mixed(self, base: Setup) -> None:
        if self._unranked:
            self._tries.note(Try("int8 with layers float", False, self._unranked))
            return
        layers = self._tries.layers(base)
        self.ranked = ranked(layers, self._tries.kept_gains(base, lambda: self._gains(layers)))
        most = most_float(self.ranked)
        if not most:
            self._tries.note(Try("int8 with layers float", False, "no layer can be left float and leave int8 a gain"))
            return
        fewest(range(most), lambda chosen: self._run(self._with_float(base, chosen)).passed)

    def _with_float(self, base: Setup, chosen: tuple[int, ...]) -> Setup:
        layers = [self.ranked[at].layer for at in chosen]
        keep = tuple(sorted(layer.pattern for layer in layers))
        return Setup(base.per_channel, base.trained, keep, tuple(layer.name for layer in layers))

    def _run(self, setup: Setup) -> Try:
        if not self._tries.is_known(setup):
            self._budget.need(self._tries.expected_s(setup))
        return self._tries.run(setup)


def ranked(layers: tuple[Layer, ...], gains: dict[str, float]) -> tuple[Ranked, ...]:
    """The layers in the order in which they are left float: first where int8 gains least for what it costs.

    Those that cost next to nothing come last, since leaving them float mends nothing.
    """
    total = sum(layer.noise for layer in layers) or 1.0
    least = NEGLIGIBLE / max(1, len(layers))
    found = [Ranked(layer, gains.get(layer.node, 0.0), layer.noise / total) for layer in layers]
    return tuple(sorted(found, key=lambda r: (r.lost < least, r.worth, -r.lost)))


def most_float(order: tuple[Ranked, ...]) -> int:
    """How many of the layers may be float at the most: int8 must keep a part of its gain in the others."""
    total = sum(max(r.gain, 0.0) for r in order)
    left, count = total, 0
    for r in order[:-1]:
        left -= max(r.gain, 0.0)
        if total and left < LEAST_GAIN * total:
            break
        count += 1
    return count


def fewest(order: range, passes: Callable[[tuple[int, ...]], bool]) -> tuple[int, ...] | None:
    """The members of `order` that are needed for `passes` to hold; None where all of them together are not enough.

    First the shortest beginning that passes, where a longer one passes as well; then each member without which the
    rest passes is left out, the last ones first.
    """
    most = len(order)
    if not passes(tuple(order)):
        return None
    low, high = 0, most  # a beginning of `high` passes, one of `low` does not
    for size in _doubling(most):
        if passes(tuple(order[:size])):
            high = size
            break
        low = size
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if passes(tuple(order[:middle])) else (middle, high)
    needed = tuple(order[:high])
    for member in reversed(needed[:-1]):  # the last one is needed: without it the beginning did not pass
        without = tuple(m for m in needed if m != member)
        if passes(without):
            needed = without
    return needed


def _doubling(most: int) -> Iterator[int]:
    size = 1
    while size < most:
        yield size
        size *= 2
