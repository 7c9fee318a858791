"""Odd models: captured and right in the ONNX and TorchScript files too, or refused with the reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from edgeopt.backends import onnx_export, torchscript
from edgeopt.errors import CaptureError, LoweringError, ModelError, ProjectError
from edgeopt.onboard import ort
from edgeopt.onboard.torchscript import open_program as open_torchscript
from edgeopt.program import Program
from tests.capture.support import assert_as_eager, assert_same, captured, eager

ROW = {"x": {"shape": ["N", 3], "values": [-1.0, 1.0]}}
AXES = {"N": {"min": 1, "opt": 3, "max": 6}}


def rows(count: int = 4, **more) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).uniform(-1, 1, (count, 3)).astype(np.float32), **more}


def model(returned: str, *, init: str = "pass", args: str = "x", before: str = "") -> str:
    return f"""
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            {init}

        def forward(self, {args}):
            {before or "pass"}
            return {returned}
    """


def assert_files_as_eager(program: Program, folder: Path, *calls: dict[str, np.ndarray]) -> None:
    """The program, its ONNX file under onnxruntime and its TorchScript file give what the user's model does."""
    assert calls
    assert_as_eager(program, folder, *calls)
    for opened in (opened_onnx(program, folder), opened_torchscript(program, folder)):
        for inputs in calls:
            given = [np.array(inputs[name]) for name in program.signature.input_names]
            assert_same(opened.call(given), eager(folder, inputs))


def opened_onnx(program: Program, folder: Path):
    onnx_export.write(program, folder, opset_max=17)
    ins, outs = specs(program)
    return ort.open_program(str(folder), {"file": "float.onnx"}, ins, outs, [], None)


def opened_torchscript(program: Program, folder: Path):
    torchscript.save(program, folder / "float.pt")
    ins, outs = specs(program)
    return open_torchscript(str(folder), {"file": "float.pt"}, ins, outs, [], None)


def run_torchscript(program: Program, arrays: list[np.ndarray], folder: Path) -> list[np.ndarray]:
    return opened_torchscript(program, folder).call([np.asarray(a) for a in arrays])


def specs(program: Program) -> tuple[list[dict], list[dict]]:
    given = program.signature
    return [spec.model_dump() for spec in given.inputs], [spec.model_dump() for spec in given.outputs]


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Initializing zero-element:UserWarning")

WRITES_TO_INPUT = {
    "add_": "x.add_(1)",
    "a slice": "x[:, 0] = 0",
    "a view": "x.view(-1).mul_(2)",
    "a transposed view": "x.t()[0].fill_(3)",
    "out=": "torch.mul(x, 2, out=x)",
    "an inplace activation": "F.relu(x, inplace=True)",
    "an index": "x.index_put_((torch.tensor([0]),), torch.zeros(3))",
    "through a list": "held = [x]; held[0] += 1",
}


@pytest.mark.parametrize("write", WRITES_TO_INPUT)
def test_a_model_that_writes_to_its_input(tmp_path, write):
    program = captured(tmp_path, model("x * 2", before=WRITES_TO_INPUT[write]), ROW, AXES)
    inputs = rows()
    before = inputs["x"].copy()
    assert_as_eager(program, tmp_path, inputs)
    np.testing.assert_array_equal(inputs["x"], before)
    assert any("writes to its inputs" in note for note in program.notes)


def test_an_input_that_is_written_and_not_returned_and_one_written_from_another(tmp_path):
    code = model("y, a + 1", args="x, a", before="y = x + 1; x.zero_(); a.copy_(y)")
    inputs = {**ROW, "a": ROW["x"]}
    assert_files_as_eager(captured(tmp_path, code, inputs, AXES), tmp_path, rows(a=np.ones((4, 3), np.float32)))


