# SPDX-License-Identifier: Apache-2.0
"""Adapters in the weights while a policy samples: the same function, and the weights as they were."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.support.models.sd3 import tiny_sd3_pipeline
from tests.support.training.images import toy_trainer
from visalign.adapters import LoraSettings, SD3Policy
from visalign.adapters.pipeline.policy import PipelinePolicy
from visalign.errors import UserError
from visalign.training.diffusion.merging import mergeable_adapters, merged_adapters


def tuned(**options) -> Any:
    """A tiny policy whose adapters change something."""
    policy = SD3Policy(tiny_sd3_pipeline(), lora=LoraSettings(rank=4, alpha=8), **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, weight in policy.trainable_parameters():
            weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
    return policy


def velocity(policy: SD3Policy | PipelinePolicy) -> torch.Tensor:
    x = torch.randn(3, 8, 8, 8, generator=torch.Generator().manual_seed(2))
    prompts = policy.encode(["a red circle", "two blue squares", "a star"])
    with torch.no_grad():
        return policy.velocity(x, torch.tensor([0.9, 0.5, 0.1]), prompts)


def test_merged_adapters_are_the_policy_and_leave_no_trace():
    policy = tuned()
    before = {name: weight.clone() for name, weight in policy.module.state_dict().items()}
    own = velocity(policy)
    with policy.reference():
        assert (velocity(policy) - own).abs().max() > 0.1
    with pytest.raises(RuntimeError, match="in the middle"):
        with merged_adapters(mergeable_adapters(policy.module)):
            assert_close(velocity(policy), own, rtol=1e-5, atol=1e-5)
            raise RuntimeError("in the middle")
    assert all(torch.equal(weight, before[name]) for name, weight in policy.module.state_dict().items())
    assert torch.equal(velocity(policy), own)
    assert all(weight.requires_grad for _, weight in policy.trainable_parameters())


def test_no_adapters_and_no_log_probs_are_refused(tmp_path):
    for module in (torch.nn.Linear(2, 2), SD3Policy(tiny_sd3_pipeline()).module):
        with pytest.raises(UserError, match=r"needs LoRA on linear layers.*Set rollout.merge_adapters=false"):
            mergeable_adapters(module)
    with pytest.raises(UserError, match=r"merge_adapters sample with another policy .*flow_grpo needs"):
        toy_trainer(tmp_path, rollout={"merge_adapters": True})
    with pytest.raises(UserError, match="needs LoRA on linear layers"):
        toy_trainer(tmp_path, objective={"algorithm": "awm"}, rollout={"merge_adapters": True})


@pytest.mark.parametrize("merged", [False, True])
def test_a_regression_samples_so_and_learns_through_its_adapters(tmp_path, monkeypatch, merged):
    policy, modes = tuned(), set()
    layers = mergeable_adapters(policy.module)
    own = policy.velocity

    def velocity(*arguments):
        modes.add((torch.is_grad_enabled(), layers[0].disable_adapters))
        return own(*arguments)

    monkeypatch.setattr(policy, "velocity", velocity)
    rollout = {"prompts_per_iteration": 2, "group_size": 2, "merge_adapters": merged}
    optimizer = {"updates_per_iteration": 1}
    objective = {"algorithm": "awm"}
    trainer = toy_trainer(tmp_path, policy=policy, objective=objective, rollout=rollout, optimizer=optimizer)
    assert trainer.iterate()["grad_norm"] > 0
    assert modes == {(False, merged), (True, False)}
