# SPDX-License-Identifier: Apache-2.0
"""Pages as MkDocs gets them: a line `{{ name argument ... }}` becomes what `macros.MACROS[name]` returns.

Keys, names and files on a page thereby come from the code; an unknown one stops the build.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from macros import MACROS
from macros.notebooks import notebook_page
from macros.papers import cited
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from visalign.data.assets import PACKAGED, assets_folder

CITED = re.compile(r"^(?P<row>\|.*) \| (?P<names>@[\w.]+(?: @[\w.]+)*) \|$", re.MULTILINE)
MACRO = re.compile(r"^\{\{ (?P<name>\w+)(?P<words>[^}]*) \}\}$", re.MULTILINE)
BOOSTS = {"start": 4.0, "help": 4.0, "trainers": 2.0, "evidence": 0.01, "reference": 0.001}
"""Folder of the site -> weight of its pages in a search; a word of a title counts a thousand times one of a text."""


def on_files(files: Files, config: Any) -> Files:
    """Add the card of every packaged model and every notebook as a page."""
    for name in PACKAGED:
        card = (assets_folder() / name / "README.md").read_text(encoding="utf-8")
        files.append(File.generated(config, f"judges/cards/{name}.md", content=card))
    for notebook in sorted((Path(config["docs_dir"]) / "notebooks").glob("*.ipynb")):
        content = notebook_page(notebook)
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=content))
    config["validation"]["nav"]["omitted_files"] = 0  # the cards are reached from judges/cards.md
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the macros of a page, and let a search show guides before the reference."""
    folder = page.file.src_uri.partition("/")[0]
    weight = BOOSTS.get(folder, 1.0) if page.file.src_uri != "help/commands.md" else BOOSTS["reference"]
    page.meta.setdefault("search", {"boost": weight})
    try:
        return expand(markdown)
    except (KeyError, ValueError, OSError) as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from error


def expand(markdown: str) -> str:
    """Replace every macro of a text.

    Raises:
        ValueError: there is no macro of that name, or it was given something that the code does not have.
    """

    def replaced(match: re.Match[str]) -> str:
        if match["name"] not in MACROS:
            raise ValueError(f"no macro {match['name']!r}; there are: {', '.join(MACROS)}")
        return MACROS[match["name"]](*match["words"].split())

    return CITED.sub(lambda row: cited(row["row"], row["names"].split()), MACRO.sub(replaced, markdown))
