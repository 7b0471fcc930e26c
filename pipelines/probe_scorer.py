# SPDX-License-Identifier: Apache-2.0
"""The pictures that a reward is probed on, and its scores of them as they are and as they were changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from visalign.data.image_references import resolve_image
from visalign.data.preference_sources import shapes_pairs
from visalign.errors import UserError
from visalign.evaluation.probes import Sample
from visalign.interfaces import PointwiseReward
from visalign.rewards.contract import RewardError
from visalign.rewards.failure import Naming, failure_reasons
from visalign.rewards.images import as_contract, load_images

from .image_rows import ImageRow

COUNT = 64
"""Reference pictures where the user gives none."""


@dataclass(frozen=True)
class Reference:
    """The unchanged samples and what was read of them."""

    source: str
    samples: tuple[Sample, ...]
    metadata: tuple[Mapping[str, Any] | None, ...]
    unreadable: int = 0
    """Pictures that could not be read and are left out."""


def shapes_reference_set(count: int = COUNT, *, seed: int = 0) -> Reference:
    """Pictures of the shapes world, right and wrong for their prompts, in all its styles and distortions.

    Args:
        count: How many.
        seed: Of the draws.
    """
    pairs = shapes_pairs(count, seed=seed).pairs
    rows = [
        ImageRow(image=pair.image_left, prompt=pair.prompt, metadata=pair.extra["record"]) for pair in pairs
    ]
    return read_reference("shapes world", rows)


def read_reference(source: str, rows: Sequence[ImageRow]) -> Reference:
    """Read the pictures of rows.

    Args:
        source: Where they come from, for the page.
        rows: Images with prompts.

    Raises:
        UserError: None of them can be read.
    """
    samples, metadata, reason = [], [], ""
    for row in rows:
        try:
            batch = load_images([resolve_image(row.image)])
        except UserError as error:
            reason = reason or str(error)
            continue
        image = batch.images[0]
        if image is None:
            reason = reason or str(batch.reasons[0])
            continue
        samples.append(Sample(image, row.prompt))
        metadata.append(row.metadata)
    if not samples:
        raise UserError(f"None of the {len(rows)} reference pictures of {source} can be read: {reason}")
    return Reference(source, tuple(samples), tuple(metadata), len(rows) - len(samples))


class Scorer:
    """Scores changed samples and sets them against the unchanged."""

    def __init__(self, reward: PointwiseReward, reference: Reference, batch_size: int) -> None:
        if batch_size < 1:
            raise UserError(f"batch_size is {batch_size}; it must be at least 1.")
        self.reward, self.reference, self.batch_size = reward, reference, batch_size
        self.with_records = False
        rows = list(range(len(reference.samples)))
        self.value, self.reasons = self.score(rows, list(reference.samples))
        if not np.isfinite(self.value).any() and any(reference.metadata):
            self.with_records = True
            self.value, self.reasons = self.score(rows, list(reference.samples))
        known = self.value[np.isfinite(self.value)]
        if len(known) < 2:
            reason = next((reason for reason in self.reasons if reason), "")
            raise UserError(
                f"{reward.name} judged {len(known)} of the {len(rows)} reference pictures, and 2 are needed"
                f"{': ' + reason if reason else ''}. Give pictures with prompts that it judges: --reference."
            )
        self.spread = float(known.std(ddof=1))
        if not self.spread > 1e-9 * max(1.0, float(np.abs(known).max())):
            raise UserError(
                f"{reward.name} gives all {len(known)} reference pictures the score {known[0]:g}, so its "
                "responses have no unit. Give --reference pictures that it tells apart."
            )

    def score(self, rows: Sequence[int], samples: Sequence[Sample]) -> tuple[np.ndarray, list[str | None]]:
        """[N] float64 scores of samples that stand for these rows, NaN with a reason where there is none."""
        values, reasons = [], []
        for start in range(0, len(rows), self.batch_size):
            part = samples[start : start + self.batch_size]
            images = as_contract([sample.image for sample in part])
            found = self.ask(images, [s.prompt for s in part], rows[start : start + self.batch_size])
            values.append(found[0])
            reasons += found[1]
        return np.concatenate(values) if values else np.zeros(0), reasons

    def ask(
        self, images: Tensor | list[Any], prompts: list[str], rows: Sequence[int]
    ) -> tuple[np.ndarray, list[str | None]]:
        """One call of the reward."""
        records = [self.reference.metadata[row] for row in rows] if self.with_records else None
        with Naming(self.reward.name):
            scores = self.reward.score(images, prompts, records)
        if len(scores) != len(prompts):
            raise RewardError(
                f"Reward {self.reward.name!r} gave {len(scores)} scores for {len(prompts)} pictures."
            )
        value = np.where(scores.valid.cpu().numpy(), scores.value.detach().cpu().double().numpy(), np.nan)
        reasons = failure_reasons(scores)
        for place in np.flatnonzero(~np.isfinite(value)):
            reasons[place] = reasons[place] or "the reward gave no finite number"
        return np.where(np.isfinite(value), value, np.nan), reasons

    def record(self) -> dict[str, Any]:
        """The reference as JSON."""
        known = self.value[np.isfinite(self.value)]
        reasons = [reason for reason in self.reasons if reason]
        return {
            "source": self.reference.source,
            "size": len(self.value),
            "judged": len(known),
            "failed": len(self.value) - len(known),
            "unreadable": self.reference.unreadable,
            "reasons": {reason: reasons.count(reason) for reason in list(dict.fromkeys(reasons))[:3]},
            "mean": float(known.mean()),
            "spread": self.spread,
            "with_records": self.with_records,
        }
