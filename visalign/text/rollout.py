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

NOT_GENERATED = ("prompt too long", "tool failed")
"""Stop reasons of samples that are not to be scored."""


@dataclass(frozen=True, kw_only=True)
class ToolTrace:
    """Record of a completion's tool calls."""

    calls: int = 0
    """Answers that were appended."""
    cut: int = 0
    """Answers that were cut short."""
    failed: str | None = None
    """Why the tool failed; such a completion is not scored."""
    shared: int = 0
    """Length of the prefix shared with the earlier completion that it branched from."""
    answers: Sequence[tuple[int, int]] = ()
    """(begin, end) characters of its text that the tool wrote."""


@dataclass(frozen=True, kw_only=True)
class TextRollout:
    """B completions to B prompts (the same prompt G times for a group), on the CPU.

    The masks alone tell padding apart; padded ids may be any token of the vocabulary.

    Raises:
        ValueError: tensors or lists that do not fit, named with both shapes.
    """

    prompt_ids: Tensor
    """[B, L] int64, padded on the left."""
    prompt_mask: Tensor
    """[B, L] float32, 1 for tokens of the prompt and 0 for padding."""
    completion_ids: Tensor
    """[B, T] int64, padded on the right; the end token is part of the completion."""
    loss_mask: Tensor
    """[B, T] float32, 1 for tokens that were drawn; 0 for padding and for tool answers."""
    log_prob: Tensor
    """[B, T] float32, log-prob of the token under the distribution that was sampled; 0 for padding."""
    full_log_prob: Tensor
    """[B, T] float32, the same without top-k and top-p: over the full vocabulary, at the temperature."""
    entropy: Tensor
    """[B, T] float32, of the distribution that was sampled."""
    text: Sequence[str]
    """B completions, without special tokens."""
    stop_reason: Sequence[StopReason]
    """B reasons."""
    group: Sequence[Hashable]
    """B labels; samples of one prompt share theirs."""
    prompt: Sequence[Prompt]
    """B prompts, not tokenized."""
    seed: Sequence[int]
    """B seeds; with the same weights, `sampling` and `stopping`, a seed gives the same completion again."""
    sampling: Sampling
    """Distribution that the tokens were drawn from."""
    kept: TokenSets | None = None
    """Tokens that could be drawn at each decision; None without top-k and top-p."""
    images: Sequence[Sequence[Any]] | None = None
    """B lists of the images in the prompt, for vision-language models."""
    tools: Sequence[ToolTrace] | None = None
    """B records of tool calls; None without a tool."""
    shared: Tensor | None = None
    """[B, T] float32, number of samples that share the drawn token because they branched after it; None
    where no samples branch."""
    routes: Tensor | None = None
    """[B, S, layers, k] int16, experts of a mixture that the tokens of prompt and completion, without padding
    between them, are sent to in training (`CausalLMPolicy.with_routes`), −1 behind them; None: the router
    decides."""

    def __post_init__(self) -> None:
        shape = self.loss_mask.shape
        kept_count = None if self.kept is None else self.kept.count
        for name in ("completion_ids", "log_prob", "full_log_prob", "entropy", "shared", "kept"):
            value = kept_count if name == "kept" else getattr(self, name)
            if value is not None and value.shape != shape:
                raise ValueError(
                    f"{name} must have shape {tuple(shape)}, as loss_mask; got {tuple(value.shape)}."
                )
        if self.prompt_ids.shape != self.prompt_mask.shape or self.prompt_ids.shape[:1] != shape[:1]:
            raise ValueError(
                f"prompt_ids and prompt_mask must both be [{shape[0]}, L]; got "
                f"{tuple(self.prompt_ids.shape)} and {tuple(self.prompt_mask.shape)}."
            )
        for name in _LISTS:
            values = getattr(self, name)
            if values is not None and len(values) != shape[0]:
                raise ValueError(
                    f"{name} needs one entry per sample, {shape[0]} as in loss_mask {tuple(shape)}; got "
                    f"{len(values)}."
                )

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

    @property
    def weight(self) -> Tensor:
        """[B, T] loss weight of the drawn tokens; a token that several samples share counts once."""
        return self.loss_mask if self.shared is None else self.loss_mask / self.shared

    def rows(self, index: Tensor | slice) -> TextRollout:
        """Select samples (integers, repeats allowed; booleans or a slice), as wide as the whole rollout."""
        rows = torch.arange(len(self))[index]
        selected: dict[str, Any] = {"kept": None if self.kept is None else self.kept.rows(rows)}
        for name in (*_TENSORS, "shared", "routes"):
            values = getattr(self, name)
            selected[name] = None if values is None else values[rows]
        for name in _LISTS:
            values = getattr(self, name)
            selected[name] = None if values is None else [values[i] for i in rows.tolist()]
        return replace(self, **selected)

    def trajectories(
        self,
        reward: Tensor | None = None,
        *,
        old_log_prob: Tensor | None = None,
        valid: Tensor | None = None,
        **more: Any,
    ) -> Trajectories:
        """Convert the rollout for the objective core.

        Args:
            reward: [B] or [B, M]; NaN is missing.
            old_log_prob: [B, T] recomputed under the weights that the update starts from, where other weights
                or another engine sampled. The rollout's own then become `rollout_log_prob`, for the
                off-policy correction. None: the rollout's own.
            valid: bool [B], False where a reward failed; samples that were not generated are never valid.
            **more: other fields of `Trajectories`: reward_weights, ref_log_prob, value, process_reward,
                uniform, or a `weight` [B, T] from `core.filter_overlong`.

        Returns:
            Trajectories with the group labels and, unless `more` has them, the entropies of the rollout.

        Raises:
            UserError: for a greedy rollout, which has no ratio.
            ValueError: shapes that do not fit.
        """
        if self.sampling.greedy:
            raise UserError(
                "A greedy rollout (temperature 0) cannot be trained on: nothing was drawn, so there is no "
                "probability to form a ratio with. Sample with a temperature above 0; greedy completions "
                "are for evaluation and ReMax's greedy_reward."
            )
        columns: dict[str, Any] = {"weight": self.weight, "entropy": self.entropy}
        if old_log_prob is not None:
            columns["rollout_log_prob"] = self.log_prob
        return Trajectories(
            old_log_prob=self.log_prob if old_log_prob is None else old_log_prob,
            group=list(self.group),
            reward=reward,
            valid=self.generated if valid is None else valid.cpu().bool() & self.generated,
            **{**columns, **more},
        )


