# SPDX-License-Identifier: Apache-2.0
"""Rewards of a set of images, credited to its images: variety, and closeness to reference images.

An image scores R of the set minus R without the image, on embeddings of a contrastive model's image tower
(not normalised for the Fréchet distance). Trainers name the sets in the metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from PIL import Image
from torch import Tensor

from visalign.core import frechet_distance, frechet_gains, vendi_gains, vendi_score
from visalign.interfaces import Metadata, RewardCapabilities, Scores
from visalign.rewards.base.contract import (
    GROUP_KEY,
    RewardError,
    check_choices,
    group_labels,
    make_scores,
    read_request,
    scatter,
)
from visalign.rewards.catalogue import check_options
from visalign.rewards.clip.towers import ClipTowers

Over = Literal["group", "batch"]


class VendiGain:
    """Contribution of an image to the variety of its set: the Vendi score minus that without it.

    The part "set" is the score of the whole set. Unreadable images belong to no set; an image alone in its
    set is invalid. Two images gain the same, so that groups of two learn nothing.

    Args:
        model: model of the image tower, as for `clip_score`.
        over: "group", the images of one prompt, or "batch", all images of a call (then there must be only one
            process).

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
        check_choices(self.name, over=(over, get_args(Over)))
        check_options(self.name, ClipTowers, {"model": model, "device": device, **towers})
        self.towers = ClipTowers(model, device=device, **{"batch_size": 64, **towers})
        self.capabilities = RewardCapabilities(needs_group=True, needs_batch=over == "batch")

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Gains of B images; each record has the key "group_id"."""
        request = read_request(self.name, images, prompts, metadata)
        if not all(record is not None and GROUP_KEY in record for record in request.metadata):
            raise RewardError(
                f"{self.name} scores sets, not single images, and the metadata name none "
                f"({GROUP_KEY!r}). Train on it (rewards.terms); vendi_score and frechet_distance of "
                "visalign.core measure sets."
            )
        labels = [0] * len(request) if self.capabilities.needs_batch else group_labels(self.name, request)
        reasons = list(request.images.reasons)
        rows, features = self.towers.image_features(request, reasons)
        gains, set_scores = torch.full((2, len(rows)), torch.nan, dtype=torch.float64)
        for label in dict.fromkeys(labels):
            members = torch.tensor([index for index, row in enumerate(rows) if labels[row] == label])
            if len(members) > 1:
                gains[members], set_scores[members] = self.gains(features[members].double())
        for row, is_alone in zip(rows, gains.isnan().tolist(), strict=True):
            if is_alone:
                reasons[row] = "its set has no other image"
        parts = {"set": scatter(set_scores, rows, len(request))}
        return make_scores(scatter(gains, rows, len(request)), reasons, self.unit, parts=parts)

    def gains(self, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """(gains [n], R of the set []) of embeddings [n, d]."""
        return vendi_gains(embedding), vendi_score(embedding)


class FrechetGain(VendiGain):
    """Contribution of an image to the closeness of its set to a folder of images: the squared Fréchet
    distance without it minus that with it.

    The part "set" is the distance of the whole set. Use large sets: `over="batch"`.

    Args:
        reference: folder with at least two images, subfolders included.
        model, over, **towers: as for `VendiGain`.

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
            for file, reason in zip(self._files, reasons, strict=True):
                if reason:
                    raise RewardError(f"{self.name}: the reference {file} cannot be read: {reason}.")
        return frechet_gains(embedding, self._reference), frechet_distance(embedding, self._reference)