def test_writes_in_every_form(tmp_path):
    """C02: each form on a copy of its own, with the results beside each other."""
    writes = [
        "a[:, 1] = (torch.arange(x.shape[0]) < 2).float()", "b.masked_fill_(b > 0, 7.0)", "c[:, [0, 1]] = c[:, [1, 0]]",
        "d[..., None][:, :, 0] = 1", "e[x.shape[0] - 1] += x[0]", "f.view(-1)[0] = 9", "g[g < 0] = 0.5",
        "h.scatter_(1, torch.zeros(x.shape[0], 1, dtype=torch.int64), 5.0)", "i.copy_(3 * x)", "j[0].add_(1)",
        "torch.mul(x, 2, out=k)", "m.clamp_(min=0).mul_(3)",
    ]  # fmt: skip
    names = [write.split("out=k")[0][0] if "out=k" not in write else "k" for write in writes]
    body = "; ".join([*(f"{name} = x.clone()" for name in names), *writes])
    program = captured(tmp_path, model(", ".join(names), before=body), ROW, AXES)
    assert_files_as_eager(program, tmp_path, rows(5), rows(2))


def test_writes_to_views_of_views(tmp_path):
    """The program and TorchScript are right; where ONNX would not be, it is refused by comparison."""
    code = model("y", before="y = x * 1; z = y[1:][:, 1:]; z += 10; w = z.t(); w[0] = 0; y.unbind(1)[0].mul_(5)")
    program = captured(tmp_path, code, ROW, AXES)
    assert_as_eager(program, tmp_path, rows(5), rows(2))
    assert_same(run_torchscript(program, list(rows().values()), tmp_path), eager(tmp_path, rows()))
    try:
        assert_same(opened_onnx(program, tmp_path).call(list(rows().values())), eager(tmp_path, rows()))
    except LoweringError as refused:
        assert "other values" in refused.what or "cannot" in refused.what


def test_shared_tied_and_oddly_laid_out_weights(tmp_path):
    init = "; ".join([
        "self.embedding = nn.Embedding(10, 3)", "self.head = nn.Linear(3, 10, bias=False)",
        "self.head.weight = self.embedding.weight", "self.a = nn.Linear(3, 3)", "self.b = self.a",
        "self.w = nn.Parameter(torch.randn(3, 3))", "self.again = self.w",
        "self.register_buffer('view', self.w.detach()[1])", "self.register_buffer('wide', torch.randn(1).expand(3))",
        "self.register_buffer('turned', torch.randn(4, 3).t())",
        "self.register_buffer('strided', torch.randn(6, 3, 1, 2)[:, :, :, ::2])",
        "self.last = nn.Conv2d(3, 6, 1).to(memory_format=torch.channels_last)",
    ])  # fmt: skip
    body = "image = x[:, :, None, None].expand(-1, 3, 2, 2)"
    returned = (
        "self.head(self.embedding(ids)), self.a(x) + self.b(2 * x), x @ self.w.t() @ self.again, x * self.view, "
        "x * self.wide, x @ self.turned, F.conv2d(image, self.strided), self.last(image)"
    )
    inputs = {**ROW, "ids": {"shape": ["N"], "dtype": "int64", "values": [0, 9]}}
    program = captured(tmp_path, model(returned, init=init, args="x, ids", before=body), inputs, AXES)
    assert_files_as_eager(program, tmp_path, rows(ids=np.arange(4) * 3))


def test_empty_tensors_inside_and_out(tmp_path):
    init = "self.w = nn.Parameter(torch.zeros(1, 0)); self.linear = nn.Linear(3, 0)"
    returned = (
        "torch.cat([x[:, :0], x, x[:, 3:]], 1), x[:, :0].sum(1, keepdim=True) + x, torch.cat([x[1:], x[:1]]), "
        "x[:, :0], torch.cat([x, self.w.expand(x.shape[0], 0)], 1), self.linear(x)"
    )
    program = captured(tmp_path, model(returned, init=init), ROW, AXES)
    assert_files_as_eager(program, tmp_path, rows(1), rows(3))


@pytest.mark.parametrize(
    "shape, axes, said",
    [([0, 3], {}, "0 is neither a size of 1 or more"), (["N", 3], {"N": {"min": 0, "opt": 1, "max": 2}}, "min")],
)
def test_an_input_without_elements_is_refused(tmp_path, shape, axes, said):
    with pytest.raises(ProjectError, match=said):
        captured(tmp_path, model("x"), {"x": {"shape": shape}}, axes)


