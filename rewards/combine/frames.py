# SPDX-License-Identifier: Apache-2.0
"""A judge of images on video clips: the mean of its scores of evenly spaced frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from visalign.interfaces import Metadata, PointwiseReward, RewardCapabilities, Scores, score_named, with_capabilities
from visalign.rewards.base.clips import read_clip, read_clips
from visalign.rewards.base.contract import RewardError, check_counts, make_scores
from visalign.rewards.base.failure import failure_reasons
from visalign.rewards.base.identity import Identity
from visalign.rewards.base.images import as_contract


class Frames:
    """A clip's score as the mean (1/n) Σ r(frame_k) of a judge of images, over n evenly spaced frames.

    A clip of F frames is judged at its n = min(frames, F) frames ⌊(k + ½) F / n⌋, k = 0 ... n − 1, the
    middles of n equal stretches: a single one is the middle frame. `rewards.base.clips` says what a clip is.
    No order of frames is seen: motion is not judged.

    The parts are "frames" (n), "lowest" and "highest" (of the n scores), and the judge's own parts, averaged.

    Args:
        reward: of images, or its name for `load_reward`.
        frames: most frames of a clip that are judged.
    """

    def __init__(
        self, reward: PointwiseReward | str, frames: int = 8, *, device: str | None = None, **options: Any
    ) -> None:
        from visalign.rewards.catalogue import load_reward

        check_counts("frames", frames=frames)
        if isinstance(reward, str):
            reward = load_reward(reward, run_device=device, **options)
        self.reward = with_capabilities(reward)
        if self.reward.capabilities.needs_group:
            fault = "compares the images of a group, so single frames have no score"
            raise RewardError(f"{self.reward.name} {fault}. Give a judge of one image.")
        self.frames, self.name = frames, f"{self.reward.name}_frames"
        self.unit, self.range = self.reward.unit, self.reward.range
        self.higher_is_better = self.reward.higher_is_better
        at: Any = self.reward.capabilities.at_iteration
        at_iteration = at and (lambda iteration: Frames(at(iteration), frames))
        self.capabilities = RewardCapabilities.of([self.reward], takes_clips=True, at_iteration=at_iteration)

    @property
    def identity(self) -> Identity | None:
        """The reward's own, with the number of frames."""
        identity = self.reward.identity
        if not isinstance(identity, Identity):
            return None
        return Identity(judge=self.name, model=identity.digest, options={"frames": self.frames})

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score B clips against B prompts; one with a frame that cannot be judged has no score.

        `images` are clips or images: a sequence, or an array [B, F, ...] or [B, ...].
        """
        clips, records = read_clips(self.name, images, prompts, metadata)
        frames: list[Tensor] = []
        rows: list[int] = []
        reasons: list[str | None] = [None] * len(clips)
        for row, clip in enumerate(clips):
            clip_frames, reasons[row] = read_clip(clip, self._chosen)
            frames += clip_frames
            rows += [row] * len(clip_frames)
        if not rows:
            return make_scores(torch.full((len(clips),), torch.nan), reasons, self.unit)
        arguments = [prompts[row] for row in rows], [records[row] for row in rows]
        scores = score_named(self.reward, as_contract(frames), *arguments, name=self.reward.name)
        return self._averaged(scores, rows, reasons)

    def _chosen(self, length: int) -> list[int]:
        n = min(self.frames, length)
        return [(2 * k + 1) * length // (2 * n) for k in range(n)]

    def _averaged(self, scores: Scores, rows: list[int], reasons: list[str | None]) -> Scores:
        """Average the scores of frames to those of clips; `rows` says whose frame each is."""
        size, owner = len(reasons), torch.tensor(rows, dtype=torch.long)
        count = torch.bincount(owner, minlength=size).double()
        counts = dict.fromkeys(range(size), 0)
        for row, reason in zip(rows, failure_reasons(scores), strict=True):
            if reason is not None and reasons[row] is None:
                reasons[row] = f"frame {counts[row] + 1} of the {int(count[row])} judged: {reason}"
            counts[row] += 1

        def mean(column: Tensor) -> Tensor:
            total = torch.zeros(size, dtype=torch.float64)
            return (total.index_add_(0, owner, column.detach().cpu().double()) / count).float()

        def end(reduce: str) -> Tensor:
            column, value = torch.full((size,), torch.nan), scores.value.detach().cpu().float()
            return column.scatter_reduce_(0, owner, value, reduce, include_self=False)

        parts = {"frames": count.float(), "lowest": end("amin"), "highest": end("amax")}
        inner_parts = {f"{self.reward.name}.{name}": mean(part) for name, part in scores.parts.items()}
        return make_scores(mean(scores.value), reasons, self.unit, parts=parts | inner_parts)