_TENSORS = tuple(f.name for f in fields(TextRollout) if f.type == "Tensor")
_LISTS = ("text", "stop_reason", "group", "prompt", "seed", "images", "tools")
_ABSENT: dict[str, Any] = {"images": (), "tools": ToolTrace()}
"""Optional lists -> entry of a sample whose rollout has none."""


def join_rollouts(rollouts: Sequence[TextRollout], *, length: int = 0) -> TextRollout:
    """Concatenate rollouts, padded to the longest prompt and completion; group labels are kept.

    Args:
        rollouts: at least one, all with the same `sampling`; groups of different rollouts need different
            labels.
        length: minimum number of tokens of a completion.

    Returns:
        The samples in order, without `routes`.

    Raises:
        ValueError: no rollout, or different ways of sampling.
    """
    ways = list(dict.fromkeys(str(rollout.sampling) for rollout in rollouts))
    if len(ways) != 1:
        raise ValueError(
            f"join_rollouts needs rollouts sampled in one way; got {' and '.join(ways) or 'none'}. Train on "
            "them in separate steps."
        )
    length = max(length, *(rollout.loss_mask.shape[1] for rollout in rollouts))
    prompt_length = max(rollout.prompt_ids.shape[1] for rollout in rollouts)

    def widen(values: Tensor, *, left: bool = False, fill: float = 0.0) -> Tensor:
        gap = (prompt_length if left else length) - values.shape[1]
        return pad(values, (gap, 0) if left else (0, gap), value=fill)

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
    if any(rollout.shared is not None for rollout in rollouts):
        shared = [torch.ones_like(r.loss_mask) if r.shared is None else r.shared for r in rollouts]
        joined["shared"] = torch.cat([widen(values, fill=1.0) for values in shared])
    kept = [rollout.kept.extended(length) for rollout in rollouts if rollout.kept is not None]
    if kept:
        joined["kept"] = TokenSets(torch.cat([k.ids for k in kept]), torch.cat([k.count for k in kept]))
    return replace(rollouts[0], **joined)
