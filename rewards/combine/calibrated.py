# SPDX-License-Identifier: Apache-2.0
"""Rewards made of others: the place of a score among those of a reference set, and a score corrected by quality."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from visalign.interfaces import Metadata, PointwiseReward, RewardCapabilities, Scores, score_named, with_capabilities
from visalign.model_files import read_object
from visalign.rewards.base.contract import RewardError, check_choices, check_rules, make_scores
from visalign.rewards.base.failure import failure_reasons
from visalign.rewards.base.identity import Identity

from .uncertainty import with_deviation

Scale = Literal["quantile", "better"]
UNITS = {"quantile": "quantile of the reference", "better": "probability better than the reference"}


class Calibrated:
    """A reward as its place among N reference scores r_i of its own, in [0, 1]; higher is better always.

    "quantile": (#{r_i < r} + ½ #{r_i = r}) / N, turned round where lower is better. "better": the mean over
    i of Φ((r − r_i) / √(σ² + σ_i²)), with the standard deviations of both sides; without any it is the
    quantile.
    Rewards calibrated in the same way have one unit and may be added (`WeightedSum`).

    Args:
        reward: the reward, or its name for `load_reward`.
        reference: N ≥ 2 valid scores of the reward, or a JSON file {"value": [...], "std": [...]} as `save` writes it.
        std: N standard deviations of the reference scores; 0 when None.
        scale: "quantile" or "better".
    """

    range = (0.0, 1.0)
    higher_is_better = True

    def __init__(
        self,
        reward: PointwiseReward | str,
        reference: Sequence[float] | Tensor | str | Path,
        *,
        std: Sequence[float] | Tensor | None = None,
        scale: Scale = "better",
        device: str | None = None,
        **options: Any,
    ) -> None:
        from visalign.rewards.catalogue import load_reward

        check_choices("calibrated", scale=(scale, UNITS))
        if isinstance(reward, str):
            reward = load_reward(reward, run_device=device, **options)
        self.reward = with_capabilities(reward)
        at: Any = self.reward.capabilities.at_iteration
        at_iteration = at and (lambda iteration: Calibrated(at(iteration), self._value, std=self._std, scale=scale))
        self.capabilities = RewardCapabilities.of([self.reward], at_iteration=at_iteration)
        if isinstance(reference, str | Path):
            reference, std = _read(Path(reference))
        self._value = torch.as_tensor(reference, dtype=torch.float64).flatten()
        std = torch.zeros_like(self._value) if std is None else torch.as_tensor(std, dtype=torch.float64)
        self._std = std.flatten()
        sizes = f"{len(self._value)} reference scores and {len(self._std)} deviations"
        are_numbers = torch.isfinite(self._value).all() and (self._std >= 0).all() and torch.isfinite(self._std).all()
        rules = {
            f"{sizes}; give at least two scores, and as many deviations or none": 2
            <= len(self._value)
            == len(self._std),
            "the reference holds NaN, infinite or negative deviations; leave invalid rows out": bool(are_numbers),
        }
        check_rules(self.reward.name, rules)
        self.scale = scale
        self.name, self.unit = f"{self.reward.name}_{scale}", UNITS[scale]

    @classmethod
    def on(
        cls,
        reward: PointwiseReward,
        images: Any,
        prompts: Sequence[str],
        metadata: Metadata | None = None,
        *,
        scale: Scale = "better",
    ) -> Calibrated:
        """Score a reference set and take its valid scores."""
        scores = score_named(reward, images, prompts, metadata, name=reward.name)
        std = None if scores.std is None else scores.std[scores.valid]
        return cls(reward, scores.value[scores.valid], std=std, scale=scale)

    def save(self, file: str | Path) -> None:
        about = {"reward": self.reward.name, "unit": self.reward.unit}
        numbers = {"value": self._value.tolist(), "std": self._std.tolist()}
        Path(file).write_text(json.dumps(about | numbers) + "\n", encoding="utf-8")

    @property
    def identity(self) -> Identity | None:
        identity = self.reward.identity
        if not isinstance(identity, Identity):
            return None
        reference = [self._value.tolist(), self._std.tolist()]
        return Identity(judge=self.name, model=identity.digest, options={"scale": self.scale, "reference": reference})

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Place each image's score among the reference; the raw score is the part "raw"."""
        scores = score_named(self.reward, images, prompts, metadata, name=self.reward.name)
        if self.scale == "better" and scores.std is not None:
            scores, _ = with_deviation(self.reward.name, scores)
        value, reasons = scores.value.detach().cpu().double(), failure_reasons(scores)
        std = torch.zeros_like(value) if scores.std is None else scores.std.detach().cpu().double()
        rank = self._rank(value, std)
        if not self.reward.higher_is_better:
            rank = 1 - rank
        parts = {"raw": scores.value.cpu().float()}
        return make_scores(rank.float(), reasons, self.unit, parts=parts, text=scores.text)

    def _rank(self, value: Tensor, std: Tensor) -> Tensor:
        """Compute [B] in [0, 1] for values [B] with deviations [B]; NaN where the value is."""
        gap = value[:, None] - self._value[None, :]
        step = (gap.sign() + 1) / 2
        if self.scale == "better":
            spread = torch.hypot(std[:, None].nan_to_num(0.0), self._std[None, :])
            graded = torch.special.ndtr(gap / spread.clamp(min=1e-300))
            step = torch.where(spread > 0, graded, step)
        return torch.where(torch.isnan(value), torch.nan, step.mean(1))


class Corrected:
    """A reward r corrected by the quality û of the image, in points from 1 to 5: r (û − 3) + 0.2.

    The parts are "reward" and "quality". An image that one of them could not score is invalid.

    Args:
        reward: the reward, in [0, 1] and higher is better, or its name for `load_reward`; `options` are its options.
        quality: the judge of quality, such as "unified_reward" or "q_align", likewise; `quality_options` are its own.

    GDRO, arXiv 2601.02036, its measure of reward hacking.
    """

    name = "corrected"
    unit = "reward times quality"
    range = (-1.8, 2.2)
    higher_is_better = True

    def __init__(
        self,
        reward: PointwiseReward | str,
        quality: PointwiseReward | str,
        *,
        options: Mapping[str, Any] | None = None,
        quality_options: Mapping[str, Any] | None = None,
        device: str | None = None,
    ) -> None:
        from visalign.rewards.catalogue import load_reward

        self.rewards: dict[str, Any] = {}
        for part, judge, chosen in (("reward", reward, options), ("quality", quality, quality_options)):
            loaded = load_reward(judge, run_device=device, **chosen or {}) if isinstance(judge, str) else judge
            judge = self.rewards[part] = with_capabilities(loaded)
            is_scale = part == "reward" or judge.range == (1, 5)
            if judge.capabilities.needs_group or not judge.higher_is_better or not is_scale:
                remedy = "give a score of single images, the higher the better, for quality points from 1 to 5"
                raise RewardError(f"corrected: {part} is {judge.name}; {remedy}.")
        self.capabilities = RewardCapabilities.of(self.rewards.values())

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        scores = [score_named(judge, images, prompts, metadata, name=part) for part, judge in self.rewards.items()]
        reasons = [first or second for first, second in zip(*map(failure_reasons, scores), strict=True)]
        r, u = (score.value.float().cpu() for score in scores)
        return make_scores(r * (u - 3) + 0.2, reasons, self.unit, parts={"reward": r, "quality": u})


def _read(file: Path) -> tuple[list[float], list[float] | None]:
    content = read_object(file)
    lists = content.get("value"), content.get("std") or []
    if not all(isinstance(numbers, list) and all(isinstance(x, int | float) for x in numbers) for numbers in lists):
        raise RewardError(f"'{file}' needs lists of numbers, value and std; give JSON as Calibrated.save writes it.")
    return content["value"], content.get("std")
