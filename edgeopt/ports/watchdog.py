"""A deadline for calls that cannot be given one: it cuts what they wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Watchdog:
    """Calls `cut` from a thread of its own when `patience_s` pass without `kick`; `fired` says that it did.

    Used in a `with` block. `patience_s` may be changed at any time; it counts from the last kick.
    """

    def __init__(self, patience_s: float, cut: Callable[[], None]):
        self.patience_s = patience_s
        self.fired = False
        self._cut = cut
        self._kicked = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="edgeopt-watchdog", daemon=True)

    def kick(self) -> None:
        """Start counting anew."""
        self._kicked = time.monotonic()

    def __enter__(self) -> Watchdog:
        self.kick()
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while (left := self._kicked + self.patience_s - time.monotonic()) > 0:
            if self._over.wait(left):
                return
        self.fired = True
        self._cut()
