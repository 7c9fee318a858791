"""What Python reads of a tensor, keeps between calls, or switches by mode: right at other values, or refused with the
user's line (cases C03, C05, C06, C10, O01, O02 and their kinds)."""

from __future__ import annotations

import numpy as np
import pytest

from edgeopt.capture.declined import Declined
from edgeopt.errors import CaptureError, ProjectError
from tests.capture.support import assert_as_eager, captured, eager, run

ROW = {"x": {"shape": ["N", 3], "values": [-1.0, 1.0]}}
AXES = {"N": {"min": 1, "opt": 3, "max": 6}}
BODY_LINE = 12  # the first line of a body in model.py


def model(body: str, *, init: str = "pass", args: str = "x") -> str:
    lines = "\n            ".join(body.splitlines())
    return f"""
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            {init}

        def forward(self, {args}):
            {lines}
    """


def rows(count: int, sign: float = 1.0, seed: int = 0) -> dict[str, np.ndarray]:
    return {"x": (sign * np.random.default_rng(seed).uniform(0, 1, (count, 3))).astype(np.float32)}


CALLS = [rows(3), rows(3, -1), rows(5), rows(1, -1), {"x": np.zeros((4, 3), np.float32)}]

RIGHT = {
    "a branch on a sum": "return x * 2 if x.sum() > 0 else x - 1",
    "elements, a branch inside": "out = []\nfor i in range(x.shape[0]):\n"
    "    out.append(2 * x[i, 0] if bool(x[i, 0] > 0.5) else x[i, 0] / 2)\nreturn torch.stack(out)",
    "elements written": "out = torch.zeros_like(x)\nfor i in range(x.shape[0]):\n"
    "    out[i] = 2 * x[i] if x[i, 0] > 0.5 else x[i] / 2\nreturn out",
    "a while loop": "y = x\nwhile bool(y.sum() < 5):\n    y = y + 1\nreturn y",
    "item": "return x * x[0, 0].item()",
    "a branch on item": "return x * 2 if x[0, 0].item() > 0 else x",
    "tolist": "v = x[0].tolist()\nreturn x + v[0] * v[1]",
    "len of nonzero": "return x + len(x[:, 0].nonzero())",
    "a loop over len of nonzero": "for _ in range(len(torch.nonzero(x[:, 0] > 0))):\n    x = x * 2\nreturn x",
    "a number from a size": "return x + int(x.shape[0] > 3)",
    "a branch on a size": "if x.shape[0] > 3:\n    return x + 1\nreturn x * 2",
    "a slice as long as data say": "n = int((x[:, 0] > 0).sum())\nreturn x[:n].sum(0)",
    "an output as long as data say": "return x[x > 0]",
    "an index from data": "return x[:, int(x[0].argmax())]",
    "a list by an index from data": "w = [1.0, 2.0, 3.0]\nreturn x * w[int(x[0].argmax())]",
    "max of Python": "return x * max(x[0, 0], x[0, 1])",
    "a branch that hardly any input takes": "if bool(x.max() > 100):\n    return x * 0\nreturn x + 1",
    "a branch on NaN": "if torch.isnan(x).any():\n    return torch.zeros_like(x)\nreturn x",
    "O01 size of data": "return x.reshape(x.data.size(0), -1)",
    "O01 size of a detached copy": "return x.reshape(x.detach().clone().shape[0], 3)",
    "O01 numel": "return x.reshape(x.numel() // 3, 3)",
    "O01 len": "return x.expand(2, len(x), 3)",
    "O03 masked by another": "y = torch.zeros(x.shape[0], 2)\nm = x[:, 0] > 0\ny[m, 0] = x[m, 0]\nreturn y",
    "O03 masked by its negation": "y = x.clone()\ny[~(x > 0)] = 0.0\nreturn y",
}  # fmt: skip


@pytest.mark.parametrize("body", RIGHT.values(), ids=RIGHT)
def test_every_path_is_kept(tmp_path, body):
    program = captured(tmp_path, model(body), ROW, AXES)
    far = {"x": np.full((3, 3), 200, np.float32)}
    missing = {"x": np.full((2, 3), np.nan, np.float32)}
    calls = CALLS + ([far] if "hardly" in body or "100" in body else []) + ([missing] if "isnan" in body else [])
    assert_as_eager(program, tmp_path, *calls)


def test_a_threshold_of_a_size_that_no_probe_reaches_is_kept(tmp_path):
    code = model("y = x * 1\nif x.shape[0] > 700:\n    y = y * 2\nreturn y")
    program = captured(tmp_path, code, ROW, {"N": {"min": 1, "opt": 3, "max": 1000}})
    assert_as_eager(program, tmp_path, rows(701), rows(700))


