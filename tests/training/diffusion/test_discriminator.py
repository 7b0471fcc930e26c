# SPDX-License-Identifier: Apache-2.0
"""Adv-GRPO on the toy: the reward is scored first and learns then, resumes bit for bit, and refuses stored scores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.training.images import Brightness, check_resume, toy_trainer
from visalign.errors import UserError
from visalign.interfaces import RewardCapabilities, Scores
from visalign.rewards import WeightedSum
from visalign.rewards.scorers.adversarial import discriminator_loss
from visalign.training.policy.winners import ReplaySettings

IS = {"importance_sampling": {"level": "token", "mode": "truncate", "high": 2.0}}


class Colours:
    """Adversarial reward on mean colours, with red references."""

    name, unit, range, higher_is_better, identity = "colours", "level", (-1.0, 1.0), True, None
    lr, steps, batch = 0.05, 3, 8

    def __init__(self) -> None:
        self.capabilities = RewardCapabilities(discriminators={self.name: self})

    def begin(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.head = nn.Linear(3, 1)

    def discriminate(self, samples: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        assert samples.dtype == torch.uint8
        real = self.head(torch.tensor([[0.8, 0.2, 0.2]]).expand(len(samples), 3))
        fake = self.head(samples.float().mean((2, 3)) / 255)
        return discriminator_loss(real, fake), torch.cat([real > 0, fake < 0]).float().mean()

    @torch.no_grad()
    def score(self, images: Tensor, prompts: Sequence[str], metadata: Any = None) -> Scores:
        value = self.head(images.mean((2, 3)))[:, 0]
        return Scores(value=value, valid=torch.ones(len(value), dtype=torch.bool), unit="level")


def make_trainer(folder: Path, **arguments: Any) -> Any:
    reward = WeightedSum({"light": (Brightness(), 1.0), "real": (Colours(), 0.5)})
    return toy_trainer(folder, reward=reward, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"rollout": {"overlap": 2}},
        {"objective": {"algorithm": "diffusion_nft"}},
        {"objective": {"algorithm": "dapo"}, "dynamic": True},
    ],
    ids=["flow_grpo", "regression", "dynamic"],
)
def test_a_resumed_run_has_the_same_discriminator(arguments: dict[str, Any], tmp_path: Path) -> None:
    if arguments.get("dynamic"):
        from visalign.training.loop.dynamic_groups import DynamicSettings

        arguments = {**arguments, "dynamic": DynamicSettings(enabled=True)}
    (_, tensors, metrics), trainer = check_resume(
        partial(make_trainer, **arguments), tmp_path, 2, 4, checkpoint_every=1
    )
    state = tensors["discriminator.real.safetensors"]
    assert {"trainable.weight", "optimizer.weight.exp_avg"} <= state.keys()
    assert all(0 <= row["discriminator/real.accuracy"] <= 1 for row in metrics)
    assert metrics[-1]["discriminator/real.loss"] != metrics[0]["discriminator/real.loss"]
    assert not trainer.algorithm.discriminators[0]._images  # images of an iteration are not kept


def test_the_images_are_scored_before_the_reward_learns(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    colours = trainer.algorithm.discriminators[0]
    before = [p.detach().clone() for p in colours._reward.head.parameters()]
    scored: list[Tensor] = []
    score = Colours.score

    def watched(self: Colours, *arguments: Any) -> Scores:
        scored.extend(p.detach().clone() for p in self.head.parameters())
        return score(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Colours, "score", watched)
        record = trainer.iterate()
    assert all(torch.equal(first, then) for first, then in zip(before, scored, strict=True))
    assert not torch.equal(before[0], colours._reward.head.weight)
    assert 0 <= record["discriminator/real.accuracy"] <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rollout": {"staleness": 1}, "objective": {"changes": IS}}, r"scores images meanwhile\. Set rollout"),
        ({"objective": {"credit": "turning_points"}}, "credit=turning_points scores more images"),
        ({"objective": {"algorithm": "par"}}, "par stores scores of the reference"),
        (
            {"objective": {"algorithm": "ram"}, "self_imitation": ReplaySettings()},
            "self_imitation replays earlier scores",
        ),
    ],
)
def test_scores_of_another_discriminator_are_refused(arguments: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"rewards\.terms\.real learns after each iteration, and .*{message}"):
        make_trainer(tmp_path, **arguments)
