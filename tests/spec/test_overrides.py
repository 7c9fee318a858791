"""`--set`: one key replaced, and a key that no file has is answered before anything is read."""

import pytest

from edgeopt.errors import ProfileError, ProjectError, UsageError
from edgeopt.spec.overrides import apply_overrides, parse_overrides
from edgeopt.spec.profile import ProfileFile


def apply(data, overrides):
    return apply_overrides(data, overrides, model=ProfileFile, scope="profile", error=ProfileError)


def test_settings_are_split_by_scope_and_keep_their_text():
    project, profile = parse_overrides(["project.seed=3", "profile.passes.fold=off", "project.model=m.py:f=g"])
    assert project == {"seed": "3", "model": "m.py:f=g"}
    assert profile == {"passes.fold": "off"}


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("profile.passes.fold", "needs a value"),
        ("profle.dla=on", "did you mean 'profile'"),
        ("dla=on", "starts with 'project.' or 'profile.'"),
        ("profile=on", "needs a key"),
        ("profile.=on", "needs a key"),
        ("profile.passes..x=on", "needs a key"),
        ("profile.backends=[a", "not YAML"),
    ],
)
def test_a_setting_that_cannot_be_read_is_a_usage_error(setting, part):
    with pytest.raises(UsageError) as caught:
        parse_overrides([setting])
    assert part in caught.value.what
    assert setting in caught.value.where


def test_nested_keys_are_replaced_and_made_in_a_copy():
    data = {"title": "t", "precision": {"allowed": ["fp32", "int8"]}}
    out = apply(data, {"precision.allowed": "[fp32]", "passes.fold": "off", "target.vnni": "true"})
    assert out == {
        "title": "t",
        "precision": {"allowed": ["fp32"]},
        "passes": {"fold": False},
        "target": {"vnni": True},
    }
    assert data == {"title": "t", "precision": {"allowed": ["fp32", "int8"]}}


@pytest.mark.parametrize(
    ("key", "part"),
    [
        ("precison.allowed", "unknown key 'precison', did you mean 'precision'?"),
        ("precision.alowed", "unknown key 'precision.alowed', did you mean 'allowed'?"),
        ("target.torch.mni", "unknown key 'target.torch.mni', did you mean 'min'?"),
        ("dla.cores", "'dla' has no keys below it"),
        ("backends.first", "'backends' has no keys below it"),
        ("passes.fold.deep.deeper", "'passes.fold.deep' has no keys below it"),
    ],
)
def test_a_key_that_no_profile_has_is_answered(key, part):
    with pytest.raises(ProfileError) as caught:
        apply({}, {key: "1"})
    assert part in caught.value.what
    assert f"--set profile.{key}=1" in caught.value.where


def test_a_key_with_dots_of_its_own_is_found():
    """An input may be named 'batch.ids'."""
    from edgeopt.spec.project import ProjectFile

    data = {"inputs": {"batch.ids": {"shape": [1]}, "batch.mask.0": {"shape": [2]}, "x": {"shape": [3]}}}
    given = {"inputs.batch.ids.shape": "[4]", "inputs.batch.mask.0.dtype": "bool", "inputs.x.dtype": "int64"}
    out = apply_overrides(data, given, model=ProjectFile, scope="project", error=ProjectError)
    assert out["inputs"] == {
        "batch.ids": {"shape": [4]}, "batch.mask.0": {"shape": [2], "dtype": "bool"},
        "x": {"shape": [3], "dtype": "int64"},
    }  # fmt: skip
    with pytest.raises(ProjectError, match="unknown key 'inputs.batch.ids.shap', did you mean 'shape'"):
        apply_overrides(data, {"inputs.batch.ids.shap": "1"}, model=ProjectFile, scope="project", error=ProjectError)
