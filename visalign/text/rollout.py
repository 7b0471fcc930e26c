# SPDX-License-Identifier: Apache-2.0
"""Results of generation: B completions of at most T tokens, with the log-probs they were drawn by."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from visalign.core import Trajectories
from visalign.errors import UserError
from visalign.interfaces import Prompt

from .distribution import Sampling
from .stopping import StopReason
from .token_sets import TokenSets

NOT_GENERATED = ("prompt too long", "tool failed")  # Stop reasons of samples that are not to be scored


@dataclass(frozen=True, kw_only=True)
class ToolTrace:
    calls: int = 0  # Answers that were appended
    cut: int = 0  # Answers that were cut short
    failed: str | None = None  # Why the tool failed; such a completion is not scored
    answers: Sequence[tuple[int, int]] = ()  # (begin, end) characters of its text that the tool wrote


@dataclass(frozen=True, kw_only=True)
class TextRollout:
    """B completions to B prompts (G to each in a group), on the CPU; the masks alone tell padding apart."""

    prompt_ids: Tensor  # [B, L] int64, padded on the left
    prompt_mask: Tensor  # [B, L] float32, 1 for tokens of the prompt and 0 for padding
    completion_ids: Tensor  # [B, T] int64, padded on the right; the end token is part of the completion
    loss_mask: Tensor  # [B, T] float32, 1 for tokens that were drawn; 0 for padding and for tool answers
    log_prob: Tensor  # [B, T] float32, log-prob of the token under the distribution that was sampled; 0 for padding
    full_log_prob: Tensor
    """[B, T] float32, the same without top-k and top-p: over the full vocabulary, at the temperature."""
    entropy: Tensor  # [B, T] float32, of the distribution that was sampled
    text: Sequence[str]
    """B completions, without start, end and padding tokens; other special tokens stay as they are spelled. With a tool
    each is a `ToolCompletion`."""
    stop_reason: Sequence[StopReason]  # B reasons
    group: Sequence[Hashable]  # B labels; samples of one prompt share theirs
    prompt: Sequence[Prompt]  # B prompts, not tokenized
    seed: Sequence[int]
    """B seeds; with the same weights, `sampling` and `stopping`, a seed gives the same completion again."""
    sampling: Sampling  # Distribution that the tokens were drawn from
    kept: TokenSets | None = None  # Tokens that could be drawn at each decision; None without top-k and top-p
    images: Sequence[Sequence[Any]] | None = None  # B lists of the images in the prompt, for vision-language models
    tools: Sequence[ToolTrace] | None = None  # B records of tool calls; None without a tool
    routes: Tensor | None = None
    """[B, S, layers, k] int16, experts of a mixture that the tokens of prompt and completion, without padding between
    them, are sent to in training (`CausalLMPolicy.with_routes`), −1 behind them; None: the router decides."""

    def __post_init__(self) -> None:
        shape = self.loss_mask.shape
        lengths = {name: len(values) for name in _LISTS if (values := getattr(self, name)) is not None}
        columns = (self.completion_ids, self.log_prob, self.full_log_prob, self.entropy)
        if any(values.shape != shape for values in columns) or set(lengths.values()) != {shape[0]}:
            shapes = [tuple(values.shape) for values in columns]
            raise ValueError(f"One row per sample, {tuple(shape)} as in loss_mask; got {shapes}, {lengths}.")

    def __len__(self) -> int:
        return self.loss_mask.shape[0]

    @property
    def truncated(self) -> Tensor:
        """bool [B], True where the completion met the length limit; for `core.filter_overlong`."""
        return torch.tensor([reason == "length" for reason in self.stop_reason], dtype=torch.bool)

    @property
    def generated(self) -> Tensor:
        """bool [B], False where the prompt was too long to be completed, or a tool failed."""
        return torch.tensor([reason not in NOT_GENERATED for reason in self.stop_reason], dtype=torch.bool)

    def rows(self, index: Tensor | slice) -> TextRollout:
        """Select samples (integers, repeats allowed; booleans or a slice), as wide as the whole rollout."""
        rows = torch.arange(len(self))[index]
        selected: dict[str, Any] = {"kept": None if self.kept is None else self.kept.rows(rows)}
        for name in (*_TENSORS, "routes"):
            values = getattr(self, name)
            selected[name] = None if values is None else values[rows]
        for name in _LISTS:
            values = getattr(self, name)
            selected[name] = None if values is None else [values[i] for i in rows.tolist()]
        return replace(self, **selected)

    def trajectories(
        self, reward: Tensor | None, *, old_log_prob: Tensor | None = None, valid: Tensor | None = None, **more: Any
    ) -> Trajectories:
        """Convert the rollout for the objective core; `more` are other fields of `Trajectories`.

        `old_log_prob` [B, T] is that of the weights that the update starts from; the rollout's own then become
        `rollout_log_prob`. Samples that were not generated are never valid.
        """
        if self.sampling.greedy:
            raise UserError(
                "A greedy rollout (temperature 0) has no probabilities to form a ratio with. Sample with a "
                "temperature above 0."
            )
        columns: dict[str, Any] = {"weight": self.loss_mask, "entropy": self.entropy, "old_log_prob": self.log_prob}
        if old_log_prob is not None:
            columns |= {"old_log_prob": old_log_prob, "rollout_log_prob": self.log_prob}
        valid = self.generated if valid is None else valid.cpu().bool() & self.generated
        return Trajectories(group=list(self.group), reward=reward, valid=valid, **{**columns, **more})


_TENSORS = tuple(f.name for f in fields(TextRollout) if f.type == "Tensor")
_LISTS = ("text", "stop_reason", "group", "prompt", "seed", "images", "tools")
_ABSENT: dict[str, Any] = {"images": (), "tools": ToolTrace()}
"""Optional lists -> entry of a sample whose rollout has none."""


def undrawn_rollout(prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor, loss_mask: Tensor) -> TextRollout:
    """Put tokens that nobody drew in the form of a rollout, for their log-probs: its own are 0, its texts empty."""
    count, zeros = len(loss_mask), torch.zeros_like(loss_mask)
    reasons: list[StopReason] = ["eos"] * count
    return TextRollout(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        completion_ids=completion_ids,
        loss_mask=loss_mask,
        log_prob=zeros,
        full_log_prob=zeros,
        entropy=zeros,
        text=[""] * count,
        stop_reason=reasons,
        group=range(count),
        prompt=[""] * count,
        seed=[0] * count,
        sampling=Sampling(),
    )


def join_rollouts(rollouts: Sequence[TextRollout], *, length: int = 0) -> TextRollout:
    """Concatenate rollouts of one `sampling`, padded to the longest; group labels are kept, and must differ.

    The result has no `routes`, and completions of at least `length` tokens.
    """
    if len({rollout.sampling for rollout in rollouts}) != 1:
        raise ValueError("join_rollouts needs rollouts sampled in one way; train on others in separate steps.")
    length = max(length, *(rollout.loss_mask.shape[1] for rollout in rollouts))
    prompt_length = max(rollout.prompt_ids.shape[1] for rollout in rollouts)

    def widen(values: Tensor, *, left: bool) -> Tensor:
        gap = (prompt_length if left else length) - values.shape[1]
        return pad(values, (gap, 0) if left else (0, gap))

    joined: dict[str, Any] = {"routes": None}
    for name in _TENSORS:
        left = name.startswith("prompt")
        joined[name] = torch.cat([widen(getattr(rollout, name), left=left) for rollout in rollouts])
    for name in _LISTS:
        columns = [getattr(rollout, name) for rollout in rollouts]
        if any(column is not None for column in columns):
            joined[name] = [
                entry
                for column, rollout in zip(columns, rollouts, strict=True)
                for entry in ([_ABSENT[name]] * len(rollout) if column is None else column)
            ]
    if kept := [rollout.kept for rollout in rollouts if rollout.kept is not None]:
        counts = [widen(sets.count, left=False) for sets in kept]
        joined["kept"] = TokenSets(torch.cat([sets.ids for sets in kept]), torch.cat(counts))
    return replace(rollouts[0], **joined)
