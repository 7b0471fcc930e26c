# SPDX-License-Identifier: Apache-2.0
"""The KL that a run logs is the distance to the model before training, not to that of the last iteration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.sd3 import build_tiny_sd3
from tests.support.training.images import toy_trainer
from tests.support.training.text import toy_policy, toy_text_trainer
from visalign.adapters import SD3Policy
from visalign.adapters.causal_lm.lora import text_lora
from visalign.flow.rollout import replay
from visalign.training import Trainer, read_metrics

ONE_UPDATE = {"updates_per_iteration": 1, "lr": 3e-3}


def of_images(untouched: Any, trainer: Trainer, experience: Any) -> float:
    """‖μ − μ₀‖²/(2 std² D), mean over all trained steps, μ₀ of an untrained model."""
    count, steps = len(experience.trajectory), len(experience.trained)
    sample = torch.arange(count).repeat_interleave(steps)
    pairs = experience.trajectory.pairs(sample, experience.trained.repeat(count))
    inputs = experience.condition.select(sample), pairs, experience.trajectory.kernel
    now, first = (replay(policy, *inputs).mean for policy in (trainer.algorithm.policy, untouched))
    return float(((now - first).double().square().flatten(1).mean(1) / (2 * pairs.std.double() ** 2)).mean())


def of_text(untouched: Any, trainer: Trainer, experience: Any) -> float:
    """e^−d − 1 + d with d = log π − log π₀, mean over all tokens."""
    now, first = (p.log_probs(experience.rollout).log_prob for p in (trainer.algorithm.parts.policy, untouched))
    d = (now - first).double()[experience.rollout.loss_mask != 0]
    return float((torch.exp(-d) - 1 + d).mean())


def logged_and_by_hand(
    folder: Path, make: Any, measure: Any, untouched: Any
) -> tuple[list[float], list[float], list[bool]]:
    """(logged KL, KL measured before each update, which runs resumed) of four iterations in two runs."""
    by_hand, resumed = [], []
    for iterations in (2, 4):
        trainer = make(run={"iterations": iterations, "checkpoint_every": 1})
        algorithm, backward = trainer.algorithm, trainer.algorithm.backward

        def watched(experience: Any, step: Any, run: Any, backward=backward, trainer=trainer) -> Any:
            with torch.no_grad():
                by_hand.append(measure(untouched, trainer, experience))
            return backward(experience, step, run)

        algorithm.backward = watched
        resumed.append(trainer.resume())
        trainer.train()
    return [record["kl"] for record in read_metrics(folder / "metrics.jsonl")], by_hand, resumed


def test_of_images(tmp_path: Path) -> None:
    model = build_tiny_sd3(tmp_path / "model")
    policy: Any = SD3Policy.from_pretrained

    def make(**options: Any) -> Trainer:
        return toy_trainer(
            tmp_path / "run",
            policy=policy(model, lora=None),
            objective={"changes": {"kl": 0.01}},
            rollout={"prompts_per_iteration": 3, "group_size": 2},
            optimizer=ONE_UPDATE,
            **options,
        )

    untouched = policy(model, lora=None)
    logged, by_hand, resumed = logged_and_by_hand(tmp_path / "run", make, of_images, untouched)
    assert logged == pytest.approx(by_hand, rel=1e-4, abs=1e-9)
    assert logged[0] < 1e-9 < min(logged[1:]), "the first iteration samples the reference itself"
    assert len(logged) == 4 and resumed == [False, True]


def test_of_text(tmp_path: Path) -> None:
    def make(**options: Any) -> Trainer:
        objective = {"changes": {"kl": 0.01}}
        return toy_text_trainer(
            tmp_path, policy=toy_policy(lora=text_lora()), objective=objective, optimizer=ONE_UPDATE, **options
        )

    logged, by_hand, resumed = logged_and_by_hand(tmp_path, make, of_text, toy_policy())
    assert logged == pytest.approx(by_hand, rel=1e-4, abs=1e-9)
    assert logged[0] < 1e-9 < min(logged[1:]), "the first iteration samples the reference itself"
    assert len(logged) == 4 and resumed == [False, True]
