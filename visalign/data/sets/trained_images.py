# SPDX-License-Identifier: Apache-2.0
"""Images that a judge was trained on, kept beside its weights as fingerprints, so that an evaluation can tell."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from visalign.atomic import write_atomic
from visalign.errors import UserError

from .image_references import image_head

FILE = "trained_on.json"


def image_print(reference: str) -> str:
    """Fingerprint an image by its size in bytes and its first 64 KiB, wherever it lies."""
    size, head = image_head(reference)
    return hashlib.blake2b(head, digest_size=12, salt=size.to_bytes(8, "little")).hexdigest()


def write_trained_images(folder: Path, references: Iterable[str], *, base: Path | str) -> None:
    """Write the fingerprints of a judge's training images into its folder, with those of the model it began as."""
    prints = trained_images(Path(base)) | {image_print(reference) for reference in references}
    if prints:
        write_atomic(folder / FILE, json.dumps({"images": sorted(prints)}) + "\n")


def trained_images(folder: Path) -> set[str]:
    """Read the fingerprints beside a judge; empty where none were written."""
    if not (folder / FILE).is_file():
        return set()
    try:
        return {str(item) for item in json.loads((folder / FILE).read_text(encoding="utf-8"))["images"]}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder / FILE} cannot be read ({error}). Copy the judge's folder again, or delete it."
        ) from error
