# SPDX-License-Identifier: Apache-2.0
"""What generation leaves behind: B completions of at most T tokens, with the log-probs they were drawn by."""

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


@dataclass(frozen=True, kw_only=True)
class ToolTrace:
    """What a completion had to do with a tool."""

    calls: int = 0
    """Answers that it got."""
    cut: int = 0
    """Of these cut short."""
    failed: str | None = None
    """Why the tool failed; such a completion is not to be judged."""
    shared: int = 0
    """Its first tokens, as many as it has of an earlier one that it branched from."""
    answers: Sequence[tuple[int, int]] = ()
    """What characters of its text the tool wrote: beginnings and ends."""


@dataclass(frozen=True, kw_only=True)
class TextRollout:
    """B completions to B prompts (the same prompt G times for a group), on the CPU.

    What is padding is said by the masks alone; padded ids may be any token of the vocabulary.

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
    """[B, T] float32, 1 for tokens that were drawn; 0 for padding and for what a tool answered."""
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
    """B labels: samples of one prompt have the same."""
    prompt: Sequence[Prompt]
    """B prompts as they were given."""
    seed: Sequence[int]
    """B seeds; with the same weights, `sampling` and `stopping`, a seed gives the same completion again."""
    sampling: Sampling
    """What the tokens were drawn with."""
    kept: TokenSets | None = None
    """The tokens that could be drawn at each decision; None without top-k and top-p."""
    images: Sequence[Sequence[Any]] | None = None
    """B lists of the images in the prompt, for vision-language models."""
    tools: Sequence[ToolTrace] | None = None
    """B accounts of what each had to do with a tool; None without one."""
    shared: Tensor | None = None
    """[B, T] float32, how many samples have the drawn token in common, since they branched behind it; None
    where each has drawn its own."""
    routes: Tensor | None = None
    """[B, S, layers, k] int16, which experts of a mixture the tokens of prompt and completion, without
    padding between them, are sent to in training (`CausalLMPolicy.with_routes`), −1 behind them; None: where
    the router sends them."""

    def __post_init__(self) -> None:
        shape = self.loss_mask.shape
        if len(shape) != 2:
            raise ValueError(f"loss_mask must be [B, T]; got shape {tuple(shape)}.")
        for name in ("completion_ids", "log_prob", "full_log_prob", "entropy"):
            if getattr(self, name).shape != shape:
                raise ValueError(
                    f"{name} must have shape {tuple(shape)}, as loss_mask has it; got "
                    f"{tuple(getattr(self, name).shape)}."
                )
        if self.prompt_ids.shape != self.prompt_mask.shape or self.prompt_ids.shape[:1] != shape[:1]:
            raise ValueError(
                f"prompt_ids and prompt_mask must both be [{shape[0]}, L]; got "
                f"{tuple(self.prompt_ids.shape)} and {tuple(self.prompt_mask.shape)}."
            )
        for name in _LISTS:
            given = getattr(self, name)
            if given is not None and len(given) != shape[0]:
                raise ValueError(
                    f"{name} needs one entry per sample, {shape[0]} as in loss_mask {tuple(shape)}; got "
                    f"{len(given)}."
                )
        if self.shared is not None and self.shared.shape != shape:
            raise ValueError(
                f"shared must have shape {tuple(shape)}, as loss_mask; got {tuple(self.shared.shape)}."
            )
        if self.kept is not None and self.kept.count.shape != shape:
            raise ValueError(
                f"kept holds sets {tuple(self.kept.count.shape)}; loss_mask is {tuple(shape)}; the two must "
                "agree."
            )

    def __len__(self) -> int:
        return self.loss_mask.shape[0]

    @property
    def truncated(self) -> Tensor:
        """bool [B], True where the completion met the limit before its end; for `core.filter_overlong`."""
        return torch.tensor([reason == "length" for reason in self.stop_reason], dtype=torch.bool)

    @property
    def generated(self) -> Tensor:
        """bool [B], False where the prompt was too long to be completed, or a tool failed."""
        return torch.tensor([reason not in NOT_GENERATED for reason in self.stop_reason], dtype=torch.bool)

    @property
    def weight(self) -> Tensor:
        """[B, T] of the drawn tokens in a loss: those that several samples have in common count once."""
        return self.loss_mask if self.shared is None else self.loss_mask / self.shared

    def rows(self, index: Tensor | slice) -> TextRollout:
        """The samples `index` (integers, repeats too, booleans or a slice), as wide as the whole rollout."""
        rows = torch.arange(len(self))[index]
        held: dict[str, Any] = {name: getattr(self, name)[rows] for name in _TENSORS}
        for name in _LISTS:
            values = getattr(self, name)
            held[name] = None if values is None else [values[i] for i in rows.tolist()]
        held["kept"] = None if self.kept is None else self.kept.rows(rows)
        for name in ("shared", "routes"):
            values = getattr(self, name)
            held[name] = None if values is None else values[rows]
        return replace(self, **held)

    def trajectories(
        self,
        reward: Tensor | None = None,
        *,
        old_log_prob: Tensor | None = None,
        valid: Tensor | None = None,
        **more: Any,
    ) -> Trajectories:
        """The rollout as the objective core takes it.

        Args:
            reward: [B] or [B, M]; NaN is missing.
            old_log_prob: [B, T] recomputed under the weights that the update starts from, where these are
                not those that sampled or another engine did. The rollout's own then go into
                `rollout_log_prob`, for the off-policy correction. None takes the rollout's own.
            valid: bool [B], False where a reward failed; samples that were not generated are never valid.
            **more: other fields of `Trajectories`: reward_weights, ref_log_prob, value, process_reward,
                uniform, or a `weight` [B, T] from `core.filter_overlong`.

        Returns:
            Trajectories with the group labels and, unless given, the entropies of the rollout.

        Raises:
            UserError: for a greedy rollout, which has no ratio.
            ValueError: shapes that do not fit.
        """
        if self.sampling.greedy:
            raise UserError(
                "A greedy rollout (temperature 0) cannot be trained on: nothing was drawn, so there is no "
                "probability to form a ratio with. Sample with a temperature above 0; greedy completions "
                "serve evaluation and ReMax's greedy_reward."
            )
        generated = self.generated
        known = generated if valid is None else valid.cpu().bool() & generated
        settled: dict[str, Any] = {"weight": self.weight, "entropy": self.entropy}
        if old_log_prob is not None:
            settled["rollout_log_prob"] = self.log_prob
        return Trajectories(
            old_log_prob=self.log_prob if old_log_prob is None else old_log_prob,
            group=list(self.group),
            reward=reward,
            valid=known,
            **{**settled, **more},
        )


_TENSORS = tuple(f.name for f in fields(TextRollout) if f.type == "Tensor")
_LISTS = ("text", "stop_reason", "group", "prompt", "seed", "images", "tools")
NOT_GENERATED = ("prompt too long", "tool failed")
"""Stop reasons of samples that are not to be judged."""


_OPTIONAL: dict[str, Any] = {"images": (), "tools": ToolTrace()}
"""Lists that not every rollout has -> the entry of one that has not."""


def join_rollouts(rollouts: Sequence[TextRollout], *, length: int = 0) -> TextRollout:
    """Several rollouts as one, padded to the longest prompt and completion; group labels are kept.

    Args:
        rollouts: at least one, all with the same `sampling`. Groups of different rollouts need different
            labels.
        length: tokens of a completion at least.

    Returns:
        The samples in the order given, without `routes`.

    Raises:
        ValueError: no rollout, or different ways of sampling.
    """
    if not rollouts:
        raise ValueError("join_rollouts needs at least one rollout.")
    first = rollouts[0]
    others = {str(r.sampling): r.sampling for r in rollouts}
    if len(others) > 1:
        raise ValueError(
            f"Rollouts of one batch must be sampled in one way; got {' and '.join(others)}. Train on them in "
            "separate steps."
        )
    length = max(length, *(r.loss_mask.shape[1] for r in rollouts))
    prompt_length = max(r.prompt_ids.shape[1] for r in rollouts)
    held: dict[str, Any] = {"routes": None}
    for name in _TENSORS:
        left = name.startswith("prompt")
        size = prompt_length if left else length
        parts = [getattr(r, name) for r in rollouts]
        gaps = [size - part.shape[1] for part in parts]
        held[name] = torch.cat(
            [pad(part, (gap, 0) if left else (0, gap)) for part, gap in zip(parts, gaps, strict=True)]
        )
    for name in _LISTS:
        lists = [getattr(r, name) for r in rollouts]
        if name in _OPTIONAL:
            if all(entries is None for entries in lists):
                continue
            lists = [
                [_OPTIONAL[name]] * len(r) if entries is None else entries
                for r, entries in zip(rollouts, lists, strict=True)
            ]
        held[name] = [entry for entries in lists for entry in entries]
    if any(r.shared is not None for r in rollouts):
        held["shared"] = torch.cat(
            [
                torch.ones(len(r), length)
                if r.shared is None
                else pad(r.shared, (0, length - r.shared.shape[1]), value=1.0)
                for r in rollouts
            ]
        )
    sets = [r.kept.extended(length) for r in rollouts if r.kept is not None]
    if sets:
        held["kept"] = TokenSets(torch.cat([s.ids for s in sets]), torch.cat([s.count for s in sets]))
    return replace(first, **held)
