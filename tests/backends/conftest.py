"""Programs and files that the tests of this folder share: exporting one takes about two seconds."""

from __future__ import annotations

import functools

import pytest

from edgeopt.backends import onnx_export
from edgeopt.spec.profile import load_profile
from tests.backends import programs


@pytest.fixture(scope="session")
def case():
    """case(NAME): the program of that name with its eager module."""
    return functools.cache(programs.build)


@pytest.fixture(scope="session")
def written(case, tmp_path_factory):
    """written(NAME, opset): (OnnxFile, path) of the program written for a target of that opset."""

    @functools.cache
    def write(name: str, opset: int):
        out = tmp_path_factory.mktemp(f"{name}-{opset}")
        file = onnx_export.write(case(name).program, out, opset_max=opset)
        return file, out / file.name

    return write


@pytest.fixture(scope="session")
def profile():
    """profile(NAME): a shipped profile."""
    return functools.cache(lambda name: load_profile(name))
