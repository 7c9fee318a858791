"""What pyproject.toml cannot say: `profiles/` lies beside the package and ships inside it, as `edgeopt/profiles`."""

from setuptools import find_namespace_packages, setup

RECORDINGS = ["edgeopt.testing.recordings", "edgeopt.testing.recordings.*"]  # folders of data, no packages

setup(
    packages=[*find_namespace_packages(include=["edgeopt", "edgeopt.*"], exclude=RECORDINGS), "edgeopt.profiles"],
    package_dir={"edgeopt.profiles": "profiles"},
    package_data={"edgeopt.profiles": ["*.yaml"], "edgeopt.testing": ["recordings/**", "recordings/**/.*"]},
)
