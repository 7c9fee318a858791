"""Fleet files: what holds for a device, what is selected, and what is refused with a word on what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeopt.errors import FleetError, UsageError
from edgeopt.spec.fleet import load_fleet, select

FLEET = """\
defaults:
  python: python3.8
  labels: {site: berlin, spare: off}
groups:
  usb: {match: {camera: usb}, root: /data, profile: xavier}
  rack-3: {match: {rack: 3}, root: /ssd}
devices:
  - host: jetson-01
    labels: {camera: usb, rack: 3}
  - host: nvidia@10.0.0.2:2222
    name: second
    labels: {camera: usb, site: kiel}
    python: /opt/python
  - {host: third, artifact: ../orin.edgeopt}
"""


@pytest.fixture
def load(tmp_path):
    def read(text: str):
        path = tmp_path / "fleet.yaml"
        path.write_text(text)
        return load_fleet(path)

    return read


def test_what_a_device_says_counts_before_its_groups_and_these_before_defaults(load, tmp_path):
    first, second, third = load(FLEET)
    assert first.labels == {"site": "berlin", "spare": "false", "camera": "usb", "rack": "3"}
    assert first.groups == ("usb", "rack-3") and first.root == "/ssd" and first.profile == "xavier"  # the later group
    assert (second.name, second.root, second.python) == ("second", "/data", "/opt/python")
    assert second.labels["site"] == "kiel" and first.python == third.python == "python3.8"
    assert Path(third.artifact).resolve() == (tmp_path.parent / "orin.edgeopt").resolve() and third.root is None


def test_select_narrows_and_knows_groups(load):
    devices = load(FLEET)
    assert [d.name for d in select(devices, [])] == ["jetson-01", "second", "third"]
    assert [d.name for d in select(devices, ["site=berlin", "camera=usb"])] == ["jetson-01"]
    assert [d.name for d in select(devices, ["group=usb"])] == ["jetson-01", "second"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["siet=berlin"], "did you mean 'site'"),
        (["site=munich"], "berlin, kiel"),
        (["site"], "LABEL=VALUE"),
        (["=x"], "LABEL=VALUE"),
        (["group=usb2"], "rack-3, usb"),
        (["site=kiel", "rack=3"], "fewer labels"),
    ],
)
def test_a_selection_of_nothing_says_what_there_is(load, asked, said):
    with pytest.raises(UsageError) as refused:
        select(load(FLEET), asked)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "missing key 'devices'"),
        ("devices: []", "devices"),
        ("device: [{host: a}]", "did you mean 'devices'"),
        ("devices: [{hots: a}]", "did you mean 'host'"),
        ("devices: [{host: a, pyhton: b}]", "did you mean 'python'"),
        ("groups: {g: {math: {a: b}}}\ndevices: [{host: a}]", "did you mean 'match'"),
        ("groups: {g: {match: {}}}\ndevices: [{host: a}]", "match"),
        ("groups: {g: {match: {rak: 1}}}\ndevices: [{host: a, labels: {rack: 1}}]", "did you mean 'rack'"),
        ("devices: [{host: a}, {host: a}]", "called 'a'"),
        ("devices: [{host: a}, {host: a, name: b}]", "stands there twice"),
        ("devices: [{host: -oProxyCommand=x}]", "is no host"),
        ("devices: [{host: a b}]", "is no host"),
        ("devices: [{host: a, name: ../x}]", "name"),
        ("devices: [{host: a, labels: {group: x}}]", "groups are selected by that name"),
        ("devices: [{host: a, labels: {'a b': x}}]", "cannot be a label"),
        ("devices: [{host: a, labels: {a: [1]}}]", "labels"),
        ("- a", "key: value"),
    ],
)
def test_what_is_wrong_is_named(load, text, said):
    with pytest.raises(FleetError) as refused:
        load(text)
    assert said in str(refused.value) and "fleet.yaml" in str(refused.value) and refused.value.todo
    assert refused.value.exit_code == 4


def test_one_host_with_two_roots_is_two_devices(load):
    assert len(load("devices: [{host: a}, {host: a, name: b, root: /other}]")) == 2
