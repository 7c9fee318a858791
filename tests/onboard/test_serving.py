"""`load` of an artifact that declares sizes: they are ready, others are padded, built or left to the dynamic graph."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import edgeopt
from edgeopt import onboard
from edgeopt.onboard import ort, serving
from edgeopt.onboard.padding import Padding
from edgeopt.spec.adaptive import Adaptive
from edgeopt.spec.manifest import Axis, TensorSpec
from tests.tiny import candidate, expected, tiny_artifact

CANDIDATES = ["onnxruntime-fp32", "openvino-fp32", "torchscript-fp32"]
READY = ({"n": 2}, {"n": 5})


def x_of(size: int) -> np.ndarray:
    return np.random.default_rng(size).normal(size=(size, 4)).astype(np.float32)


@pytest.fixture
def every_entry_is_kept(monkeypatch):
    """On a model this small no entry is worth it; which are is another test's question."""
    monkeypatch.setattr(serving, "TRIAL_CALLS", 0)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    candidates = [
        candidate("onnxruntime-fp32", "onnxruntime", "float.onnx", opset=13),
        candidate("openvino-fp32", "openvino", "float.onnx", opset=13),
        candidate("torchscript-fp32", "torchscript", "float.pt"),
    ]
    declared = Adaptive(specialise=READY, build_after=2, entries=3)
    return tiny_artifact(tmp_path_factory.mktemp("artifact"), adaptive=declared, candidates=candidates)


@pytest.mark.usefixtures("every_entry_is_kept")
@pytest.mark.parametrize("candidate", CANDIDATES)
def test_declared_sizes_are_ready_before_the_first_call(artifact, candidate):
    with onboard.load(artifact.folder, candidate) as predictor:
        before = predictor.statistics()
        assert (before.builds, before.entries, before.hits, before.fallbacks) == (2, 2, 0, 0)
        for size in (2, 5, 2):
            np.testing.assert_allclose(predictor.predict({"x": x_of(size)}), expected(x_of(size)), rtol=1e-5, atol=1e-6)
        assert predictor.statistics().hits == 3 and predictor.statistics().fallbacks == 0


@pytest.mark.usefixtures("every_entry_is_kept")
@pytest.mark.parametrize("candidate", CANDIDATES)
def test_every_size_gives_the_models_answer_whoever_serves_it(artifact, candidate):
    with onboard.load(artifact.folder, candidate) as predictor:
        for size in (1, 2, 3, 4, 5, 6, 7, 8) * 3:
            np.testing.assert_allclose(predictor.predict({"x": x_of(size)}), expected(x_of(size)), rtol=1e-5, atol=1e-6)
        done = predictor.statistics()
    assert done.hits + done.fallbacks == 24 and done.failures == 0
    assert done.builds > 2 and done.evictions == done.builds - 3  # room for one beside the two that were declared


@pytest.mark.usefixtures("every_entry_is_kept")
def test_threads_share_a_predictor(artifact):
    with edgeopt.load(artifact.folder, "onnxruntime-fp32") as predictor:
        wrong = []

        def work(seed):
            rng = np.random.default_rng(seed)
            for size in rng.integers(1, 9, 60):
                x = x_of(int(size))
                if not np.allclose(predictor.predict({"x": x}), expected(x), rtol=1e-4, atol=1e-5):
                    wrong.append(size)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        done = predictor.statistics()
    assert wrong == [] and done.hits + done.fallbacks == 240


def test_an_entry_is_kept_only_where_it_is_faster(artifact):
    """Whichever way the trials end, every size that was declared was tried and is accounted for."""
    with onboard.load(artifact.folder, "onnxruntime-fp32") as predictor:
        done = predictor.statistics()
    assert done.builds + done.declined == 2 and done.failures == 0 and len(done.reasons) == done.declined


def test_an_artifact_that_declares_nothing_is_called_as_it_is(tmp_path):
    with onboard.load(tiny_artifact(tmp_path, torchscript=False).folder) as predictor:
        assert predictor.statistics() is None


@pytest.mark.usefixtures("every_entry_is_kept")
def test_a_session_that_cannot_be_made_for_a_size_costs_the_entry_only(artifact, monkeypatch):
    def refuse(self, sizes):
        raise RuntimeError("out of patience")

    monkeypatch.setattr(ort.Program, "at", refuse)
    with onboard.load(artifact.folder, "onnxruntime-fp32") as predictor:
        np.testing.assert_allclose(predictor.predict({"x": x_of(2)}), expected(x_of(2)), rtol=1e-5, atol=1e-6)
        done = predictor.statistics()
    assert (done.failures, done.fallbacks, done.entries) == (2, 1, 0)
    assert done.reasons[0] == ("0 float32 (2, 4)", "it cannot be made: RuntimeError: out of patience")


