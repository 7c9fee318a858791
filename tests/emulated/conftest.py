"""The machine that these tests share, and its file system as it says it is."""

from __future__ import annotations

import pytest

from edgeopt.errors import HostError
from edgeopt.testing import machine as machines
from edgeopt.testing import virtual_device
from tests.conftest import absent


@pytest.fixture(scope="module")
def machine(virtual_jetson_cache):
    try:
        machines.unavailable()
    except HostError as why:
        absent(f"no machine here: {why.what}; {why.todo}")
    with virtual_device(tier=2, cache=virtual_jetson_cache) as device:
        yield device
