# SPDX-License-Identifier: Apache-2.0
"""A model hub made of folders on this disk, or none."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace

import huggingface_hub
from huggingface_hub.errors import LocalEntryNotFoundError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def offline(monkeypatch) -> list[str]:
    """Nothing answers, and nothing was fetched before; the list fills with the requests."""
    return hub(monkeypatch, {}, reachable=False)


def hub(monkeypatch, repositories: Mapping[str, Path], *, reachable: bool = True) -> list[str]:
    """Repositories by hub id; what is fetched is copied to a folder of its own. Returns the log of calls."""
    log: list[str] = []
    root = Path(mkdtemp())

    def info(_self, name: str, **_options):
        log.append(f"list {name}")
        if not reachable or name not in repositories:
            raise ConnectionError("no network\nand more")
        files = sorted(str(f.relative_to(repositories[name])) for f in repositories[name].rglob("*"))
        return SimpleNamespace(sha=COMMIT, siblings=[SimpleNamespace(rfilename=file) for file in files])

    def fetch(name: str, *, allow_patterns=(), local_files_only=False, **_options) -> str:
        log.append(f"fetch {name} {' '.join(sorted(allow_patterns))}")
        folder = root / name.replace("/", "--") / "snapshots" / COMMIT
        if local_files_only and not folder.is_dir():
            raise LocalEntryNotFoundError("nothing is here")
        for file in allow_patterns:
            source = repositories[name] / file
            if source.is_file():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, folder / file)
        folder.mkdir(parents=True, exist_ok=True)
        return str(folder)

    monkeypatch.setattr("visalign.rewards.weights.hub.go_offline_if_unreachable", lambda: "")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    return log
