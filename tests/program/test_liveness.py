"""Peak activation memory by liveness, against what a run of the graph really holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from edgeopt.program import graph
from edgeopt.program.liveness import peak, peak_activation_bytes
from edgeopt.program.walk import walk
from tests.passes.support import optimized, program
from tests.program import networks

TOLERANCE = 0.01  # of the bytes: what kernels return besides, as attention's log-sums; with torch 2.13 it was 0


class Held(TorchDispatchMode):
    """The largest sum of bytes of live storages that are no weights, seen after each operator."""

    def __init__(self, weights, inputs):
        super().__init__()
        self._weights = {t.untyped_storage()._cdata for t in weights}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        for tensor in inputs:
            self._see(tensor)

    def _see(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self._weights and storage._cdata not in self._live:
            self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self._live = {key: held for key, held in self._live.items() if not held[0].expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor)
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result


def measured(given, sizes) -> int:
    module = given.module
    inputs = graph.to_tensors(given.signature, graph.synthetic(given.signature, sizes, 0))
    with torch.no_grad(), Held([*module.parameters(), *module.buffers()], inputs) as held:
        module(*inputs)
    return held.peak


@pytest.mark.parametrize("make", [networks.residual, networks.block, networks.views, networks.branches])
def test_the_peak_is_what_a_run_holds_before_and_after_optimize(make):
    given = make()
    for each in (given, optimized(given)[0]):
        for size in (1, 3, 8):
            counted = peak_activation_bytes(each, {"N": size})
            assert counted == pytest.approx(measured(each, {"N": size}), rel=TOLERANCE)


def test_without_sizes_the_axes_have_their_opt():
    given = networks.residual()
    assert peak_activation_bytes(given) == peak_activation_bytes(given, {"N": 3})
    assert peak_activation_bytes(given) != peak_activation_bytes(given, {"N": 8})


def test_a_view_shares_memory_and_a_copy_does_not():
    class Shared(nn.Module):
        def forward(self, x):
            return (x + 1).transpose(1, 2).unsqueeze(0).sum()

    class Copied(nn.Module):
        def forward(self, x):
            return (x + 1).transpose(1, 2).contiguous().sum()

    x = 5 * 7 * 4 * 3  # of N=3, in bytes
    assert peak_activation_bytes(program(Shared(), ("N", 5, 7))) == 2 * x + 4
    assert peak_activation_bytes(program(Copied(), ("N", 5, 7))) == 3 * x


def test_a_part_of_a_tensor_keeps_the_whole_alive():
    class Kept(nn.Module):
        def forward(self, x):
            first = (x * 2)[:, :1]  # a view of all of x * 2
            for _ in range(3):
                x = x + 1
            return first + x

    x = 6 * 4 * 3
    found = peak(walk(program(Kept(), ("N", 6))))
    assert found.bytes == 4 * x  # the input, x * 2, and two steps of the chain


def test_in_place_work_takes_no_memory_of_its_own():
    class InPlace(nn.Module):
        def forward(self, x):
            return (x + 1).relu_().mul_(2)

    x = 5 * 4 * 3
    assert peak_activation_bytes(program(InPlace(), ("N", 5))) == 2 * x


def test_an_output_lives_to_the_end_and_an_input_all_the_time():
    class Early(nn.Module):
        def forward(self, x):
            early = x + 1
            late = (early * 2).sum()
            return early, late

    found = peak(walk(program(Early(), ("N", 100))))
    x = 100 * 4 * 3
    assert found.live_bytes[-1] == 3 * x + 4
