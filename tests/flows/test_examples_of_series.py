"""The two example projects on real series, watch (1-D CNN and LSTM) and vowels (GRU, any length): the whole pipeline.

A build takes 10 to 20 s of an idle core, most of it torch's exports: it is what is tried here.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import edgeopt
from edgeopt.runtime.artifact import Artifact
from tests.conftest import absent
from tests.small_project import run_edgeopt

ROOT = Path(__file__).parents[2]
# example -> (a file of its data, candidates, accuracy of the committed weights)
EXAMPLES = {
    "watch": (
        "seglearn/data/watch_dataset.npy",
        ["onnxruntime-fp32", "torchscript-fp32", "onnxruntime-int8", "onnxruntime-int8-dynamic"],
        84.8,
    ),
    "vowels": (
        "aeon/datasets/data/JapaneseVowels/JapaneseVowels_TEST.ts",
        ["onnxruntime-fp32", "torchscript-fp32", "onnxruntime-int8"],
        95.68,
    ),
}


def data_of(example: str):
    """The example's module `data`; the test is left out where the data was not fetched."""
    if not (ROOT / ".zoo" / "site" / EXAMPLES[example][0]).is_file():
        absent(f"the data of examples/{example} is not here: run scripts/fetch-zoo")
    name = f"data_of_{example}"
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / example / "data.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=list(EXAMPLES))
def built(request, tmp_path_factory):
    example = request.param
    data = data_of(example)
    folder = tmp_path_factory.mktemp(example)
    out, project = folder / f"{example}.edgeopt", folder / "examples" / example
    shutil.copytree(ROOT / "examples" / example, project, ignore=shutil.ignore_patterns(".edgeopt", "*.edgeopt"))
    (folder / ".zoo").symlink_to(ROOT / ".zoo")
    done = run_edgeopt("build", "--profile", "x86-cpu", "--project", str(project), "--out", str(out))
    assert done.returncode == 0, done.stderr
    return example, data, out


def test_every_candidate_keeps_the_accuracy(built):
    example, _, out = built
    manifest = Artifact.open(out).manifest
    _, candidates, accuracy = EXAMPLES[example]
    assert [c.name for c in manifest.candidates] == candidates
    assert manifest.metrics["reference"]["accuracy"] == pytest.approx(accuracy, abs=0.5)
    for name in candidates:
        assert manifest.metrics[name]["accuracy"] >= manifest.metrics["reference"]["accuracy"] - 1


def test_it_was_trained_and_quantized_and_the_recurrent_layer_is_named(built):
    example, _, out = built
    stages = {stage["name"]: stage for stage in json.loads((out / "build.json").read_text())["stages"]}
    assert not stages["qat"]["skipped"] and not stages["quantize"]["skipped"]
    left = stages["quantize"]["details"]["left_float"]
    assert left["rnn"].startswith("LSTM: float here; int8 weights" if example == "watch" else "GRU: no runtime here")


def test_int8_answers_at_every_length(built):
    example, data, out = built
    candidate = "onnxruntime-int8-dynamic" if example == "watch" else "onnxruntime-int8"
    with edgeopt.load(out, candidate) as predictor:
        seen = set()
        for inputs in data.calibration():
            seen.add(next(iter(inputs.values())).shape[2 if example == "watch" else 1])
            scores = predictor.predict(inputs)["scores"]
            assert np.isfinite(scores).all() and len(scores) == len(next(iter(inputs.values())))
    assert seen == {128} if example == "watch" else len(seen) >= 15


def test_the_watch_data_is_what_the_example_says():
    data = data_of("watch")
    signals, labels, subjects = data.windows()
    assert signals.shape[1:] == (6, 128) and signals.dtype == np.float32 and set(labels) == set(range(7))
    train, held_out = data.split()
    assert set(subjects[train]) == set(range(1, 8)) and set(subjects[held_out]) == {8, 9, 10}


def test_another_file_in_place_of_the_watch_data_is_not_unpickled(monkeypatch, tmp_path):
    data = data_of("watch")
    (tmp_path / "watch.npy").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    monkeypatch.setattr(data, "FILE", tmp_path / "watch.npy")
    with pytest.raises(RuntimeError, match="is not the file that this example was written for"):
        data.windows()


def test_the_vowels_are_what_the_example_says():
    data = data_of("vowels")
    sizes = {part: len(data.utterances(part)) for part in ("TRAIN", "TEST")}
    assert sizes == {"TRAIN": 270, "TEST": 370}
    lengths = [len(frames) for part in sizes for frames, _ in data.utterances(part)]
    assert (min(lengths), max(lengths)) == (7, 29)
    for part, count in sizes.items():
        given = list(data.batches(part))
        assert sum(len(speakers) for _, speakers in given) == count
        assert {speaker for _, speakers in given for speaker in speakers} == set(range(9))
