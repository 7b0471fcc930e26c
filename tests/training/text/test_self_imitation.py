# SPDX-License-Identifier: Apache-2.0
"""SPEAR's replay: the loss by hand, what is kept and for how long, an exact resume, what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.training.images import check_resume
from tests.support.training.text import Letters, toy_text_trainer
from visalign.errors import UserError
from visalign.interfaces import Scores
from visalign.training import SelfImitationSettings
from visalign.training.loop.metrics import check_keys
from visalign.training.policy.winners import KEY

PACE = {"weight": 0.5, "warmup": 2}


class FirstHalf(Letters):
    """Share of a completion's characters from a to m."""

    def score(self, completions: Any, prompts: Any, metadata: Any = None) -> Scores:
        scores = super().score(completions, prompts, metadata)
        value = [sum("a" <= x <= "m" for x in text) / max(1, len(text)) for text in completions]
        return replace(scores, value=torch.tensor(value))


def _trainer(folder: Any, algorithm: str = "grpo", **changes: Any) -> Any:
    settings = SelfImitationSettings(**{**PACE, **changes.pop("imitation", {})})
    return toy_text_trainer(folder, algorithm, **{"reward": FirstHalf(), **changes}, self_imitation=settings)


def test_the_replays_gradient_is_the_clipped_surrogate_of_what_beats_the_median(tmp_path):
    """−c mean_i mean_t min(r Ã, clip(r) Ã), added to the iteration's own; c(1) = 0.5 (1 − cos(π/2))/2."""
    trainer = _trainer(tmp_path, imitation={"cov_share": 0.0}, optimizer={"updates_per_iteration": 1})
    algorithm, run = trainer.algorithm, trainer.context
    first = algorithm.collect(run).experience
    (step,) = algorithm.prepare(first, run)
    assert step.extra is None  # c(0) = 0
    t, reward = first.trajectories, first.trajectories.reward
    gain = reward.view(4, 6) - reward.view(4, 6).mean(1, keepdim=True)
    won = (gain.flatten() > 0).nonzero()[:, 0]
    run.counters.iteration = 1
    with torch.no_grad():
        for _, parameter in trainer.weights.named:
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    second = algorithm.collect(run).experience
    means = torch.cat([e.trajectories.reward.view(4, 6).mean(1) for e in (first, second)])
    advantage = reward[won] - means.double().quantile(0.5)
    used, above = won[advantage > 0], advantage[advantage > 0]
    assert 0 < len(used) < len(won)
    (step,) = algorithm.prepare(second, run)
    policy = algorithm.parts.policy
    ratio = (policy.log_probs(first.rollout.rows(used)).log_prob - t.old_log_prob[used]).exp()
    gain = torch.minimum(ratio * above[:, None], ratio.clamp(0.8, 1.28) * above[:, None])
    weight = t.weight[used]
    by_hand = -0.25 * ((gain * weight).sum(1) / weight.sum(1)).mean()
    assert bool(((ratio < 0.8) | (ratio > 1.28)).any())
    sums = algorithm.backward(second, step, run)
    assert sums["loss/replay"] == pytest.approx(by_hand.item(), rel=1e-4)
    both = [p.grad.clone() for _, p in trainer.weights.named]
    trainer.weights.clear()
    algorithm.imitation = None
    algorithm.backward(second, step, run)
    by_hand.backward()  # on top of the iteration's own
    for (_, parameter), gradient in zip(trainer.weights.named, both, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)


def test_a_resumed_replay_is_the_uninterrupted_one(tmp_path):
    make = partial(_trainer, imitation={"capacity": 12, "max_age": 2, "batch": 5}, rollout={"top_p": 0.8})
    outcome, _ = check_resume(make, tmp_path, 3, 5)
    assert f"{KEY}.safetensors" in outcome[1]
    rows = outcome[2]
    for row in rows:
        check_keys(row)
    assert [row["replay/weight"] for row in rows] == pytest.approx([0, 0.25, 0.5, 0.5, 0.5])
    assert [row.get("replay/samples", 0) for row in rows] == [0, 5, 5, 5, 5]
    assert max(row["replay/size"] for row in rows) == 12


def test_nothing_older_than_its_age_is_kept(tmp_path):
    trainer = _trainer(tmp_path, imitation={"max_age": 1})
    born = []
    for _ in range(4):
        trainer.iterate()
        born.append(sorted(set(trainer.context.tensors[KEY]["born"].tolist())))
    assert born[0] == [0] and born[2] == [1, 2] and born[3] == [2, 3]


def test_what_cannot_be_replayed_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"algorithm=ppo has a value function, or log Z .*Use 'grpo'"):
        _trainer(tmp_path, "ppo")
