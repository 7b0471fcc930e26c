# SPDX-License-Identifier: Apache-2.0
"""The text side of an SD3 pipeline: each unique prompt encoded once, the empty prompt once and for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor

from visalign.adapters.offload import ENCODERS, on_device
from visalign.adapters.prompt_cache import has_prompt_cache
from visalign.flow.noise import queue_copy

from .joint_attention import collapse_null_tokens

BATCH = 64  # prompts that pass the encoders at a time


@dataclass(frozen=True, kw_only=True)
class SD3Condition:
    """U unique encoded prompts and, for each of B samples, which of them it has."""

    embeds: Tensor  # [U, L, D] text tokens
    pooled: Tensor  # [U, Dp] pooled text
    log_multiplicity: Tensor | None
    """[L] float32, log of how many equal tokens each one stands for; None when each stands for itself."""
    index: Tensor  # [B] int64, the row of each sample

    def __len__(self) -> int:
        return len(self.index)

    def select(self, index: Tensor) -> SD3Condition:
        """Return the condition of the samples `index` [N] (repeats allowed); the encoded prompts are shared."""
        return replace(self, index=self.index[queue_copy(index, self.index.device)])


class SD3TextEncoders:
    """CLIP and T5 encoders behind the pipeline's `encode_prompt`; of a run of null tokens one, weighted, is kept."""

    def __init__(self, pipe: StableDiffusion3Pipeline, *, max_sequence_length: int) -> None:
        self._pipe, self._max_sequence_length = pipe, max_sequence_length
        self._null: SD3Condition | None = None
        for encoder in (pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3):
            if encoder is not None:
                encoder.requires_grad_(False).eval()

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> SD3Condition:
        """Encode B prompts, each unique one once, in order of first appearance."""
        rows = {prompt: row for row, prompt in enumerate(dict.fromkeys(prompts))}
        unique = list(rows)
        with on_device(self._pipe, ENCODERS, self._pipe.transformer.device):
            if has_prompt_cache(self._pipe):  # which has each prompt by itself
                # a batch of one or two is rounded otherwise than a larger one
                chunks = [[rows[:1] for rows in self._encode([prompt] * 3)] for prompt in unique]
            else:
                chunks = [self._encode(unique[i : i + BATCH]) for i in range(0, len(unique), BATCH)]
        embeds, pooled = (torch.cat(tensors) for tensors in zip(*chunks, strict=True))
        embeds, weights = collapse_null_tokens(embeds)
        log_multiplicity = weights if weights.any() else None
        index = torch.tensor([rows[prompt] for prompt in prompts], device=embeds.device)
        return SD3Condition(embeds=embeds, pooled=pooled, log_multiplicity=log_multiplicity, index=index)

    def null(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the empty prompt for `count` samples, tokens [B, L, D] and pooled [B, Dp], encoded at first use."""
        if self._null is None:
            self._null = self.encode([""])
        return self._null.embeds.expand(count, -1, -1), self._null.pooled.expand(count, -1)

    def _encode(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        """Return tokens [U, L, D] and pooled [U, Dp] as the pipeline computes them."""
        encoded: Any = self._pipe.encode_prompt(
            prompt=prompts,
            prompt_2=prompts,
            prompt_3=prompts,
            do_classifier_free_guidance=False,
            max_sequence_length=self._max_sequence_length,
            device=self._pipe.transformer.device,
        )
        embeds, _, pooled, _ = encoded
        return embeds, pooled
