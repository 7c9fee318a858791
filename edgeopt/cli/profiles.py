"""`edgeopt profiles`: the shipped hardware profiles, and the check of one's own."""

from __future__ import annotations

import json

import click

_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def profiles() -> None:
    """List, show and check hardware profiles.

    \b
    Example:
      edgeopt profiles list
      edgeopt profiles show xavier@4.6
      edgeopt profiles check boards/mine.yaml
    """


@profiles.command("list")
@_json_option
def list_(as_json: bool) -> None:
    """List the shipped profiles.

    \b
    Example:
      edgeopt profiles list --json
    """
    from edgeopt.spec.profile import jetpacks_of, load_profile, profile_names

    loaded = [load_profile(name) for name in profile_names()]
    rows = [
        {
            "name": p.name, "title": p.title, "arch": p.target.arch, "sm": p.target.sm, "jetpack": p.jetpack,
            "jetpacks": list(jetpacks_of(p)), "precisions": list(p.precision.allowed), "backends": list(p.backends),
        }
        for p in loaded
    ]  # fmt: skip
    if as_json:
        click.echo(json.dumps(rows))
        return
    header = ("NAME", "ARCH", "SM", "JETPACK", "OTHERS (NAME@JETPACK)", "PRECISIONS", "BACKENDS")
    cells = [
        (
            r["name"], r["arch"], r["sm"] or "-", r["jetpack"] or "-",
            " ".join(j for j in r["jetpacks"] if j != r["jetpack"]) or "-",
            " ".join(r["precisions"]), " ".join(r["backends"]),
        )
        for r in rows
    ]  # fmt: skip
    _table([header, *cells])


@profiles.command()
@click.argument("name")
@click.option("--set", "settings", multiple=True, metavar="profile.KEY=VALUE", help="Override one key.")
@_json_option
def show(name: str, settings: tuple[str, ...], as_json: bool) -> None:
    """Print what profile NAME means, the facts of its module and JetPack filled in.

    NAME is a shipped profile, NAME@JETPACK, or the path of a file.

    \b
    Example:
      edgeopt profiles show xavier@4.6
      edgeopt profiles show x86-cpu --set profile.target.vnni=true
    """
    from edgeopt.spec.profile import load_profile
    from edgeopt.spec.yaml_file import to_yaml

    profile = load_profile(name, _profile_overrides(settings))
    data = {"source": profile.source, **profile.model_dump(mode="json")}
    click.echo(json.dumps(data) if as_json else to_yaml(data), nl=as_json)


@profiles.command()
@click.argument("file")
@_json_option
def check(file: str, as_json: bool) -> None:
    """Check the profile FILE: exit code 0 when it is good, 3 with the reasons when it is not.

    FILE is the path of a YAML file, FILE@JETPACK, or the name of a shipped profile.

    \b
    Example:
      edgeopt profiles check boards/mine.yaml
    """
    from edgeopt.spec.profile import load_profile

    profile = load_profile(file)
    if as_json:
        click.echo(json.dumps({"profile": profile.name, "source": profile.source, "notes": list(profile.notes)}))
        return
    click.echo(f"{profile.source}: good")
    for note in profile.notes:
        click.echo(f"  note: {note}")


@profiles.command()
def schema() -> None:
    """Print the JSON Schema (draft 2020-12) of a profile's file, for an editor.

    \b
    Example:
      edgeopt profiles schema > profile.schema.json
      # first line of a profile: # yaml-language-server: $schema=profile.schema.json
    """
    from edgeopt.spec.profile import schema as profile_schema

    click.echo(json.dumps(profile_schema(), indent=2))


def _profile_overrides(settings: tuple[str, ...]) -> dict[str, str]:
    from edgeopt.errors import UsageError
    from edgeopt.spec.overrides import parse_overrides

    project, profile = parse_overrides(settings)
    if project:
        raise UsageError(
            "a profile has no project keys", where=f"--set project.{next(iter(project))}",
            todo="set profile.KEY=VALUE here",
        )  # fmt: skip
    return profile


def _table(rows: list[tuple[str, ...]]) -> None:
    """Columns as wide as they need: plain text that a pipe reads whole, where rich would cut to the terminal."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
