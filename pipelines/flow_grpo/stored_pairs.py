# SPDX-License-Identifier: Apache-2.0
"""Sets of compared images that a policy learns from in place of its samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from visalign.data.sets.checks import check_preferences, summed_votes, without_duplicates
from visalign.data.sets.columns import Columns
from visalign.data.sets.prompt_files import Edits, check_sources, source_of
from visalign.data.sets.records import PreferenceSet
from visalign.data.sets.sources import is_named_set, load_source
from visalign.errors import UserError
from visalign.pipelines.shared.parts import Records, Row, check_images, check_texts, name_key, read_images
from visalign.training.diffusion.samples import Stored

READ = 32  # Images that are in memory as files have them
_SOURCES = (
    'Give each pair one in a column "source", a path such as cup.png, or as `visalign sample` leaves it, '
    '{"source": PATH} in "metadata"; or leave data.pairs out.'
)


def read_stored(
    source: str,
    edits: Edits,
    *,
    limit: int | None = None,
    several: bool = True,
    names: Mapping[str, str] | None = None,
) -> tuple[Records, tuple[str, ...]]:
    """Read the pairs of `data.pairs` with the votes of each summed, without ties; images are not read yet.

    `edits` and `several` say whether the model edits an image, and whether it joins several; `names` is our name of
    a column -> the file's. A record has prompt, tag (its category), two candidates, each {image, preference, where},
    and where the model edits the source. With the records come oddities of the set that do not stop the run.
    """
    with name_key("data.pairs"):
        split = "train" if is_named_set(source) else None
        source_set = load_source(source, split=split, limit=limit, columns=Columns(names=names or {}))
        if not isinstance(source_set, PreferenceSet):
            raise UserError("the set holds single rated images. Give one with image_left and image_right.")
        findings = check_preferences(source_set, files=False)
        pairs, summed = summed_votes(without_duplicates(source_set))
        check_texts([{"prompt": pair.prompt} for pair in pairs.pairs])
        sources = {} if edits == "none" else _sources(source_set)
        rows, records = [], []
        for number, pair in enumerate(pairs.pairs):
            if pair.label == 0.5:
                continue
            images = pair.image_left, pair.image_right
            where = f"row {pairs.row(number)} of '{pairs.name}'"
            rows.append(Row(where, pair.prompt, images))
            sides = zip(images, (pair.label, 1 - pair.label), strict=True)
            candidates = [{"image": image, "preference": share, "where": where} for image, share in sides]
            records.append({"prompt": pair.prompt, "tag": pair.category or "", "candidates": candidates})
            if (edited := sources.get((pair.prompt, frozenset(images)))) is not None:
                records[-1]["source"] = edited
        if not records:
            raise UserError(f"the votes on each of {len(pairs)} pairs are ties. Give more votes.")
    check_images(rows, "data.pairs")
    if edits != "none":
        labelled = [(f"data.pairs: {row.where}", record) for row, record in zip(rows, records, strict=True)]
        check_sources(labelled, needed=edits == "needed", several=several, remedy=_SOURCES)
    notes = [finding.message for finding in (*findings, *summed) if finding.kind not in ("ties", "one_side")]
    if ties := len(pairs) - len(records):
        notes.append(f"{ties} of {len(pairs)} pairs are ties and left out.")
    return records, tuple(f"data.pairs: {note}" for note in notes)


def _sources(pairs: PreferenceSet) -> dict[Any, Any]:
    """Map (prompt, its two images) to their source, refusing pairs whose rows name two."""
    sources: dict[Any, tuple[Any, int]] = {}
    for number, pair in enumerate(pairs.pairs):
        if (source := source_of(pair.extra)) is not None:
            key = pair.prompt, frozenset((pair.image_left, pair.image_right))
            first, row = sources.setdefault(key, (source, pairs.row(number)))
            if first != source:
                raise UserError(
                    f"rows {row} and {pairs.row(number)} of '{pairs.name}' have the same two images, as "
                    f"edits of {first!r} and of {source!r}. Keep the right one."
                )
    return {key: source for key, (source, _) in sources.items()}


def stored_latents(policy: Any, first: Mapping[str, Any]) -> Stored:
    """Return a function that encodes the images of records to clean latents, tried on the first."""
    if not hasattr(policy, "encode_images"):
        raise UserError(
            f"data.pairs: the adapter {type(policy).__name__} has no encode_images, which makes latents of "
            "images. Add it (visalign.interfaces.DiffusionPolicy says how), or leave data.pairs out."
        )

    def latents(records: Sequence[Mapping[str, Any]]) -> Tensor:
        parts = []
        with ThreadPoolExecutor() as pool:
            for start in range(0, len(records), READ):  # few at a time: images may be large
                part = records[start : start + READ]
                images = pool.map(lambda record: read_images([record["image"]], record["where"])[0], part)
                parts.append(policy.encode_images(list(images)))
        return torch.cat(parts)

    latents(first["candidates"][:1])  # an adapter that cannot do it fails now and not after the first evaluation
    return latents
