# SPDX-License-Identifier: Apache-2.0
"""What a run read, by content: fingerprints that a resume must meet again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from visalign.atomic import write_atomic
from visalign.training.loop.checkpoint import check_same_config

from .parts import Records

FINGERPRINTS = "inputs.json"
"""File of a run folder: what was read -> SHA-256 of its content."""


def fingerprint(records: Records) -> str:
    """SHA-256 of prompt records.

    Args:
        records: JSON values.
    """
    return hashlib.sha256(json.dumps(list(records), sort_keys=True, default=str).encode()).hexdigest()


def check_unchanged(output: Path, fingerprints: Mapping[str, str]) -> None:
    """Refuse to continue a run whose prompts or rewards have another content than when it began.

    Args:
        output: the run's folder; one without the file is of an earlier version, and is not checked.
        fingerprints: of the present content.

    Raises:
        CheckpointError: listing what has changed.
    """
    path = output / FINGERPRINTS
    if path.is_file():
        saved = json.loads(path.read_text(encoding="utf-8"))
        check_same_config(saved, fingerprints, where=f"the run in '{output}' (SHA-256 of its inputs)")


def write_once(path: Path, text: str) -> None:
    """Write a file whole, and leave one that holds this text already as it is.

    Args:
        path: of the file.
        text: its content.
    """
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_atomic(path, text.encode("utf-8"))
