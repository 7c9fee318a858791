"""Softmax, argmax and top-k on arrays, signatures, graphs and scripts; and how their choices are compared."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from edgeopt.backends import equality, onnx_export
from edgeopt.capture import script
from edgeopt.device import judge
from edgeopt.errors import LoweringError, ProjectError
from edgeopt.onboard.structure import restore
from edgeopt.pipeline import heads as pipeline_heads
from edgeopt.program import Call, ScriptGraph, graph, heads
from edgeopt.runtime import compare
from edgeopt.spec.camera import Output
from edgeopt.spec.limits import Limits
from edgeopt.spec.manifest import Agreement, Candidate, Tolerance
from edgeopt.spec.report import CandidateResult
from tests.passes.support import program

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
HEADS = [
    {"y0": Output(head="softmax")},
    {"y0": Output(head="argmax")},
    {"y0": Output(head="topk", k=2, axis=-1), "y1": Output(head="argmax", axis=2)},
    {"y1": Output(head="softmax", axis=-1)},
]


class Two(nn.Module):
    """[N, 5] -> scores [N, 5] and a map [N, 2, 5]."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 5)

    def forward(self, x):
        y = self.layer(x)
        return y, torch.stack([y, -2 * y], 1)


@pytest.fixture(scope="module")
def given():
    found = program(Two(), ("N", 5))
    items = [{"kind": "tensor", "index": i} for i in range(2)]
    named = [spec.model_copy(update={"shape": ("N", *spec.shape[1:])}) for spec in found.signature.outputs]
    signature = dataclasses.replace(
        found.signature, outputs=tuple(named), output_structure={"kind": "tuple", "items": items}
    )
    return dataclasses.replace(found, signature=signature)


def on(program_, wanted):
    return pipeline_heads.on(program_, SimpleNamespace(outputs=wanted))


def inputs(count: int = 6) -> dict[str, np.ndarray]:
    return {"x0": np.random.default_rng(0).normal(0, 1, (count, 5)).astype(np.float32)}


def assert_same(found: dict, wanted: dict) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        np.testing.assert_allclose(found[name], value, atol=1e-5)


@pytest.mark.parametrize("wanted", HEADS)
def test_graph_script_and_onnx_give_what_the_arrays_say(given, wanted, tmp_path):
    x = inputs()
    answers = heads.answers(graph.run(given, x), wanted)
    headed = on(given, wanted)
    assert_same(graph.run(headed, x), answers)
    assert list(headed.reference[0].outputs) == list(headed.signature.output_names) == list(answers)
    for spec in headed.signature.outputs:
        shape = tuple(6 if size == "N" else size for size in spec.shape)
        assert (answers[spec.name].dtype.name, answers[spec.name].shape) == (spec.dtype, shape)
    file = onnx_export.write(headed, tmp_path, opset_max=17)
    session = onnxruntime.InferenceSession(str(tmp_path / file.name), providers=["CPUExecutionProvider"])
    assert_same(dict(zip(headed.signature.output_names, session.run(None, x), strict=True)), answers)

    traced = torch.jit.freeze(torch.jit.trace(Two().eval(), torch.zeros(2, 5)).eval())
    scripted = on(ScriptGraph(signature=given.signature, reference=given.reference, module=traced), wanted)
    assert_same(graph.run_script(scripted, x), answers)


def test_a_lone_tensor_of_a_script_gets_a_head():
    lone = torch.jit.freeze(torch.jit.trace(nn.Linear(5, 3).eval(), torch.zeros(2, 5)).eval())
    signature = SimpleNamespace(inputs=(None,), outputs=(None,))
    module = script.extended(lone, signature, heads.source(("y0",), {"y0": Output(head="argmax")}))
    x = torch.randn(4, 5)
    assert torch.equal(module(x)[0], lone(x).argmax(1).to(torch.int32))


def test_of_equal_values_the_first_counts():
    value = {"y": np.float32([[1, 3, 3, 0], [2, 2, 2, 2]])}
    assert heads.answers(value, {"y": Output(head="argmax")})["y"].tolist() == [1, 0]
    top = heads.answers(value, {"y": Output(head="topk", k=3)})
    assert top["y.indices"].tolist() == [[1, 2, 0], [0, 1, 2]]
    assert top["y.values"].tolist() == [[3, 3, 1], [2, 2, 2]]


def test_softmax_of_large_values_is_finite():
    found = heads.answers({"y": np.float32([[1000, 1001, -1e30]])}, {"y": Output(head="softmax")})["y"]
    np.testing.assert_allclose(found, [[0.26894142, 0.73105858, 0]], atol=1e-7)


