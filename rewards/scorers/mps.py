# SPDX-License-Identifier: Apache-2.0
"""MPS: a CLIP ViT-H/14 whose image attends to the words of the prompt that belong to a condition.

Source: Zhang et al., "Learning Multi-dimensional Human Preference for Text-to-Image Generation", CVPR 2024;
code github.com/Kwai-Kolors/MPS (MIT). Four layers of cross-attention from image tokens to prompt tokens, each
followed by a parallel block of attention and feedforward with rotary positions; keys and values share one
head.

The published file is a pickled module; its tensors are read, its code is not run (`read_module`). Upstream
normalises the similarity of words and condition over the batch; here over each prompt, which is the same for
the single prompts of its evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import RewardError, make_scores, read_request, scatter
from visalign.rewards.base.identity import Identity, fingerprint
from visalign.rewards.catalogue import check_options
from visalign.rewards.clip.encoder import ClipParts
from visalign.rewards.clip.published_layouts import CLIP_VIT_H_14, load_transformers_clip
from visalign.rewards.clip.towers import ClipTowers, cosine
from visalign.rewards.weights.checkpoint_files import drop_suffixes, load_strict, read_module
from visalign.rewards.weights.resize import fitting_images

OVERALL = (
    "light, color, clarity, tone, style, ambiance, artistry, shape, face, hair, hands, limbs, structure, "
    "instance, texture, quantity, attributes, position, number, location, word, things."
)
"""The published condition of overall preference."""


class Gated(nn.Module):
    """x · SiLU(gate) of the two halves (SwiGLU, Shazeer, arXiv 2002.05202)."""

    def forward(self, x: Tensor) -> Tensor:
        x, gate = x.chunk(2, dim=-1)
        return x * F.silu(gate)


class CrossAttention(nn.Module):
    """x + attention(norm x, context) + feedforward(norm x), one head of keys and values for all."""

    def __init__(self, width: int, head: int, heads: int, inner: int) -> None:
        super().__init__()
        self.head = head
        self.norm = nn.LayerNorm(width)
        self.to_q = nn.Linear(width, head * heads, bias=False)
        self.to_kv = nn.Linear(width, 2 * head, bias=False)
        self.to_out = nn.Linear(head * heads, width, bias=False)
        self.ff = nn.Sequential(nn.Linear(width, 2 * inner, bias=False), Gated(), nn.Linear(inner, width, bias=False))

    def forward(self, x: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        """Attend from x [B, n, D] to context [B, m, D] with an additive mask [B, 1, 1, m]."""
        normed = self.norm(x)
        query = self.to_q(normed).unflatten(-1, (-1, self.head)).transpose(1, 2)
        key, value = self.to_kv(context)[:, None].expand(-1, query.shape[1], -1, -1).chunk(2, dim=-1)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return x + self.to_out(attended.transpose(1, 2).flatten(2)) + self.ff(normed)


class ParallelBlock(nn.Module):
    """x + attention(norm x) + feedforward(norm x), with rotary positions and one head of keys and values."""

    def __init__(self, width: int, head: int, heads: int, inner: int) -> None:
        super().__init__()
        self.sizes = (head * heads, head, head, 2 * inner)
        self.norm = nn.LayerNorm(width)
        self.fused_attn_ff_proj = nn.Linear(width, sum(self.sizes), bias=False)
        self.attn_out = nn.Linear(head * heads, width, bias=False)
        self.ff_out = nn.Sequential(Gated(), nn.Linear(inner, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value, inner = self.fused_attn_ff_proj(self.norm(x)).split(self.sizes, dim=-1)
        query = query.unflatten(-1, (-1, self.sizes[1])).transpose(1, 2)
        key, value = _rotate(key)[:, None].expand_as(query), value[:, None].expand_as(query)
        attended = F.scaled_dot_product_attention(_rotate(query), key, value)
        return x + self.attn_out(attended.transpose(1, 2).flatten(2)) + self.ff_out(inner)


def _rotate(x: Tensor) -> Tensor:
    """Apply rotary positions (Su et al., arXiv 2104.09864) to [..., n, d], halves paired."""
    count, width = x.shape[-2:]
    power = torch.arange(0, width, 2, device=x.device, dtype=torch.float32) / width
    angle = torch.arange(count, device=x.device, dtype=torch.float32)[:, None] / 10000**power
    angle = torch.cat((angle, angle), -1)
    first, second = x.chunk(2, dim=-1)
    return x * angle.cos().to(x.dtype) + torch.cat((-second, first), -1) * angle.sin().to(x.dtype)


class Mps:
    """exp(logit_scale) · cos(prompt, image after cross-attention to words of the condition), float32.

    A word of the prompt is attended to if its largest product with a word of the condition is above
    `threshold` of the prompt's largest. The difference of two scores is the log-odds of the preference.

    Args:
        model: `MPS_overall_checkpoint.pth`, or a state dict of it as .safetensors; config.json and tokenizer
            in its folder replace CLIP ViT-H/14's.
        condition: words for the aspect of the preference.
        threshold: of a word's similarity to the condition; 0.3 in upstream's evaluation, 0.01 in training.
        **towers: options of `ClipTowers`: batch_size.
    """

    name = "mps"
    unit = "logit"
    range = (-math.inf, math.inf)
    higher_is_better = True

    def __init__(
        self,
        model: str | Path,
        *,
        condition: str = OVERALL,
        threshold: float = 0.3,
        device: str | torch.device = "cpu",
        **towers: Any,
    ) -> None:
        check_options(self.name, ClipTowers, {"model": model, "device": device, **towers})
        self.file, self.condition, self.threshold = Path(model), condition, threshold
        self._device = device
        self.towers = ClipTowers(model, device=device, load=self._load, **towers)

    @property
    def identity(self) -> Identity:
        options = {"condition": self.condition, "threshold": self.threshold}
        return self.towers.identity(self.name, head=fingerprint(self.file), **options)

    @torch.no_grad()
    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        notes = self.towers.read_prompts(request.prompts, reasons)
        rows, readable_images = fitting_images(request, reasons, self.towers.preprocess)
        size = self.towers.batch_size
        readable_prompts = [request.prompts[row] for row in rows]
        values = [torch.zeros(0)]
        for at in range(0, len(rows), size):
            values.append(self._scores(readable_images[at : at + size], readable_prompts[at : at + size]))
        value = scatter(torch.cat(values), rows, len(request))
        for row in rows:
            if not math.isfinite(float(value[row])):
                reasons[row] = reasons[row] or "no word of the prompt is like the condition"
        parts = {"cut": torch.tensor([float(bool(note)) for note in notes])}
        return make_scores(value, reasons, self.unit, parts=parts, text=notes)

    def _scores(self, images: Sequence[Tensor], prompts: Sequence[str]) -> Tensor:
        encoder = self.towers.encoder
        model: Any = encoder.model
        pixels = self.towers.pixels(images).to(encoder.device, encoder.dtype)
        image = model.visual_projection(model.vision_model(pixel_values=pixels).last_hidden_state)
        ids = self.towers.tokens([*prompts, self.condition]).to(encoder.device)
        text_output = model.text_model(input_ids=ids)
        words = model.text_projection(text_output.last_hidden_state)
        # s_i = max_j w_i·c_j; word i is attended to if s_i / max_i s_i > threshold
        similarity = torch.einsum("bid,jd->bij", words[:-1], words[-1]).amax(-1)
        attended = similarity / similarity.amax(-1, keepdim=True) > self.threshold
        mask = torch.where(attended, 0.0, -math.inf)[:, None, None].to(words.dtype)
        for cross, block in self._cross.layers:  # type: ignore[misc]
            image = block(cross(image, words[:-1], mask))
        text = model.text_projection(text_output.pooler_output)[:-1]
        return (cosine(image[:, 0], text) * encoder.logit_scale.float().exp()).cpu()

    def _load(self, precision: str) -> ClipParts:
        state = read_module(self.file)
        clip = {key.removeprefix("model."): tensor for key, tensor in state.items() if key.startswith("model.")}
        options: Any = {"config": CLIP_VIT_H_14, "device": self._device, "precision": precision}
        parts = load_transformers_clip(self.file.parent, state=clip, **options)
        prefix = "cross_model.layers."
        layers = {
            key.removeprefix("cross_model.").replace(".fn.", "."): tensor
            for key, tensor in drop_suffixes(state, ("inv_freq", "pos_emb")).items()
            if key.startswith(prefix)
        }
        if not layers:
            raise RewardError(f"{self.file} is no MPS: it has no cross_model. Give the file as published.")
        self._cross = _cross_model(layers, self.file.name).to(parts.encoder.device, parts.encoder.dtype)
        return parts


def _cross_model(state: Mapping[str, Tensor], where: str) -> nn.Module:
    query, head = state["layers.0.0.to_q.weight"].shape, len(state["layers.0.0.to_kv.weight"]) // 2
    sizes = (query[1], head, query[0] // head, state["layers.0.0.ff.2.weight"].shape[1])
    count = 1 + max(int(key.split(".")[1]) for key in state)
    module = nn.Module()
    module.layers = nn.ModuleList(nn.ModuleList([CrossAttention(*sizes), ParallelBlock(*sizes)]) for _ in range(count))
    load_strict(module, {key: tensor.float() for key, tensor in state.items()}, where)
    return module.eval().requires_grad_(False)
