"""Projects: what is written is what is loaded, and every contradiction is answered with file and key."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from edgeopt.errors import ProjectError
from edgeopt.spec.project import ProjectFile, load_project, model_kind, name_for, project_for_model

GOOD = """
name: digits
model: model.py:build
weights: weights.pt
inputs:
  image: {shape: [batch, 1, 28, 28], dtype: float32, values: [0, 1]}
  ids: {shape: [batch, length], dtype: int64}
axes:
  batch: {min: 1, opt: 4, max: 64}
  length: {min: 2, opt: 16, max: 32}
calibration: data.py:calibration
train: data.py:train
loss: pkg.losses:loss
qat: {epochs: 2, learning_rate: 1e-3, optimizer: sgd, momentum: 0.9}
evaluate: data.py:evaluate
limits: {latency_ms: 20, metric_drop: {accuracy: 0.5}}
data: [data]
passes: {fold: off}
keep_float: [head.*]
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "edgeopt.yaml").write_text(GOOD)
    for name in ("model.py", "weights.pt", "data.py"):
        (tmp_path / name).touch()
    (tmp_path / "data").mkdir()
    return tmp_path


def refused(path, overrides=None) -> ProjectError:
    with pytest.raises(ProjectError) as caught:
        load_project(path, overrides)
    assert caught.value.todo
    return caught.value


def test_a_project_is_read_from_its_file_or_its_folder(folder):
    project = load_project(folder)
    assert project == load_project(folder / "edgeopt.yaml")
    assert project.folder == folder and project.path("weights.pt") == folder / "weights.pt"
    assert list(project.inputs) == ["image", "ids"]
    assert project.inputs["image"].shape == ("batch", 1, 28, 28) and project.inputs["image"].values == (0, 1)
    assert project.inputs["ids"].dtype == "int64"
    assert (project.axes["batch"].min, project.axes["batch"].opt, project.axes["batch"].max) == (1, 4, 64)
    assert (project.qat.epochs, project.qat.learning_rate, project.qat.optimizer) == (2, 1e-3, "sgd")
    assert project.limits.metric_drop == {"accuracy": 0.5}
    assert project.passes == {"fold": False}
    assert project.calibration_batches == 32 and project.seed == 0 and project.classifier is False
    assert project.kind == "factory"


def test_the_dump_says_nothing_of_where_the_project_lies(folder):
    dumped = load_project(folder).model_dump(mode="json")
    assert str(folder) not in json.dumps(dumped)
    assert set(dumped) == set(ProjectFile.model_fields)


