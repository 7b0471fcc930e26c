# SPDX-License-Identifier: Apache-2.0
"""API reference of the public packages, the command line, and files of the repository."""

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
    """Build the table of names that a package exports, with the first sentence of each."""
    module = importlib.import_module(name)
    rows = []
    for attribute in sorted(module.__all__, key=str.lower):
        if attribute.startswith("_"):
            continue
        target = getattr(module, attribute)
        home = getattr(target, "__module__", name)
        rows.append((code(attribute), first_sentence(target), code(home)))
    return table(("name", "what it is", "home"), rows)


def api(name: str) -> str:
    """Build the reference of a package: its docstring, then its names by module.

    A package with many names lists its further ones in `MODULES`, module -> names.
    """
    module = importlib.import_module(name)
    homes = _homes(module)
    modules = {module_name: names.split() for module_name, names in getattr(module, "MODULES", {}).items()}
    sections: dict[str, list[str]] = {}
    elsewhere = []
    for attribute in module.__all__:
        if attribute == "MODULES":
            continue
        home = homes[attribute]
        if not home.startswith(f"{name}."):
            elsewhere.append(code(f"{home}.{attribute}"))
            continue
        section = "First" if modules else home.removeprefix(f"{name}.").split(".")[0]
        sections.setdefault(section, []).append(f"{home}.{attribute}")
    parts = [inspect.getdoc(module) or ""]
    if modules:
        parts.append(f"Main names first; the rest by module, as in `{name}.MODULES`.")
    if elsewhere:
        parts.append(f"Exported here, defined elsewhere: {', '.join(elsewhere)}.")
    for module_name, names in modules.items():
        paths = sections.setdefault(module_name.split(".")[0], [])
        paths += [f"{_defined(f'{name}.{module_name}', attribute)}.{attribute}" for attribute in names]
    for section, paths in sorted(sections.items()):
        parts.append(f"## {section}")
        parts += [f"::: {path}\n    options: {API}" for path in sorted(paths, key=_last)]
    return "\n\n".join(parts)


API = "{heading_level: 3, show_root_heading: true, show_root_toc_entry: true, show_root_full_path: false}"


def _last(path: str) -> str:
    return path.rpartition(".")[2].lower()


def _homes(module: Any) -> dict[str, str]:
    """Return public name -> defining module; packages that import at first use are read from their stub."""
    file = Path(module.__file__)
    stub = file.with_suffix(".pyi")
    homes = {name: getattr(getattr(module, name), "__module__", module.__name__) for name in module.__all__}
    for node in ast.walk(ast.parse((stub if stub.is_file() else file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and (node.level or "visalign" in node.module):
            source = f"{module.__name__}.{node.module}" if node.level else node.module
            homes |= {alias.asname or alias.name: source for alias in node.names}
    return {name: _defined(source, name) for name, source in homes.items() if name in module.__all__}


def _defined(module: str, name: str) -> str:
    """Return the module that defines a name, if `module` only re-exports it."""
    home = getattr(getattr(importlib.import_module(module), name), "__module__", None)
    return home if isinstance(home, str) and home.startswith("visalign.") else module


def commands() -> str:
    """Build the reference of the command line: every command with its arguments and options."""
    group = typing.cast("Any", typer.main.get_command(app))
    parts = []
    for name, command in group.commands.items():
        rows = []
        for option in command.params:
            if option.name in {"help"}:
                continue
            names = " ".join(option.opts) if option.param_type_name == "option" else option.name.upper()
            rows.append((code(names), prose(getattr(option, "help", None) or "")))
        summary = prose(command.help or "")
        example = f"```bash\n{command.epilog.removeprefix('Example: ')}\n```"
        parts += [f"## visalign {name}", summary, example, table(("argument", "meaning"), rows)]
    return "\n\n".join(parts)


def include(path: str, start: str = "", end: str = "") -> str:
    """Include a file of the repository, or its part between two headings (underscores are spaces).

    Raises:
        ValueError: the file has no such heading.
    """
    text = (ROOT / path).read_text(encoding="utf-8")
    if start:
        heading = f"## {start.replace('_', ' ')}\n"
        if heading not in text:
            raise ValueError(f"{path} has no heading {heading.strip()!r}")
        text = text[text.index(heading) :]
    if end:
        text = text[: text.index(f"\n## {end.replace('_', ' ')}\n")]
    return text.partition("\n")[2].strip() if text.startswith("# ") else text.strip()


def python(path: str) -> str:
    """Include the first Python block of a file of the repository."""
    text = (ROOT / path).read_text(encoding="utf-8")
    start = text.index("```python\n")
    return text[start : text.index("\n```", start)] + "\n```"
