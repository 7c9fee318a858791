"""AdaptiveModel: one dynamic graph, and beside it entries made for one shape, dtype and device each.

A dynamic graph serves every size; an entry made for one size may be faster, and costs time to make and memory to keep.
So entries are few: a cache bounded by count and by bytes, the least recently used leaves first, those made by `warm`
never. What makes an entry is passed in. Whatever goes wrong with an entry, the dynamic graph answers instead.
"""

import logging
import threading
import time
from collections import OrderedDict, namedtuple

from .adaptive_key import key_of, words
from .memory import give_back, resident_bytes

log = logging.getLogger("edgeopt.onboard")

WARM_UP_CALLS = 3  # TorchScript's executor looks on for one call, optimises in the second, and runs from the third on
GAIN = 0.97  # an entry that is put to the trial takes at most so much of the dynamic graph's time
_MOST_SEEN = 1024  # sizes whose calls are counted, and sizes that are known to get no entry
_MOST_REASONS = 32

Statistics = namedtuple(
    "Statistics", "hits padded builds evictions fallbacks failures declined entries size_bytes reasons"
)
Statistics.__doc__ = """What an AdaptiveModel has done so far.

`hits`: calls answered by an entry, `padded` of them after padding; `fallbacks`: calls answered by the dynamic graph.
`builds`: entries made; `failures`: those that could not be made, or failed in a call; `declined`: made, but not worth
their memory. `evictions`: entries that made room. `entries` and `size_bytes`: what is kept now. `reasons`: (size in
words, why it is served by the dynamic graph), the newest last.
"""


