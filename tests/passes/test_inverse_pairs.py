"""Operators that undo each other go, and those that only nearly do stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.passes.support import assert_equal, optimized, program, targets
from tests.passes.test_identities import between, model

GO = {
    "transposes": lambda s, x: x.transpose(1, 2).transpose(2, 1),
    "named otherwise": lambda s, x: x.swapaxes(1, 2).mT.movedim(1, 0).movedim(0, 1),
    "permutations": lambda s, x: x.permute(1, 2, 0).permute(2, 0, 1),
    "three of them": lambda s, x: x.permute(1, 2, 0).permute(1, 2, 0).permute(1, 2, 0),
    "no permutation": lambda s, x: x.permute(0, 1, 2),
    "views": lambda s, x: x.view(-1).view(-1, 4, 6),
    "flatten, unflatten": lambda s, x: x.flatten(1).unflatten(1, (4, 6)),
    "unsqueeze, squeeze": lambda s, x: x.unsqueeze(1).squeeze(1),
    "squeeze of what was added": lambda s, x: x[None, :, None].squeeze(2).squeeze(0),
    "to double and back": lambda s, x: x.double().float(),
    "chunks concatenated": lambda s, x: torch.cat(x.chunk(2, 1), 1),
    "uneven chunks": lambda s, x: torch.cat(x.split(4, -1), 2),
    "sizes": lambda s, x: torch.cat(x.split([1, 3], 1), 1),
    "unbound and stacked": lambda s, x: torch.stack(x.unbind(2), 2),
    "slices": lambda s, x: torch.cat([x[:, :1], x[:, 1:3], x[:, 3:]], 1),
    "pad and crop": lambda s, x: F.pad(F.pad(x, (1, 2)), (-1, -2)),
    "pad and slice": lambda s, x: F.pad(x, (1, 2))[..., 1:-2],
    "pad and slice to a number": lambda s, x: F.pad(x, (0, 0, 2, 1), value=5.0)[:, 2:6],
    "pad after only": lambda s, x: F.pad(x, (0, 3), mode="replicate")[..., :6],
    "reflected and cut": lambda s, x: F.pad(x, (2, 0), mode="reflect")[..., 2:],
    "flips": lambda s, x: x.flip(1, 2).flip(-1, 1),
    "copies": lambda s, x: x.clone().contiguous().clone(memory_format=torch.contiguous_format),
    "a copy for a view": lambda s, x: x.transpose(1, 2).contiguous().view(-1, 24).view(-1, 6, 4).mT,
}  # fmt: skip


@pytest.mark.parametrize("kind", GO)
def test_what_is_undone_goes(kind):
    given = program(model(between(GO[kind])), ("N", 4, 6))
    result, records = optimized(given)
    assert records["inverse_pairs"].status == "applied", records["inverse_pairs"]
    left = ["aten.transpose.int", "aten.contiguous.default", "aten.mT.default"] if kind == "a copy for a view" else []
    assert targets(result) == ["aten.cos.default", *left, "aten.sin.default"]
    assert_equal(result, given, atol=0)


ONE = {
    "permutations": (lambda x: x.permute(1, 2, 0).transpose(0, 1), ["aten.transpose.int"]),
    "a transpose is left": (lambda x: x.permute(2, 0, 1).permute(0, 2, 1).transpose(0, 1), ["aten.permute.default"]),
    "reshapes": (lambda x: x.view(-1, 2, 2, 6).flatten(1).view(-1, 3, 8), ["aten.reshape.default"]),
    "flatten last": (lambda x: x.unsqueeze(1).flatten(1), ["aten.reshape.default"]),
    "one dynamic size and a product": (
        lambda x: x.reshape(-1, 12, 2).flatten(1).unsqueeze(0).squeeze(0) * 1, ["aten.reshape.default"],
    ),
    "a reshape of a transposed copy": (
        lambda x: x.mT.contiguous().view(-1, 24), ["aten.mT.default", "aten.reshape.default"],
    ),
    "widened first": (lambda x: x.half().float().double(), ["aten.to.dtype", "aten.to.dtype"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", ONE)
def test_a_chain_becomes_one(kind):
    work, left = ONE[kind]
    given = program(model(between(lambda self, x: work(x))), ("N", 4, 6))
    result, _ = optimized(given)
    assert targets(result)[1:-1] == left
    assert_equal(result, given, atol=0)


STAY = {
    "half and back": (lambda x: x.half().float(), "float16 does not hold every float32"),
    "bfloat16 and back": (lambda x: x.bfloat16().float(), "bfloat16 does not hold every float32"),
    "integers and back": (lambda x: x.int().float(), "int32 does not hold every float32"),
    "long and back": (lambda x: (x * 1e9).long().double().long(), "float64 does not hold every int64"),
    "int and back": (lambda x: (x * 1e8).int().float().int(), "float32 does not hold every int32"),
    "bool and back": (lambda x: (x * 4).int().bool().int(), "bool does not hold every int32"),
    "signed and unsigned": (lambda x: (x * 9).to(torch.int8).to(torch.uint8).to(torch.int8), "uint8 does not hold"),
    "a permutation read twice": (lambda x: (y := x.permute(1, 2, 0)).permute(1, 2, 0).sum() + y.sum(), "elsewhere"),
    "a view read twice": (lambda x: (y := x.view(-1, 24)).view(-1, 12).sum() + y.mean(), "elsewhere"),
    "two dynamic sizes": (
        lambda x: (x[:, None] + x).unsqueeze(0).flatten(3),
        "two of its sizes are dynamic, and it does not name them",
    ),
    "another layout": (
        lambda x: x.view(-1, 2, 2, 6).contiguous(memory_format=torch.channels_last),
        "channels_last",
    ),
    "strides that are read": (
        lambda x: x.mT.contiguous().as_strided((2, 2), (6, 1)).sum() + x.sum(),
        "may need its strides",
    ),
}


@pytest.mark.parametrize("kind", STAY)
def test_what_is_not_undone_stays(kind):
    work, reason = STAY[kind]
    given = program(model(between(lambda self, x: work(x))), ("N", 4, 6))
    result, records = optimized(given)
    assert any(reason in why for why in records["inverse_pairs"].declined), records["inverse_pairs"]
    assert_equal(result, given, atol=1e-6)


LEFT = {
    "another order of parts": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "a part left out": lambda x: torch.cat(x.chunk(4, 1)[:3], 1),
    "another axis": lambda x: torch.cat(x.chunk(2, 1), 2),
    "another axis for the stack": lambda x: torch.stack(x.unbind(2), 1),
    "a gap": lambda x: torch.cat([x[:, :1], x[:, 2:]], 1),
    "an overlap": lambda x: torch.cat([x[:, :2], x[:, 1:]], 1),
    "every second": lambda x: torch.cat([x[:, ::2], x[:, 1::2]], 1),
    "less is cut off": lambda x: F.pad(x, (2, 2))[..., 1:-2],
    "another end is cut off": lambda x: F.pad(x, (1, 2))[..., 2:-1],
    "another axis is cut": lambda x: F.pad(x, (1, 1))[:, 1:-1],
    "cropped, then padded": lambda x: F.pad(F.pad(x, (-1, -1)), (1, 1)),
    "another flip": lambda x: x.flip(1).flip(2),
    "permutations that do not end where they began": lambda x: x.permute(1, 2, 0).permute(1, 2, 0),
    "narrower than it was": lambda x: x.double().half().float(),
}
SHORTER = {"permutations that do not end where they began", "narrower than it was"}  # a chain of them is one


@pytest.mark.parametrize("kind", LEFT)
def test_what_nearly_undoes_is_computed(kind):
    given = program(model(between(lambda self, x: LEFT[kind](x))), ("N", 4, 6))
    result, records = optimized(given)
    assert len(targets(result)) > 2
    assert records["inverse_pairs"].changed == (1 if kind in SHORTER else 0)
    assert_equal(result, given, atol=0)


def test_the_named_sizes_of_two_dynamic_axes_are_kept():
    given = program(model(between(lambda s, x: x.view(-1).view(x.shape[0] * 2, 2, -1))), ("N", 4, 6))
    result, records = optimized(given)
    assert records["inverse_pairs"].changed == 1
    assert_equal(result, given, atol=0)


def writes_to_the_copy(self, x):
    y = torch.cos(x)
    z = y.clone()
    z[:, 0] = 1
    return y, z


def writes_to_the_original(self, x):
    y = torch.cos(x)
    z = y.mT.contiguous()
    y.add_(1)
    y[0].mul_(2)
    return y, z


def writes_through_two_transposes(self, x):
    y = torch.cos(x)
    y.mT.mT.mul_(2)
    return y


@pytest.mark.parametrize("forward", [writes_to_the_copy, writes_to_the_original, writes_through_two_transposes])
def test_a_copy_that_is_written_to_stays_apart(forward):
    given = program(model(forward), ("N", 4, 6))
    result, records = optimized(given, out_of_place=False)
    kept = {"aten.clone.default", "aten.contiguous.default", "aten.mT.default"}
    assert [t for t in targets(result) if t in kept] == [t for t in targets(given) if t in kept]
    assert any("writes" in why for why in records["inverse_pairs"].declined)
    assert_equal(result, given, atol=0)


def test_what_is_returned_is_not_the_callers_input_nor_a_weight():
    def forward(self, x):
        return x.clone(), x.double().float(), torch.cat(x.chunk(2, 1), 1), self.table.clone()

    given = program(model(forward, table=torch.ones(3)), ("N", 4, 6))
    result, records = optimized(given, fold_constants=False)
    assert sum("what the caller holds" in why for why in records["inverse_pairs"].declined) == 4
    x = torch.ones(2, 4, 6)
    with torch.no_grad():
        for value in result.module(x):
            value.zero_()
        assert torch.equal(x, torch.ones(2, 4, 6)) and torch.equal(result.module(x)[3], torch.ones(3))
