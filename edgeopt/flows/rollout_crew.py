"""The threads of a rollout: so many devices at once, each tried again after a pause, ended in peace by a signal."""

from __future__ import annotations

import contextlib
import heapq
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from edgeopt.errors import EdgeoptError, first_line
from edgeopt.flows.rollout_device import Outcome
from edgeopt.ports.connection import Connection

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK_S = 0.2  # between two looks whether a signal came
_LONGEST_PAUSE_S = 60.0
_LAST_WAIT_S = 10.0  # for threads whose connections were cut


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
    """Used in a `with` block, in which a signal sets `stopped()`; a second one cuts the connections."""

    def __init__(
        self, reach: Callable[[str], Connection], pace: Pace, watch: Watch, settle: Callable[[str, Outcome], None]
    ):
        self._reach, self._pace, self._watch, self._settle = reach, pace, watch, settle
        self._stop = threading.Event()
        self._cut = threading.Event()
        self._held: set[Connection] = set()
        self._lock = threading.Lock()
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
            self._cut.set()
        self._stop.set()

    @contextlib.contextmanager
    def _holding(self, connection: Connection) -> Iterator[None]:
        with self._lock:
            self._held.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._held.discard(connection)

    @contextlib.contextmanager
    def reach(self, host: str) -> Iterator[Connection]:
        """A connection to `host` for the time of the block, which a second signal cuts."""
        with self._reach(host) as connection, self._holding(connection):
            yield connection

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
                self._watch.say(f"interrupted: ending {flying} at work; again to cut their connections")
                said = True
            while due and not closed and flying < self._pace.jobs and due[0][0] <= time.monotonic():
                _, at, name, turn = heapq.heappop(due)
                self._start(at, name, turn, work, ended)
                flying += 1
            if closed and not flying:
                return
            if self._cut.is_set():
                self._cut_all(flying, ended)
                return
            with contextlib.suppress(queue.Empty):
                at, name, turn, outcome = ended.get(timeout=_LOOK_S)
                flying -= 1
                again_s = self._again_s(outcome, turn, tries) if not enough() else None
                if again_s is None:
                    self._settle(name, self._said(outcome))
                else:
                    heapq.heappush(due, (time.monotonic() + again_s, at, name, turn + 1))
                    self._watch.device(name, outcome.state, f"tried again in {again_s:g} s: {outcome.what}")

    def _again_s(self, outcome: Outcome, turn: int, tries: int) -> float | None:
        if not outcome.again or turn >= tries or self.stopped():
            return None
        return min(_LONGEST_PAUSE_S, self._pace.backoff_s * 2 ** (turn - 1))

    def _said(self, outcome: Outcome) -> Outcome:
        """A step that broke because its connection was cut by us has not failed."""
        return replace(outcome, state="stopped") if self._cut.is_set() and outcome.again else outcome

    def _start(self, at: int, name: str, turn: int, work: Callable[[str], Outcome], ended: queue.SimpleQueue) -> None:
        def one() -> None:
            try:
                outcome = work(name)
            except Exception as why:  # such as a full disk here: the others go on, and nobody waits for this one
                outcome = Outcome("failed", f"it could not be recorded: {first_line(why)}")
            ended.put((at, name, turn, outcome))

        # a daemon: after a second signal nobody waits for a device that hangs
        threading.Thread(target=one, name=f"rollout {name}", daemon=True).start()

    def _cut_all(self, flying: int, ended: queue.SimpleQueue) -> None:
        with self._lock:
            held = tuple(self._held)
        for connection in held:
            with contextlib.suppress(EdgeoptError, OSError):
                connection.close()
        deadline = time.monotonic() + _LAST_WAIT_S
        while flying and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                _, name, _, outcome = ended.get(timeout=left)
                flying -= 1
                self._settle(name, self._said(outcome))
