# SPDX-License-Identifier: Apache-2.0
"""Images of a set's rows: checked before anything is loaded, read when they are needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from PIL import Image
from torch import Tensor

from visalign.data.sets.image_references import resolve_image
from visalign.errors import UserError

from .parts import name_key


class Row(NamedTuple):
    """Prompt and images of a row of a file."""

    where: str
    """The row in words, for messages."""
    prompt: str | None
    """None: the set has no prompts."""
    images: tuple[str, ...]
    """References, as `resolve_image` takes them."""


def read_images(references: Sequence[str], where: str) -> tuple[Tensor, ...]:
    """Read the images of a row."""
    from visalign.rewards.base.images import load_images

    batch = load_images([resolve_image(reference) for reference in references])
    for reference, reason in zip(references, batch.reasons, strict=True):
        if reason is not None:
            raise UserError(
                f"The image '{reference}' in {where} cannot be read: {reason}. Repair it or take the row out."
            )
    return tuple(image for image in batch.images if image is not None)


def check_images(rows: Iterable[Row], key: str) -> None:
    """Refuse rows with a file that begins like no image; `key` is the setting that names the set."""
    where = {reference: row.where for row in rows for reference in row.images if "://" not in reference}
    for reference, row in where.items():
        try:
            Image.open(reference).close()
        except (OSError, ValueError, Image.DecompressionBombError):
            with name_key(key):
                read_images([reference], row)  # raises with the reason
