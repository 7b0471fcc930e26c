# SPDX-License-Identifier: Apache-2.0
"""Replay of winning images: the loss by hand, what is stored and for how long, a resume, what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training.images import ToyPolicy, check_resume, gradients_of, toy_trainer
from visalign.errors import UserError
from visalign.training.loop.metrics import check_keys
from visalign.training.policy.winners import KEY, ReplaySettings

PACE = {"weight": 0.5, "warmup": 2}
REGRESSION = {"algorithm": "reward_weighted", "changes": {"levels": 2}}
SIZE = {"prompts_per_iteration": 3, "group_size": 4}


def _trainer(folder: Path, **changes: Any) -> Any:
    replay = ReplaySettings(**{**PACE, **changes.pop("replay", {})})
    changes = {"objective": REGRESSION, "rollout": SIZE, "run": {"iterations": 3}, **changes}
    return toy_trainer(folder, **changes, self_imitation=replay)


@pytest.mark.parametrize("micro_batch", [64, 3])
def test_the_replays_gradient_is_the_weighted_error_of_what_beats_the_median(micro_batch: int, tmp_path: Path) -> None:
    """c(1) mean_i mean_s Ã |v − u|², c(1) = 0.5 (1 − cos(π/2))/2, added to the iteration's own."""
    policy = ToyPolicy(torch.float64)
    size = {"updates_per_iteration": 1, "micro_batch": micro_batch}
    trainer = _trainer(tmp_path, policy=policy, optimizer=size)
    algorithm, run = trainer.algorithm, trainer.context
    first = algorithm.collect(run).experience
    (step,) = algorithm.prepare(first, run)
    assert step.replay is None  # c(0) = 0
    run.counters.iteration = 1
    second = algorithm.collect(run).experience
    (step,) = algorithm.prepare(second, run)
    value = first.images.value.view(3, 4)
    won = (value > value.mean(1, keepdim=True)).flatten()
    means = torch.cat([value.mean(1), second.images.value.view(3, 4).mean(1)])
    advantage = (first.images.value - means.quantile(0.5))[won]
    replay = step.replay
    assert sorted(replay.signal.tolist()) == pytest.approx(sorted(0.25 * a for a in advantage.tolist() if a > 0))
    stored = {tuple(x.flatten().tolist()) for x in first.images.trajectory.latents[won]}
    assert {tuple(x.flatten().tolist()) for x in replay.images.trajectory.latents} <= stored
    count = len(replay.signal)
    sample, level = torch.arange(count).repeat_interleave(2), torch.arange(2).repeat(count)
    x, u, sigma, time = algorithm._noised(replay, sample, level, 0)
    error = (policy.velocity(x, sigma, replay.images.condition.select(sample), time) - u).square().flatten(1).mean(1)
    loss = (replay.signal[sample] * error).mean()
    expected = torch.autograd.grad(loss, [p for _, p in policy.trainable_parameters()])
    without = algorithm.backward(second, replace(step, replay=None), run)
    own = gradients_of(policy).clone()
    policy.net.zero_grad()
    sums = algorithm.backward(second, step, run)
    assert sums["loss/replay"] == pytest.approx(loss.item()) and without["loss/replay"] == 0
    torch.testing.assert_close(gradients_of(policy) - own, torch.cat([g.flatten() for g in expected]))


def test_winners_leave_by_age_and_by_number(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, replay={"capacity": 5, "max_age": 1, "batch": 2})
    records = [trainer.iterate() for _ in range(3)]
    for record in records:
        check_keys(record)
    assert records[0]["replay/size"] == 0 and records[2]["replay/size"] == 5
    assert records[2]["replay/samples"] <= 2 and records[2]["loss/replay"] >= 0
    assert {int(image.born) for image in trainer.algorithm.imitation.samples} <= {1, 2}


@pytest.mark.parametrize("algorithm", ["reward_weighted", "diffusion_nft", "crd", "ram"])
def test_a_resumed_run_replays_the_same(algorithm: str, tmp_path: Path) -> None:
    make = partial(_trainer, objective={"algorithm": algorithm, "changes": {"levels": 2}})
    assert KEY in check_resume(make, tmp_path, 2, 4, checkpoint_every=1)[1].context.tensors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({"objective": {"algorithm": name}}, rf"algorithm={name} has a ratio .*=null.*=diffusion_nft")
            for name in ("flow_grpo", "awm", "v_grpo")
        ),
        ({"objective": {"algorithm": "draft"}}, "algorithm=draft compares no rewards.*=null"),
        ({"rollout": {**SIZE, "image_sizes": [8, 16]}}, "image_sizes gives the latents several sizes"),
    ],
)
def test_a_replay_that_would_lie_is_refused(changes: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"self_imitation replays images of earlier iterations, and .*{message}"):
        _trainer(tmp_path, **changes)
