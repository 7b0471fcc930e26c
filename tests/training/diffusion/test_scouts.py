# SPDX-License-Identifier: Apache-2.0
"""A pool drawn in few steps: its extremes alone are drawn again exactly, trained on, counted and resumed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.core import f64
from tests.support.training.images import Brightness, ToyPolicy, check_resume, toy_trainer
from visalign.core.regression.signals import best_and_worst
from visalign.errors import UserError
from visalign.flow.rollout import rollout
from visalign.training import DiffusionObjectiveSettings, RolloutSettings, ScoutSettings
from visalign.training.diffusion.rollout_settings import check_sampling

NFT = {"algorithm": "diffusion_nft_closed"}
SCOUT = {"scout": ScoutSettings(pool=12, steps=2), "group_size": 4}


def test_best_and_worst() -> None:
    """The missing one comes last; refusals are among the golden cases."""
    reward, group = f64(1, 1, 0, 0, 0.5, 2, float("nan"), 3, -1), [0] * 4 + [1] * 5
    options = {"valid": reward.isfinite()}
    assert best_and_worst(reward, group, best=1, worst=2, **options).tolist() == [0, 2, 3, 7, 8, 4]
    assert best_and_worst(reward, group, best=4, worst=0, **options).tolist() == [0, 1, 2, 3, 7, 5, 4, 8]


@pytest.mark.parametrize("best", [None, 4])
def test_extremes_of_the_pool_are_drawn_again_from_their_seeds(best: int | None, tmp_path) -> None:
    policy: Any = ToyPolicy()
    settings = {**SCOUT, "scout": replace(SCOUT["scout"], best=best)}
    trainer = toy_trainer(tmp_path, policy=policy, objective=NFT, rollout=settings)
    algorithm = trainer.algorithm
    pool = algorithm.sampler.batch(0)
    prompts = [algorithm.records[i]["prompt"] for i in pool.prompt_index]
    condition, seeds = policy.encode(prompts), algorithm.sample_seeds(pool.sample_id)
    scouts, exact = (rollout(policy, condition, sigmas=policy.sigmas(n), seeds=seeds).latents for n in (2, 4))
    foretold = Brightness().score(policy.decode(scouts), prompts).value.view(6, 12)
    order = foretold.argsort(dim=1, descending=True, stable=True)
    rows = (order[:, :4] if best else order[:, [0, 1, -1, -2]]) + 12 * torch.arange(6)[:, None]
    images = algorithm.collect(trainer.context).experience.images
    assert images.batch.sample_id.tolist() == pool.sample_id[rows.flatten()].tolist() and len(images.value) == 24
    torch.testing.assert_close(images.trajectory.latents, exact[rows.flatten()])
    assert images.metrics["scout_agreement"] > 0.5


def test_pools_are_counted_and_resumed(tmp_path) -> None:
    check_resume(partial(toy_trainer, objective=NFT, rollout=SCOUT), tmp_path, 2, 3)
    once = {"updates_per_iteration": 1}
    line = toy_trainer(tmp_path / "count", objective=NFT, rollout=SCOUT, optimizer=once).iterate()
    planned = RolloutSettings(**{"steps": 4, **SCOUT}).sampled_per_image  # 4 steps, and 3 scouts of 2
    assert planned == 4 + 3 * 2
    assert line["forward_equivalents_per_image"] == planned + 3 * 3 * line["trained_share"]


@pytest.mark.parametrize(
    ("objective", "changes", "message"),
    [
        ("flow_grpo", {}, r"rollout.scout trains on the extremes .*flow_grpo learns from the probability"),
        ("draft", {}, r"rollout.scout trains on the extremes .*draft learns"),
        ("diffusion_nft", {"scout": ScoutSettings(pool=4)}, r"pool=4, .*group_size=4 .*larger than the group"),
        ("diffusion_nft", {"scout": ScoutSettings(steps=10)}, r"steps=10 .*fewer than those of the rollout"),
        ("diffusion_nft", {"scout": ScoutSettings(best=5)}, r"best=5, with .*best at most the group"),
    ],
)
def test_pools_are_refused_where_they_mean_nothing(objective: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_sampling(DiffusionObjectiveSettings(algorithm=objective), RolloutSettings(**{**SCOUT, **changes}))
    with pytest.raises(UserError, match=r"stored images .* are not sampled\. Set rollout.scout=null"):
        check_sampling(DiffusionObjectiveSettings(algorithm="diffusion_dpo"), RolloutSettings(**SCOUT), stored=True)
