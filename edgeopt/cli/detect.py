"""The command that says what a device is and which profile is for it."""

from __future__ import annotations

import json
from pathlib import Path

import click

from edgeopt.cli.device import device_options, open_connection


@click.command()
@click.argument("host", required=False)
@click.option(
    "--write", "write_to", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Write a profile of the device to FILE, a new one ending in .yaml.",
)  # fmt: skip
@click.option("--python", metavar="PATH", help="Python on the device [default: python3; without HOST this one].")
@click.option("--all", "all_profiles", is_flag=True, help="Show the profiles that do not fit too, with the reasons.")
@device_options
def detect(host, write_to, python, all_profiles, root, accept_new_host_key, ssh_config, as_json):
    """Show what HOST is and which profiles fit it.

    HOST is an alias of ~/.ssh/config or user@host[:port]; without it this machine is the device. Nothing is written
    there, and no root is needed. What the device does not say is left out.

    \b
    Example:
      edgeopt detect jetson
      edgeopt detect jetson --write boards/gripper.yaml
      edgeopt detect jetson --json
    """
    import sys

    from edgeopt.flows.detect import detect, write_profile

    with open_connection(host, ssh_config, accept_new_host_key) as connection:
        found = detect(connection, python=python or ("python3" if host else sys.executable), root=root)
    if write_to is not None:
        write_profile(found, write_to, root=root)
    if as_json:
        click.echo(json.dumps({**found.as_dict(), "written": str(write_to) if write_to else None}))
        return
    _print(fact_rows(found))
    click.echo()
    _print(profile_rows(found, all_profiles))
    if write_to is not None:
        click.echo(f"\nwritten  {write_to}; build for it: edgeopt build --profile {write_to}")


def fact_rows(found) -> list[tuple[str, str]]:
    """(what, value) for people; what the device does not say has no row."""
    f = found.facts
    rows = [
        ("device", _joined(f.model, f.module and f"module {f.module}", f.soc, f.sm and f"sm_{f.sm.replace('.', '')}")),
        ("EMULATED", f.emulated and f"{f.emulated}: nothing that is timed here is a device's latency"),
        ("gpu", ", ".join(f.gpus)),
        ("jetpack", _joined(f.jetpack, f.l4t and f"L4T {f.l4t}")),
        ("cuda", _joined(f.cuda, f.cudnn and f"cuDNN {f.cudnn}", f.tensorrt and f"TensorRT {f.tensorrt}")),
        ("system", _joined(f.system, f.kernel and f"Linux {f.kernel}", f.arch, f.libc and f"glibc {f.libc}",
                           f.container and f"in a container ({f.container})")),
        ("cpu", _joined(f.cpu_model, _cores(f))),
        ("python", _joined(f.python, *(_package(f, name) for name in f.packages))),
        ("memory", _joined(_gib(f.memory_bytes), f.memory_available_bytes is not None
                           and f"{_gib(f.memory_available_bytes)} available", _swap(f))),
        *(("disk", _disk(disk)) for disk in f.disks),
        ("power mode", _joined(_mode(f.power_mode), _modes(f))),
        ("clocks", ", ".join(_clock(f, name) for name in f.clocks_mhz)),
        ("temperature", ", ".join(f"{name} {value:g}" for name, value in f.temperatures_c.items())),
        ("rails", ", ".join(f.rails)),
        ("sensors", ", ".join(f.sensors) or "none that can be read"),
        ("user", _joined(f.user, f.shell, f.home)),
        ("commands", ", ".join(f.commands)),
        ("clock", _skew(f)),
    ]  # fmt: skip
    return [(name, value) for name, value in rows if value]


def profile_rows(found, all_profiles: bool) -> list[tuple[str, str, str]]:
    """(profile, verdict, why) of those that fit or nearly do, or of all."""
    shown = [fit for fit in found.fits if all_profiles or fit.verdict != "no"]
    rows = [(fit.profile, fit.verdict, "; ".join(fit.reasons)) for fit in shown]
    hidden = len(found.fits) - len(shown)
    note = f"{hidden} other profile{'s do' if hidden > 1 else ' does'} not fit: --all says why"
    return [("PROFILE", "FITS", ""), *rows, *([("", "", note)] if hidden else [])]


def _print(rows: list[tuple[str, ...]]) -> None:
    """A table as wide as the terminal, its last column wrapped; unwrapped where a program reads it."""
    import shutil
    import sys

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    table = Table.grid(padding=(0, 2))
    for i, _ in enumerate(rows[0]):
        table.add_column(no_wrap=i < len(rows[0]) - 1, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_printable(cell)) for cell in row))
    console = Console(width=width, highlight=False)
    with console.capture() as shown:
        console.print(table)
    for line in shown.get().splitlines():
        click.echo(line.rstrip())


def _printable(text: str) -> str:
    """Without what would steer the terminal: these words come from a device."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _joined(*parts) -> str:
    return ", ".join(str(part) for part in parts if part)


def _gib(size: int | None) -> str | None:
    return None if size is None else f"{size / 2**30:.1f} GiB"


def _swap(f) -> str | None:
    return None if f.swap_bytes is None else f"swap {_gib(f.swap_bytes)}" if f.swap_bytes else "no swap"


def _cores(f) -> str | None:
    if f.cpu_count is None:
        return None
    off = f.cpu_count - (f.cpu_online or f.cpu_count)
    return f"{f.cpu_count} cores" + (f", {off} of them off" if off > 0 else "")


def _package(f, name: str) -> str:
    cuda = f" (CUDA {f.torch_cuda})" if name == "torch" and f.torch_cuda else ""
    return f"{name} {f.packages[name]}{cuda}"


def _disk(disk) -> str:
    free = f"{_gib(disk.free_bytes)} free of {_gib(disk.total_bytes)}" if disk.free_bytes is not None else None
    return _joined(disk.path, free, disk.writable is False and "NOT WRITABLE")


def _mode(mode) -> str | None:
    if mode is None:
        return None
    return mode.name if mode.id is None else f"{mode.name} ({mode.id})"


def _modes(f) -> str | None:
    return f"of {' '.join(m.name for m in f.power_modes)}" if f.power_modes else None


def _clock(f, name: str) -> str:
    most = f.clocks_max_mhz.get(name)
    return f"{name} {f.clocks_mhz[name]:.0f}" + (f" of {most:.0f}" if most is not None else "") + " MHz"


def _skew(f) -> str | None:
    if f.clock_skew_s is None or abs(f.clock_skew_s) < 2:  # the round trip itself and whole seconds of `date`
        return None
    return f"{abs(f.clock_skew_s):.0f} s {'ahead of' if f.clock_skew_s > 0 else 'behind'} this machine"
