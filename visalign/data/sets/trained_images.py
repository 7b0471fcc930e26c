# SPDX-License-Identifier: Apache-2.0
"""Images that a judge was trained on, kept beside its weights as fingerprints, so that an evaluation can tell."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from visalign.atomic import write_atomic

from .image_references import image_bytes

FILE = "trained_on.txt"


def image_print(reference: str) -> str:
    """Fingerprint the content of an image, wherever it lies."""
    return hashlib.blake2b(image_bytes(reference), digest_size=12).hexdigest()


def write_trained_images(folder: Path, references: Iterable[str], *, base: str | Path) -> None:
    """Write the fingerprints of a judge's training images into its folder, with those of the model it began as."""
    if prints := trained_images(base).union(map(image_print, references)):
        write_atomic(folder / FILE, "\n".join(sorted(prints)) + "\n")


def trained_images(folder: str | Path) -> set[str]:
    """Read the fingerprints beside a judge; empty where none were written."""
    path = Path(folder) / FILE
    return set(path.read_text(encoding="utf-8").split()) if path.is_file() else set()
