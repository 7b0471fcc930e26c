# SPDX-License-Identifier: Apache-2.0
"""Table of papers: the names that a row cites, with their files and the folders of their tests."""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from visalign.pipelines.jobs import PIPELINES

from .catalogues import entries
from .markdown import ROOT, code


def cited(row: str, names: Sequence[str]) -> str:
    """Fill in a row of the table of papers: the files of its names, and the folders of their tests.

    Args:
        row: its cells before.
        names: `@face.name`, `@judge.NAME` of the catalogue, or `@job.PIPELINE`.

    Raises:
        ValueError: the code has no such name.
    """
    places, folders = [], []
    for name in names:
        found = inspect.unwrap(_named(name.removeprefix("@")))
        file = Path(typing.cast("str", inspect.getsourcefile(found))).resolve().relative_to(ROOT)
        mirrored = Path("tests", *file.parts[file.parts[0] == "visalign" :])
        folder = next(parent for parent in mirrored.parents if [*(ROOT / parent).rglob("test_*.py")])
        shown = name.rpartition(".")[2] if inspect.ismodule(found) else found.__name__
        places.append(f"{code(shown)} in {code(file)}")
        folders.append(code(folder))
    return f"{row} | {', '.join(places)} | {', '.join(dict.fromkeys(folders))} |"


def _named(name: str) -> Any:
    wing, _, rest = name.partition(".")
    try:
        if wing == "judge":
            return {key: kind for key, kind, _ in entries("CATALOGUE")}[rest]
        if wing == "job":
            return importlib.import_module(PIPELINES[rest].partition(":")[0])
        place, _, attribute = name.rpartition(".")
        return getattr(importlib.import_module(f"visalign.{place}"), attribute)
    except (AttributeError, KeyError, ImportError) as error:
        raise ValueError(f"the code has no {name!r} ({error})") from error
