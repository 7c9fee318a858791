"""The plan of a rollout and its record: waves, artifacts by profile, a journal that was cut off, Ansible's files."""

from __future__ import annotations

import json
import shutil
import subprocess

import hypothesis
import hypothesis.strategies as st
import pytest

from edgeopt.errors import RolloutError, UsageError
from edgeopt.flows import rollout_ansible, rollout_journal
from edgeopt.flows.rollout import Options, make_plan
from edgeopt.flows.rollout_plan import sizes_of_waves
from edgeopt.spec.fleet import load_fleet
from edgeopt.spec.yaml_file import parse_value, to_yaml
from tests.tiny import tiny_artifact

PLAIN = {"torchscript": False, "metrics": {}, "cases": ()}


@pytest.mark.parametrize(
    ("count", "canary", "waves", "sizes"),
    [
        (200, 1, "10%,50%,100%", (1, 19, 80, 100)),
        (4, 1, "10%,50%,100%", (1, 1, 2)),
        (1, 1, "10%,50%,100%", (1,)),
        (3, 5, "100%", (3,)),
        (10, 0, "100%", (10,)),
        (10, 0, "3, 50% ,100%", (3, 2, 5)),
        (10, 2, "100", (2, 8)),
        (7, 0, "0%,33.3%,100%", (3, 4)),
    ],
)
def test_waves_are_cumulative_and_start_with_the_canary(count, canary, waves, sizes):
    assert sizes_of_waves(count, canary=canary, waves=waves) == sizes


@hypothesis.given(st.integers(1, 500), st.integers(0, 20), st.lists(st.integers(0, 100), max_size=6).map(sorted))
def test_every_device_is_in_one_wave(count, canary, shares):
    sizes = sizes_of_waves(count, canary=canary, waves=",".join([*(f"{s}%" for s in shares), "100%"]))
    assert sum(sizes) == count and min(sizes) > 0


@pytest.mark.parametrize("waves", ["", "10", "50%,10%,100%", "101%", "1.5,100%", "-5%", "ten", "10%", "100%,"])
def test_waves_that_are_none_are_refused(waves):
    with pytest.raises(UsageError) as refused:
        sizes_of_waves(100, canary=1, waves=waves)
    assert refused.value.where == "--waves" and refused.value.todo


def devices(tmp_path, text: str):
    (tmp_path / "fleet.yaml").write_text(text)
    return load_fleet(tmp_path / "fleet.yaml")


@pytest.fixture
def two(tmp_path):
    """Artifacts of one name for two profiles."""
    return [tiny_artifact(tmp_path / p, profile=p, **PLAIN) for p in ("x86-cpu", "arm64-cpu")]


def test_each_device_gets_the_artifact_of_its_profile_or_the_one_that_the_fleet_names(tmp_path, two):
    special = tiny_artifact(tmp_path / "special", profile="special", root="/data", **PLAIN)
    fleet = devices(
        tmp_path,
        "devices: [{host: a, profile: x86-cpu}, {host: b, profile: arm64-cpu, root: /ssd},"
        " {host: c, artifact: special/tiny.edgeopt}]",
    )
    plan = make_plan(two, fleet, Options())
    assert [d.digest for d in plan.devices] == [two[0].digest, two[1].digest, special.digest]
    assert [d.release_root for d in plan.devices] == [None, "/ssd", "/data"] and len(plan.artifacts) == 3


def test_what_no_artifact_or_several_fit_is_refused_before_any_work(tmp_path, two):
    with pytest.raises(UsageError, match="not clear"):
        make_plan(two, devices(tmp_path, "devices: [{host: a}]"))
    with pytest.raises(UsageError, match="for the profile 'xavier'"):
        make_plan(two, devices(tmp_path, "devices: [{host: a, profile: xavier}]"))
    other = tiny_artifact(tmp_path / "other", name="other", **PLAIN)
    with pytest.raises(UsageError, match="several names"):
        make_plan([two[0], other], devices(tmp_path, "devices: [{host: a}]"))


@pytest.fixture
def begun(tmp_path, two):
    """(folder, plan) of a rollout whose journal holds two events after the plan."""
    plan = make_plan(two[:1], devices(tmp_path, "devices: [{host: a}, {host: b}, {host: 'x@c:22'}]"))
    folder = tmp_path / "rollouts" / plan.id
    journal = rollout_journal.begin(folder, plan)
    journal.write("device", device="a", state="begun", before={"current": "1", "previous": None})
    journal.write("device", device="a", state="active", before=None, ms=float("nan"))
    journal.close()
    return folder, plan


