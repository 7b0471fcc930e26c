# SPDX-License-Identifier: Apache-2.0
"""Faces and their rooms for the API reference, the command line, and files of the repository."""

from __future__ import annotations

import ast
import importlib
import inspect
import typing
from pathlib import Path
from typing import Any

import typer.main

from visalign.pipelines.cli.app import app

from .markdown import ROOT, code, first_sentence, prose, table


def face(name: str) -> str:
    """The names that a face offers, with the first sentence of each."""
    module = importlib.import_module(name)
    rows = []
    for attribute in sorted(module.__all__, key=str.lower):
        if attribute.startswith("_"):
            continue
        found = getattr(module, attribute)
        place = getattr(found, "__module__", name)
        rows.append((code(attribute), first_sentence(found), code(place)))
    return table(("name", "what it is", "home"), rows)


def api(name: str) -> str:
    """The reference of a face: what it says of itself, its names by the room that has them.

    A package with many names lists its further ones in `MODULES`, module -> names.
    """
    module = importlib.import_module(name)
    homes = _homes(module)
    others = {room: names.split() for room, names in getattr(module, "MODULES", {}).items()}
    rooms: dict[str, list[str]] = {}
    elsewhere = []
    for attribute in module.__all__:
        if attribute == "MODULES":
            continue
        home = homes[attribute]
        if not home.startswith(f"{name}."):
            elsewhere.append(code(f"{home}.{attribute}"))
            continue
        room = "First" if others else home.removeprefix(f"{name}.").split(".")[0]
        rooms.setdefault(room, []).append(f"{home}.{attribute}")
    parts = [inspect.getdoc(module) or ""]
    if others:
        parts.append(f"Main names first; the rest by module, as in `{name}.MODULES`.")
    if elsewhere:
        parts.append(f"Offered here, at home elsewhere: {', '.join(elsewhere)}.")
    for place, names in others.items():
        found = rooms.setdefault(place.split(".")[0], [])
        found += [f"{_defined(f'{name}.{place}', attribute)}.{attribute}" for attribute in names]
    for room, paths in sorted(rooms.items()):
        parts.append(f"## {room}")
        parts += [f"::: {path}\n    options: {API}" for path in sorted(paths, key=_last)]
    return "\n\n".join(parts)


API = "{heading_level: 3, show_root_heading: true, show_root_toc_entry: true, show_root_full_path: false}"


def _last(path: str) -> str:
    return path.rpartition(".")[2].lower()


def _homes(module: Any) -> dict[str, str]:
    """Public name -> module that defines it; faces that import at first use have a stub that says so."""
    file = Path(module.__file__)
    stub = file.with_suffix(".pyi")
    found = {name: getattr(getattr(module, name), "__module__", module.__name__) for name in module.__all__}
    for node in ast.walk(ast.parse((stub if stub.is_file() else file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and (node.level or "visalign" in node.module):
            place = f"{module.__name__}.{node.module}" if node.level else node.module
            found |= {alias.asname or alias.name: place for alias in node.names}
    return {name: _defined(place, name) for name, place in found.items() if name in module.__all__}


def _defined(place: str, name: str) -> str:
    """Where a name is defined, if its module only passes it on."""
    home = getattr(getattr(importlib.import_module(place), name), "__module__", None)
    return home if isinstance(home, str) and home.startswith("visalign.") else place


def commands() -> str:
    """The command line: every command with its arguments and options."""
    group = typing.cast("Any", typer.main.get_command(app))
    parts = []
    for name, command in group.commands.items():
        rows = []
        for option in command.params:
            if option.name in {"help"}:
                continue
            names = " ".join(option.opts) if option.param_type_name == "option" else option.name.upper()
            rows.append((code(names), prose(getattr(option, "help", None) or "")))
        said = prose(command.help or "")
        parts.append(f"## visalign {name}\n\n{said}\n\n{table(('argument', 'meaning'), rows)}")
    return "\n\n".join(parts)


def include(path: str, start: str = "", end: str = "") -> str:
    """A file of the repository, or its part between two headings (underscores stand for spaces).

    Raises:
        ValueError: the file has no such heading.
    """
    text = (ROOT / path).read_text(encoding="utf-8")
    if start:
        wanted = f"## {start.replace('_', ' ')}\n"
        if wanted not in text:
            raise ValueError(f"{path} has no heading {wanted.strip()!r}")
        text = text[text.index(wanted) :]
    if end:
        text = text[: text.index(f"\n## {end.replace('_', ' ')}\n")]
    return text.partition("\n")[2].strip() if text.startswith("# ") else text.strip()


def python(path: str) -> str:
    """The first Python block of a file of the repository."""
    text = (ROOT / path).read_text(encoding="utf-8")
    start = text.index("```python\n")
    return text[start : text.index("\n```", start)] + "\n```"
