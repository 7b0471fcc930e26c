# SPDX-License-Identifier: Apache-2.0
"""Rewards of a set of images, credited to its images: variety, and closeness to exemplars, images or texts.

R of a set is of embeddings of a contrastive model (not normalised for the Fréchet distance to images). Trainers name
the sets in the metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from visalign.core import contrast_sets, frechet_closeness, set_gains, vendi_gains, vendi_score
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


def image_files(name: str, folder: str | Path) -> list[Path]:
    """List the images of a folder and its subfolders, for the reward `name`."""
    if not folder or not Path(folder).is_dir():
        raise RewardError(f"{name}: {str(folder)!r} does not exist; give a folder of images.")
    endings = set(Image.registered_extensions())
    paths = [path for path in sorted(Path(folder).rglob("*")) if path.suffix.lower() in endings]
    for path in paths:
        try:
            Image.open(path).close()
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise RewardError(f"{name}: {path} is no image that can be read. Take it out.") from error
    return paths


class VendiGain:
    """Contribution of an image to the variety of its set: the Vendi score minus that without it.

    The part "set" is the score of the whole set. Unreadable images belong to no set; an image alone in its
    set is invalid. Two images gain the same, so that groups of two learn nothing from gains.

    Args:
        model: model of the image tower, as for `clip_score`.
        over: "group", the images of one prompt, or "batch", all images of a call, in one process. "sets" is DRAGON:
            neighbouring images of a group are a pair, and `visalign.core.contrast_sets` divides the pairs of a call
            into a positive and a negative set, whose scores are parts. An image scores 1 or −1.

    Vendi score, arXiv 2210.02410; "sets": DRAGON, arXiv 2504.15217, which a gain is not.
    """

    name = "vendi_gain"
    unit = "Vendi score"
    range = (float("-inf"), float("inf"))
    higher_is_better = True
    overs: tuple[str, ...] = ("group", "batch", "sets")
    sign = 1  # −1: the parts are distances, and `measure` their negative

    def __init__(
        self,
        model: str | Path = "shapes-clip",
        *,
        over: str = "group",
        device: str | torch.device = "cpu",
        **towers: Any,
    ) -> None:
        check_choices(self.name, over=(over, self.overs))
        check_options(self.name, ClipTowers, {"model": model, "device": device, **towers})
        self.towers = ClipTowers(model, device=device, **{"batch_size": 64, **towers})
        self.over = over
        needs: dict[str, Any] = {"needs_group": over != "image", "needs_batch": over in ("batch", "sets")}
        self.capabilities = RewardCapabilities(needs_prompt=False, **needs)
        if over == "sets":
            self.unit, self.range = "1 = in the positive set", (-1.0, 1.0)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score B images; each record has the key "group_id", unless over="image"."""
        request = read_request(self.name, images, prompts, metadata)
        is_named = all(record is not None and GROUP_KEY in record for record in request.metadata)
        if self.capabilities.needs_group and not is_named:
            raise RewardError(
                f"{self.name} scores sets, and the metadata name none ({GROUP_KEY!r}). Train on it (rewards.terms); "
                "vendi_score and frechet_distance of visalign.core measure sets."
            )
        labels = list(range(len(request))) if self.over == "image" else group_labels(self.name, request)
        reasons = list(request.images.reasons)
        rows, features = self.towers.image_features(request, reasons)
        groups: dict[Any, list[int]] = {}
        for index, row in enumerate(rows):
            groups.setdefault(0 if self.over == "batch" else labels[row], []).append(index)
        sets = [group for group in groups.values() if len(group) > (self.over != "image")]
        if self.over == "sets" and sets:  # of pairs, one after the other
            sets = [[index for group in sets for index in group[: len(group) // 2 * 2]]]
        values, parts = torch.full((len(rows),), torch.nan, dtype=torch.float64), dict[str, Tensor]()
        for members in sets:
            values[members], scores = self.credit(features[members].double())
            for name, score in scores.items():
                parts.setdefault(name, torch.full_like(values, torch.nan))[members] = self.sign * score
        for row, is_alone in zip(rows, values.isnan().tolist(), strict=True):
            if is_alone:
                reasons[row] = f"its {'group' if self.over == 'sets' else 'set'} has no other image"
        columns = {name: scatter(part, rows, len(request)) for name, part in parts.items()}
        return make_scores(scatter(values, rows, len(request)), reasons, self.unit, parts=columns)

    def credit(self, embedding: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute (scores [n], R by part) of embeddings [n, d]."""
        if self.over == "image":
            return self.measure(embedding), {}
        if self.over == "sets":
            is_first, scores = contrast_sets(self.measure, embedding[::2], embedding[1::2])
            side = torch.where(is_first, 1.0, -1.0).double()
            return torch.stack([side, -side], 1).flatten(), {"positive": scores[0], "negative": scores[1]}
        return self.gains(embedding), {"set": self.measure(embedding)}

    def gains(self, embedding: Tensor) -> Tensor:
        """Compute what each of n images adds to R of their set."""
        return vendi_gains(embedding)

    def measure(self, embedding: Tensor) -> Tensor:
        """Compute R of sets [..., n, d]."""
        return vendi_score(embedding)


class FrechetGain(VendiGain):
    """Contribution of an image to the closeness of its set to exemplars, images or texts: the squared Fréchet
    distance without it minus that with it.

    The part "set" is the distance of the whole set. Use large sets: `over="batch"`.

    Args:
        reference: the exemplars, at least two: a folder of images, subfolders included; a .txt file, a text per line;
            or a list of texts. Texts are embedded by the text tower, and all embeddings then brought to unit norm.
        model, over, **towers: as for `VendiGain`. With over="image" an image scores minus its own distance to the
            exemplars, |z − μ|² + tr Σ, as one embedding has no spread.

    FID, arXiv 1706.08500, by the embeddings of `model` instead of Inception's; exemplars: DRAGON, arXiv 2504.15217.
    """

    name = "frechet_gain"
    unit = "squared Fréchet distance"
    overs = ("group", "batch", "sets", "image")
    sign = -1

    def __init__(
        self,
        reference: str | Path | Sequence[str],
        model: str | Path = "shapes-clip",
        *,
        over: str = "group",
        device: str | torch.device = "cpu",
        **towers: Any,
    ) -> None:
        super().__init__(model, over=over, device=device, **towers)
        self._texts, self._files = list[str](), list[Path]()
        if not isinstance(reference, str | Path):
            self._texts = list(map(str, reference))
        elif Path(reference).is_file():
            try:
                lines = Path(reference).read_text(encoding="utf-8-sig").splitlines()
            except UnicodeDecodeError as error:
                raise RewardError(f"{self.name}: {str(reference)!r} is no UTF-8 text; save it so.") from error
            self._texts = [line for line in lines if line.strip()]
        else:
            self._files = image_files(self.name, reference)
        if (count := len(self._texts or self._files)) < 2:
            remedy = "give at least two: a folder of images, a .txt file with a text per line, or a list of texts"
            raise RewardError(f"{self.name}: reference={str(reference)!r} holds {count} exemplars; {remedy}.")

    def gains(self, embedding: Tensor) -> Tensor:
        return set_gains(self.measure, embedding)

    def measure(self, embedding: Tensor) -> Tensor:
        """Compute R of sets [..., n, d], minus the distance."""
        return self._closeness(F.normalize(embedding, dim=-1) if self._texts else embedding)

    @cached_property
    def _closeness(self) -> Callable[[Tensor], Tensor]:
        """Embed the exemplars; the Fréchet distance to them."""
        if self._texts:
            reasons: list[str | None] = [None] * len(self._texts)
            self.towers.read_prompts(self._texts, reasons)
            exemplars = F.normalize(self.towers.text_features(self._texts).double(), dim=-1)
        else:
            request = read_request(self.name, self._files, [""] * len(self._files), None)
            reasons = list(request.images.reasons)
            _, exemplars = self.towers.image_features(request, reasons)
        for exemplar, reason in zip(self._texts or self._files, reasons, strict=True):
            if reason:
                raise RewardError(f"{self.name}: the exemplar {str(exemplar)!r} cannot be read: {reason}.")
        return frechet_closeness(exemplars)
