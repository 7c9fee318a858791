"""A fleet: the devices that a rollout goes to, their labels, and what differs from one to another.

    defaults: {python: python3, labels: {site: berlin}}
    groups:
      line-a:
        match: {camera: usb}
        root: /data/edgeopt
    devices:
      - host: jetson-01
        labels: {camera: usb}

What a device says itself counts first, then its groups (the later one in the file over the earlier), then `defaults`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator

from edgeopt.errors import FleetError, UsageError
from edgeopt.spec.values import Value, did_you_mean, validate
from edgeopt.spec.yaml_file import read_mapping

GROUP = "group"  # what `--select group=NAME` asks for, so no label may have this name

_NAME = r"[A-Za-z0-9][A-Za-z0-9._@:-]*"
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")


def _text(value: Any) -> Any:
    """A label's value as text: YAML reads `rack: 3` as a number and `spare: on` as a boolean."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value


def _labels(value: Any) -> Any:
    return {key: _text(item) for key, item in value.items()} if isinstance(value, dict) else value


Labels = Annotated[dict[str, str], BeforeValidator(_labels)]


class Settings(Value):
    """What a device, a group and `defaults` may say."""

    root: str | None = Field(None, min_length=1, description="where releases lie there, as --root of deploy")
    python: str | None = Field(None, min_length=1, description="the interpreter there, as --python of deploy")
    profile: str | None = Field(None, description="of the artifacts given, the one that was built for this profile")
    artifact: str | None = Field(None, description="another artifact of the same name, relative to the fleet's file")


class Defaults(Settings):
    labels: Labels = Field({}, description="labels of every device that does not have them itself")


class Group(Settings):
    match: Labels = Field(min_length=1, description="labels that a device of this group has, all of them")


class FleetDevice(Settings):
    host: str = Field(description="an alias of ~/.ssh/config or user@host[:port]")
    name: str | None = Field(None, pattern=f"^{_NAME}$", description="how it is called; default its host")
    labels: Labels = Field({}, description="label: value")

    @field_validator("host")
    @classmethod
    def _is_a_host(cls, host: str) -> str:
        if not re.fullmatch(r"[^\s-]\S*", host):
            raise ValueError(f"'{host}' is no host: give an alias of ~/.ssh/config or user@host[:port]")
        return host


class FleetFile(Value):
    defaults: Defaults = Field(Defaults(), description="what holds where device and groups say nothing")
    groups: dict[str, Group] = Field({}, description="name: labels to match, and settings of what matches")
    devices: tuple[FleetDevice, ...] = Field(min_length=1, description="in the order in which they are taken")


class Device(Value):
    """A device of the fleet with everything that holds for it. `artifact` is an absolute path."""

    name: str
    host: str
    labels: dict[str, str]
    groups: tuple[str, ...]
    root: str | None
    python: str
    profile: str | None
    artifact: str | None


def load_fleet(path: Path) -> tuple[Device, ...]:
    """The devices of the fleet in the file `path`. FleetError names the file, the key and the closest known one."""
    source = str(path)
    file = validate(FleetFile, read_mapping(path, error=FleetError), source=source, error=FleetError)
    _check_labels(file, source)
    devices = tuple(_resolved(device, file, path.resolve().parent) for device in file.devices)
    _check_unique(((d.name, d.name) for d in devices), "two devices are called '{}'", "give each a 'name'", source)
    places = ((f"{d.host} {d.root}", d.host) for d in devices)
    _check_unique(places, "the host '{}' stands there twice with one root", "leave one of them out", source)
    return devices


def select(devices: Iterable[Device], asked: Iterable[str]) -> tuple[Device, ...]:
    """The devices that have every LABEL=VALUE of `asked`; 'group=NAME' asks for those of a group.

    UsageError for what is not of that form, for a label or value that no device has, and where nothing is left.
    """
    devices, left = tuple(devices), tuple(devices)
    for text in asked:
        label, equals, value = text.partition("=")
        if not equals or not label:
            raise UsageError(f"'{text}' is not LABEL=VALUE", where="--select", todo="as in --select site=berlin")
        found = tuple(d for d in devices if value in _values(d, label))
        if not found:
            raise _nobody(devices, label, value)
        left = tuple(d for d in left if d in found)
    if not left:
        raise UsageError(
            f"no device has all of {', '.join(asked)}", where="--select", todo="ask for fewer labels at once"
        )
    return left


def _values(device: Device, label: str) -> tuple[str, ...]:
    if label == GROUP:
        return device.groups
    return (device.labels[label],) if label in device.labels else ()


def _nobody(devices: tuple[Device, ...], label: str, value: str) -> UsageError:
    known = sorted({name for d in devices for name in d.labels} | {GROUP})
    if label not in known:
        near = did_you_mean(label, known)
        todo = f"did you mean '{near}'?" if near else f"labels there: {', '.join(known)}"
        return UsageError(f"no device has the label '{label}'", where="--select", todo=todo)
    values = sorted({item for d in devices for item in _values(d, label)})
    return UsageError(
        f"no device has {label}={value}", where="--select", todo=f"values there: {', '.join(values) or 'none'}"
    )


def _resolved(device: FleetDevice, file: FleetFile, folder: Path) -> Device:
    labels = {**file.defaults.labels, **device.labels}
    groups = [name for name, group in file.groups.items() if _matches(labels, group.match)]
    said: list[Settings] = [device, *(file.groups[name] for name in reversed(groups)), file.defaults]

    def first(key: str) -> Any:
        return next((value for one in said if (value := getattr(one, key)) is not None), None)

    artifact = first("artifact")
    return Device(
        name=device.name or device.host, host=device.host, labels=labels, groups=tuple(groups), root=first("root"),
        python=first("python") or "python3", profile=first("profile"),
        artifact=str(folder / artifact) if artifact else None,
    )  # fmt: skip


def _matches(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(labels.get(name) == value for name, value in wanted.items())


def _check_labels(file: FleetFile, source: str) -> None:
    held = {"defaults": file.defaults.labels}
    held |= {f"groups.{name}.match": group.match for name, group in file.groups.items()}
    held |= {f"devices.{at}.labels": device.labels for at, device in enumerate(file.devices)}
    for key, labels in held.items():
        for label in labels:
            if not _LABEL.fullmatch(label) or label == GROUP:
                why = "groups are selected by that name" if label == GROUP else "use letters, digits, '.', '_', '-'"
                raise FleetError(f"key '{key}': '{label}' cannot be a label", where=source, todo=why)
    known = sorted({label for key, labels in held.items() if not key.startswith("groups.") for label in labels})
    for name, group in file.groups.items():
        for label in group.match:
            if label not in known:
                near = did_you_mean(label, known)
                todo = f"did you mean '{near}'?" if near else "give a device that label, or remove the group"
                raise FleetError(f"key 'groups.{name}.match': no device has '{label}'", where=source, todo=todo)


def _check_unique(pairs: Iterable[tuple[str, str]], what: str, todo: str, source: str) -> None:
    seen = set()
    for key, shown in pairs:
        if key in seen:
            raise FleetError(what.format(shown), where=source, todo=todo)
        seen.add(key)
