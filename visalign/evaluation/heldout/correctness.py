# SPDX-License-Identifier: Apache-2.0
"""Scores of held-out samples, and their verdicts, correct or wrong, by rewards that can give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from visalign.errors import UserError, suggestion
from visalign.interfaces import PointwiseReward, Scores

PART = "correct"
"""Part of a reward's scores with its verdicts, 1 or 0."""


@dataclass(kw_only=True)
class Tally:
    """Accumulates scores and verdicts batch by batch."""

    correctness: str | None  # Name of the reward that gives the verdicts
    correct: list[bool] = field(default_factory=list)
    judged: list[bool] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    """Why there is no verdict; else the explanation of the reward, if any."""
    values: dict[str, list[NDArray[np.float32]]] = field(default_factory=dict)

    def add(self, name: str, reward: Any, scores: Scores, size: int) -> None:
        """Store one reward's scores of `size` samples, and its verdicts if it gives them."""
        valid = scores.valid.cpu()
        self.values.setdefault(name, []).append(scores.value.detach().cpu().to(torch.float32).numpy())
        if name == self.correctness:
            self.correct += (verdict(name, reward, scores) & valid).tolist()
            self.judged += valid.tolist()
            texts, failures = scores.text or [""] * size, scores.reason or [None] * size
            for ok, text, failure in zip(valid.tolist(), texts, failures, strict=True):
                self.reasons.append((text or "") if ok else (failure or "no reason given"))

    def fields(self, rewards: Mapping[str, Any], total: int) -> dict[str, Any]:
        """Return the fields of a `HeldoutResult`; without a reward for verdicts no sample has one."""
        return {
            "correct": np.array(self.correct or [False] * total, dtype=bool),
            "judged": np.array(self.judged or [False] * total, dtype=bool),
            "reasons": tuple(self.reasons or [""] * total),
            "scores": {name: np.concatenate(self.values[name]) for name in rewards},
            "units": {name: reward.unit for name, reward in rewards.items()},
            "higher_is_better": {name: reward.higher_is_better for name, reward in rewards.items()},
        }


def check_evaluation(
    rewards: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    seeds: Sequence[int],
    correctness: str | None,
    batch_size: int = 1,
) -> None:
    """Refuse an evaluation without samples, with empty prompts or repeated seeds, or by an unknown reward."""
    empty = [number for number, record in enumerate(records) if not str(record.get("prompt", "")).strip()]
    judge = correctness or ""
    rules = (
        (bool(records), "at least one prompt record; got none"),
        (not empty, f"a 'prompt' in each record, and records {empty[:5]} have none"),
        (0 < len(seeds) == len(set(seeds)), f"one or more different seeds; got {list(seeds)}"),
        (batch_size >= 1, f"a batch_size of at least 1; got {batch_size}"),
        (
            correctness is None or judge in rewards,
            f"a reward for correctness, or None; '{judge}' is not among {', '.join(rewards) or 'none'}. "
            f"{suggestion(judge, rewards)}",
        ),
    )
    for holds, needed in rules:
        if not holds:
            raise UserError(f"Held-out evaluation needs {needed}")


def record_tags(records: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the category of each record: its tag, else its task; null is none."""
    fields = ([record.get("tag"), record.get("task"), "untagged"] for record in records)
    return tuple(str(next(value for value in values if value is not None)) for values in fields)


def verdict(name: str, reward: Any, scores: Scores) -> Tensor:
    """Return the verdicts [B]: the part `correct`; else True for the best value of the range (0, 1)."""
    if not scores.valid.any():
        return scores.valid.cpu()
    if PART in scores.parts:
        return scores.parts[PART].cpu() > 0.5
    if tuple(reward.range) != (0.0, 1.0):
        raise _no_verdict(name, reward)
    return scores.value.cpu() >= 1 if reward.higher_is_better else scores.value.cpu() <= 0


def check_judge(name: str, reward: PointwiseReward, record: Mapping[str, Any]) -> None:
    """Refuse, before anything is sampled, a reward that cannot say correct or wrong, by its range or a grey image."""
    if tuple(reward.range) == (0.0, 1.0):
        return
    scores = reward.score(torch.full((1, 3, 64, 64), 0.5), [str(record["prompt"])], [record])
    if PART not in scores.parts and bool(scores.valid.any()):
        raise _no_verdict(name, reward)


def _no_verdict(name: str, reward: Any) -> UserError:
    return UserError(
        f"Reward '{name}' cannot say correct or wrong: its range is {tuple(reward.range)} and its scores have no part "
        f"'{PART}'. Choose one with the range (0, 1) or that part, or evaluation.correctness=null."
    )