REFUSED = {
    "numpy": ("return x + torch.from_numpy(x.numpy() * 2)", 1),
    "numpy, then a number": ("y = x + 1\nreturn y * float(y.numpy().max())", 2),
    "sorted": ("v = sorted(x[:, 0].tolist())\nreturn x + v[0]", 1),
    "a try": ("try:\n    y = 1 // int(x.sum() > 0)\nexcept ZeroDivisionError:\n    y = 7\nreturn x + y", 2),
    "a dict by value": ("table = {0: 1.0, 1: 5.0}.get(int(x[0, 0] > 0))\nreturn x * table", 1),
    "a set of values": ("seen = {float(v) for v in x[:, 0]}\nreturn x + len(seen)", 1),
    "text of a value": ("return x + len(str(float(x[0, 0])))", 1),
}


@pytest.mark.parametrize("body, line", REFUSED.values(), ids=REFUSED)
def test_what_no_way_keeps_is_refused_with_the_line(tmp_path, body, line):
    with pytest.raises(CaptureError, match="no way of capture") as error:
        captured(tmp_path, model(body), ROW, AXES)
    assert error.value.where == f"model.py, line {BODY_LINE + line - 1}"
    assert error.value.todo


def test_a_check_of_values_does_not_stand_in_the_way(tmp_path):
    body = "assert x.max() < 1000, 'too large'\nif bool(x.min() < -1000):\n    raise ValueError('too small')\n" \
        "return x[1:] if x.shape[0] > 1 else x[:1]"  # fmt: skip
    program = captured(tmp_path, model(body), ROW, {"N": {"min": 2, "opt": 3, "max": 6}})
    assert_as_eager(program, tmp_path, rows(2), rows(5))


@pytest.mark.parametrize("body", ["return x * 2 if x.max() > 100 else x", "return x + float(x[0, 0])"])
def test_a_trace_says_what_it_would_freeze(tmp_path, body):
    """Whatever other way takes the model, a trace never does."""
    from edgeopt.capture import arguments, eager, script
    from edgeopt.ports.user_code import load_attribute

    signature = captured(tmp_path, model(body), ROW, AXES).signature
    module = load_attribute("model.py:Model", tmp_path, key="model")()
    given = eager.Eager(module, signature.inputs, tmp_path, arguments.Arguments(("x",)))
    with pytest.raises(Declined, match="a value of the inputs") as error:
        script.trace(given, signature, copy_inputs=False, seed=0)
    assert error.value.where == f"model.py, line {BODY_LINE}"


