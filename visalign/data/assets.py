# SPDX-License-Identifier: Apache-2.0
"""Folders of the packaged models, such as "shapes-sd3", in a checkout and installed."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGED = (
    "shapes-sd3", "shapes-sd3-composed", "shapes-sd15", "shapes-clip", "tasks-qwen3", "shapes-vlm", "shapes-ict",
    "shapes-hp", "shapes-hpsv3", "shapes-hpsv3-ensemble", "shapes-pairs", "shapes-heie",
)  # fmt: skip
"""Models that come with the package."""


def assets_folder() -> Path:
    """Find the folder `assets/`: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "assets", package.parent / "assets"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"The packaged models are missing: no folder assets/ in or beside {package.name}/. Install visalign again."
    )


def resolve_model(name_or_path: str | Path) -> Path | str:
    """Return the folder of a packaged model, or an existing folder; a file or a hub id stays a text.

    "~" is the home folder; a repository's folder in the hub's cache (models--owner--name) is its snapshot.
    """
    path = Path(os.path.expanduser(name_or_path))
    if (path / "snapshots").is_dir():
        main = path / "refs" / "main"
        snapshots = sorted((path / "snapshots").iterdir())
        commit = main.read_text().strip() if main.is_file() else snapshots[-1].name if snapshots else ""
        return path / "snapshots" / commit
    if path.is_dir():
        return path
    if str(name_or_path) not in PACKAGED:
        return str(path if path.is_file() else name_or_path)
    return assets_folder() / str(name_or_path)