def test_the_user_s_structure_holds_values_and_indices(given):
    headed = on(given, HEADS[2])
    values = ["v", "i", "map"]
    assert restore(headed.signature.output_structure, values) == ({"values": "v", "indices": "i"}, "map")


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"y2": Output(head="argmax")}, "no output .y2."),
        ({"y0": Output(head="argmax", axis=2)}, "no axis 2"),
        ({"y0": Output(head="topk", k=6)}, "5 classes"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_its_key(given, wanted, said):
    with pytest.raises(ProjectError, match=said) as caught:
        on(given, wanted)
    assert next(iter(wanted)) in caught.value.where


def test_integers_have_no_head():
    class Chosen(nn.Module):
        def forward(self, x):
            return x.argmax(1)

    with pytest.raises(ProjectError, match="int64"):
        on(program(Chosen(), ("N", 5)), {"y0": Output(head="softmax")})


def test_choices_agree_in_any_order_of_a_top_k():
    reference, value = np.int32([[1, 2, 3], [4, 5, 6]]), np.int32([[2, 1, 3], [4, 5, 9]])
    assert compare.agreement([reference], [value]) == pytest.approx(3 / 6)
    assert compare.agreement([reference], [value], axis=1) == pytest.approx(5 / 6)
    assert compare.agreement([np.int32([1, 2])], [np.int32([1, 3])]) == 0.5


def test_files_may_differ_in_a_choice_between_near_values_and_in_no_other_integer():
    reference = {"y": np.zeros(1000, np.int32)}
    found = {"y": np.zeros(1000, np.int32)}
    found["y"][:5] = 1
    equality.require(reference, found, equality.FLOAT, words="here", file="f", decisions={"y": None})
    with pytest.raises(LoweringError, match="5 integers differ"):
        equality.require(reference, found, equality.FLOAT, words="here", file="f")
    found["y"][:50] = 1
    with pytest.raises(LoweringError, match="only 95.0% agree"):
        equality.require(reference, found, equality.FLOAT, words="here", file="f", decisions={"y": None})


def test_what_a_program_that_rounds_chooses_is_left_to_the_gates():
    reference, found = {"y": np.arange(10, dtype=np.int32)}, {"y": np.zeros(10, np.int32)}
    rounds = Tolerance(sqnr_db=30)
    equality.require(reference, found, rounds, words="here", file="f", decisions={"y": None})
    with pytest.raises(LoweringError, match="only 10.0% agree"):
        equality.require(reference, found, rounds, words="here", file="f")
    for other in (found["y"][:5], found["y"].astype(np.int64)):
        with pytest.raises(LoweringError, match="instead of"):
            equality.require(reference, {"y": other}, rounds, words="here", file="f", decisions={"y": None})


@pytest.mark.parametrize(("share", "verdict"), [(1.0, "pass"), (0.99, "pass"), (0.98, "fail")])
def test_the_gate_judges_choices_by_agreement(share, verdict):
    result = CandidateResult(name="c", runtime="onnxruntime", precision="fp32", top1_agreement=share)
    tolerance = Tolerance(agreement={"y": Agreement(least=0.99)})
    checks = judge.accuracy(result, tolerance, {}, Limits())
    assert [check.name for check in checks] == ["reference agreement", "proxy top1_agreement"]
    assert judge.verdict(checks) == verdict


def test_measured_choices_have_no_error_but_an_agreement(tmp_path):
    from edgeopt.device import measured
    from edgeopt.runtime.tensors import PackWriter
    from edgeopt.spec.manifest import Feed

    calls = [{"p": np.float32([[0.5, 0.25]]), "y": np.int32([0])}, {"p": np.float32([[0.5, 1]]), "y": np.int32([1])}]
    with PackWriter(tmp_path / "r.bin", "r.bin") as pack:
        feeds = tuple(Feed(inputs={}, outputs={n: pack.add(a) for n, a in call.items()}) for call in calls)
    found = [calls[0], {"p": np.float32([[0.5, 1]]), "y": np.int32([0])}]
    response = SimpleNamespace(outputs=lambda name, feed: found[int(feed.split("/")[1])])
    candidate = Candidate(
        name="c", runtime="onnxruntime", precision="fp32", file="f.onnx",
        tolerance=Tolerance(max_abs=1e-3, agreement={"y": Agreement(least=0.99)}),
    )  # fmt: skip
    asked = measured.Questions(tmp_path, feeds, (), None, classifier=True)
    closeness = measured._closeness(candidate, response, asked)
    assert closeness == {"sqnr_db": float("inf"), "max_abs_error": 0.0, "top1_agreement": 0.5}


def test_calls_keep_their_inputs():
    call = Call(inputs(2), {"y": np.float32([[1, 2]])})
    (headed,) = heads.calls((call,), {"y": Output(head="argmax")})
    assert headed.inputs is call.inputs
    assert headed.outputs["y"].tolist() == [1]
