# SPDX-License-Identifier: Apache-2.0
"""What of a set of files is looked at before a judge is built: its pictures and prompts, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from PIL import Image

from visalign.errors import UserError

from .config import TrainRewardConfig
from .examples import Examples, FilePairs, FileRatings, read_images
from .row_names import row_name


def check_files(config: TrainRewardConfig, examples: Examples | None, name: str) -> None:
    """Refuse a set with a picture that is none or a prompt without a visible character, naming the row.

    Of each picture file the beginning is read; one that breaks off later is refused when it is needed.

    Args:
        config: of the job; a judge of kind hp reads no prompts.
        examples: the set; generated ones pass.
        name: data.train or data.heldout.

    Raises:
        UserError: see above.
    """
    if isinstance(examples, FilePairs) and config.model.kind != "hp":
        for number, pair in enumerate(examples.pairs.pairs):
            if not pair.prompt.strip():
                where = row_name(examples.pairs, number)
                raise UserError(
                    f"{name}: the prompt in {where} is {pair.prompt!r}, and a judge of kind "
                    f"{config.model.kind} reads it. Write one, or take the row out."
                )
    seen: set[str] = set()
    for where, reference in pictures(examples):
        if "://" in reference or reference in seen:
            continue
        seen.add(reference)
        try:
            Image.open(reference).close()
        except (OSError, ValueError, Image.DecompressionBombError):
            try:
                read_images([reference], where)  # says what is wrong with it
            except UserError as error:
                raise UserError(f"{name}: {error}") from error


def pictures(examples: Examples | None) -> Iterator[tuple[str, str]]:
    """(row in words, reference) of each picture of a set from files, refined ones of triples included."""
    if isinstance(examples, FilePairs):
        for number, pair in enumerate(examples.pairs.pairs):
            references = [pair.image_left, pair.image_right]
            if examples.triples:
                references.append(str(examples.folder / str(pair.extra["image_refined"])))
            yield from ((row_name(examples.pairs, number), reference) for reference in references)
    elif isinstance(examples, FileRatings):
        for number, record in enumerate(examples.records.records):
            yield row_name(examples.records, number), record.image


def sizes(config: TrainRewardConfig, train: Any) -> list[str]:
    """What is odd about the number of examples."""
    if len(train) >= config.data.batch:
        return []
    return [
        f"data.train holds {len(train)} examples, fewer than data.batch {config.data.batch}: each update "
        "reads some of them more than once."
    ]
