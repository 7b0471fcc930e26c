# SPDX-License-Identifier: Apache-2.0
"""A video model is trained and evaluated on all its frames."""

import pytest
import torch

from tests.support.models.pipelines import tiny_pipeline
from tests.support.training.images import Brightness
from visalign.adapters import LoraSettings, PipelinePolicy
from visalign.evaluation.heldout.images import evaluate
from visalign.flow.rollout import rollout
from visalign.rewards import Frames, WeightedSum
from visalign.seeds import sample_seed
from visalign.training import FlowGRPO, RunSettings, Trainer
from visalign.training.diffusion.rollout_settings import RolloutSettings
from visalign.training.loop.optimizer import OptimizerSettings


def test_a_video_is_trained_and_evaluated_on_all_its_frames(tmp_path):
    pipe, options = tiny_pipeline("wan")
    policy = PipelinePolicy(pipe, lora=LoraSettings(rank=2, alpha=4), **options)
    scored: list[int] = []

    class Watched(Brightness):
        def score(self, images, prompts, metadata=None):
            scored.append(len(images))
            return super().score(images, prompts, metadata)

    records = [{"prompt": "a red circle"}, {"prompt": "two blue squares!"}]
    algorithm = FlowGRPO(
        policy,
        WeightedSum({"light": (Frames(Watched(), 3), 1.0)}),
        records,
        rollout=RolloutSettings(prompts_per_iteration=2, group_size=2, steps=3),
    )
    before = [p.clone() for _, p in policy.trainable_parameters()]
    result = Trainer(
        algorithm,
        optimizer=OptimizerSettings(lr=1e-3, updates_per_iteration=1),
        run=RunSettings(folder=tmp_path, iterations=2),
    ).train()
    assert result.counters.updates == 2 and result.counters.skipped == 0 and scored == [4 * 3] * 2
    assert any(not torch.equal(a, b) for a, (_, b) in zip(before, policy.trainable_parameters(), strict=True))
    rewards = {"all": Frames(Brightness(), 5), "middle": Brightness()}
    sigmas, prompts = policy.sigmas(3), [record["prompt"] for record in records]
    heldout = evaluate(policy, rewards, records, seeds=[0], sigmas=sigmas, batch_size=2, correctness=None)
    seeds = [sample_seed("heldout", prompt, 0) for prompt in prompts]
    latents = rollout(policy, policy.encode(prompts), sigmas=sigmas, seeds=seeds).latents
    light = policy.decode_frames(latents).mean((2, 3, 4))
    assert heldout.scores["all"].tolist() == pytest.approx(light.mean(1).tolist(), abs=2e-3)
    assert heldout.scores["middle"].tolist() == pytest.approx(light[:, 2].tolist(), abs=2e-3)