class AdaptiveModel:
    """Called as the model is; gives what the model gives. Threads may call it at once.

    `dynamic(*args, **kwargs)`: the graph for every size. `build(*args, **kwargs)`: is given a call's arguments and
    returns what answers such calls from then on, a function with the same arguments; it may have `size_bytes` (else
    the growth of this process while it was made counts alone) and `close()`. It is asked in the calling thread, one
    at a time; calls of other threads meanwhile are answered by the dynamic graph.
    `entries`, `size_bytes`: the most that is kept. `build_after`: calls of a size that `warm` did not make, at which
    it gets an entry, None for never. `pad(*args, **kwargs)`: (args, kwargs, undo) of a larger size, or None; outputs
    of the larger size go through `undo(outputs)`. `trial_calls`: calls that a new entry and the dynamic graph make in
    turns; an entry that is no faster is not kept; 0 keeps all.
    `concurrent`: whether `dynamic`, and an entry, may be called by several threads at once; else those calls queue.
    """

    def __init__(
        self, dynamic, build=None, entries=16, size_bytes=512 << 20, build_after=1, pad=None, trial_calls=0,
        concurrent=False,
    ):  # fmt: skip
        if entries < 1 or size_bytes < 1 or (build_after is not None and build_after < 1):
            raise ValueError("entries, size_bytes and build_after must be 1 or more")
        self._build, self._pad, self._trial_calls, self._concurrent = build, pad, trial_calls, concurrent
        self._most_entries, self._most_bytes, self._build_after = entries, size_bytes, build_after
        self._lock = threading.Lock()  # of everything below; never held while a model runs or is made
        self._building = threading.Lock()
        self._dynamic = _Slot(dynamic, 0, True, concurrent)
        self._slots = OrderedDict()  # key -> _Slot, the least recently used first
        self._seen = OrderedDict()  # key -> calls so far
        self._refused = OrderedDict()  # key -> why it gets no entry
        self._reasons = []
        self._counts = dict.fromkeys(("hits", "padded", "builds", "evictions", "fallbacks", "failures", "declined"), 0)
        self._bytes = 0
        self._closed = False

    def __call__(self, *args, **kwargs):
        key = key_of(args, kwargs)
        slot = self._take(key)
        padded = None if slot or self._pad is None else self._pad(*args, **kwargs)
        if slot is None and padded is None:
            slot = self._make(key, args, kwargs, wait=False)
        if slot is not None:
            return self._answer(slot, key, args, kwargs)
        if padded is None:
            return self._fall_back(args, kwargs)
        larger, named, undo = padded
        key = key_of(larger, named)
        slot = self._take(key) or self._make(key, larger, named, wait=False)
        if slot is None:
            return self._fall_back(args, kwargs)  # unpadded: it does less, and takes every size
        return undo(self._answer(slot, key, larger, named, padded=True))

    def warm(self, *args, **kwargs):
        """Make the entry for such a call now, and keep it whatever comes; run the dynamic graph at this size too.

        True where there is an entry now. False where it could not be made, was not worth it, or has no room: such
        calls are answered by the dynamic graph, which is warm for them then.
        """
        for _ in range(WARM_UP_CALLS):
            self._call(self._dynamic, args, kwargs)
        key = key_of(args, kwargs)
        slot = self._take(key) or self._make(key, args, kwargs, wait=True, pinned=True)
        if slot is None:
            return False
        with self._lock:
            slot.pinned = True
        self._release(slot)
        return True

    def statistics(self):
        """Statistics of this moment."""
        with self._lock:
            return Statistics(
                entries=len(self._slots), size_bytes=self._bytes, reasons=tuple(self._reasons), **self._counts
            )

    def close(self):
        """Let the entries go. Calls that are under way end first; later ones raise ValueError. May be called twice."""
        with self._lock:
            self._closed = True
            slots = list(self._slots.values())
            self._slots.clear()
            self._bytes = 0
            idle = [slot for slot in slots if slot.leave()]
        _close_all(idle)

    def _take(self, key):
        """The entry of the key, held until it is released; None where there is none."""
        with self._lock:
            if self._closed:
                raise ValueError("this model is closed")
            slot = self._slots.get(key)
            if slot is None:
                return None
            self._slots.move_to_end(key)
            slot.users += 1
            return slot

    def _answer(self, slot, key, args, kwargs, padded=False):
        try:
            try:
                found = self._call(slot, args, kwargs)
            finally:
                self._release(slot)
        except Exception as error:  # whatever a runtime raises
            found = self._fall_back(args, kwargs)  # raises where the call is at fault, and the entry stays
            self._drop(key, slot, "it failed in a call: %s" % _first_line(error))
            return found
        with self._lock:
            self._counts["hits"] += 1
            self._counts["padded"] += padded
        return found

    def _fall_back(self, args, kwargs):
        with self._lock:
            self._counts["fallbacks"] += 1
        return self._call(self._dynamic, args, kwargs)

    def _call(self, slot, args, kwargs):
        if slot.queue is None:
            return slot.call(*args, **kwargs)
        with slot.queue:
            return slot.call(*args, **kwargs)

    def _make(self, key, args, kwargs, wait, pinned=False):
        """A new entry, held; None where the size gets none, or another is being made and we do not wait."""
        if self._build is None or not self._due(key, pinned):
            return None
        if not self._building.acquire(wait):
            return None
        try:
            slot = self._take(key)  # the thread before us may have made it
            if slot is not None:
                return slot
            return self._made(key, args, kwargs, pinned)
        finally:
            self._building.release()

    def _due(self, key, pinned):
        """Whether the key is to get an entry with this call, which is counted."""
        with self._lock:
            if key in self._refused:
                return False
            if pinned:
                return True
            if self._build_after is None:
                return False
            count = self._seen.pop(key, 0) + 1
            _remember(self._seen, key, count)
            return count >= self._build_after

    def _made(self, key, args, kwargs, pinned):
        before, call = _settled_bytes(), None
        try:
            call = self._build(*args, **kwargs)
            slot = _Slot(call, 0, pinned, getattr(call, "concurrent", self._concurrent))
            for _ in range(WARM_UP_CALLS):
                self._call(slot, args, kwargs)
            slower = self._trial(slot, args, kwargs)
        except Exception as error:  # whatever a compiler or a runtime raises costs the entry and not the call
            _close(call)
            self._refuse(key, "failures", "it cannot be made: %s" % _first_line(error))
            return None
        if slower:
            _close_all([slot])
            self._refuse(key, "declined", slower)
            return None
        slot.size = max(getattr(call, "size_bytes", 0), _settled_bytes() - before, 0)
        return self._keep(key, slot)

    def _trial(self, slot, args, kwargs):
        """Why the entry is not worth its memory, in words; None where it is."""
        if not self._trial_calls:
            return None
        entry, dynamic = [], []
        for _ in range(self._trial_calls):
            for each, times in ((slot, entry), (self._dynamic, dynamic)):
                started = time.perf_counter()
                self._call(each, args, kwargs)
                times.append(time.perf_counter() - started)
        ours, theirs = 1e3 * sorted(entry)[len(entry) // 2], 1e3 * sorted(dynamic)[len(dynamic) // 2]
        if ours <= GAIN * theirs:
            return None
        return "no faster than the dynamic graph: %.3g ms against %.3g ms" % (ours, theirs)

    def _keep(self, key, slot):
        """The new entry put into the cache and held, others evicted for it; None where there is no room for it."""
        with self._lock:
            leaving, room = self._make_room(slot.size)
            if room and not self._closed:
                self._slots[key] = slot
                self._bytes += slot.size
                self._counts["builds"] += 1
                self._seen.pop(key, None)
                slot.users = 1
        _close_all(leaving)
        if room:
            return slot
        _close_all([slot])
        self._refuse(key, "declined", "no room for %.1f MB beside what is kept" % (slot.size / 1e6))
        return None

    def _make_room(self, size):
        """(entries to close, whether there is room): the least recently used that are not pinned go, if that helps."""
        free = [key for key, slot in self._slots.items() if not slot.pinned]
        count, total, out = len(self._slots), self._bytes, []
        while out != free and (count + 1 > self._most_entries or total + size > self._most_bytes):
            out.append(free[len(out)])
            count, total = count - 1, total - self._slots[out[-1]].size
        if count + 1 > self._most_entries or total + size > self._most_bytes:
            return [], False
        slots = [self._slots.pop(key) for key in out]
        self._bytes = total
        self._counts["evictions"] += len(slots)
        return [slot for slot in slots if slot.leave()], True

    def _drop(self, key, slot, reason):
        """Take an entry that failed out of the cache, for good."""
        with self._lock:
            there = self._slots.get(key) is slot
            if there:
                del self._slots[key]
                self._bytes -= slot.size
            idle = there and slot.leave()
        if idle:
            _close_all([slot])
        if there:
            self._refuse(key, "failures", reason)

    def _refuse(self, key, counter, reason):
        said = (words(key), reason)
        with self._lock:
            self._counts[counter] += 1
            _remember(self._refused, key, reason)
            self._seen.pop(key, None)
            self._reasons = (self._reasons + [said])[-_MOST_REASONS:]
        level = logging.WARNING if counter == "failures" else logging.INFO
        log.log(level, "%s is served by the dynamic graph: %s", *said)

    def _release(self, slot):
        with self._lock:
            slot.users -= 1
            idle = slot.gone and slot.users == 0
        if idle:
            _close_all([slot])


class _Slot:
    """An entry: `users` call it right now; once `gone` from the cache it is closed by the last of them."""

    def __init__(self, call, size, pinned, concurrent):
        self.call, self.size, self.pinned = call, size, pinned
        self.queue = None if concurrent else threading.Lock()
        self.users, self.gone = 0, False

    def leave(self):
        """Mark it as gone; True where nobody uses it, so that it is to be closed."""
        self.gone = True
        return self.users == 0

    def close(self):
        call, self.call = self.call, None
        _close(call)


def _settled_bytes():
    """Resident memory without what is free: loading a file leaves several times its size of that."""
    give_back()
    return resident_bytes()


def _close_all(slots):
    """Close entries, and return their memory."""
    for slot in slots:
        slot.close()
    if slots:
        give_back()


def _close(call):
    close = getattr(call, "close", None)
    if close is not None:
        close()


def _remember(counts, key, value):
    """Put the value at the end, and forget the oldest beyond what is remembered."""
    counts[key] = value
    if len(counts) > _MOST_SEEN:
        counts.popitem(last=False)


def _first_line(error):
    text = str(error).strip()
    return "%s: %s" % (type(error).__name__, text.split("\n")[0][:300] if text else "no message")
