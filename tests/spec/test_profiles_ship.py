"""The profiles are found from a wheel, from an editable install and from a plain checkout on sys.path."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from edgeopt.spec.profile import profile_names

REPO = Path(__file__).resolve().parents[2]
ASK = "import edgeopt.spec.profile as p; p.load_profile('xavier@4.6'); print(p.__file__, *p.profile_names())"


def asked(place: Path, cwd: Path) -> tuple[str, list[str]]:
    """Where edgeopt was imported from and the profiles that it found, with `place` first on sys.path."""
    code = f"import sys; sys.path.insert(0, {str(place)!r}); {ASK}"
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=True)
    file, *names = done.stdout.split()
    return file, names


def test_a_plain_checkout_on_the_path(tmp_path):
    shutil.copytree(REPO / "edgeopt", tmp_path / "edgeopt", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(REPO / "profiles", tmp_path / "profiles")
    file, names = asked(tmp_path, tmp_path)
    assert Path(file).is_relative_to(tmp_path)
    assert names == profile_names()


def test_a_wheel_holds_every_package_and_every_profile(tmp_path):
    pytest.importorskip("setuptools", reason="building a wheel needs setuptools in this environment")
    source = tmp_path / "source"
    for name in ("edgeopt", "profiles"):
        shutil.copytree(REPO / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        if (REPO / name).exists():
            shutil.copy(REPO / name, source / name)
    build = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(tmp_path), "."]
    subprocess.run([sys.executable, *build], cwd=source, check=True, capture_output=True, text=True)
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    shutil.rmtree(source)
    file, names = asked(installed, tmp_path)
    assert Path(file).is_relative_to(installed)
    assert names == profile_names()
    shipped = {p.relative_to(installed) for p in (installed / "edgeopt").rglob("*.py")}
    ours = {p.relative_to(REPO) for p in (REPO / "edgeopt").rglob("*.py")}
    assert shipped == ours
    data = "edgeopt/testing/recordings"
    recorded = {p.relative_to(REPO) for p in (REPO / data).rglob("*") if p.is_file()}
    assert {p.relative_to(installed) for p in (installed / data).rglob("*") if p.is_file()} == recorded


def test_the_environment_of_this_run_finds_them_from_any_folder(tmp_path):
    done = subprocess.run([sys.executable, "-c", ASK], cwd=tmp_path, capture_output=True, text=True)
    if done.returncode and "No module named 'edgeopt'" in done.stderr:
        pytest.skip("edgeopt is not installed in this environment")
    assert done.stdout.split()[1:] == profile_names()