STATE = {
    "a counter": ("self.n = 0", "self.n += 1\nreturn x * self.n", 1),
    "a list": ("self.seen = []", "self.seen.append(x)\nreturn x + sum(t.sum() for t in self.seen)", 1),
    "a dict": ("self.d = {}", "self.d['k'] = self.d.get('k', 0) + 1\nreturn x * self.d['k']", 1),
    "a buffer in place": ("self.register_buffer('b', torch.zeros(1))", "y = x\nself.b.add_(1)\nreturn y + self.b", 2),
    "a buffer assigned": ("self.register_buffer('b', torch.ones(1))", "self.b = self.b * 2\nreturn x + self.b", 1),
    "a parameter's data": ("self.p = nn.Parameter(torch.ones(3))", "self.p.data.mul_(2)\nreturn x * self.p", 1),
    "what the first call saw": ("self.c = None", "if self.c is None:\n    self.c = x.mean()\nreturn x + self.c", 2),
    "the last call": ("self.last = torch.zeros(3)", "y = x + self.last\nself.last = x[0]\nreturn y", 2),
    "statistics": (
        "self.register_buffer('m', torch.zeros(3)); self.register_buffer('v', torch.ones(3))",
        "return F.batch_norm(torch.cat([x, x]), self.m, self.v, training=True)", 1,
    ),
    "a module in train mode": (
        "self.norm = nn.BatchNorm1d(3)", "self.norm.train()\nreturn self.norm(torch.cat([x, x]))", 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("init, body, line", STATE.values(), ids=STATE)
def test_state_is_refused_with_the_line_that_writes_it(tmp_path, init, body, line):
    with pytest.raises(CaptureError) as error:
        captured(tmp_path, model(body, init=init), ROW, AXES)
    assert error.value.where == f"model.py, line {BODY_LINE + line - 1}"
    assert "state" in error.value.todo


NO_STATE = {
    "a constant kept": ("self.c = None", "if self.c is None:\n    self.c = torch.arange(3.0)\nreturn x + self.c"),
    "a table that grows with the size": (
        "self.k = 0; self.c = torch.zeros(0)",
        "n = x.shape[0]\nif n > self.k:\n    self.k = n\n    self.c = torch.arange(float(n))\n"
        "return x + self.c[:n, None]",
    ),
    "a counter that nothing reads": ("self.n = 0", "self.n += 1\nreturn x * 2"),
    "a list that nothing reads": ("self.seen = []", "self.seen.append(x)\nreturn x * 2"),
    "a buffer assigned its value": (
        "self.register_buffer('b', torch.ones(1))", "self.b = self.b * 1\nreturn x + self.b",
    ),
}  # fmt: skip


@pytest.mark.parametrize("init, body", NO_STATE.values(), ids=NO_STATE)
def test_what_changes_no_answer_is_no_state(tmp_path, init, body):
    program = captured(tmp_path, model(body, init=init), ROW, AXES)
    assert_as_eager(program, tmp_path, *CALLS, *CALLS)


EVAL = {
    "functional dropout with the mode": ("pass", "return F.dropout(x, 0.5, training=self.training)"),
    "dropout in a list": ("self.d = nn.ModuleList([nn.Dropout(0.5)])", "return self.d[0](x)"),
    "a module put in train mode before": ("self.d = nn.Dropout(0.5).train(); self.train()", "return self.d(x)"),
    "a branch on the mode": ("self.train()", "return x * 3 if self.training else x"),
    "BN without running statistics": (
        "self.n = nn.BatchNorm1d(3, track_running_stats=False)", "return self.n(torch.cat([x, 2 * x]))",
    ),
}  # fmt: skip


@pytest.mark.parametrize("init, body", EVAL.values(), ids=EVAL)
def test_the_model_is_captured_in_eval_mode(tmp_path, init, body):
    program = captured(tmp_path, model(body, init=init), ROW, AXES)
    assert_as_eager(program, tmp_path, rows(3), rows(3), rows(5, -1))


def test_a_module_that_cannot_leave_train_mode_is_refused(tmp_path):
    code = (
        model("return self.d(x)", init="self.d = nn.Dropout(0.5)")
        + """
        def train(self, mode=True):
            return super().train(True)
    """
    )
    with pytest.raises(CaptureError, match="random numbers in eval mode") as error:
        captured(tmp_path, code, ROW, AXES)
    assert error.value.where.startswith(f"model.py, line {BODY_LINE}")


@pytest.mark.parametrize(
    "args, given, want",
    [
        ("a, b=None, c=None", ("a", "c"), 101), ("a, b=None, c=None", ("c", "b", "a"), 111),
        ("a, *, c=None, b=None", ("b", "a"), 11), ("b=None, a=None, c=None", ("c", "a"), 101),
        ("c, **rest", ("a", "c"), 101),
    ],
)  # fmt: skip
def test_inputs_go_by_name_whatever_their_order(tmp_path, args, given, want):
    body = "all = {**locals(), **locals().get('rest', {})}\nout = 0\nfor t, f in (('a', 1), ('b', 10), ('c', 100)):\n" \
        "    v = all.get(t)\n    if v is not None:\n        out = out + f * v\nreturn out"  # fmt: skip
    program = captured(tmp_path, model(body, args=args), {name: {"shape": [1]} for name in given})
    assert run(program, **{name: np.ones(1, np.float32) for name in given})["output"] == want


def test_a_default_that_is_not_None_stays(tmp_path):
    code = model("return x * scale + (0 if shift is None else shift)", args="x, scale: float = 2.0, shift=None")
    program = captured(tmp_path, code, {"x": {"shape": [3]}})
    np.testing.assert_array_equal(run(program, x=np.ones(3, np.float32))["output"], [2, 2, 2])


@pytest.mark.parametrize("args", ["x, unused", "unused, x", "x, unused, other=None"])
def test_unused_inputs_stay_in_the_files(tmp_path, args):
    """O02."""
    from edgeopt.backends import onnx_export

    inputs = {"x": ROW["x"], "unused": {"shape": ["N"], "dtype": "int64"}}
    program = captured(tmp_path, model("return x * 2", args=args), inputs, AXES)
    file = onnx_export.write(program, tmp_path, opset_max=17)
    assert {spec.name for spec in file.inputs} == {"x", "unused"} == set(program.signature.input_names)
    assert_as_eager(program, tmp_path, {**rows(4), "unused": np.arange(4)})


def test_an_input_that_only_a_size_is_read_of(tmp_path):
    inputs = {**ROW, "like": {"shape": ["M", 2]}}
    axes = {**AXES, "M": {"min": 1, "opt": 2, "max": 7}}
    program = captured(tmp_path, model("return x.sum() * torch.ones(like.shape[0])", args="x, like"), inputs, axes)
    assert program.signature.outputs[0].shape == ("M",)
    assert_as_eager(program, tmp_path, {**rows(4), "like": np.zeros((7, 2), np.float32)})


def test_the_helper_of_these_tests_runs_the_users_model(tmp_path):
    captured(tmp_path, model("return x * 2 if x.sum() > 0 else x - 1"), ROW, AXES)
    np.testing.assert_array_equal(eager(tmp_path, {"x": np.ones((1, 3), np.float32)})[0], [[2, 2, 2]])
    with pytest.raises(ProjectError):
        captured(tmp_path / "other", model("return x"), {"y": ROW["x"]}, AXES)
