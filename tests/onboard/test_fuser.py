"""Fuser flags against the torch that is installed: applied, missing or refused, and restored."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from edgeopt import onboard
from edgeopt.onboard import fuser
from edgeopt.runtime import tensors
from edgeopt.spec.manifest import TensorRef, TensorSpec
from tests.onboard.asking import ask, request_of
from tests.tiny import candidate, tiny_artifact


def by_flag(records: list[dict]) -> dict[str, str]:
    return {record["flag"]: record["status"] for record in records}


def state() -> dict[str, object]:
    """What the flags are now, read where torch has a getter."""
    return {
        "texpr_fuser": torch._C._jit_texpr_fuser_enabled(),
        "texpr_reductions": torch._C._jit_texpr_reductions_enabled(),
        "fuse_on_cpu": torch._C._jit_can_fuse_on_cpu(),
        "fuse_on_gpu": torch._C._jit_can_fuse_on_gpu(),
        "onednn_fusion": torch.jit.onednn_fusion_enabled(),
        "strategy": fusion_strategy(),
    }


def fusion_strategy() -> list:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        before = torch.jit.set_fusion_strategy([("STATIC", 1)])
        torch.jit.set_fusion_strategy(before)
    return before


@pytest.mark.parametrize("value", [True, False])
def test_flags_are_applied_read_back_and_restored(value):
    before = state()
    flags = {"texpr_fuser": value, "texpr_reductions": value, "onednn_fusion": value,
             "profiling_executor": value, "profiling_mode": value}  # fmt: skip
    records, undo = fuser.apply(torch, flags)
    try:
        assert by_flag(records) == dict.fromkeys(flags, "applied")
        assert [state()[flag] for flag in ("texpr_fuser", "texpr_reductions", "onednn_fusion")] == [value] * 3
    finally:
        undo()
    assert state() == before


def test_a_fusion_strategy_is_applied_and_restored():
    before = fusion_strategy()
    records, undo = fuser.apply(torch, {"fusion_strategy": [["STATIC", 3], ["DYNAMIC", 7]]})
    try:
        assert by_flag(records) == {"fusion_strategy": "applied"}
        assert fusion_strategy() == [("STATIC", 3), ("DYNAMIC", 7)]
    finally:
        undo()
    assert fusion_strategy() == before


def test_fusion_on_the_cpu_without_llvm_is_never_enabled():
    if torch._C._llvm_enabled():
        pytest.skip("this torch has LLVM")
    before = state()
    records, undo = fuser.apply(torch, {"fuse_on_cpu": True})
    assert by_flag(records) == {"fuse_on_cpu": "refused"}
    assert "no LLVM" in records[0]["message"]
    assert state() == before
    undo()
    assert state() == before


WRONG = {
    "unknown flag": ({"fuse_everything": True}, "missing", "does not know"),
    "nvfuser left": ({"nvfuser": True}, "missing", "no longer has nvfuser"),
    "no such strategy": ({"fusion_strategy": [["SOMETIMES", 2]]}, "refused", ""),
    "not a bool": ({"texpr_fuser": "yes"}, "refused", "TypeError"),
}


@pytest.mark.parametrize("flags, status, said", WRONG.values(), ids=WRONG)
def test_what_this_torch_does_not_take_is_reported(flags, status, said):
    before = state()
    records, undo = fuser.apply(torch, flags)
    undo()
    assert [record["status"] for record in records] == [status]
    assert said in records[0]["message"]
    assert state() == before


def test_the_predictor_holds_the_flags_until_it_is_closed(tmp_path):
    before = state()
    chosen = candidate("ts", "torchscript", "float.pt", flags={"texpr_fuser": not before["texpr_fuser"]})
    artifact = tiny_artifact(tmp_path, candidates=[chosen])
    with onboard.load(artifact.folder) as predictor:
        assert by_flag(predictor.flags) == {"texpr_fuser": "applied"}
        assert state()["texpr_fuser"] is not before["texpr_fuser"]
    assert state() == before


def test_a_load_that_fails_restores_the_flags(tmp_path):
    before = state()
    chosen = candidate("ts", "torchscript", "float.pt", flags={"texpr_fuser": not before["texpr_fuser"]})
    artifact = tiny_artifact(tmp_path, candidates=[chosen])
    (artifact.folder / "float.pt").write_bytes(b"no archive")
    with pytest.raises(onboard.Failure):
        onboard.load(artifact.folder)
    assert state() == before


class ConvBnRelu(torch.nn.Module):
    """Case G06: what optimize_for_inference turns into something that cannot be loaded again."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn = torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)

    def forward(self, x):
        return torch.relu(self.bn(self.conv(x)))


