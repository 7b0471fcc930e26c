# SPDX-License-Identifier: Apache-2.0
"""How models of the Qwen-VL family take pictures in: embeddings of tokens and patches, and their positions.

Positions have three axes (time, row, column). A picture moves the text behind it on by its longer side, not
by its number of tokens; each prompt therefore has an offset between the two, which goes with its cache. The
model's own bookkeeping of it (`rope_deltas`) is by place in the batch and is not used: samples leave the
batch, and share prompts. Positions are computed here: some releases of transformers move pictures along the
axis of time for Qwen2.5-VL (huggingface/transformers issue 45325, version 5.3).

Sources: M-RoPE, Qwen2-VL, arXiv 2409.12191, section 2.1; DeepStack, arXiv 2406.04334 (Qwen3-VL).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from visalign.errors import UserError
from visalign.vision.pictures import Picture, insert_features, tower_features
from visalign.vision.positions import rotary_positions

from .loading import VISION_LANGUAGE
from .network import Seen


class QwenSight:
    """The vision part of a model, and where its pictures stand among the tokens.

    Args:
        model: Qwen2-VL, Qwen2.5-VL or Qwen3-VL with its language head.

    Raises:
        UserError: for a model of another family.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        kind = getattr(model.config, "model_type", "")
        if kind not in VISION_LANGUAGE:
            raise UserError(
                f"A processor was given for a {type(model).__name__} (model type {kind!r}), and this policy "
                f"does not know how that sees. It knows {', '.join(VISION_LANGUAGE)}; for text alone give "
                "the tokenizer."
            )
        self._trunk: Any = model.base_model
        self.language: nn.Module = self._trunk.language_model
        self._image_token: int = model.config.image_token_id
        self._merge: int = model.config.vision_config.spatial_merge_size

    def see(self, ids: Tensor, mask: Tensor, pictures: Sequence[Sequence[Picture]]) -> Seen:
        """What the language part takes instead of ids [b, S] from the beginning, with gradient where the
        model has it, and the rows' offsets; each different picture of the b lists goes through the tower
        once.

        The first image tokens of a row belong to its pictures; those that a completion draws are text.
        """
        shown = [picture for row in pictures for picture in row]
        places = self._places(ids, mask, pictures)
        different = list(dict.fromkeys(shown))
        features = dict(zip(different, tower_features(self._trunk, different), strict=True))
        embeds = self._trunk.get_input_embeddings()(ids)
        inputs = insert_features(embeds, places, [features[picture] for picture in shown])
        positions, offset = rotary_positions(places.cpu(), mask.cpu(), pictures, self._merge)
        inputs["position_ids"] = positions.to(ids.device)
        return Seen(inputs, offset.to(ids.device))

    def _places(self, ids: Tensor, mask: Tensor, pictures: Sequence[Sequence[Picture]]) -> Tensor:
        """bool [b, S], True for the tokens that stand for pictures."""
        wanted = torch.tensor([sum(p.tokens for p in row) for row in pictures], device=ids.device)
        marks = (ids == self._image_token) & (mask != 0)
        places = marks & (marks.cumsum(1) <= wanted[:, None])
        if not torch.equal(places.sum(1), wanted):
            row = int((places.sum(1) != wanted).nonzero()[0])
            raise ValueError(
                f"Row {row} holds {int(places[row].sum())} image tokens, and its pictures take "
                f"{int(wanted[row])}. Encode prompt and pictures with one processor."
            )
        return places
