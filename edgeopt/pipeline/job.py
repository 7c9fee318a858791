"""What every stage of one build is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgeopt.progress import SILENT, Progress
from edgeopt.spec.limits import Limits, stricter
from edgeopt.spec.profile import Profile
from edgeopt.spec.profile_values import PassSetting
from edgeopt.spec.project import Project

if TYPE_CHECKING:
    from edgeopt.device.session import Device


@dataclass(frozen=True)
class Job:
    """One build: the project, the profile, and the folder that belongs to this project's builds."""

    profile: Profile
    project: Project
    workdir: Path  # .edgeopt beside the project file: the stage cache and scratch files
    progress: Progress = SILENT
    target_python: str | None = None  # an interpreter here that has the target's torch, to test-load TorchScript
    device: Device | None = None  # where candidates run at the gates, None for this machine
    key: str = ""  # of the stage that runs

    @property
    def seed(self) -> int:
        return self.project.seed

    @property
    def passes(self) -> dict[str, PassSetting]:
        """Graph passes switched on or off, or set; the project's word wins over the profile's."""
        return {**self.profile.passes, **self.project.passes}

    @property
    def limits(self) -> Limits:
        return stricter(self.profile.limits, self.project.limits)
