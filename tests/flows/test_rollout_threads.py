"""What several deployments of one artifact at once must not do to each other, as Ansible's forks are."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from edgeopt.runtime.artifact import replace_file
from tests.fleet import version


def test_a_file_that_many_replace_is_always_one_of_theirs(tmp_path):
    path, texts = tmp_path / "selection.json", [b"%d" % n * 10_000 for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            list(pool.map(lambda text: replace_file(path, text), texts))
            assert path.read_bytes() in texts
    assert [p.name for p in tmp_path.iterdir()] == ["selection.json"]


def test_processes_that_deploy_one_artifact_leave_each_device_its_own_selection(fleet, tmp_path):
    artifact, config = version(tmp_path, 1), fleet.config()
    children = []
    for name in fleet.names[:3]:
        argv = [sys.executable, "-m", "edgeopt", "deploy", artifact.folder, name, "--root", fleet.root(name)]
        argv += ["--python", sys.executable, "--ssh-config", config, "--threads", "1"]
        children.append(subprocess.Popen([str(a) for a in argv], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
    for child in children:
        assert child.communicate(timeout=300)[1] is not None and child.returncode == 0
    for name, server in zip(fleet.names[:3], fleet.servers, strict=False):
        selection = json.loads((fleet.root(name) / "tiny" / "current" / "selection.json").read_text())
        assert selection["where"].endswith(f":{server.port}")
