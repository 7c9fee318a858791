"""AdaptiveModel: which sizes get entries, what bounds them, what threads see, and who answers when an entry fails."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass

import numpy as np
import pytest

from edgeopt.onboard.adaptive_key import key_of
from edgeopt.onboard.memory import resident_bytes
from edgeopt.runtime import AdaptiveModel


def double(x):
    return {"twice": 2 * x}


def frame(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


class Entries:
    """Builds entries for one shape each, which refuse every other; remembers what it built and what is closed."""

    def __init__(self, size_bytes: int = 0, fails=()):
        self.size_bytes, self.fails = size_bytes, fails
        self.built, self.closed, self.active = [], [], 0

    def __call__(self, x):
        self.active += 1
        assert self.active == 1, "two entries are made at once"
        try:
            if x.shape in self.fails:
                raise RuntimeError("this compiler does not take it\nand says so at length")
            self.built.append(x.shape)
            return Entry(self, x.shape)
        finally:
            self.active -= 1


class Entry:
    concurrent = True

    def __init__(self, entries: Entries, shape: tuple[int, ...]):
        self.entries, self.shape, self.size_bytes, self.open = entries, shape, entries.size_bytes, True

    def __call__(self, x):
        assert self.open, "called after it was closed"
        assert x.shape == self.shape
        return double(x)

    def close(self):
        assert self.open, "closed twice"
        self.open = False
        self.entries.closed.append(self.shape)


def test_a_size_gets_an_entry_and_is_served_by_it():
    entries = Entries()
    model = AdaptiveModel(double, entries)
    for _ in range(3):
        np.testing.assert_array_equal(model(frame(2, 3))["twice"], 2 * frame(2, 3))
    done = model.statistics()
    assert (entries.built, done.builds, done.hits, done.fallbacks, done.entries) == ([(2, 3)], 1, 3, 0, 1)


def test_without_a_builder_the_dynamic_graph_serves_all():
    model = AdaptiveModel(double)
    np.testing.assert_array_equal(model(frame(4))["twice"], 2 * frame(4))
    assert not model.warm(frame(4))
    assert model.statistics()[:6] == (0, 0, 0, 0, 1, 0)


def test_a_size_must_be_seen_often_enough():
    entries = Entries()
    model = AdaptiveModel(double, entries, build_after=3)
    for size in (2, 3, 2, 3, 2):
        model(frame(size))
    done = model.statistics()
    assert (entries.built, done.fallbacks, done.hits) == ([(2,)], 4, 1)
    never = AdaptiveModel(double, Entries(), build_after=None)
    for _ in range(20):
        never(frame(2))
    assert never.statistics().builds == 0


def test_the_least_recently_used_leaves_by_count_and_those_made_by_warm_stay():
    entries = Entries()
    model = AdaptiveModel(double, entries, entries=3)
    assert model.warm(frame(1))
    for size in (2, 3, 2, 4):  # 3 is the oldest when 4 comes, though 1 was used before it
        model(frame(size))
    assert entries.closed == [(3,)]
    assert model.statistics().evictions == 1 and model.statistics().entries == 3
    model(frame(3))
    assert entries.closed == [(3,), (2,)]


def test_bytes_bound_as_well_as_count():
    entries = Entries(size_bytes=1 << 40)  # more than the noise of this process's memory
    model = AdaptiveModel(double, entries, entries=100, size_bytes=5 << 39)
    for size in (1, 2, 3, 4):
        model(frame(size))
    done = model.statistics()
    assert (done.entries, done.evictions, entries.closed) == (2, 2, [(1,), (2,)])
    assert done.size_bytes == 2 << 40


def test_an_entry_that_has_no_room_is_not_kept_and_not_made_again():
    entries = Entries(size_bytes=1 << 40)
    model = AdaptiveModel(double, entries, size_bytes=1 << 39)
    for _ in range(3):
        np.testing.assert_array_equal(model(frame(2))["twice"], 2 * frame(2))
    done = model.statistics()
    assert (entries.built, entries.closed, done.declined, done.fallbacks) == ([(2,)], [(2,)], 1, 3)
    assert "no room" in done.reasons[0][1]


def test_declared_sizes_beyond_the_room_are_told_and_displace_none():
    entries = Entries()
    model = AdaptiveModel(double, entries, entries=2)
    assert [model.warm(frame(size)) for size in (1, 2, 3)] == [True, True, False]
    assert entries.closed == [(3,)] and model.statistics().evictions == 0


def test_a_declared_size_is_warm_on_both_sides_before_its_first_call():
    """Case V02: TorchScript looks on for one call and optimises in the second, which no frame is to wait for."""
    dynamic, entry = [], []

    def count(calls):
        return lambda x: calls.append(x.shape) or double(x)

    model = AdaptiveModel(count(dynamic), lambda x: count(entry))
    assert model.warm(frame(3))
    assert dynamic == entry == [(3,)] * 3
    model(frame(3))
    assert len(dynamic) == 3 and len(entry) == 4
    assert model.statistics().hits == 1 and model.statistics().fallbacks == 0  # warming is no call of the application


def test_a_failing_build_is_counted_told_and_served_by_the_dynamic_graph(caplog):
    entries = Entries(fails=[(2, 2)])
    model = AdaptiveModel(double, entries)
    for _ in range(3):
        np.testing.assert_array_equal(model(frame(2, 2))["twice"], 2 * frame(2, 2))
    done = model.statistics()
    assert (done.failures, done.fallbacks, done.builds, done.entries) == (1, 3, 0, 0)
    size, reason = done.reasons[0]
    assert size == "0 float32 (2, 2)"
    assert reason == "it cannot be made: RuntimeError: this compiler does not take it"
    assert "0 float32 (2, 2) is served by the dynamic graph" in caplog.text


def test_an_entry_that_fails_in_a_call_is_dropped_and_the_call_is_answered():
    calls = []

    def build(x):
        def entry(x):
            calls.append(x)
            if len(calls) > 4:
                raise RuntimeError("the device is gone")
            return double(x)

        return entry

    model = AdaptiveModel(double, build)
    for _ in range(4):
        np.testing.assert_array_equal(model(frame(2))["twice"], 2 * frame(2))
    done = model.statistics()
    assert (done.hits, done.failures, done.fallbacks, done.entries) == (1, 1, 3, 0)


def test_a_call_that_is_at_fault_raises_and_costs_no_entry():
    def look_up(x):
        return np.arange(10)[x]

    model = AdaptiveModel(look_up, lambda x: look_up)
    good, bad = np.array([1, 2]), np.array([1, 20])
    model(good)
    with pytest.raises(IndexError):
        model(bad)
    model(good)
    assert model.statistics().hits == 2 and model.statistics().failures == 0 and model.statistics().entries == 1


def slow(x):
    for _ in range(200):
        double(x)
    return double(x)


def test_an_entry_that_is_no_faster_is_declined():
    model = AdaptiveModel(double, lambda x: slow, trial_calls=5)
    assert not model.warm(frame(100))
    np.testing.assert_array_equal(model(frame(100))["twice"], 2 * frame(100))
    done = model.statistics()
    assert (done.declined, done.builds, done.entries, done.fallbacks) == (1, 0, 0, 1)
    assert "no faster than the dynamic graph" in done.reasons[0][1]


def test_an_entry_that_is_faster_passes_its_trial():
    model = AdaptiveModel(slow, lambda x: double, trial_calls=5)
    assert model.warm(frame(100))
    assert model.statistics().builds == 1


def test_two_threads_that_ask_for_one_new_size_build_it_once():
    started, go_on = threading.Event(), threading.Event()
    built = []

    def build(x):
        built.append(x.shape)
        started.set()
        assert go_on.wait(20)
        return double

    model = AdaptiveModel(double, build, concurrent=True)
    answers = []
    first = threading.Thread(target=lambda: answers.append(model(frame(3))))
    first.start()
    assert started.wait(20)
    others = [threading.Thread(target=lambda: answers.append(model(frame(3)))) for _ in range(4)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join(20)  # they do not wait for the entry
    assert len(answers) == 4 and model.statistics().fallbacks == 4
    go_on.set()
    first.join(20)
    model(frame(3))
    assert len(answers) == 5 and built == [(3,)] and model.statistics().builds == 1
    assert all((answer["twice"] == 2 * frame(3)).all() for answer in answers)


def test_threads_hammer_a_cache_that_is_too_small():
    """Entries are evicted while others run: none may be called once closed, closed twice, or mixed up."""
    entries = Entries()
    model = AdaptiveModel(double, entries, entries=3)
    wrong = []

    def work(seed: int):
        pick = random.Random(seed)
        for _ in range(300):
            x = frame(pick.randrange(1, 9))
            try:
                if not (model(x)["twice"] == 2 * x).all():
                    wrong.append(x.shape)
            except BaseException as why:
                wrong.append(why)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    done = model.statistics()
    assert wrong == [] and done.failures == 0
    assert done.hits + done.fallbacks == 6 * 300
    assert done.entries <= 3 and done.builds - done.evictions == done.entries
    model.close()
    assert sorted(entries.built) == sorted(entries.closed)


def test_what_is_not_concurrent_is_called_by_one_thread_at_a_time():
    inside, most = [], []

    def model_of_one_thread(x):
        inside.append(1)
        most.append(len(inside))
        double(frame(2000))
        inside.pop()
        return x

    model = AdaptiveModel(model_of_one_thread)
    threads = [threading.Thread(target=lambda: [model(frame(2)) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(most) == 200 and max(most) == 1


def test_memory_stays_flat_over_2000_random_sizes():
    def build(x):
        kept = np.ones(1 << 18, np.float32)  # 1 MiB an entry: 2,000 of them would be 2 GB
        return lambda x: {"twice": 2 * x * kept[0]}

    model = AdaptiveModel(double, build, entries=8)
    pick = random.Random(0)
    for _ in range(200):
        model(frame(pick.randrange(1, 3000)))
    before = resident_bytes()
    for _ in range(2000):
        model(frame(pick.randrange(1, 3000)))
    assert model.statistics().evictions > 1000
    assert resident_bytes() - before < 32 << 20


def test_an_entry_that_does_not_say_its_size_is_weighed():
    """And what was free before, or is free after, does not count: 64 MiB in blocks of 64 KiB come and go."""

    def build(x):
        passing = [np.ones(1 << 13) for _ in range(1 << 10)]
        kept = np.ones(1 << 22)  # 32 MiB
        del passing
        return lambda x: {"twice": 2 * x * kept[0]}

    model = AdaptiveModel(double, build, size_bytes=80 << 20)
    for size in range(1, 6):
        model(frame(size))
        assert abs(model.statistics().size_bytes / (32 << 20) - min(size, 2)) < 0.4
    assert (model.statistics().entries, model.statistics().evictions) == (2, 3)


def test_closed_is_closed():
    entries = Entries()
    model = AdaptiveModel(double, entries)
    model(frame(2))
    model.close()
    model.close()
    assert entries.closed == [(2,)]
    with pytest.raises(ValueError, match="closed"):
        model(frame(2))


@dataclass
class Config:
    scale: object
    on: bool = True


def test_structures_are_kept_and_count_for_the_key():
    def nested(batch, config, *, pair):
        return {"sum": batch["ids"] + pair[1], "config": config, "none": None}

    model = AdaptiveModel(nested, lambda *args, **kwargs: nested)
    ids = np.ones(3, np.int64)
    for scale in (frame(1), frame(2)):
        found = model({"ids": ids}, Config(scale), pair=(ids, ids))
        np.testing.assert_array_equal(found["sum"], 2 * ids)
        assert found["config"].scale is scale and found["none"] is None
    assert model.statistics().builds == 2


F32, F64 = np.zeros((2, 3), np.float32), np.zeros((2, 3))
DIFFERENT = {
    "shape": ((F32,), (F32[:1],)), "dtype": ((F32,), (F64,)), "name": ({"a": F32}, {"b": F32}),
    "structure": (([F32],), ((F32,),)), "constant": ((F32, 1.0), (F32, 2.0)), "its type": ((F32, 1), (F32, True)),
    "number": ((F32,), (F32, F32)), "nested key": (({"a": F32},), ({"b": F32},)),
}  # fmt: skip


@pytest.mark.parametrize("a, b", DIFFERENT.values(), ids=DIFFERENT)
def test_what_an_entry_is_made_for_tells_calls_apart(a, b):
    keys = [key_of((), call) if isinstance(call, dict) else key_of(call, {}) for call in (a, b)]
    assert keys[0] != keys[1]


def test_the_order_of_a_dict_does_not_count_nor_do_values():
    assert key_of(({"a": F32, "b": F64},), {}) == key_of(({"b": F64 + 1, "a": F32 - 1},), {})
    assert key_of((float("nan"),), {}) == key_of((float("nan"),), {})


def test_tensors_of_torch_count_by_device_and_dtype():
    import torch

    there, here = torch.zeros(2, device="meta"), torch.zeros(2)
    assert key_of((here,), {}) != key_of((there,), {})
    assert key_of((here,), {})[0][1:] == ((2,), "float32", "cpu")
    assert key_of((here,), {}) != key_of((here.bfloat16(),), {})


def test_a_part_that_is_no_array_is_named():
    with pytest.raises(TypeError, match="'batch.mask' is a object, neither"):
        key_of((), {"batch": {"mask": object()}})


@pytest.mark.parametrize("wrong", [{"entries": 0}, {"size_bytes": 0}, {"build_after": 0}])
def test_limits_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match="1 or more"):
        AdaptiveModel(double, **wrong)