@pytest.mark.parametrize(
    ("key", "text", "wrong_key", "part"),
    [
        ("seeed", "3", "seeed", "did you mean 'seed'?"),
        ("qat.epoch", "3", "qat.epoch", "did you mean 'epochs'?"),
        ("inputs.image.shap", "[1]", "inputs.image.shap", "did you mean 'shape'?"),
        ("seed", "three", "seed", "valid integer"),
        ("seed", "-1", "seed", "greater than or equal to 0"),
        ("seed", "on", "seed", "valid integer"),
        ("qat.learning_rate", "0", "qat.learning_rate", "greater than 0"),
        ("qat.freeze_observers_at", "1.5", "qat.freeze_observers_at", "less than or equal to 1"),
        ("qat.optimizer", "lion", "qat.optimizer", "'sgd', 'adam' or 'adamw'"),
        ("qat.optimizer", "there.py:make", "qat.optimizer", "there is no file there.py"),
        ("qat.trainer", "there.py:fit", "qat.trainer", "there is no file there.py"),
        ("qat.state", "there.pt", "qat.state", "there is no file there.pt"),
        ("qat", "{state: there.pt, trainer: data.py:fit}", "qat.state", "qat.trainer is given too"),
        ("qat.precision", "fp16", "qat.precision", "only a GPU has"),
        ("qat.schedule", "step", "qat.schedule", "'cosine', 'linear' or 'constant'"),
        ("qat.patience", "2", "qat.patience", "qat.evaluate_every is not given"),
        ("qat.metric", "accuracy", "qat.metric", "qat.evaluate_every is not given"),
        ("qat.accumulate", "0", "qat.accumulate", "greater than or equal to 1"),
        ("qat.clip_norm", "0", "qat.clip_norm", "greater than 0"),
        ("classifier", "1", "classifier", "valid boolean"),
        ("name", "a/b", "name", "pattern"),
        ("inputs", "{}", "inputs", "at least 1"),
        ("inputs.image.shape", "[0, 3]", "inputs.image.shape.0", "0 is neither a size of 1 or more"),
        ("inputs.image.shape", "[-1, 3]", "inputs.image.shape.0", "-1 is neither"),
        ("inputs.image.shape", "[batch, 1.5]", "inputs.image.shape.1", "1.5 is neither"),
        ("inputs.image.shape", "[batch, null]", "inputs.image.shape.1", "None is neither"),
        ("inputs.image.shape", "TODO", "inputs.image.shape", "still to be given"),
        ("inputs.image.shape", "[bach]", "inputs.image.shape", "'bach' is not declared under 'axes', did you"),
        ("inputs.image.dtype", "float", "inputs.image.dtype", "'float32'"),
        ("inputs.image.values", "[1, 0]", "inputs.image", "low 1.0 is above high 0.0"),
        ("axes.frames", "{min: 1, opt: 1, max: 2}", "axes.frames", "no input's shape uses this axis"),
        ("axes.batch", "{min: 4, opt: 1, max: 2}", "axes.batch", "min <= opt <= max"),
        ("loss", "null", "loss", "train is given, so loss is needed"),
        ("train", "null", "train", "loss is given, so train is needed"),
        ("model", "model.py", "model", "model.py:build"),
        ("model", "net.pth", "model", "holds weights, not a model"),
        ("model", "net.tflite", "model", "neither file.py:factory"),
        ("model", "missing.py:build", "model", "there is no file missing.py"),
        ("model", "missing.onnx", "weights", "it needs a model factory"),
        ("weights", "missing.pt", "weights", "there is no file missing.pt"),
        ("calibration", "nowhere.py:f", "calibration", "there is no file nowhere.py"),
        ("calibration", "data.py", "calibration", "not file.py:function"),
        ("evaluate", "data.py:not a name", "evaluate", "not file.py:function"),
        ("data", "[data, more]", "data", "there is no file more"),
        ("limits.latency_ms", "-1", "limits.latency_ms", "greater than 0"),
        ("passes.fold", "maybe", "passes.fold", "neither on, off, nor"),
    ],
)  # fmt: skip
def test_a_wrong_value_names_key_reason_and_setting(folder, key, text, wrong_key, part):
    why = refused(folder, {key: text})
    assert f"'{wrong_key}'" in why.what
    assert part in why.what
    assert f"--set project.{key}={text}" in why.where


def test_a_wrong_value_in_the_file_names_the_file(folder):
    (folder / "edgeopt.yaml").write_text(GOOD.replace("evaluate:", "evalute:"))
    why = refused(folder)
    assert "unknown key 'evalute', did you mean 'evaluate'?" in why.what
    assert why.where == str(folder / "edgeopt.yaml")


def test_several_wrong_keys_are_told_at_once(folder):
    (folder / "edgeopt.yaml").write_text(
        GOOD.replace("evaluate:", "evalute:").replace("qat: {epochs: 2", "qat: {epochs: two")
    )
    what = refused(folder).what
    assert "evalute" in what and "qat.epochs" in what


