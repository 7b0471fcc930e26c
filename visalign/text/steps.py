# SPDX-License-Identifier: Apache-2.0
"""Steps of a completion: splitting a text into steps, their tokens, and their rewards.

A text is split at every separator. Pieces of blanks alone are no steps, so "a\\n\\nb" has two; a text without
the separator is one step. Every token of a rollout's completion belongs to one step: separators and blanks to
the step before them (those at the very beginning to the first), the end token to the last. A token that ends
one step and begins the next belongs to the earlier.
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
from visalign.interfaces import ToolCompletion, policy_text

from .decoding import completion_text, decode
from .rollout import TextRollout

Span = tuple[int, int]  # First character of a step, and one past its last; the separator is outside


@dataclass(frozen=True, kw_only=True)
class StepReading:
    """Separator of steps in a text, and the marker that a process reward model reads after each."""

    separator: str = "\n"  # Text that ends a step
    marker: str | None = None
    """Text read after each step in place of the separator (Qwen2.5-Math-PRM: "<extra_0>"); None: the separator."""

    def __post_init__(self) -> None:
        if not self.separator or self.marker == "":
            raise UserError(
                r'Neither separator nor marker may be empty; give the text between two steps, such as "\n".'
            )

    @property
    def read_after_step(self) -> str:
        """Text at whose last token a model judges a step."""
        return self.separator if self.marker is None else self.marker

    def spans(self, text: str) -> list[Span]:
        """Locate the steps of a text; none in a text of blanks.

        >>> StepReading().spans("a = 1\\n\\nb = 2")
        [(0, 5), (7, 12)]
        """
        spans, start = [], 0
        for piece in text.split(self.separator):
            if piece.strip():
                spans.append((start, start + len(piece)))
            start += len(piece) + len(self.separator)
        return spans

    def split(self, text: str) -> list[str]:
        return [text[start:end] for start, end in self.spans(text)]


def step_index(rollout: TextRollout, tokenizer: Any, reading: StepReading) -> Tensor:
    """Number the step of each token of a rollout, [B, T] int64; −1 where the loss mask is 0 or there is no step."""
    rows = [_token_spans(rollout, row, tokenizer, reading) for row in range(len(rollout))]
    table = torch.zeros(2, len(rollout), max([len(spans) for spans in rows], default=0), dtype=torch.int64)
    for row, spans in enumerate(rows):
        for number, span in enumerate(spans):
            table[:, row, number] = torch.tensor(span)
    return torch.where(rollout.loss_mask != 0, span_index(table[0], table[1], rollout.loss_mask.shape[1]), -1)


def _token_spans(rollout: TextRollout, row: int, tokenizer: Any, reading: StepReading) -> list[tuple[int, int]]:
    """(first token, one past the last) of each step of one completion; together they cover it."""
    length = int((torch.arange(1, rollout.loss_mask.shape[1] + 1) * (rollout.loss_mask[row] != 0)).amax())
    ids, text = rollout.completion_ids[row, :length].tolist(), rollout.text[row]
    answers = text.answers if isinstance(text, ToolCompletion) else ()
    ended = rollout.stop_reason[row] == "eos"
    if length == 0:
        return []

    decoders = (
        lambda count: completion_text(tokenizer, ids[:count], ended=count == length and ended),
        # a conversation keeps the end tokens of its earlier turns
        lambda count: decode(tokenizer, ids[: count - (count == length and ended)]),
    )

    def completed(count: int) -> int:
        """Characters of `policy_text` that the first tokens complete; one spread over two counts at the last."""
        decoded = read(count)
        pairs = zip(decoded, text, strict=False)
        end = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(decoded), len(text)))
        return end - sum(min(stop, end) - begin for begin, stop in answers if begin < end)

    # with a tool the text may end in an answer, behind the last drawn token
    fits = str.startswith if rollout.tools is None else lambda decoded, text: text.startswith(decoded)
    if not (matching := [decoder for decoder in decoders if fits(decoder(length), text)]):
        raise UserError(
            f"This tokenizer reads the tokens of completion {row}, {text[:60]!r}, otherwise. Give that of its policy."
        )
    read, spans, begin = matching[0], [], 0
    pieces = reading.spans(policy_text(text))  # a tool's answers are no steps
    for start, _ in pieces[1:]:  # bisect for the token that completes the text before the step
        low, high = begin, length
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if completed(middle) >= start else (middle + 1, high)
        spans.append((begin, low))
        begin = low
    return [*spans, (begin, length)] if pieces else []


@dataclass(frozen=True, kw_only=True)
class StepRewards:
    """Process rewards of the steps of B completions."""

    reward: Tensor  # [B, K] float32; NaN where there is no step, and in invalid completions
    step: Tensor  # [B, T] int64, the step of each token, −1 for none
    valid: Tensor  # bool [B]
    reason: Sequence[str | None]  # Why a completion is invalid; None for the valid ones

    def tokens(self, place: Place = "last") -> Tensor:
        """Place the rewards [B, T] on the step's "last" token, on "every" token, or "spread" over them.

        They are 0 outside the steps and in invalid completions: pass `valid` along with them.
        """
        return span_rewards(torch.where(self.valid[:, None], self.reward, 0.0), self.step, place=place)

    def bounded(self, *, clip: float | None = None, delta: bool = False) -> StepRewards:
        """Apply `clip_step_rewards` with η = clip, then `delta_step_rewards`: more steps earn no more."""
        exists = torch.isfinite(self.reward)
        reward = torch.where(exists, self.reward, 0.0)
        reward = reward if clip is None else clip_step_rewards(reward, exists, eta=clip)
        reward = delta_step_rewards(reward, exists) if delta else reward
        return replace(self, reward=torch.where(exists, reward, torch.nan))

    def aggregate(self, how: Reduction = "min") -> Tensor:
        """Reduce to one number [B] per completion, NaN in invalid ones."""
        return torch.where(self.valid, aggregate_steps(self.reward, how, torch.isfinite(self.reward)), torch.nan)
