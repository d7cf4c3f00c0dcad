"""``edgespec profiles``: what devices can do, and which one this is."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.output import json_option, print_json
from edgespec.devices.profile import (
    Profile,
    ProfileFile,
    as_dict,
    as_toml,
    load_profile,
    profile_files,
    read_profile,
    user_dir,
)
from edgespec.errors import MissingDependencyError, ProfileError

if TYPE_CHECKING:
    from edgespec.devices.detect import Choice
    from edgespec.devices.probe import Box

REPLACES = "yours, wins"  # over a shipped profile of the same name


@click.group(invoke_without_command=True)
@click.pass_context
def profiles(ctx: click.Context) -> None:
    """What devices can do, and which one this is.

    A profile is a TOML file that says how a device is recognised, what fits it and how to run a pair on it; `edgespec
    run --profile NAME` follows it. Your own lie in the folder that `edgespec profiles list` names, and win by name.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@profiles.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List all profiles: the shipped ones and your own."""
    rows = [_row(file) for file in profile_files()]
    if as_json:
        print_json(rows)
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        text = f"cannot be used: {row['error']}" if row["error"] else row["description"]
        click.echo(f"{row['name']:{width}}  {_origin(row):{len(REPLACES)}}  {text}".rstrip())
    click.echo(f"your own profiles: {user_dir()}/NAME.toml", err=True)


@profiles.command()
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """Print the profile NAME (or the file at a path) in full, defaults filled in.

    The text is a profile file itself: a start for one of your own.
    """
    profile = load_profile(name)
    if as_json:
        print_json(as_dict(profile))
        return
    click.echo(as_toml(profile), nl=False)


@profiles.command()
@json_option
def detect(as_json: bool) -> None:
    """Find the profile that fits this box, and say why.

    Looks at the board's own name (device tree, DMI), the devices that llama.cpp lists, and the CPUs and memory that
    this process may use (affinity mask, control groups).
    """
    from edgespec.devices.detect import detect as choose
    from edgespec.devices.probe import probe

    devices, problem = _devices()
    usable, broken = _usable_profiles()
    box = probe(devices=devices)
    choice = choose(box, usable)
    notes = [*problem, *broken]
    command = f"edgespec run --profile {shlex.quote(choice.profile.name)}"
    if as_json:
        reasons = [*choice.reasons, *notes]
        print_json({"profile": choice.profile.name, "reasons": reasons, "command": command, "box": _box(box)})
        return
    _print_choice(box, choice, notes)
    click.echo(f"use it: {command}")


@profiles.command()
@click.argument("file", type=click.Path(path_type=Path))
@json_option
def validate(file: Path, as_json: bool) -> None:
    """Check a profile FILE: print OK, or what is wrong with it (exit code 14)."""
    try:
        read_profile(file)
    except ProfileError as error:
        if as_json:
            print_json({"file": str(file), "valid": False, "error": str(error)})
        raise
    if as_json:
        print_json({"file": str(file), "valid": True, "error": None})
    else:
        click.echo("OK")


def _row(file: ProfileFile) -> dict[str, Any]:
    """What ``list`` says of a file; one that is not right does not hide the others."""
    description, problem = "", None
    try:
        description = " ".join(read_profile(file.path).device.description.split())
    except ProfileError as error:
        problem = str(error)
    return {
        "name": file.name,
        "description": description,
        "origin": "user" if file.is_user else "shipped",
        "replaces_shipped": file.replaces,
        "path": str(file.path),
        "error": problem,
    }


def _origin(row: dict[str, Any]) -> str:
    return REPLACES if row["replaces_shipped"] else "yours" if row["origin"] == "user" else "shipped"


def _devices() -> tuple[tuple[Any, ...], list[str]]:
    """llama.cpp's devices; without llama.cpp none, and a line that says so."""
    from edgespec.verifiers.llama_devices import list_devices

    try:
        return list_devices(), []
    except MissingDependencyError as error:
        return (), [f"note: no list of devices: {error}"]


def _usable_profiles() -> tuple[list[Profile], list[str]]:
    """The user's first: between equals they win. Files that are not right are left out, with a line each."""
    usable, broken = [], []
    for file in sorted(profile_files(), key=lambda file: not file.is_user):
        try:
            usable.append(read_profile(file.path))
        except ProfileError as error:
            broken.append(f"note: left out: {error}")
    return usable, broken


def _print_choice(box: Box, choice: Choice, notes: list[str]) -> None:
    about = _box(box)
    click.echo(f"board: {'; '.join(box.machine) or 'says nothing of itself'}")
    click.echo(f"CPUs this process may use: {box.num_cpus}")
    click.echo(f"memory this process can have: {about['memory_gib']} GiB, {about['free_memory_gib']} GiB of it free")
    for device in about["devices"]:
        click.echo(
            f"llama.cpp: {device['name']} ({device['description']}), {device['kind']}, {device['memory_gib']} GiB"
        )
    click.echo("")
    click.echo(f"profile {choice.reasons[0]}")
    for reason in (*choice.reasons[1:], *notes):
        click.echo(f"  {reason}")


def _box(box: Box) -> dict[str, Any]:
    return {
        "machine": list(box.machine),
        "num_cpus": box.num_cpus,
        "memory_gib": _gib(box.memory_bytes),
        "free_memory_gib": _gib(box.free_memory_bytes),
        "devices": [
            {
                "name": device.name,
                "description": device.description,
                "kind": device.kind,
                "memory_gib": _gib(device.memory_bytes),
            }
            for device in box.devices
        ],
    }


def _gib(num_bytes: int) -> float:
    return round(num_bytes / 2**30, 1)
