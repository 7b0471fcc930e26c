# SPDX-License-Identifier: Apache-2.0
"""SAFE: two critics whose soft minimum is V, each fitted, and a KL term that acts beyond a threshold."""

from __future__ import annotations

import pytest
import torch

from tests.support.training.text import toy_policy, toy_text_trainer, weights_of
from visalign.core.surrogates.value import soft_minimum
from visalign.errors import UserError
from visalign.training import TextObjectiveSettings

LOW = {"kl_threshold": 1e-9}


@pytest.mark.parametrize("separate", [False, True])
def test_v_is_the_soft_minimum_of_the_critics(separate, tmp_path) -> None:
    trainer = toy_text_trainer(tmp_path, "safe", separate_value=separate)
    algorithm = trainer.algorithm
    experience = algorithm.collect(trainer.context).experience
    with torch.no_grad():
        if separate:
            assert algorithm.parts.value_model is not None
            critics = algorithm.parts.value_model.values(experience.rollout)
        else:
            critics = algorithm.parts.policy.log_probs(experience.rollout).value
    assert critics is not None and critics.shape[2] == 2 and bool((critics[..., 0] != critics[..., 1]).any())
    torch.testing.assert_close(experience.trajectories.value, soft_minimum(critics).cpu())
    before = weights_of(trainer)
    trainer._update(experience)
    assert not torch.equal(before, weights_of(trainer))


def test_the_gate_opens_with_the_divergence_and_a_resumed_run_keeps_it(tmp_path) -> None:
    run = {"checkpoint_every": 2, "iterations": 4}
    uninterrupted = toy_text_trainer(tmp_path / "whole", "safe", objective=LOW, run=run)
    strengths = []
    for _ in range(3):
        strengths.append(uninterrupted.algorithm.objective.kl)
        uninterrupted.iterate()
    assert strengths[0] == 0 and 0 < strengths[1] < strengths[2]
    uninterrupted.iterate()
    toy_text_trainer(tmp_path / "part", "safe", objective=LOW, run={**run, "iterations": 2}).train()
    resumed = toy_text_trainer(tmp_path / "part", "safe", objective=LOW, run=run)
    resumed.resume()
    resumed.train()
    assert resumed.algorithm.objective.kl == uninterrupted.algorithm.objective.kl
    assert torch.equal(weights_of(resumed), weights_of(uninterrupted))
    shut = toy_text_trainer(tmp_path / "shut", "safe", objective={"kl_threshold": 50.0})
    for _ in range(3):
        shut.iterate()
    assert shut.algorithm.objective.kl == 0


def test_what_does_not_go_together_is_named(tmp_path) -> None:
    with pytest.raises(UserError, match=r"soft minimum of several critics.*model\.critics=2"):
        toy_text_trainer(tmp_path, "safe", policy=toy_policy(value=1))
    with pytest.raises(UserError, match=r"value_clip 0\.2.*2 critics.*value_clip: null"):
        toy_text_trainer(tmp_path, "ppo", policy=toy_policy(value=2))
    with pytest.raises(UserError, match=r"algorithm=grpo does not read objective\.kl_threshold of safe"):
        TextObjectiveSettings(algorithm="grpo", kl_threshold=0.1)
