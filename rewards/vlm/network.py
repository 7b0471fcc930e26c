# SPDX-License-Identifier: Apache-2.0
"""The model of a vision-language judge: images and tokens in, hidden states at the marked places out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from visalign.rewards.base.contract import RewardError
from visalign.rewards.weights.feature_cache import FeatureCache
from visalign.vision.images import ImageFeatures, insert_features

from .packing import Batch, attention_mask, batch_packs, collate, pack_rows
from .requests import ImageEncoder, PatchEncoder, SeenImage, TileEncoder, TokenRow, by_patches

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
TILES = ("internvl",)
"""Model types by how they take images in."""
STRIP = 16384
"""Rows of the head that are multiplied at a time where all are needed."""


def image_encoder(model: Any, processor: Any, **changes: Any) -> ImageEncoder:
    """How a model of transformers takes images in; `changes` are of the settings of its patches (Qwen-VL
    alone).
    """
    kind = getattr(model.config, "model_type", "")
    if kind in QWEN and hasattr(getattr(processor, "image_processor", None), "merge_size"):
        try:
            return PatchEncoder(processor.image_processor, **changes)
        except ValueError as error:
            raise RewardError(str(error)) from error
    if kind in TILES and hasattr(processor, "image_seq_length"):
        return TileEncoder(processor)
    raise RewardError(
        f"A {type(model).__name__} (model type {kind!r}) with a {type(processor).__name__} is not known as a "
        f"judge that sees; known are {', '.join((*QWEN, *TILES))}, each with its own processor."
    )


class SeeingNetwork:
    """Hidden states of rows; the head is multiplied by what is asked for, not by all.

    Args:
        model: transformers model with language head, on its device.
        images: how it takes images in.
        positions: "mrope" or "1d".
        pad: id that fills batches.
        max_tokens: of one pass, with padding.
        feature_bytes: of images' features that are kept.
    """

    def __init__(
        self,
        model: Any,
        images: ImageEncoder,
        *,
        positions: str,
        pad: int,
        max_tokens: int,
        feature_bytes: int,
    ) -> None:
        self.model, self.images, self.pad, self.max_tokens = model, images, pad, max_tokens
        self.trunk: Any = model.base_model
        self.merge = images.merge if positions == "mrope" else 0
        self.image_token: int = model.config.image_token_id
        self.cache: FeatureCache[ImageFeatures] = FeatureCache(feature_bytes)
        self.in_one_pass = False
        """Whether rows with gradient go through together, `max_tokens` or not: processes that share the
        weights have to make equally many passes."""
        self._seen_with: int | None = None
        text = model.config.get_text_config()
        attention = getattr(text, "_attn_implementation", "sdpa")
        layers = getattr(text, "layer_types", None) or ["full_attention"]
        self.shares = attention in ("sdpa", "eager") and set(layers) == {"full_attention"}

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.trunk.get_input_embeddings().weight.device

    def states(self, rows: Sequence[TokenRow], run: Callable[[Batch], Tensor] | None = None) -> Tensor:
        """Hidden states [N, H] float32 at the marks of N rows, one at least; with gradient where it is
        enabled.

        Equal rows are computed once; rows with the same images and a common beginning share it. `run` goes
        from a batch to what stands at each of its places, [b, S, *]; the language part when None.
        """
        run = run or self.hidden
        different = list(dict.fromkeys(rows))
        packs = pack_rows(different, self.image_token, share=self.shares)
        found: list[Tensor] = []
        numbers: list[int] = []
        together = self.in_one_pass and torch.is_grad_enabled()
        for part in [packs] if together else batch_packs(packs, self.max_tokens):
            batch = collate(part, self.image_token, self.pad, self.merge)
            hidden = run(batch)
            at = batch.marks.to(hidden.device)
            found.append(hidden[at[:, 0], at[:, 1]].float())
            numbers += batch.numbers
        place = {number: order for order, number in enumerate(numbers)}
        of = {row: place[number] for number, row in enumerate(different)}
        return torch.cat(found)[[of[row] for row in rows]]

    def head_logits(self, states: Tensor, ids: Sequence[int]) -> Tensor:
        """Logits [N, K] float32 of K tokens at states [N, H]: only their rows of the head are multiplied."""
        head = self.model.get_output_embeddings()
        index = torch.tensor(list(ids), device=head.weight.device)
        # A few rows cost nothing in float64, and rounding then does not tell neighbours.
        wide = torch.float32 if head.weight.device.type == "mps" else torch.float64
        bias = None if head.bias is None else head.bias[index].to(wide)
        return linear(states.to(head.weight.device, wide), head.weight[index].to(wide), bias).float()

    def log_total(self, states: Tensor) -> Tensor:
        """logsumexp [N] float32 over the whole vocabulary at states [N, H], a part of the head at a time."""
        return torch.stack([strip.logsumexp(-1) for strip in self._strips(states)]).logsumexp(0)

    def likeliest(self, states: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """(log-probs [N, K], ids [N, K]) of the K likeliest tokens at states [N, H], the likeliest first."""
        best, ids, parts = [], [], []
        for number, strip in enumerate(self._strips(states)):
            found = strip.topk(min(count, strip.shape[-1]))
            best.append(found.values)
            ids.append(found.indices + number * STRIP)
            parts.append(strip.logsumexp(-1))
        all_best, all_ids = torch.cat(best, -1), torch.cat(ids, -1)
        order = all_best.topk(min(count, all_best.shape[-1]))
        total = torch.stack(parts).logsumexp(0)
        return order.values - total[:, None], all_ids.gather(-1, order.indices)

    def _strips(self, states: Tensor) -> Iterator[Tensor]:
        """Logits [N, up to `STRIP`] float32 of all tokens, part by part."""
        head = self.model.get_output_embeddings()
        states = states.to(head.weight.device).float()
        for start in range(0, len(head.weight), STRIP):
            part = slice(start, start + STRIP)
            bias = None if head.bias is None else head.bias[part].float()
            yield linear(states, head.weight[part].float(), bias)

    @property
    def tower(self) -> list[nn.Parameter]:
        """What images go through before they meet tokens."""
        return [one for name, one in self.trunk.named_parameters() if "language_model." not in name]

    def features(self, shown: Sequence[SeenImage]) -> dict[SeenImage, ImageFeatures]:
        """Features of images: kept ones, or live with gradient where the tower is trained.

        What is kept is found by the pixels, across prompts and calls, and forgotten when a weight of the
        tower was changed.
        """
        different = list(dict.fromkeys(shown))
        tower = self.tower
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in tower):
            live = self.images.features(self.trunk, different) if different else []
            return dict(zip(different, live, strict=True))
        state = hash(tuple((one.data_ptr(), 0 if one.is_inference() else one._version) for one in tower))
        if state != self._seen_with:
            self.cache.clear()
            self._seen_with = state
        kept = {image: self.cache.get(image.digest) for image in different}
        found = {image: features for image, features in kept.items() if features is not None}
        with torch.no_grad():
            for part in by_patches([image for image in different if image not in found]):
                for image, features in zip(part, self.images.features(self.trunk, part), strict=True):
                    self.cache.put(image.digest, features)
                    found[image] = features
        return found

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """What the language part takes for a batch, but its mask."""
        device = self.device
        features = self.features(batch.shown)
        embeds = self.trunk.get_input_embeddings()(batch.ids.to(device))
        given = insert_features(embeds, batch.places.to(device), [features[shown] for shown in batch.shown])
        if batch.positions is not None:
            given["position_ids"] = batch.positions.to(device)
        return given

    def hidden(
        self, batch: Batch, change: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    ) -> Tensor:
        """Last hidden states [b, S, H] of a batch; `change` changes what the language part takes, e.g. adds
        rows.

        Without packs no mask is needed: padding stands behind everything that is read.
        """
        given = self.inputs(batch)
        dtype = given["inputs_embeds"].dtype
        mask = None if batch.segments is None else attention_mask(batch.segments.to(self.device), dtype)
        given["attention_mask"] = mask
        given = given if change is None else change(given)
        return self.trunk.language_model(**given, use_cache=False).last_hidden_state
