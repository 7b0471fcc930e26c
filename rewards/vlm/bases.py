# SPDX-License-Identifier: Apache-2.0
"""Folders that hold a LoRA and name its base: which model that is, and how it is written down."""

from __future__ import annotations

import json
from pathlib import Path

from visalign.rewards.base.contract import RewardError

from .template import JudgeSettings

ADAPTER = "adapter_config.json"
"""The file by which peft knows the folder of a LoRA."""


def base_of(folder: Path, settings: JudgeSettings) -> str | Path:
    """Where the base of a folder's LoRA is: beside the folder, or under a name; else the folder itself.

    Args:
        folder: of a judge.
        settings: its `judge.json`, whose "base" is a packaged name, a hub id, or a folder relative to this
            one. Where it names none, peft's file is read.

    Raises:
        RewardError: peft's file is no JSON.
    """
    named = settings.rest.get("base")
    if named is None and (folder / ADAPTER).is_file() and not (folder / "config.json").is_file():
        try:
            named = json.loads((folder / ADAPTER).read_text(encoding="utf-8")).get("base_model_name_or_path")
        except ValueError as error:
            raise RewardError(f"{ADAPTER} of {folder.name} is no JSON: {error}.") from error
    if not named:
        return folder
    beside = folder / str(named)
    return beside.resolve() if beside.is_dir() else str(named)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds a LoRA and no model of its own."""
    return (folder / ADAPTER).is_file() and not (folder / "config.json").is_file()


def has_base(folder: Path) -> bool:
    """Whether a folder holds no model of its own but a LoRA, or a `judge.json` that names a base."""
    if (folder / "config.json").is_file():
        return False
    return is_adapter(folder) or "base" in JudgeSettings.read(folder).rest


def name_base(folder: Path, base: str) -> None:
    """Put the base's name into a LoRA's config, where peft writes the place it was loaded from."""
    file = folder / ADAPTER
    config = json.loads(file.read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = base
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
