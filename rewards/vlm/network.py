# SPDX-License-Identifier: Apache-2.0
"""Network of a vision-language judge: from images and tokens to hidden states at the read positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from visalign.memory import BatchSize
from visalign.rewards.base.contract import RewardError
from visalign.rewards.weights.feature_cache import FeatureCache
from visalign.vision.images import ImageFeatures, insert_features

from .packing import Batch, attention_mask, batch_packs, collate, pack_rows
from .requests import ImageEncoder, PatchEncoder, SeenImage, SplitEncoder, TileEncoder, TokenRow, by_patches

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
TILES = {"internvl": TileEncoder, "smolvlm": SplitEncoder}  # Model types that read tiles; those of QWEN read patches
BLANK = 512  # Tokens of a row in trials of the memory
STRIP = 16384  # Rows of the head that are multiplied at a time when all are needed


def image_encoder(model: Any, processor: Any, **changes: Any) -> ImageEncoder:
    """Create the image encoder of a transformers model; `changes` are settings of `PatchCutter` (Qwen-VL)."""
    kind = getattr(model.config, "model_type", "")
    if kind in QWEN and hasattr(getattr(processor, "image_processor", None), "merge_size"):
        try:
            return PatchEncoder(processor.image_processor, **changes)
        except ValueError as error:
            raise RewardError(str(error)) from error
    if kind in TILES and hasattr(processor, "image_processor"):
        if unread := [name for name in ("min_pixels", "max_pixels") if changes.get(name) is not None]:
            raise RewardError(
                f"{' and '.join(unread)} are of Qwen-VL; a model of type {kind!r} cuts images into tiles as its "
                "processor says. Leave them out."
            )
        return TILES[kind](processor)
    raise RewardError(
        f"A {type(model).__name__} ({kind!r}) with a {type(processor).__name__} is no vision-language judge; supported"
        f" are {', '.join((*QWEN, *TILES))}, each with its processor."
    )


class SeeingNetwork:
    """Hidden states of rows, and logits of the requested tokens only.

    `max_tokens` are those of one pass, with padding, and `feature_bytes` is the cache size for image features.
    """

    def __init__(
        self, model: Any, images: ImageEncoder, *, positions: str, pad: int, max_tokens: int | str, feature_bytes: int
    ) -> None:
        self.model, self.images, self.pad = model, images, pad
        self.batch = BatchSize(max_tokens, self._read_blank, default=8192, unit=BLANK)
        self.trunk: Any = model.base_model
        self.language: Any = self.trunk.text_model if hasattr(self.trunk, "text_model") else self.trunk.language_model
        self.merge = images.merge if positions == "mrope" else 0
        self.image_token: int = model.config.image_token_id
        self.cache: FeatureCache[ImageFeatures] = FeatureCache(feature_bytes)
        self.in_one_pass = False
        """True to send rows with gradient through together, whatever `max_tokens`: processes that share the
        weights must make equally many passes."""
        self._tower_state: int | None = None
        text = model.config.get_text_config()
        attention = getattr(text, "_attn_implementation", "sdpa")
        layers = getattr(text, "layer_types", None) or ["full_attention"]
        self.shares = attention in ("sdpa", "eager") and set(layers) == {"full_attention"}

    @property
    def max_tokens(self) -> int:
        return self.batch.read()

    @torch.no_grad()
    def _read_blank(self, count: int) -> Tensor:
        rows = [TokenRow((self.pad,) * BLANK, ())] * count
        inputs = self.inputs(collate(pack_rows(rows, self.image_token), self.image_token, self.pad, self.merge))
        # with the keys and values that written answers keep
        return self.language(**inputs, attention_mask=None, use_cache=True).last_hidden_state

    @property
    def device(self) -> torch.device:
        return self.trunk.get_input_embeddings().weight.device

    def states(self, rows: Sequence[TokenRow], run: Callable[[Batch], Tensor] | None = None) -> Tensor:
        """Hidden states [N, H] float32 at the ends of N ≥ 1 rows, with gradient where it is enabled.

        Equal rows are computed once. `run` maps a batch to values at its tokens, [b, S, *]; the language part when
        None.
        """
        run = run or self.hidden
        unique_rows = list(dict.fromkeys(rows))
        packs = pack_rows(unique_rows, self.image_token, share=self.shares)
        states: list[Tensor] = []
        numbers: list[int] = []
        together = self.in_one_pass and torch.is_grad_enabled()
        for part in [packs] if together else batch_packs(packs, self.max_tokens):
            batch = collate(part, self.image_token, self.pad, self.merge)
            hidden = run(batch)
            ends = batch.ends.to(hidden.device)
            states.append(hidden[ends[:, 0], ends[:, 1]].float())
            numbers += batch.numbers
        index = {unique_rows[number]: order for order, number in enumerate(numbers)}
        return torch.cat(states)[[index[row] for row in rows]]

    def head_logits(self, states: Tensor, ids: Sequence[int]) -> Tensor:
        """Logits [N, K] float32 of K tokens at states [N, H]; only their rows of the head are multiplied."""
        head = self.model.get_output_embeddings()
        index = torch.tensor(list(ids), device=head.weight.device)
        # float64 costs nothing for a few rows, and then rounding does not depend on the other rows of a batch
        dtype = torch.float32 if head.weight.device.type == "mps" else torch.float64
        bias = None if head.bias is None else head.bias[index].to(dtype)
        return linear(states.to(head.weight.device, dtype), head.weight[index].to(dtype), bias).float()

    def log_total(self, states: Tensor) -> Tensor:
        """Compute logsumexp [N] float32 over the vocabulary at states [N, H], in strips of the head."""
        return torch.stack([strip.logsumexp(-1) for strip in self._strips(states)]).logsumexp(0)

    def likeliest(self, states: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """(log-probs [N, K], ids [N, K]) of the K likeliest tokens at states [N, H], the likeliest first."""
        best, ids, parts = [], [], []
        for number, strip in enumerate(self._strips(states)):
            top = strip.topk(min(count, strip.shape[-1]))
            best.append(top.values)
            ids.append(top.indices + number * STRIP)
            parts.append(strip.logsumexp(-1))
        all_best, all_ids = torch.cat(best, -1), torch.cat(ids, -1)
        order = all_best.topk(min(count, all_best.shape[-1]))
        total = torch.stack(parts).logsumexp(0)
        return order.values - total[:, None], all_ids.gather(-1, order.indices)

    def _strips(self, states: Tensor) -> Iterator[Tensor]:
        """Yield the logits [N, ≤ `STRIP`] float32 of all tokens, strip by strip."""
        head = self.model.get_output_embeddings()
        states = states.to(head.weight.device).float()
        for start in range(0, len(head.weight), STRIP):
            part = slice(start, start + STRIP)
            bias = None if head.bias is None else head.bias[part].float()
            yield linear(states, head.weight[part].float(), bias)

    @property
    def tower(self) -> list[nn.Parameter]:
        """Parameters of the vision tower and the projector."""
        language = set(map(id, self.language.parameters()))
        return [weight for weight in self.trunk.parameters() if id(weight) not in language]

    def features(self, images: Sequence[SeenImage]) -> dict[SeenImage, ImageFeatures]:
        """Features of images: cached, or computed with gradient where the tower is trained or the image has one."""
        unique = list(dict.fromkeys(images))
        tower = self.tower
        is_trained = torch.is_grad_enabled() and any(weight.requires_grad for weight in tower)
        live = [image for image in unique if is_trained or image.pixels.is_floating_point()]
        with_gradient = dict(zip(live, self.images.features(self.trunk, live) if live else [], strict=True))
        if len(live) == len(unique):
            return with_gradient
        unique = [image for image in unique if image not in with_gradient]
        state = hash(tuple((w.data_ptr(), 0 if w.is_inference() else w._version) for w in tower))
        if state != self._tower_state:
            self.cache.clear()
            self._tower_state = state
        cached = {image: self.cache.get(image.digest) for image in unique}
        features = {image: value for image, value in cached.items() if value is not None}
        with torch.no_grad():
            for part in by_patches([image for image in unique if image not in features]):
                for image, value in zip(part, self.images.features(self.trunk, part), strict=True):
                    self.cache.put(image.digest, value)
                    features[image] = value
        return {**features, **with_gradient}

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Inputs of the language part for a batch, without its mask."""
        device = self.device
        features = self.features(batch.images)
        embeds = self.trunk.get_input_embeddings()(batch.ids.to(device))
        in_order = [features[image] for image in batch.images]
        inputs = insert_features(embeds, batch.image_mask.to(device), in_order)
        if batch.positions is not None:
            inputs["position_ids"] = batch.positions.to(device)
        return inputs

    def hidden(self, batch: Batch, change: Callable[[dict[str, Any]], dict[str, Any]] | None = None) -> Tensor:
        """Last hidden states [b, S, H] of a batch; `change` edits the inputs of the language part."""
        inputs = self.inputs(batch)
        dtype = inputs["inputs_embeds"].dtype
        # without packs no mask is needed: padding comes after everything that is read
        mask = None if batch.segments is None else attention_mask(batch.segments.to(self.device), dtype)
        inputs["attention_mask"] = mask
        inputs = inputs if change is None else change(inputs)
        return self.language(**inputs, use_cache=False).last_hidden_state
