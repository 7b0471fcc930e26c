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
    sources, folders = [], []
    for name in names:
        target = inspect.unwrap(_named(name.removeprefix("@")))
        file = Path(typing.cast("str", inspect.getsourcefile(target))).resolve().relative_to(ROOT)
        mirrored = Path("tests", *file.parts[file.parts[0] == "visalign" :])
        folder = next(parent for parent in mirrored.parents if [*(ROOT / parent).rglob("test_*.py")])
        title = name.rpartition(".")[2] if inspect.ismodule(target) else target.__name__
        sources.append(f"{code(title)} in {code(file)}")
        folders.append(code(folder))
    return f"{row} | {', '.join(sources)} | {', '.join(dict.fromkeys(folders))} |"


def _named(name: str) -> Any:
    wing, _, rest = name.partition(".")
    try:
        if wing == "judge":
            return {key: kind for key, kind, _ in entries("CATALOGUE")}[rest]
        if wing == "job":
            return importlib.import_module(PIPELINES[rest].partition(":")[0])
        module, _, attribute = name.rpartition(".")
        return getattr(importlib.import_module(f"visalign.{module}"), attribute)
    except (AttributeError, KeyError, ImportError) as error:
        raise ValueError(f"the code has no {name!r} ({error})") from error
