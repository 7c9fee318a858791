"""`edgeopt init`: what can be inferred is, the rest is named, and nothing of the user's is overwritten."""

import json
import subprocess
import sys
import warnings

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from edgeopt.cli import main
from edgeopt.errors import ModelError, ProjectError, UsageError
from edgeopt.flows.init import infer, write_project
from edgeopt.spec.project import load_project

MODELS = '''
import torch
from torch import nn


class Digits(nn.Module):
    """Runs at 28 x 28 only."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(4 * 26 * 26, 10)

    def forward(self, image, temperature=1.0):
        return self.head(self.conv(image).flatten(1)) / temperature


def pooled():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


class Ids(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 4)

    def forward(self, tokens):
        return self.table(tokens).mean(1)


class Two(nn.Module):
    def forward(self, left, right, scale=None):
        return left + right


class Odd(nn.Module):
    """Starts with a convolution, but takes nothing that its first layer suggests."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        assert x.shape[-1] == 77, "77 columns only"
        return self.conv(x)


mlp = nn.Linear(7, 2)
not_a_model = 3


def broken():
    raise RuntimeError("no weights here")
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("models", "with_examples"):
        sys.modules.pop(name, None)


@pytest.fixture
def models(folder):
    (folder / "models.py").write_text(MODELS)
    return folder


def test_a_size_that_runs_is_found_and_the_file_loads_at_once(models):
    written = write_project("models.py:Digits", models / "edgeopt.yaml")
    assert written.complete
    project = load_project(models)
    assert project.model == "models.py:Digits"
    assert {n: (i.shape, i.dtype) for n, i in project.inputs.items()} == {"image": (("batch", 1, 28, 28), "float32")}
    assert project.axes["batch"].max == 8
    text = (models / "edgeopt.yaml").read_text()
    line = next(line for line in text.splitlines() if line.startswith("  image:"))
    assert line.endswith(": check") and "guessed" in line
    assert "temperature: optional" in text


@pytest.mark.parametrize(
    ("factory", "name", "shape", "dtype", "values"),
    [
        ("pooled", "input", ["batch", 3, 224, 224], "float32", None),
        ("Ids", "tokens", ["batch", 16], "int64", [0, 49]),
        ("mlp", "input", ["batch", 7], "float32", None),
    ],
)
def test_the_first_layer_tells_the_input(models, factory, name, shape, dtype, values):
    found = infer(f"models.py:{factory}", models)
    entry = {"shape": shape, "dtype": dtype} | ({"values": values} if values else {})
    assert found.inputs == {name: entry}
    assert found.unknown == {} and name in found.notes


@pytest.mark.parametrize(("factory", "names"), [("Two", ["left", "right"]), ("Odd", ["x"])])
def test_what_is_not_known_is_a_todo_that_build_answers_by_key(models, factory, names):
    written = write_project(f"models.py:{factory}", models / "edgeopt.yaml")
    assert not written.complete and list(written.inferred.unknown) == names
    with pytest.raises(ProjectError) as caught:
        load_project(models)
    for name in names:
        assert f"key 'inputs.{name}.shape': the shape is still to be given" in caught.value.what


def test_a_todo_once_answered_loads(models):
    write_project("models.py:Two", models / "edgeopt.yaml")
    text = (models / "edgeopt.yaml").read_text()
    text = (
        text.replace("shape: TODO", "shape: [batch, 3]").replace("# axes:", "axes:").replace("#   batch:", "  batch:")
    )
    (models / "edgeopt.yaml").write_text(text)
    project = load_project(models)
    assert {n: i.shape for n, i in project.inputs.items()} == {"left": ("batch", 3), "right": ("batch", 3)}


EXAMPLES = {
    "tensor": "torch.zeros(4, 3, 8)",
    "tuple": "(torch.zeros(4, 3, 8), torch.full((4, 2), 9, dtype=torch.int64))",
    "dict": "{'ids': torch.full((4, 2), 9, dtype=torch.int64), 'x': torch.zeros(4, 3, 8)}",
}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_example_inputs_beside_the_factory_tell_shapes_and_dtypes(folder, kind):
    (folder / "with_examples.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n    def forward(self, x, ids=None):\n        return x\n"
        f"def example_inputs():\n    return {EXAMPLES[kind]}\n"
    )
    assert write_project("with_examples.py:Net", folder / "edgeopt.yaml").complete
    project = load_project(folder)
    wanted = {"x": (("batch", 3, 8), "float32")}
    if kind != "tensor":
        wanted["ids"] = (("batch", 2), "int64")
        assert project.inputs["ids"].values == (0, 9)
    assert {n: (i.shape, i.dtype) for n, i in project.inputs.items()} == wanted
    assert (project.axes["batch"].min, project.axes["batch"].opt, project.axes["batch"].max) == (1, 4, 8)


STRUCTURED = """
import dataclasses
from typing import NamedTuple, Optional, Tuple
import torch
from torch import nn

@dataclasses.dataclass
class Config:
    ids: torch.Tensor
    scale: float = 1.0
    mask: Optional[torch.Tensor] = None

class Net(nn.Module):
    def forward(self, batch, pair: Tuple[torch.Tensor, torch.Tensor], config: Config, extra=None):
        return batch["x"] + pair[0] + pair[1] + config.ids

class Alone(nn.Module):
    def forward(self, batch):
        return sum(batch.values()) if isinstance(batch, dict) else sum(batch)
"""


def test_examples_with_parts_become_dotted_names(folder):
    (folder / "with_examples.py").write_text(
        STRUCTURED + "def example_inputs():\n    t = torch.zeros(4, 3)\n"
        "    return {'batch': {'x': t, 'y': {'z': t}}, 'pair': (t, t), 'config': Config(torch.ones(4, 3).long())}\n"
    )
    assert write_project("with_examples.py:Net", folder / "edgeopt.yaml").complete
    project = load_project(folder)
    assert list(project.inputs) == ["batch.x", "batch.y.z", "pair.0", "pair.1", "config.ids"]
    assert {spec.shape for spec in project.inputs.values()} == {("batch", 3)}
    assert project.inputs["config.ids"].dtype == "int64"
    assert "PARAMETER.KEY" in (folder / "edgeopt.yaml").read_text()


@pytest.mark.parametrize(
    ("returned", "names"),
    [
        ("{'a': torch.zeros(2, 3), 'b': torch.zeros(2, 3)}", ["batch.a", "batch.b"]),
        ("(torch.zeros(2, 3), torch.zeros(2, 3))", ["batch.0", "batch.1"]),
        ("{'batch': [torch.zeros(2, 3)]}", ["batch.0"]),
        ("{'batch': torch.zeros(2, 3)}", ["batch"]),
    ],
)
def test_the_examples_of_a_lone_parameter_may_be_its_parts(folder, returned, names):
    (folder / "with_examples.py").write_text(STRUCTURED + f"def example_inputs():\n    return {returned}\n")
    assert list(infer("with_examples.py:Alone", folder).inputs) == names


def test_annotations_tell_the_parts_that_are_not_known(folder):
    (folder / "with_examples.py").write_text(STRUCTURED)
    found = infer("with_examples.py:Net", folder)
    assert list(found.unknown) == ["batch", "pair.0", "pair.1", "config.ids"] and found.optional == ("extra",)
    written = write_project("with_examples.py:Net", folder / "edgeopt.yaml")
    assert not written.complete and "  config.ids: {shape: TODO" in written.path.read_text()


def test_a_key_with_a_dot_in_the_examples_is_refused(folder):
    (folder / "with_examples.py").write_text(
        STRUCTURED + "def example_inputs():\n    return {'batch': {'a.b': torch.zeros(2)}}\n"
    )
    with pytest.raises(ModelError, match="'a.b', which has no dotted name"):
        infer("with_examples.py:Alone", folder)


@pytest.mark.parametrize(
    ("returned", "part"),
    [
        ("(1, 2, 3)", "returns 3 values, and forward takes 1"),
        ("torch.zeros(0, 3)", "which cannot be an input"),
        ("'text'", "which cannot be an input"),
        ("1 / 0", "division by zero"),
    ],
)
def test_example_inputs_that_are_none_are_answered(folder, returned, part):
    (folder / "with_examples.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        return x\n"
        f"def example_inputs():\n    return {returned}\n"
    )
    with pytest.raises(ModelError, match=part):
        infer("with_examples.py:Net", folder)


def onnx_file(path, inputs, *, initializers=()):
    values = [helper.make_tensor_value_info(name, dtype, shape) for name, dtype, shape in inputs]
    output = helper.make_tensor_value_info("y", inputs[0][1], None)
    node = helper.make_node("Identity", [inputs[0][0]], ["y"])
    graph = helper.make_graph([node], "g", values, [output], initializer=list(initializers))
    onnx.save(helper.make_model(graph), str(path))


def test_an_onnx_graph_tells_its_inputs_and_the_file_loads_at_once(folder):
    (folder / "my nets").mkdir()
    weight = helper.make_tensor("w", TensorProto.FLOAT, [2], [1.0, 2.0])
    inputs = [
        ("images:0", TensorProto.FLOAT, ["N", 3, "height", None]),
        ("ids", TensorProto.INT64, ["N", 5]),
        ("mask", TensorProto.BOOL, [None, 5]),
        ("half", TensorProto.FLOAT16, [2, 2]),
        ("w", TensorProto.FLOAT, [2]),
    ]
    onnx_file(folder / "my nets" / "a net.onnx", inputs, initializers=[weight])
    assert write_project("my nets/a net.onnx", folder / "edgeopt.yaml").complete
    project = load_project(folder)
    assert (project.name, project.kind) == ("a-net", "onnx")
    assert {n: (i.shape, i.dtype) for n, i in project.inputs.items()} == {
        "images:0": (("N", 3, "height", "images_0_3"), "float32"),
        "ids": (("N", 5), "int64"),
        "mask": (("batch", 5), "bool"),
        "half": ((2, 2), "float16"),
    }
    assert set(project.axes) == {"N", "height", "images_0_3", "batch"}


def test_an_onnx_input_without_a_shape_is_a_todo(folder):
    onnx_file(folder / "net.onnx", [("x", TensorProto.FLOAT, None)])
    found = infer("net.onnx", folder)
    assert found.inputs == {} and "declares no shape" in found.unknown["x"]


def test_a_torchscript_file_tells_names_only(folder):
    class Net(torch.nn.Module):
        def forward(self, audio, rate: int = 3):
            return audio * rate

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(Net()), str(folder / "net.pt"))
    written = write_project("net.pt", folder / "edgeopt.yaml")
    assert not written.complete
    assert list(written.inferred.unknown) == ["audio"] and written.inferred.optional == ("rate",)
    assert "audio: {shape: TODO" in written.path.read_text()


def test_the_model_is_named_from_the_folder_of_the_file(models):
    (models / "deploy").mkdir()
    write_project("models.py:Digits", models / "deploy" / "edgeopt.yaml")
    assert load_project(models / "deploy").model == "../models.py:Digits"


def test_nothing_is_overwritten_without_force(models):
    out = models / "edgeopt.yaml"
    out.write_text("name: mine\n")
    with pytest.raises(UsageError, match="exists already; nothing was written"):
        write_project("models.py:Digits", out)
    assert out.read_text() == "name: mine\n"
    write_project("models.py:Digits", out, force=True)
    assert load_project(models).model == "models.py:Digits"


@pytest.mark.parametrize(
    ("model", "error", "part"),
    [
        ("models.py:Digit", ModelError, "has no 'Digit'"),
        ("models.py:broken", ModelError, "no weights here"),
        ("models.py:not_a_model", ModelError, "not a torch.nn.Module"),
        ("missing.py:build", ModelError, "no file 'missing.py'"),
        ("missing.onnx", ModelError, "no such model file"),
        ("corrupt.onnx", ModelError, "not a readable ONNX model"),
        ("corrupt.pt", ModelError, "cannot be loaded"),
        ("corrupt.pt2", ModelError, "a .pt2 file is not read"),
        ("models.py", ProjectError, "as in models.py:build"),
    ],
)
def test_a_model_that_cannot_be_read_leaves_no_file(models, model, error, part):
    for name in ("corrupt.onnx", "corrupt.pt", "corrupt.pt2"):
        (models / name).write_bytes(b"\x00not a model\xff" * 9)
    with pytest.raises(error, match=part):
        write_project(model, models / "edgeopt.yaml")
    assert not list(models.glob("edgeopt.yaml*"))


def test_a_folder_that_cannot_be_written_is_answered(models):
    with pytest.raises(ProjectError, match="cannot be written"):
        write_project("models.py:mlp", models / "nowhere" / "edgeopt.yaml")


def test_the_users_module_is_as_it_was(models):
    import models as user

    before = {k: v.clone() for k, v in user.mlp.state_dict().items()}
    assert user.mlp.training
    infer("models.py:mlp", models)
    assert user.mlp.training
    assert all(torch.equal(v, before[k]) for k, v in user.mlp.state_dict().items())


def test_the_command_line(models):
    command = [sys.executable, "-m", "edgeopt", "init", "models.py:Digits", "--json"]
    done = subprocess.run(command, cwd=models, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["complete"] is True and data["inputs"]["image"]["shape"] == ["batch", 1, 28, 28]


@pytest.mark.parametrize(
    ("argv", "code", "out", "err"),
    [
        (["models.py:Digits"], 2, "", "give --out FILE, or --force"),
        (["models.py:Two", "--force"], 0, "left: TODO", ""),
        (["models.py:Two"], 2, "", "exists already"),
        (["--help"], 0, "edgeopt init model.py:build", ""),
        ([], 2, "", "Missing argument 'MODEL'"),
    ],
)
def test_each_way_of_calling_has_its_exit_code(models, capsys, argv, code, out, err):
    (models / "edgeopt.yaml").touch()
    with pytest.raises(SystemExit) as caught:
        main(["init", *argv])
    shown = capsys.readouterr()
    assert caught.value.code == code
    assert out in shown.out and err in shown.err
