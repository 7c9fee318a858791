from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile

import edgeopt.onboard
from edgeopt.runtime import zipapp


def test_the_bytes_depend_only_on_the_sources(tmp_path):
    code = "import sys, hashlib; from edgeopt.runtime.zipapp import pack; print(hashlib.sha256(pack()).hexdigest())"
    env = {**os.environ, "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "1", "SOURCE_DATE_EPOCH": "1"}
    root = os.path.dirname(os.path.dirname(os.path.dirname(edgeopt.onboard.__file__)))
    argv = [sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r}); {code}"]
    other = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == hashlib.sha256(zipapp.pack()).hexdigest()


def test_it_holds_the_sources_and_nothing_else(tmp_path):
    with zipfile.ZipFile(zipapp.write_zipapp(tmp_path)) as archive:
        names = archive.namelist()
        assert names == sorted(names) and "__main__.py" in names and "onboard/run.py" in names
        assert all(name.endswith(".py") for name in names)
        assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_it_starts(tmp_path):
    done = subprocess.run([sys.executable, str(zipapp.write_zipapp(tmp_path))], capture_output=True, text=True)
    assert (done.returncode, done.stderr[:6]) == (2, "usage:")
