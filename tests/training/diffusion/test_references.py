# SPDX-License-Identifier: Apache-2.0
"""References of a reward while training: who draws them, which are kept, when they are renewed, resume, cost."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.judges.brightness import BrightnessPairs
from tests.support.training.images import RECORDS, ToyPolicy, check_resume, toy_trainer
from visalign.errors import UserError
from visalign.flow.rollout import rollout
from visalign.rewards.questions.reward_dance_reference import ReferenceReward
from visalign.seeds import sample_seed
from visalign.training.diffusion.references import ReferenceImages
from visalign.vision.pixels import to_levels

TRUNCATED = {"level": "token", "mode": "truncate", "high": 2.0}


class Pairs(BrightnessPairs):
    """Compares brightness, with a gradient."""

    def compare_with_gradient(self, left: Any, right: Any, prompts: Any) -> torch.Tensor:
        pairs = zip(left, right, strict=True)
        return self.scale * torch.stack([first.mean() - second.mean() for first, second in pairs])


def trainer_of(folder: Path, *, own: Any = None, count: int = 4, every: int | None = None, **arguments: Any) -> Any:
    reward = ReferenceReward(Pairs(), own)
    references = ReferenceImages(reward, count=count, keep=2, every=every)
    return toy_trainer(folder, reward=reward, references=references, **arguments)


def drawn_by_hand(policy: ToyPolicy, prompt: str, moment: int = 0) -> torch.Tensor:
    """The brightest two of four images, by the policy's weights."""
    seeds = [sample_seed(0, "reference image", prompt, moment, number) for number in range(4)]
    latents = rollout(policy, policy.encode([prompt] * 4), sigmas=policy.sigmas(4), seeds=seeds).latents  # type: ignore[arg-type]
    images = to_levels(policy.decode(latents))
    return images[images.float().mean((1, 2, 3)).argsort(descending=True)[:2]]


def test_the_model_before_training_draws_each_prompts_references_once(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, run={"iterations": 3})
    trainer.train()
    references = trainer.algorithm.references
    assert references.drawn == {"bright": 0, "dark": 0, "light": 0}
    for prompt, images in references.reward.references.items():
        assert torch.equal(images, drawn_by_hand(ToyPolicy(), prompt))
    rounds = [(i, [r["prompt"] for r in trainer.algorithm.prompts(i)[1]]) for i in range(3)]
    assert references.planned(rounds) == 3 * 4
    # 6 prompts × 8 images of 4 steps and 3 · 4 updates an image, and once 3 prompts × 4 images of 4 steps
    assert trainer.counters.forward_equivalents == 3 * 48 * (4 + 3 * 3) + 3 * 4 * 4


def test_the_present_policy_draws_again_what_is_too_old(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, every=2)
    references, policy = trainer.algorithm.references, trainer.algorithm.policy
    for iteration in range(3):
        expected = {p: drawn_by_hand(policy, p, iteration) for p in ("bright", "dark", "light")}
        trainer.iterate()
        assert set(references.drawn.values()) == {iteration // 2 * 2}
        if iteration % 2 == 0:
            assert all(torch.equal(references.reward.references[p], images) for p, images in expected.items())
    assert not torch.equal(expected["dark"], drawn_by_hand(ToyPolicy(), "dark", 2))


def test_references_of_the_users_own_stay_and_old_ones_of_other_prompts_go(tmp_path: Path) -> None:
    own = torch.full((1, 3, 8, 8), 0.5)
    trainer = trainer_of(tmp_path, own={"bright": own}, every=1, rollout={"prompts_per_iteration": 1})
    for _ in range(4):
        trainer.iterate()
    references = trainer.algorithm.references
    assert torch.equal(references.reward.references["bright"], own) and "bright" not in references.drawn
    rounds = [(i, [trainer.algorithm.prompts(i)[1][0]["prompt"]]) for i in range(4)]
    assert references.planned(rounds) == 4 * sum(prompts != ["bright"] for _, prompts in rounds)
    assert len(references.drawn) == 1 and len(references.state()) == 1  # one prompt an iteration, two are old


def test_renewed_references_go_with_no_stored_or_late_scores(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"par compares with stored rewards .*Set references\.every=null"):
        trainer_of(tmp_path, every=1, objective={"algorithm": "par"})
    late = {
        "credit": "one_step",
        "changes": {"importance_sampling": {"level": "token", "mode": "truncate", "high": 2.0}},
    }
    with pytest.raises(UserError, match="one_step scores after the next iteration has renewed"):
        trainer_of(tmp_path, every=1, objective=late, rollout={"staleness": 1})


@pytest.mark.parametrize("every", [None, 2])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"objective": {"algorithm": "diffusion_nft"}},
        {"objective": {"algorithm": "draft"}},
        {"objective": {"changes": {"importance_sampling": TRUNCATED}}, "rollout": {"staleness": 1}},
    ],
    ids=["flow_grpo", "regression", "gradient", "staleness"],
)
def test_a_resumed_run_has_the_same_references(arguments: Any, every: int | None, tmp_path: Path) -> None:
    rollout = {"prompts_per_iteration": 2, **arguments.get("rollout", {})}
    make = partial(trainer_of, every=every, **{**arguments, "rollout": rollout})
    assert check_resume(make, tmp_path, 3, 5, checkpoint_every=3)[0][1]["references.safetensors"]


def test_the_gradient_of_the_score_is_the_mean_over_references() -> None:
    references = {"a": torch.tensor([0.1, 0.5])[:, None, None, None].expand(-1, 3, 8, 8)}
    reward: Any = ReferenceReward(Pairs(scale=2.0), references)
    images = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    value = reward.score_with_gradient(images, ["a", "b", "a"])
    expected = reward.score(images.detach(), ["a", "b", "a"]).value
    torch.testing.assert_close(value.detach(), expected, equal_nan=True, rtol=1e-3, atol=1e-4)
    (gradient,) = torch.autograd.grad(value[[0, 2]].sum(), images)
    torch.testing.assert_close(gradient[0], torch.full((3, 8, 8), 2 / 192))  # ∂ 2 mean / ∂ pixel
    assert not gradient[1].any() and not hasattr(ReferenceReward(BrightnessPairs()), "score_with_gradient")


def test_prompts_are_those_of_the_records() -> None:
    references = ReferenceImages(ReferenceReward(Pairs()), count=2, keep=1)
    prompts = [str(record["prompt"]) for record in RECORDS] * 2
    assert references.due(prompts, 0, {}) == ["bright", "dark", "light"]