@pytest.fixture
def conv_artifact(tmp_path):
    """A conv artifact: 'frozen' with optimize_for_inference on the device, 'packaged' saved after it."""
    x = torch.rand(1, 3, 16, 16)
    flags = {"optimize_for_inference": True}
    artifact = tiny_artifact(
        tmp_path,
        inputs=[TensorSpec(name="x", dtype="float32", shape=(1, 3, 16, 16))],
        outputs=[TensorSpec(name="output", dtype="float32", shape=(1, 8, 14, 14))],
        candidates=[candidate("frozen", "torchscript", "float.pt", flags=flags)],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        frozen = torch.jit.freeze(torch.jit.trace(ConvBnRelu().eval(), x))
        torch.jit.save(frozen, str(artifact.folder / "float.pt"))
        torch.jit.save(torch.jit.optimize_for_inference(frozen), str(artifact.folder / "packaged.pt"))
    (artifact.folder / "x.bin").write_bytes(x.numpy().tobytes())
    return artifact, x


def test_a_module_is_optimised_for_inference_on_the_device(conv_artifact, tmp_path):
    artifact, x = conv_artifact
    result = ask_with(artifact, tmp_path)
    assert by_flag(result["flags"]) == {"optimize_for_inference": "applied"}
    got = tensors.read(tmp_path / "out", TensorRef(**result["outputs"]["x"]["output"]))
    with torch.no_grad():
        np.testing.assert_allclose(got, ConvBnRelu().eval()(x).numpy(), rtol=1e-4, atol=1e-5)


def test_a_file_that_was_saved_after_it_is_a_load_failure_and_no_crash(conv_artifact, tmp_path):
    artifact, _ = conv_artifact
    failure = ask_with(artifact, tmp_path, file="packaged.pt")["failure"]
    assert failure["kind"] in ("load", "abort")
    assert failure["message"]


def ask_with(artifact, work, **changes) -> dict:
    request = request_of(artifact, work / "out")
    request["candidates"] = [{**request["candidates"][0], **changes}]
    ref = {"file": "x.bin", "offset": 0, "dtype": "float32", "shape": [1, 3, 16, 16]}
    request["feeds"] = [{"id": "x", "inputs": {"x": ref}}]
    return ask(artifact, request, work)["candidates"]["frozen"]


def test_a_python_op_library_is_loaded_before_the_model(tmp_path):
    """Case G09: a model with a custom operator, saved here and loaded in a process that knows it only so."""
    artifact = tiny_artifact(
        tmp_path, op_libraries=[], outputs=[TensorSpec(name="output", dtype="float32", shape=("n", 4))]
    )
    code = (
        "import torch\n"
        "lib = torch.library.Library('edgeopt_test', 'DEF')\n"
        "lib.define('twice(Tensor x) -> Tensor')\n"
        "lib.impl('twice', lambda x: x * 2, 'CompositeExplicitAutograd')\n"
    )
    (artifact.folder / "ops.py").write_text(code)
    scope: dict = {}
    exec(code, scope)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(lambda x: torch.ops.edgeopt_test.twice(x), torch.zeros(2, 4))
        torch.jit.save(traced, str(artifact.folder / "float.pt"))
    request = request_of(artifact, tmp_path / "out", op_libraries=["ops.py"])
    request["candidates"] = [c for c in request["candidates"] if c["runtime"] == "torchscript"]
    result = ask(artifact, request, tmp_path)["candidates"]["torchscript-fp32"]
    assert result["failure"] is None
    got = tensors.read(tmp_path / "out", TensorRef(**result["outputs"]["reference/0"]["output"]))
    x = tensors.read(artifact.folder, artifact.manifest.reference[0].inputs["x"])
    np.testing.assert_array_equal(got, 2 * x)

    (tmp_path / "without").mkdir()
    request["op_libraries"] = []
    failure = ask(artifact, request, tmp_path / "without")["candidates"]["torchscript-fp32"]["failure"]
    assert failure["kind"] == "load" and "edgeopt_test" in failure["message"]


FLAGS = {
    "threads": ({"intra_op_threads": 1}, "applied"),
    "optimization": ({"graph_optimization": "basic"}, "applied"),
    "no such level": ({"graph_optimization": "extreme"}, "refused"),
    "an optimizer off": ({"disabled_optimizers": ["WeightBiasQuantization", "NoSuchOptimizer"]}, "applied"),
    "cpu": ({"providers": ["CPUExecutionProvider"]}, "applied"),
    "absent provider": ({"providers": ["NoSuchExecutionProvider", "CPUExecutionProvider"]}, "missing"),
    "unknown": ({"turbo": True}, "missing"),
}


@pytest.mark.parametrize("flags, status", FLAGS.values(), ids=FLAGS)
def test_session_options_are_reported_as_flags(tmp_path, flags, status):
    chosen = candidate("ort", "onnxruntime", "float.onnx", flags=flags)
    artifact = tiny_artifact(tmp_path, torchscript=False, candidates=[chosen])
    with onboard.load(artifact.folder) as predictor:
        assert by_flag(predictor.flags) == dict.fromkeys(flags, status)
        assert predictor.predict({"x": np.zeros((1, 4), np.float32)}).shape == (1, 3)


@pytest.mark.parametrize("given, status", [(None, "applied"), (2, "applied"), (1, "refused")])
def test_threads_of_the_request_win_and_that_is_said(tmp_path, given, status):
    chosen = candidate("ort", "onnxruntime", "float.onnx", flags={"intra_op_threads": given})
    artifact = tiny_artifact(tmp_path, torchscript=False, candidates=[chosen])
    with onboard.load(artifact.folder, threads=2) as predictor:
        assert by_flag(predictor.flags) == {"intra_op_threads": status}
