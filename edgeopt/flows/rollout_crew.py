"""The threads of a rollout: so many devices at once, each tried again after a pause, ended in peace by a signal."""

from __future__ import annotations

import contextlib
import heapq
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from edgeopt.errors import first_line
from edgeopt.flows.rollout_device import Outcome

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK_S = 0.2  # between two looks whether a signal came
_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True)
class Pace:
    """`jobs` devices at once; `retries` further tries of what is not reached, `backoff_s` before the first of them.

    The pause doubles from one try to the next, up to a minute.
    """

    jobs: int = 8
    retries: int = 3
    backoff_s: float = 5.0


class Watch:
    """Who watches a rollout; this one shows nothing. Called from any thread."""

    def device(self, name: str, state: str, detail: str) -> None:
        """A device is in `state` now; `detail` is for people."""

    def say(self, text: str) -> None:
        """Something about the rollout as a whole."""


class Crew:
    """Used in a `with` block, in which a signal sets `stopped()`.

    After a second one nobody waits for what is at work: it ends with this process, as if its machine had died.
    """

    def __init__(self, pace: Pace, watch: Watch, settle: Callable[[str, Outcome], None]):
        self._pace, self._watch, self._settle = pace, watch, settle
        self._stop = threading.Event()
        self._leave = threading.Event()
        self._old: dict[int, object] = {}
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def stopped(self) -> bool:
        return self._stop.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait; True where a signal ended it."""
        deadline = time.monotonic() + seconds
        while not self._stop.is_set() and (left := deadline - time.monotonic()) > 0:
            self._stop.wait(min(_LOOK_S, left))
        return self._stop.is_set()

    def __enter__(self) -> Crew:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no handlers
            for number in _SIGNALS:
                self._old[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        if self._stop.is_set():
            self._leave.set()
        self._stop.set()

    def each(
        self, names: Iterable[str], work: Callable[[str], Outcome], *, enough: Callable[[], bool] = lambda: False,
        tries: int | None = None,
    ) -> None:  # fmt: skip
        """Do `work` for every name, in this order, and settle each outcome; none is begun once `enough()` holds."""
        tries = 1 + self._pace.retries if tries is None else tries
        # (when it is due, its place in the order, name, which try)
        due = [(0.0, at, name, 1) for at, name in enumerate(names)]
        heapq.heapify(due)
        ended: queue.SimpleQueue[tuple[int, str, int, Outcome]] = queue.SimpleQueue()
        flying, said = 0, False
        while due or flying:
            closed = self.stopped() or enough()
            if self.stopped() and flying and not said:
                self._watch.say(f"interrupted: ending {flying} at work; again to leave them where they are")
                said = True
            while due and not closed and flying < self._pace.jobs and due[0][0] <= time.monotonic():
                _, at, name, turn = heapq.heappop(due)
                self._start(at, name, turn, work, ended)
                flying += 1
            if closed and not flying:
                return
            if self._leave.is_set():
                return
            with contextlib.suppress(queue.Empty):
                at, name, turn, outcome = ended.get(timeout=_LOOK_S)
                flying -= 1
                again_s = self._again_s(outcome, turn, tries) if not enough() else None
                if again_s is None:
                    self._settle(name, outcome)
                else:
                    heapq.heappush(due, (time.monotonic() + again_s, at, name, turn + 1))
                    self._watch.device(name, outcome.state, f"tried again in {again_s:g} s: {outcome.what}")

    def _again_s(self, outcome: Outcome, turn: int, tries: int) -> float | None:
        if not outcome.again or turn >= tries or self.stopped():
            return None
        return min(_LONGEST_PAUSE_S, self._pace.backoff_s * 2 ** (turn - 1))

    def _start(self, at: int, name: str, turn: int, work: Callable[[str], Outcome], ended: queue.SimpleQueue) -> None:
        def one() -> None:
            try:
                outcome = work(name)
            except Exception as why:  # such as a full disk here: the others go on, and nobody waits for this one
                outcome = Outcome("failed", f"it could not be recorded: {first_line(why)}")
            ended.put((at, name, turn, outcome))

        # a daemon: after a second signal nobody waits for a device that hangs
        threading.Thread(target=one, name=f"rollout {name}", daemon=True).start()