def test_complex_numbers_inside(tmp_path):
    init = "self.register_buffer('w', torch.tensor([1 + 2j, 2j, 3.0]))"
    returned = (
        "torch.fft.rfft(x).abs(), torch.view_as_real(torch.fft.fft(x)), (x * self.w).imag, "
        "(torch.complex(x, 2 * x) * torch.complex(x, x)).real"
    )
    program = captured(tmp_path, model(returned, init=init), ROW, AXES)
    assert_as_eager(program, tmp_path, rows())
    assert_same(run_torchscript(program, list(rows().values()), tmp_path), eager(tmp_path, rows()))
    assert_same(opened_onnx(program, tmp_path).call(list(rows().values())), eager(tmp_path, rows()))


def test_a_view_of_a_conjugate_leaves_torch_as_numbers(tmp_path):
    """Its imaginary part is a tensor with the negative bit set, which numpy does not take."""
    program = captured(tmp_path, model("torch.complex(x, x).conj().imag"), ROW, AXES)
    assert_as_eager(program, tmp_path, rows())
    assert_same(run_torchscript(program, list(rows().values()), tmp_path), [-rows()["x"]])


def test_complex_numbers_at_the_boundary_are_refused(tmp_path):
    with pytest.raises(CaptureError, match="'output' is complex64") as error:
        captured(tmp_path, model("torch.fft.rfft(x)"), ROW, AXES)
    assert error.value.where == "model.py, line 12" and "view_as_real" in error.value.todo
    with pytest.raises(ProjectError, match=r"inputs\.x\.dtype"):
        captured(tmp_path / "in", model("x"), {"x": {"shape": [3], "dtype": "complex64"}})


def test_a_bfloat16_input_is_refused_with_the_reason(tmp_path):
    with pytest.raises(ProjectError, match="cannot be bfloat16") as error:
        captured(tmp_path, model("x.float()"), {"x": {"shape": [3], "dtype": "bfloat16"}})
    assert "float32" in error.value.todo


def test_inputs_and_outputs_without_dimensions(tmp_path):
    inputs = {
        **ROW, "scale": {"shape": []}, "column": {"shape": [], "dtype": "int64", "values": [0, 2]},
        "flip": {"shape": [], "dtype": "bool"},
    }  # fmt: skip
    returned = "x * scale, x.index_select(1, column[None]), torch.where(flip, x, -x), x.sum(), scale + 1"
    program = captured(tmp_path, model(returned, args="x, scale, column, flip"), inputs, AXES)
    scalars = {"scale": np.float32(1.5), "column": np.int64(2), "flip": np.bool_(True)}
    assert_files_as_eager(program, tmp_path, rows(**scalars), rows(2, **{**scalars, "flip": np.bool_(False)}))


def test_a_model_of_scalars_alone(tmp_path):
    program = captured(tmp_path, model("x + 1"), {"x": {"shape": []}})
    assert_files_as_eager(program, tmp_path, {"x": np.float32(2)})


def test_outputs_of_every_dtype(tmp_path):
    returned = (
        "x.argmax(1), x.topk(2, 1), x.sort(1), x.max(1), x > 0, x.argmax(1).int(), (x * 10 + 20).to(torch.uint8), "
        "(x * 10).to(torch.int16), x.double() * 2, x.half() * 2, x.bool(), (x * 9).long() // 2"
    )
    program = captured(tmp_path, model(returned), ROW, AXES)
    assert_files_as_eager(program, tmp_path, rows())
    dtypes = [spec.dtype for spec in program.signature.outputs]
    assert dtypes.count("int64") == 5 and {"bool", "int32", "uint8", "int16", "float64", "float16"} <= set(dtypes)


@pytest.mark.parametrize("dtype", ["int64", "int32", "int8", "uint8", "float64", "float16", "bool"])
def test_inputs_of_every_dtype(tmp_path, dtype):
    inputs = {"x": {"shape": ["N", 3], "dtype": dtype, **({} if dtype == "bool" else {"values": [0, 9]})}}
    program = captured(tmp_path, model("x.float() * 2, x"), inputs, AXES)
    assert_as_eager(program, tmp_path, {"x": np.arange(12).reshape(4, 3).astype(dtype)})