def test_a_folder_without_a_project_says_how_to_make_one(tmp_path):
    assert "edgeopt init" in refused(tmp_path).todo
    assert "no such project file" in refused(tmp_path / "x.yaml").what
    (tmp_path / "edgeopt.yml").touch()
    assert "rename edgeopt.yml" in refused(tmp_path).todo


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("m.py:build", "factory"), ("dir/m.py:Net.small", "factory"), ("pkg.mod:build", "factory"),
        ("pkg:build", "factory"), ("x.onnx", "onnx"), ("dir with space/X.ONNX", "onnx"), ("x.pt", "torchscript"),
        ("x.ts", "torchscript"), ("x.pt2", "exported"),
    ],
)  # fmt: skip
def test_forms_of_model(model, kind):
    assert model_kind(model) == kind


@pytest.mark.parametrize("model", ["", "m.py", "m.py:", ":build", "a b:c", "x.pth", "m.py:1x", "m.py:a:b"])
def test_forms_that_are_no_model(model):
    with pytest.raises(ValueError):
        model_kind(model)


def test_a_model_alone_needs_known_inputs(folder):
    with pytest.raises(ProjectError, match="the inputs of model.py:build are not known") as caught:
        project_for_model("model.py:build", folder=folder)
    assert "edgeopt init model.py:build" in caught.value.todo
    inputs, axes = {"x": {"shape": ["n", 3]}}, {"n": {"min": 1, "opt": 1, "max": 4}}
    project = project_for_model("model.py:build", folder=folder, inputs=inputs, axes=axes, overrides={"seed": "7"})
    assert (project.seed, project.inputs["x"].shape, project.folder) == (7, ("n", 3), folder)
    given = {"inputs.x.shape": "[2, 3]"}
    assert project_for_model("model.py:build", folder=folder, overrides=given).inputs["x"].shape == (2, 3)
    with pytest.raises(ProjectError, match="there is no file gone.py"):
        project_for_model("gone.py:build", folder=folder, inputs=inputs, axes=axes)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("net.py:build", "net"),
        ("pkg.detector:build", "detector"),
        ("my dir/face net.onnx", "face-net"),
        ("日本.onnx", "model"),
    ],
)
def test_a_model_gives_its_name(model, name):
    assert name_for(model) == name


_KEYS = st.sampled_from(list(ProjectFile.model_fields))
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["m.py:f", "x.onnx", "batch", "float32", "a b", "1e-4"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(_KEYS | st.sampled_from(["shape", "dtype", "min", "opt", "max", "batch"]), inner, max_size=4),
    max_leaves=10,
)  # fmt: skip


@given(
    data=st.binary(max_size=200) | st.dictionaries(_KEYS, _VALUES, max_size=6).map(lambda d: yaml.safe_dump(d).encode())
)
def test_any_file_gives_a_project_or_a_project_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("any") / "edgeopt.yaml"
    path.write_bytes(data)
    try:
        load_project(path)
    except ProjectError as why:
        assert why.what and why.todo


@pytest.mark.parametrize(
    "names, said",
    [
        (["p.0", "p.2"], "a tuple's items have no gap"), (["p.1"], "'p.0' is not"),
        (["p.0", "p.a"], "an item of a tuple"), (["p", "p.a"], "'p' is a tensor"),
        (["p.a", "p"], "other inputs name parts"),
        (["p."], "empty part"), (["p.a.0", "p.a.b"], "'p.a.0' is an item of a tuple, and 'p.a.b' a key"),
    ],
)  # fmt: skip
def test_input_names_that_make_no_structure_are_refused(folder, names, said):
    with pytest.raises(ProjectError, match="key 'inputs'") as error:
        project_for_model("model.py:build", folder=folder, inputs={name: {"shape": [1]} for name in names})
    assert said in error.value.what and "PARAMETER.0" in error.value.todo


def test_an_onnx_file_names_its_inputs_as_it_likes(folder):
    (folder / "net.onnx").write_bytes(b"")
    inputs = {"input.1": {"shape": [1]}, "input": {"shape": [1]}}
    assert list(project_for_model("net.onnx", folder=folder, inputs=inputs).inputs) == ["input.1", "input"]
