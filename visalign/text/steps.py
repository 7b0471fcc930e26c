# SPDX-License-Identifier: Apache-2.0
"""Steps of a completion: where a text is cut into them, which tokens they are made of, and what they earned.

A text is cut at every occurrence of the separator. Pieces of blanks alone are no steps, so "a\\n\\nb" has
two; a text without the separator is one step. Every token of a rollout's completion belongs to one step:
separators and blanks to the step before them (those at the very beginning to the first), the end token to the
last. A token that ends one step and begins the next belongs to the earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from visalign.core.advantages.process import Place, Reduction, aggregate_steps, span_index, span_rewards
from visalign.core.rewards.steps import clip_step_rewards, delta_step_rewards
from visalign.errors import UserError

from .rollout import TextRollout

Span = tuple[int, int]
"""First character of a step, and one past its last; the separator is outside."""


@dataclass(frozen=True, kw_only=True)
class StepReading:
    """How a text is cut into steps, and what a process reward model reads after each.

    Raises:
        UserError: an empty separator or marker.
    """

    separator: str = "\n"
    """What ends a step in the text."""
    marker: str | None = None
    """What the model reads after each step in place of the separator (Qwen2.5-Math-PRM: "<extra_0>"); None is
    the separator itself, as TRL trains."""

    def __post_init__(self) -> None:
        for name in ("separator", "marker"):
            if getattr(self, name) == "":
                raise UserError(
                    f"{name} is empty, and then no step would end. Give the text that stands between two "
                    r'steps, such as "\n" or "\n\n".'
                )

    @property
    def read_after_step(self) -> str:
        """The text at whose last token a model judges a step."""
        return self.separator if self.marker is None else self.marker

    def spans(self, text: str) -> list[Span]:
        """The steps of a text; none for a text of blanks.

        Args:
            text: what the policy wrote.

        Example:
            >>> StepReading().spans("a = 1\\n\\nb = 2")
            [(0, 5), (7, 12)]
        """
        found, start = [], 0
        for piece in text.split(self.separator):
            if piece.strip():
                found.append((start, start + len(piece)))
            start += len(piece) + len(self.separator)
        return found

    def split(self, text: str) -> list[str]:
        """The steps of what the policy wrote as texts."""
        return [text[start:end] for start, end in self.spans(text)]


def step_index(rollout: TextRollout, tokenizer: Any, reading: StepReading) -> Tensor:
    """Which step each token of a rollout belongs to.

    Args:
        rollout: B completions.
        tokenizer: of the policy that wrote them.
        reading: how texts are cut.

    Returns:
        [B, T] int64, −1 where the loss mask is 0 and in completions without a step.

    Raises:
        UserError: the tokenizer does not give the rollout's texts back.
    """
    rows = [_token_spans(rollout, row, tokenizer, reading) for row in range(len(rollout))]
    count = max([len(spans) for spans in rows], default=0)
    table = torch.zeros(2, len(rollout), count, dtype=torch.int64)
    for row, spans in enumerate(rows):
        for number, span in enumerate(spans):
            table[:, row, number] = torch.tensor(span)
    found = span_index(table[0], table[1], rollout.loss_mask.shape[1])
    return torch.where(rollout.loss_mask != 0, found, -1)


def _token_spans(
    rollout: TextRollout, row: int, tokenizer: Any, reading: StepReading
) -> list[tuple[int, int]]:
    """First token and one past the last of each step of one completion; together they are all of it."""
    length = int((torch.arange(1, rollout.loss_mask.shape[1] + 1) * (rollout.loss_mask[row] != 0)).amax())
    ids, text = rollout.completion_ids[row, :length].tolist(), rollout.text[row]
    if length == 0:
        return []

    def written(tokens: int) -> int:
        """Characters that the first tokens complete; one spread over two tokens counts at the last."""
        shown = tokenizer.decode(ids[:tokens], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        pairs = zip(shown, text, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(shown), len(text)))

    shown = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if written(length) != len(text if rollout.tools is None else shown):  # a tool's answer may be the end
        raise UserError(
            f"Completion {row} of the rollout is {text[:60]!r}, but this tokenizer reads its tokens "
            "otherwise. Give the tokenizer of the policy that generated it."
        )
    spans, begin = [], 0
    pieces = reading.spans(text)
    for place in [start for start, _ in pieces[1:]]:
        low, high = begin, length
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if written(middle) >= place else (middle + 1, high)
        spans.append((begin, low))
        begin = low
    return [*spans, (begin, length)] if pieces else []


@dataclass(frozen=True, kw_only=True)
class StepRewards:
    """What a process reward says of the steps of B completions."""

    reward: Tensor
    """[B, K] float32; NaN where there is no step, and in invalid completions."""
    step: Tensor
    """[B, T] int64, which step a token belongs to, −1 to none."""
    valid: Tensor
    """bool [B]."""
    reason: Sequence[str | None]
    """Why a completion is invalid; None for the valid ones."""

    def tokens(self, place: Place = "last") -> Tensor:
        """Process rewards of the tokens, for `Trajectories.process_reward`; give `valid` along with them.

        Args:
            place: on the step's "last" token, on "every" token of it, or "spread" over them.

        Returns:
            [B, T] float32, 0 outside the steps and in invalid completions.
        """
        return span_rewards(torch.where(self.valid[:, None], self.reward, 0.0), self.step, place=place)

    def bounded(self, *, clip: float | None = None, delta: bool = False) -> StepRewards:
        """The same with Clip and then Delta, so that more steps earn no more; see `clip_step_rewards` and
        `delta_step_rewards`.

        Args:
            clip: η, the reward that a step must reach to cost nothing; None leaves Clip out.
            delta: count the difference to the next step alone.
        """
        exists = torch.isfinite(self.reward)
        value = torch.where(exists, self.reward, 0.0)
        value = value if clip is None else clip_step_rewards(value, exists, eta=clip)
        value = delta_step_rewards(value, exists) if delta else value
        return replace(self, reward=torch.where(exists, value, torch.nan))

    def aggregate(self, how: Reduction = "min") -> Tensor:
        """One number per completion.

        Args:
            how: "min", "product", "mean", "sum" or "last".

        Returns:
            [B] float32, NaN in invalid completions.
        """
        exists = torch.isfinite(self.reward)
        return torch.where(self.valid, aggregate_steps(self.reward, how, exists), torch.nan)