def test_a_record_that_is_cut_off_anywhere_goes_on_from_the_last_whole_line(begun):
    folder, plan = begun
    path = folder / "journal.jsonl"
    data = path.read_bytes()
    first, second = data.find(b"\n") + 1, data.find(b"\n", data.find(b"\n") + 1) + 1
    for length in [*range(first, len(data), 37), len(data) - 1, len(data)]:
        path.write_bytes(data[:length])
        again, events, journal = rollout_journal.take_up(folder)
        known = rollout_journal.replay(again, events)
        journal.write("device", device="b", state="begun", before={})
        journal.close()
        expected = "active" if length == len(data) else "begun" if length >= second else "waiting"
        assert again == plan and known["a"].state == expected
        assert all(json.loads(line) for line in path.read_bytes().splitlines())
    assert known["a"].before == {"current": "1", "previous": None}


def test_a_record_that_is_damaged_elsewhere_is_refused_with_its_line(begun):
    folder, _ = begun
    path = folder / "journal.jsonl"
    lines = path.read_bytes().splitlines()
    for wrong, number in ((b'{"event": ', 2), (b"[]", 2), (b"", 1)):
        damaged = [*lines]
        damaged[number - 1] = wrong
        path.write_bytes(b"\n".join(damaged) + b"\n")
        with pytest.raises(RolloutError, match="damaged") as refused:
            rollout_journal.take_up(folder)
        assert refused.value.where.endswith(f":{number}")


def test_rollouts_are_found_by_id_and_the_newest_without(begun):
    folder, plan = begun
    assert rollout_journal.find(folder.parent, "tiny", "") == folder
    assert rollout_journal.find(folder.parent, "tiny", plan.id) == folder
    for name, asked in (("tiny", "tiny-1"), ("tin", ""), ("tiny", "../x")):
        with pytest.raises(UsageError, match="no rollout"):
            rollout_journal.find(folder.parent, name, asked)
    assert rollout_journal.new_id(folder.parent, "tiny") != plan.id


def test_files_of_devices_are_plain_and_their_own():
    names = ["a", "x@c:22", "x-c-22", "x-c:22", "[::1]"]
    files = [rollout_journal.file_name(name) for name in names]
    assert len(set(files)) == len(names) and all("/" not in f and ":" not in f for f in files)


def test_ansible_gets_a_play_a_wave_that_calls_deploy(tmp_path, two):
    text = "devices:\n" + "".join(f"  - {{host: d{i}, root: '~/on the device'}}\n" for i in range(10))
    plan = make_plan(two[:1], devices(tmp_path, text), Options(max_failures=1, soak_s=5, keep=2))
    paths = rollout_ansible.write(tmp_path / "out", plan, ["--threads", "2"])
    inventory, plays = (parse_value(path.read_bytes(), source="", error=RolloutError) for path in paths)
    assert inventory == rollout_ansible.inventory(plan, ["--threads", "2"]) and plays == rollout_ansible.playbook(plan)
    assert [play["serial"] for play in plays] == [len(wave) for wave in plan.waves] == [1, 4, 5]
    for play, wave in zip(plays, plan.waves, strict=True):
        hosts = inventory["all"]["children"][play["hosts"]]["hosts"]
        assert tuple(hosts) == wave
        # Ansible ends where the share of failed ones is more than this
        assert 100 / len(wave) <= play["max_fail_percentage"] < 200 / len(wave)
        for name, variables in hosts.items():
            assert variables["edgeopt_host"] == name and variables["edgeopt_artifact"] == str(two[0].folder)
            wanted = ["--root", "~/on the device", "--python", "python3", "--keep", "2", "--json", "--threads", "2"]
            assert variables["edgeopt_options"] == wanted
    assert ["pause" in json.dumps(play) for play in plays] == [True, True, False]
    assert "[0, 11, 17]" in to_yaml(plays)


def test_ansible_takes_the_playbook(tmp_path, two):
    """Its own word on the syntax; it is 70 MB, and CI does not install it."""
    if shutil.which("ansible-playbook") is None:
        pytest.skip("ansible-playbook is not installed (ansible-core), which is optional")
    plan = make_plan(two[:1], devices(tmp_path, "devices:\n  - d0\n  - d1\n"), Options(soak_s=5))
    paths = rollout_ansible.write(tmp_path / "out", plan, [])
    argv = ["ansible-playbook", "--syntax-check", "-i", str(paths[0]), str(paths[1])]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
