# SPDX-License-Identifier: Apache-2.0
"""Input of a process reward model: a prompt, its steps with a marker after each, one logit per step.

The convention is that of TRL's PRMTrainer (and of Math-Shepherd, arXiv 2312.08935): prompt, steps and markers
are tokenized one by one and concatenated, and a token classifier with two labels judges a step at the last
token of the marker behind it. The last step has a marker too. A classifier with one label is a progress
estimator (SPA-RL, arXiv 2505.20732): its output there is the step's contribution.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from visalign.errors import UserError
from visalign.interfaces import Prompt
from visalign.settings import Count, settings

from .chat import PromptEncoder, image_parts
from .steps import StepReading


@dataclass(frozen=True, kw_only=True)
class StepTokens:
    ids: list[int]
    ends: list[int]  # Position in `ids` of the token at which each step is judged


@settings("data.cut")
class StepLimits:
    """Tokens that records are cut to, as TRL's PRMTrainer cuts them; a step whose end is cut off has no label."""

    max_prompt_length: Count | None = None
    """Last tokens of the prompt that stay; null: all."""
    max_completion_length: Count | None = None
    """First tokens of the steps that stay; null: all."""
    max_length: Count | None = None
    """First tokens of both together that stay; null: all."""


class StepEncoder:
    """Tokenizer of prompts (a text behind the begin token, a conversation by its template) and steps."""

    def __init__(self, tokenizer: Any, reading: StepReading, limits: StepLimits | None = None) -> None:
        self.tokenizer, self.reading, self.limits = tokenizer, reading, limits or StepLimits()
        self._prompts = PromptEncoder(tokenizer)
        self._marker = self._ids(reading.read_after_step)
        unknown = getattr(tokenizer, "unk_token_id", None)
        if not self._marker or (unknown is not None and unknown in self._marker):
            raise UserError(
                f"The tokenizer has no token for {reading.read_after_step!r}, so the ends of steps cannot be told. "
                "Give a separator that it knows, or marker= a token."
            )

    def encode(self, prompt: Prompt, steps: Sequence[str]) -> StepTokens:
        """Tokenize a prompt and its steps, at least one, without their separators."""
        limits, ends = self.limits, list[int]()
        ids = self._prompt_ids(prompt)[-(limits.max_prompt_length or 0) :]  # −0 is all of them
        length = min(len(ids) + (limits.max_completion_length or sys.maxsize), limits.max_length or sys.maxsize)
        for step in steps:
            ids = [*ids, *self._ids(step), *self._marker]
            ends.append(len(ids) - 1)
        return StepTokens(ids=ids[:length], ends=[end for end in ends if end < length])

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            begin, ids = getattr(self.tokenizer, "bos_token_id", None), self._ids(prompt)
            return ids if begin is None or ids[:1] == [begin] else [begin, *ids]
        if image_parts(prompt):
            raise UserError("A prompt shows images, and a process reward model reads text alone.")
        return self._ids(self._prompts.render(prompt))

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def step_logits(model: nn.Module, batch: Sequence[StepTokens], *, right_label: int = 1) -> Tensor:
    """Compute the log-odds [n] that each step of the texts is right, or its contribution; differentiable.

    The model gives `logits` [b, L, 2], of which `right_label` is "right", or [b, L, 1].
    """
    device = next(model.parameters()).device
    rows = [torch.tensor(tokens.ids) for tokens in batch]
    ids = pad_sequence(rows, batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    logits = model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
    if logits.shape not in {(*ids.shape, 1), (*ids.shape, 2)}:
        raise UserError(
            f"The process reward model gave logits {tuple(logits.shape)} for tokens {tuple(ids.shape)}; needed are "
            "two per token, or one (num_labels)."
        )
    positions = torch.tensor([(row, end) for row, tokens in enumerate(batch) for end in tokens.ends], device=device)
    scores = logits[positions[:, 0], positions[:, 1]].float()
    return scores[:, 0] if scores.shape[1] == 1 else scores[:, right_label] - scores[:, 1 - right_label]
