"""A small fleet: real OpenSSH servers on loopback, each with its own port, keys and home, and a root for every test."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from edgeopt.flows.activate import activate
from edgeopt.flows.push import push
from edgeopt.flows.rollout import Options, Rolled, Tools, make_plan, rollout
from edgeopt.flows.rollout_crew import Pace, Watch
from edgeopt.flows.rollout_journal import folder_beside
from edgeopt.flows.validate import How
from edgeopt.ports.connect import connect
from edgeopt.ports.ssh import SSHConnection
from edgeopt.runtime.artifact import Artifact
from edgeopt.spec.fleet import Device, load_fleet
from edgeopt.spec.yaml_file import to_yaml
from tests.tiny import tiny_artifact

QUICK = How(rounds=1, calls=3, threads=1)
# run in ROOT/tiny/releases/DIGEST: a device is ill as long as ROOT/ill is there
HEALTH = ("sh", "-c", "test ! -e ../../../ill")


@dataclass
class Fleet:
    """Devices d0, d1 ... on `servers`; what belongs to a test lies in `folder`."""

    servers: list
    folder: Path
    ports: dict[str, int] = field(default_factory=dict)  # of devices that are not reached by their server's own

    @property
    def names(self) -> list[str]:
        return [f"d{at}" for at in range(len(self.servers))]

    def root(self, name: str) -> Path:
        return self.folder / "devices" / name

    def config(self) -> Path:
        lines = []
        for name, server in zip(self.names, self.servers, strict=True):
            lines += [
                f"Host {name}", "  HostName 127.0.0.1", f"  Port {self.ports.get(name, server.port)}",
                f"  HostKeyAlias [127.0.0.1]:{server.port}", f'  IdentityFile "{server.folder}/client_key"',
                "  IdentitiesOnly yes", f'  UserKnownHostsFile "{server.known_hosts}"', "  ConnectTimeout 2",
            ]  # fmt: skip
        path = self.folder / "ssh_config"
        path.write_text("\n".join(lines) + "\n")
        return path

    def file(self, **changes: dict) -> Path:
        """fleet.yaml; `changes` are further keys of a device, by its name."""
        devices = [
            {"host": name, "root": str(self.root(name)), "labels": {"rack": at % 2}, **changes.get(name, {})}
            for at, name in enumerate(self.names)
        ]
        path = self.folder / "fleet.yaml"
        path.write_text(to_yaml({"defaults": {"python": sys.executable}, "devices": devices}))
        return path

    def devices(self, **changes: dict) -> tuple[Device, ...]:
        return load_fleet(self.file(**changes))

    def tools(self, watch: Watch | None = None, **pace) -> Tools:
        config = self.config()

        def reach(host: str) -> SSHConnection:
            return SSHConnection(host, config=config, silence_s=2)

        return Tools(reach, QUICK, Pace(**{"retries": 0, "backoff_s": 0.05, **pace}), watch or Watch())

    def roll(self, artifact: Artifact, devices=None, *, pace: dict | None = None, **options) -> Rolled:
        plan = make_plan([artifact], devices or self.devices(), Options(**options))
        return rollout(plan, folder_beside(artifact.folder), self.tools(**(pace or {})))

    def hold(self, *artifacts: Artifact, names: list[str] | None = None) -> None:
        """Have devices (all, or these) run these artifacts one after the other, unproven."""
        with connect(None) as connection:
            for name in names or self.names:
                for artifact in artifacts:
                    push(artifact, connection, root=str(self.root(name)))
                    activate(connection, "tiny", artifact.digest, root=str(self.root(name)))

    def current(self, name: str) -> str | None:
        link = self.root(name) / "tiny" / "current"
        return os.readlink(link).removeprefix("releases/") if link.is_symlink() else None

    def links(self, name: str) -> dict[str, str]:
        folder = self.root(name) / "tiny"
        return {n: os.readlink(folder / n) for n in ("current", "previous") if (folder / n).is_symlink()}

    def make_ill(self, *names: str) -> None:
        for name in names:
            self.root(name).mkdir(parents=True, exist_ok=True)
            (self.root(name) / "ill").touch()


def version(folder: Path, number: int, **changes) -> Artifact:
    """An artifact called tiny, which differs from those of other numbers."""
    fields = {"torchscript": False, "metrics": {}, "cases": (), "health": HEALTH, **changes}
    return tiny_artifact(folder / f"v{number}", extra={"notes.txt": b"%d" % number}, **fields)


def states(done: Rolled) -> dict[str, str]:
    return {name: outcome.state for name, outcome in done.outcomes.items()}
