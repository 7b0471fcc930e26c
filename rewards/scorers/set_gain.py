# SPDX-License-Identifier: Apache-2.0
"""Rewards of a whole set of images, handed to the images: variety, and nearness to images one has.

R of the set less R without the image, in the embeddings of a contrastive model's image tower (raw for the
Fréchet distance). The sets are those that trainers name in the metadata, so only a training can use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from visalign.core import frechet_distance, frechet_gains, vendi_gains, vendi_score
from visalign.interfaces import Metadata, RewardCapabilities, Scores
from visalign.rewards.base.contract import (
    GROUP_KEY,
    RewardError,
    group_labels,
    make_scores,
    read_request,
    scatter,
)
from visalign.rewards.catalogue import check_options
from visalign.rewards.clip.towers import ClipTowers

Over = Literal["group", "batch"]


class VendiGain:
    """What an image adds to the variety of its set: the Vendi score less that without it.

    The part "set" is the score of the whole set. An image that cannot be read is in no set; one without
    another beside it is invalid. Of two images both gain the same, so that
    groups of two learn nothing from it.

    Args:
        model: whose image tower embeds: what `clip_score` takes.
        over: a set is the images of one "group" (of one prompt), or all of a "batch" (the images that one
            process judges at once, so that it must be the only one).
        device: where the tower runs.
        **towers: precision, batch_size, ... of `ClipTowers`.

    DRAGON, arXiv 2504.15217; Vendi score, arXiv 2210.02410.
    """

    name = "vendi_gain"
    unit = "Vendi score"
    range = (float("-inf"), float("inf"))
    higher_is_better = True

    def __init__(
        self,
        model: str | Path = "shapes-clip",
        *,
        over: Over = "group",
        device: str | torch.device = "cpu",
        **towers: Any,
    ) -> None:
        if over not in ("group", "batch"):
            raise ValueError(f"{self.name}: over is {over!r}; allowed are 'group' and 'batch'.")
        check_options(self.name, ClipTowers, {"model": model, "device": device, **towers})
        self.towers = ClipTowers(model, device=device, **{"batch_size": 64, **towers})
        self.capabilities = RewardCapabilities(needs_group=True, needs_batch=over == "batch")

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Gains of B images; each record has the key "group_id"."""
        request = read_request(self.name, images, prompts, metadata)
        if not all(record is not None and GROUP_KEY in record for record in request.metadata):
            raise RewardError(
                f"{self.name} judges sets, not single images, and the metadata name none "
                f"({GROUP_KEY!r}). Train on it (rewards.terms); vendi_score and frechet_distance of "
                "visalign.core measure sets."
            )
        labels = [0] * len(request) if self.capabilities.needs_batch else group_labels(self.name, request)
        reasons = list(request.images.reasons)
        rows, found = self.towers.image_features(request, reasons)
        gains, whole = torch.full((2, len(rows)), torch.nan, dtype=torch.float64)
        for label in dict.fromkeys(labels):
            own = torch.tensor([place for place, row in enumerate(rows) if labels[row] == label])
            if len(own) > 1:
                gains[own], whole[own] = self.gains(found[own].double())
        for row, gain in zip(rows, gains.isnan().tolist(), strict=True):
            if gain:
                reasons[row] = "its set has no other image"
        parts = {"set": scatter(whole, rows, len(request))}
        return make_scores(scatter(gains, rows, len(request)), reasons, self.unit, parts=parts)

    def gains(self, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """(gains [n], R of the set []) of embeddings [n, d]."""
        return vendi_gains(embedding), vendi_score(embedding)


class FrechetGain(VendiGain):
    """How much nearer an image brings its set to a folder of images: the squared Fréchet distance without
    it, less that with it.

    The part "set" is the distance of the whole set. Sets want to be large: `over="batch"`.

    Args:
        reference: folder with at least two images, those in folders below it too.
        model: as of `vendi_gain`.
        over: as of `vendi_gain`.
        device: where the tower runs.
        **towers: precision, batch_size, ... of `ClipTowers`.

    DRAGON, arXiv 2504.15217; FID, arXiv 1706.08500, by the embeddings of `model` instead of Inception's.
    """

    name = "frechet_gain"
    unit = "squared Fréchet distance"

    def __init__(
        self,
        reference: str | Path,
        model: str | Path = "shapes-clip",
        *,
        over: Over = "group",
        device: str | torch.device = "cpu",
        **towers: Any,
    ) -> None:
        super().__init__(model, over=over, device=device, **towers)
        endings = set(Image.registered_extensions())
        self._files = [path for path in sorted(Path(reference).rglob("*")) if path.suffix.lower() in endings]
        if len(self._files) < 2:
            raise RewardError(
                f"{self.name}: reference={str(reference)!r} holds {len(self._files)} images; give a folder "
                "with at least two."
            )
        self._reference: Tensor | None = None

    def gains(self, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """(gains [n], R of the set []) of embeddings [n, d]."""
        if self._reference is None:
            request = read_request(self.name, self._files, [""] * len(self._files), None)
            reasons = list(request.images.reasons)
            _, self._reference = self.towers.image_features(request, reasons)
            if why := [f"{file}: {said}" for file, said in zip(self._files, reasons, strict=True) if said]:
                raise RewardError(f"{self.name}: {why[0]}. Take it out of the reference, or mend it.")
        return frechet_gains(embedding, self._reference), frechet_distance(embedding, self._reference)