def test_a_declared_size_that_the_model_does_not_run_at_fails_the_load(tmp_path):
    """Before the first frame, and not at it."""
    value = helper.make_tensor_value_info
    shape = helper.make_tensor("shape", TensorProto.INT64, [2], [-1, 8])
    graph = helper.make_graph(
        [helper.make_node("Reshape", ["x", "shape"], ["output"])], "even",
        [value("x", TensorProto.FLOAT, ["n", 4])], [value("output", TensorProto.FLOAT, ["m", 8])], [shape],
    )  # fmt: skip
    outputs = (TensorSpec(name="output", dtype="float32", shape=("m", 8)),)
    artifact = tiny_artifact(tmp_path, torchscript=False, outputs=outputs, adaptive=Adaptive(specialise=({"n": 3},)))
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)]), artifact.folder / "float.onnx")
    with pytest.raises(onboard.Failure, match="Reshape"):
        onboard.load(artifact.folder)


@pytest.mark.parametrize(
    "name, said", [("onnxruntime-fp32", "Got: 2 Expected: 3"), ("openvino-fp32", "shape.compatible")]
)
def test_a_session_for_one_size_refuses_others(name, said, artifact):
    """It really is of one size, and no dynamic one by another name."""
    with onboard.load(artifact.folder, name) as predictor:
        fixed = predictor._program.at({"n": 3})
        np.testing.assert_allclose(fixed.call([x_of(3)])[0], expected(x_of(3)), rtol=1e-5, atol=1e-6)
        with pytest.raises(Exception, match=said):
            fixed.call([x_of(2)])


INPUTS = [
    {"name": "ids", "dtype": "int64", "shape": ["n", "t"]},
    {"name": "mel", "dtype": "float32", "shape": ["t", 3]},
]
OUTPUTS = [
    {"name": "all", "dtype": "float32", "shape": ["n", "t"]},
    {"name": "one", "dtype": "float32", "shape": ["n", 2]},
]
AXES = {"n": {"min": 1, "opt": 1, "max": 4}, "t": {"min": 1, "opt": 8, "max": 20}}


def given(n: int, t: int):
    return np.ones((n, t), np.int64), np.ones((t, 3), np.float32)


@pytest.mark.parametrize(
    "size, multiples, ready, to",
    [
        ((1, 13), {"t": 8}, [], (1, 16)),
        ((1, 17), {"t": 8}, [], (1, 20)),  # never beyond the axis
        ((1, 16), {"t": 8}, [], None),
        ((1, 2), {"t": 8}, [], None),  # four times the work
        ((1, 12), {"t": 8}, [{"n": 1, "t": 15}], (1, 15)),  # what is ready is preferred
        ((2, 12), {"t": 8}, [{"n": 1, "t": 15}], (2, 16)),  # n may not be padded
        ((3, 16), {"t": 8, "n": 2}, [{"n": 4, "t": 17}, {"n": 4, "t": 20}], (4, 17)),
        ((1, 15), {"t": 8}, [{"n": 1, "t": 15}], None),
    ],
)
def test_a_size_is_padded_to_the_nearest_bucket(size, multiples, ready, to):
    padded = Padding(INPUTS, OUTPUTS, AXES, multiples, ready)(*given(*size))
    if to is None:
        assert padded is None
        return
    (ids, mel), named, undo = padded
    assert ids.shape == to and mel.shape == (to[1], 3) and named == {}
    assert ids.sum() == size[0] * size[1] and ids[: size[0], : size[1]].all()
    whole, one = undo([np.arange(to[0] * to[1], dtype=np.float32).reshape(to), np.ones((to[0], 2), np.float32)])
    assert whole.shape == size and one.shape == (size[0], 2)
    assert whole[-1, -1] == (size[0] - 1) * to[1] + size[1] - 1


@pytest.mark.usefixtures("every_entry_is_kept")
def test_other_sizes_are_padded_to_one_that_is_ready(tmp_path):
    plan = Adaptive(specialise=({"n": 6},), pad={"n": 2})
    axes = {"n": Axis(min=1, opt=2, max=8)}
    artifact = tiny_artifact(tmp_path, torchscript=False, adaptive=plan, axes=axes)
    with onboard.load(artifact.folder) as predictor:
        for size in (5, 6, 7, 1):
            np.testing.assert_allclose(predictor.predict({"x": x_of(size)}), expected(x_of(size)), rtol=1e-5, atol=1e-6)
        done = predictor.statistics()
    assert (done.hits, done.padded, done.fallbacks) == (2, 1, 2)  # 7 goes to 8, which is not ready; 1 would double


def test_an_artifact_of_onnxruntime_is_loaded_and_called_without_torch(artifact):
    code = (
        "import sys, edgeopt.runtime, numpy\n"
        f"with edgeopt.runtime.load({str(artifact.folder)!r}, 'onnxruntime-fp32') as predictor:\n"
        "    predictor.predict({'x': numpy.zeros((2, 4), numpy.float32)})\n"
        "    assert predictor.statistics().hits + predictor.statistics().fallbacks == 1\n"
        "edgeopt.runtime.AdaptiveModel\n"
        "heavy = {'torch', 'paramiko', 'onnx', 'openvino', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