def test_outputs_that_are_inputs_weights_constants_and_each_other(tmp_path):
    returned = "x, x, y, y, y.view(-1), y[0], x.t(), x[:1].expand(4, 3), self.w, torch.ones(2), x.flip(0)"
    code = model(returned, init="self.w = nn.Parameter(torch.ones(3))", before="y = x * 2")
    program = captured(tmp_path, code, ROW, AXES)
    assert_files_as_eager(program, tmp_path, rows(), rows(2))


def test_names_that_meet(tmp_path):
    """Duplicate output names, outputs named as inputs, empty and odd keys: each output has a name of its own."""
    returned = "{'a.b': x, 'a': {'b': x + 1}, 'x': x + 2, '': x + 3, 'c/d': x + 4, 'output': x + 5}"
    program = captured(tmp_path, model(returned, args="x, output"), {**ROW, "output": ROW["x"]}, AXES)
    assert program.signature.output_names == ("a.b", "a.b_2", "output.x", "_", "c/d", "output.output")
    assert_files_as_eager(program, tmp_path, rows(output=np.ones((4, 3), np.float32)))


NON_ASCII = """
    class Θ(nn.Module):
        def __init__(self):
            super().__init__()
            setattr(self, 'слой', nn.Linear(3, 3))

        def forward(self, входы_θ):
            return getattr(self, 'слой')(входы_θ)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.层 = Θ()

        def forward(self, x_θ, d: dict):
            return {'π': self.层(x_θ) + d['ключ'], 'ж': d['θ']}
"""


def test_names_and_paths_outside_ascii(tmp_path):
    folder = tmp_path / "模型 με κενά"
    names = ["x_θ", "d.ключ", "d.θ"]
    program = captured(folder, NON_ASCII, dict.fromkeys(names, ROW["x"]), AXES)
    assert program.signature.input_names == tuple(names) and program.signature.output_names == ("π", "ж")
    x, a, b = (np.full((4, 3), value, np.float32) for value in (1, 2, 3))
    want = run_nested(folder, x, a, b)
    assert_same(run_torchscript(program, [x, a, b], folder), want)
    assert_same(opened_onnx(program, folder).call([x, a, b]), want)


def run_nested(folder: Path, x: np.ndarray, a: np.ndarray, b: np.ndarray) -> list[np.ndarray]:
    from edgeopt.ports.user_code import load_attribute

    module = load_attribute("model.py:Model", folder, key="model")().eval()
    x, a, b = (torch.from_numpy(value) for value in (x, a, b))
    with torch.no_grad():
        return [t.numpy() for t in module(x, {"ключ": a, "θ": b}).values()]


SCRIPTED_NON_ASCII = """
    class Model(nn.Module):
        def forward(self, x_θ):
            y_ж = x_θ * 2
            if bool(y_ж.sum() > 0):
                return y_ж
            return x_θ - 1
"""


def test_a_script_with_local_names_outside_ascii(tmp_path):
    program = captured(tmp_path / "模型", SCRIPTED_NON_ASCII, {"x_θ": ROW["x"]}, AXES)
    for sign in (1, -1):
        inputs = {"x_θ": sign * np.ones((2, 3), np.float32)}
        assert_as_eager(program, tmp_path / "模型", inputs)
        assert_same(run_torchscript(program, list(inputs.values()), tmp_path), eager(tmp_path / "模型", inputs))


@pytest.mark.parametrize("init", ["self.l = nn.Linear(3, 3); self.l.up = self", "self.me = self"])
def test_a_module_that_holds_itself_is_refused(tmp_path, init):
    with pytest.raises(ModelError, match="is one that holds it") as error:
        captured(tmp_path, model("x", init=init), ROW, AXES)
    assert "object.__setattr__" in error.value.todo


def test_a_plain_reference_upwards_is_no_cycle(tmp_path):
    init = "self.l = nn.Linear(3, 3); object.__setattr__(self.l, 'up', self)"
    assert_as_eager(captured(tmp_path, model("self.l(x)", init=init), ROW, AXES), tmp_path, rows())
