# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning on images with captions: the loss by hand, learning, buckets, captions left out, resumes."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.training.images import check_resume, toy_trainer
from visalign.core.regression.signals import level_position
from visalign.training.diffusion.samples import StoredPreference
from visalign.training.loop.sampler import BucketSampler

TABLE = torch.randn(12, 4, 4, 4, generator=torch.Generator().manual_seed(3))
TABLE[0::2] += 0.5
"""Latents; those of even number are the lighter ones."""


def _records() -> list[dict[str, Any]]:
    words = ("bright", "dark")
    return [
        {"prompt": words[number % 2], "candidates": [{"latent": number, "preference": 1.0}]} for number in range(12)
    ]


def _trainer(folder: Path, **changes: Any) -> Any:
    defaults: dict[str, Any] = {
        "objective": {"algorithm": "sft"},
        "rollout": {"prompts_per_iteration": 12, "group_size": 1},
        "records": _records(),
        "optimizer": {"lr": 0.01},
        "stored": lambda records: TABLE[[record["latent"] for record in records]],
    }
    return toy_trainer(folder, reward=StoredPreference(), **{**defaults, **changes})


def test_the_loss_is_that_of_flow_matching(tmp_path):
    """Mean |v − (ε − x0)|² over the images, each once, at levels of SD3's density."""
    trainer = _trainer(tmp_path, optimizer={"updates_per_iteration": 1})
    algorithm = trainer.algorithm
    experience = algorithm.collect(trainer.context).experience
    (step,) = algorithm.prepare(experience, trainer.context)
    recorded: list[tuple[Tensor, Tensor, Tensor]] = []
    original = algorithm._noised

    def noised(*arguments: Any) -> Any:
        outputs = original(*arguments)
        recorded.append(outputs[:3])
        return outputs

    algorithm._noised = noised
    loss = algorithm.backward(experience, step, trainer.context)["loss/policy"]
    x, target, sigma = (torch.cat(parts) for parts in zip(*recorded, strict=True))
    images = experience.images
    clean, wide = x - sigma[:, None, None, None] * target, sigma[:, None, None, None]
    torch.testing.assert_close(clean, images.trajectory.latents)  # x_σ = x0 + σ (ε − x0)
    v = algorithm.policy.velocity(x, sigma, images.condition).detach()
    assert loss == pytest.approx(float((v - target).square().mean()), rel=1e-5)
    assert len(set(sigma.tolist())) == 12 and bool((wide > 0).all())


@pytest.mark.parametrize("density", ["uniform", "logit_normal", "mode"])
def test_levels_have_the_density(density):
    """Quantiles of draws by the definition, against positions at evenly spread shares."""
    share = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    generator = torch.Generator().manual_seed(0)
    draw = torch.rand(200_000, generator=generator, dtype=torch.float64)
    if density == "logit_normal":
        draw = torch.sigmoid(0.5 + 0.6 * torch.randn(200_000, generator=generator, dtype=torch.float64))
    elif density == "mode":
        draw = 1 - draw - 1.29 * (torch.cos(torch.pi * draw / 2) ** 2 - 1 + draw)
    options = {"mean": 0.5, "std": 0.6} if density == "logit_normal" else {}
    ours = level_position(share, density, **options).sort().values
    for quantile in (0.05, 0.25, 0.5, 0.75, 0.95):
        assert abs(ours.quantile(quantile) - draw.quantile(quantile)) < 0.005


def test_a_policy_learns_the_images_of_each_caption(tmp_path):
    trainer = _trainer(tmp_path, run={"iterations": 20})
    trainer.train()
    shift = trainer.algorithm.policy.net.shift.detach()
    assert shift[0].mean() < shift[1].mean() - 0.02  # v = ε − x0: lighter images, lower velocity


def test_captions_are_left_out_at_their_share(tmp_path):
    trainer = _trainer(tmp_path, caption_dropout=0.25)
    counts: Counter[str] = Counter()
    for iteration in range(40):
        trainer.context.counters.iteration = iteration
        experience = trainer.algorithm.collect(trainer.context).experience
        counts.update(record["prompt"] for record in experience.images.records)
        assert trainer.algorithm.policy.encoded[-1] == [record["prompt"] for record in experience.images.records]
    assert counts[""] / counts.total() == pytest.approx(0.25, abs=0.05)
    assert _records()[0]["prompt"] == "bright"


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    make = partial(_trainer, rollout={"prompts_per_iteration": 4, "group_size": 1}, caption_dropout=0.5)
    check_resume(make, tmp_path, 2, 4, checkpoint_every=1)


def test_buckets_are_visited_as_often_as_they_have_images():
    buckets = np.array([0] * 60 + [2] * 30 + [5] * 10)
    sampler = BucketSampler(buckets.tolist(), 5, 1, seed=1)
    visits, epoch, labels = Counter[int](), Counter[int](), list[int]()
    for iteration in range(200):
        batch = sampler.batch(iteration)
        assert set(buckets[batch.prompt_index.numpy()]) == {sampler.bucket(iteration)}
        visits[sampler.bucket(iteration)] += 1
        epoch.update(batch.prompt_index.tolist())
        labels += batch.group_id.tolist()
        halves = [sampler.batch(iteration, rank, 2).prompt_index for rank in range(2)]
        assert torch.equal(torch.cat(halves), batch.prompt_index)
    assert [visits[b] for b in (0, 2, 5)] == pytest.approx([120, 60, 20], abs=2)
    assert max(epoch.values()) - min(epoch.values()) <= 3, "each image as often as another"
    assert len(set(labels)) == len(labels)
