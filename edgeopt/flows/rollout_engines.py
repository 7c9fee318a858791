"""Engines within a rollout: the first device of an equal passport builds one, the others are given its file.

A passport names everything that an engine was made from and for, so an equal one is the same GPU, L4T, CUDA and
TensorRT. The file is fetched here with its sha256, sent as a blob, hashed there, and loaded and run once by trtexec
there before it counts; a device on which that fails builds its own.
"""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path

from edgeopt import digest
from edgeopt.errors import ArtifactError, DeviceError, SpaceError, TransferError
from edgeopt.flows.place import Place
from edgeopt.flows.prepare import Engine, ask, prepare_at, recipes
from edgeopt.flows.push import push_to
from edgeopt.ports.blobs import BlobStore
from edgeopt.progress import Progress, log
from edgeopt.runtime.artifact import Artifact, replace_file
from edgeopt.runtime.zipapp import FILE_NAME as RUNNER

_LOOK_S = 0.5  # between two looks whether the rollout was interrupted while another device builds
_SPARE_BYTES = 16 << 20


class Engines:
    """The engines that are known in a rollout, kept in `folder` as PASSPORT.plan and PASSPORT.json."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._changed = threading.Condition()
        self._building: set[str] = set()

    def serve(self, place: Place, artifact: Artifact, python: str, keep: int, progress: Progress) -> None:
        """Have the device at the locked `place` hold the engines of `artifact`, pushed there first.

        Engines that a device cannot be given, or cannot build, are no error here: deploy's own prepare finds that out.
        """
        names = recipes(artifact.manifest)
        if not names:
            return
        push_to(place, artifact, keep=keep, progress=progress, python=python)
        release = place.release(artifact.digest)
        runner = f"{release}/{RUNNER}"
        try:
            wanted = ask(place.connection, python, runner, "passports", release, *names)
        except DeviceError as why:  # a runner of an older artifact
            log.info("%s: engines are not shared: %s", place.where, why.what)
            return
        self._serve(place, artifact, python, runner, wanted.engines, progress)

    def _serve(
        self, place: Place, artifact: Artifact, python: str, runner: str, wanted: tuple[Engine, ...],
        progress: Progress,
    ) -> None:  # fmt: skip
        by_passport = {engine.passport: engine for engine in wanted if engine.passport}
        ours: list[str] = []
        try:
            # in one order on all devices, so that no two wait for each other
            for passport, engine in sorted(by_passport.items()):
                if self._claim(passport, progress):
                    ours.append(passport)
                elif engine.status != "ready":
                    self._give(place, artifact, python, runner, engine, progress)
            if any(by_passport[passport].status != "ready" for passport in ours):
                prepare_at(place, artifact, python=python, progress=progress)
            for passport in ours:
                self._fetch(place, artifact, python, runner, by_passport[passport], progress)
        finally:
            with self._changed:
                self._building -= set(ours)
                self._changed.notify_all()

    def _claim(self, passport: str, progress: Progress) -> bool:
        """True where the caller is the one to build it, False once its file is here; waits while another builds."""
        with self._changed:
            while True:
                if self._held(passport) is not None:
                    return False
                if passport not in self._building:
                    self._building.add(passport)
                    return True
                self._changed.wait(_LOOK_S)
                with progress.bar("engines of an equal device are awaited", None):
                    pass  # where an interruption ends the step

    def _held(self, passport: str) -> dict | None:
        """What is known of the engine whose file is here: {"sha256", "seconds", "size_bytes"}."""
        try:
            about = json.loads((self._folder / f"{passport}.json").read_bytes())
            return about if (self._folder / f"{passport}.plan").stat().st_size == about["size_bytes"] else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _fetch(
        self, place: Place, artifact: Artifact, python: str, runner: str, engine: Engine, progress: Progress
    ) -> None:
        """Bring the engine here where the device has it by now; without it the next device builds."""
        release = place.release(artifact.digest)
        try:
            answer = ask(place.connection, python, runner, "engine", release, engine.candidate or "")
            if answer.failure or not answer.engines:
                return
            made = answer.engines[0]
            if made.passport is None or not re.fullmatch("[0-9a-f]{64}", made.passport) or not made.sha256:
                return
            path = self._folder / f"{made.passport}.plan"
            arriving = path.with_suffix(".arriving")
            with progress.bar("engines are fetched", made.size_bytes, unit="bytes") as advance:
                place.connection.get(f"{made.folder}/engine.plan", arriving, advance=advance)
            if digest.of_file(arriving) != made.sha256:
                raise TransferError("the engine arrived damaged", where=place.where, todo="repeat")
            os.replace(arriving, path)
            about = {"sha256": made.sha256, "seconds": made.seconds or 0, "size_bytes": path.stat().st_size}
            replace_file(path.with_suffix(".json"), json.dumps({**about, "built_on": place.where}).encode())
        except (DeviceError, TransferError, SpaceError) as why:
            log.warning("%s: its engine is not shared: %s", place.where, why.what)

    def _give(
        self, place: Place, artifact: Artifact, python: str, runner: str, engine: Engine, progress: Progress
    ) -> None:
        """Send the engine that is here to the device and have it taken in; what fails leaves it to build its own."""
        passport = engine.passport or ""
        held = self._held(passport)
        if held is None:
            return
        path, sha256, size = self._folder / f"{passport}.plan", held["sha256"], held["size_bytes"]
        try:
            store = BlobStore(place.connection, place.root, owner=place.name)
            survey = store.survey({sha256: size})
            if sha256 in survey.missing:
                if survey.free_bytes < size + _SPARE_BYTES:
                    raise SpaceError("there is no room for the engine", where=place.where, todo="free space there")
                with progress.bar(f"push engine {passport[:12]}", size, unit="bytes") as advance:
                    store.upload(path, sha256, size, survey.missing[sha256], advance=advance)
            blob = f"{place.root}/blobs/sha256/{sha256[:2]}/{sha256}"
            argv = ("adopt", place.release(artifact.digest), engine.candidate or "", blob, sha256, str(held["seconds"]))
            answer = ask(place.connection, python, runner, *argv)
            if answer.failure:
                raise DeviceError(answer.failure.message, where=place.where)
            log.info("%s: %s is taken over from a device of an equal passport", place.where, engine.candidate)
        except (ArtifactError, DeviceError, TransferError, SpaceError) as why:
            log.warning("%s: the engine of an equal device is not used: %s; it builds its own", place.where, why.what)
