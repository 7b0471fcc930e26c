# SPDX-License-Identifier: Apache-2.0
"""RLFR's flow: what strays from right completions is paid less; a resumed run is the uninterrupted one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from tests.support.training.images import check_resume
from tests.support.training.text import toy_policy, toy_text_trainer
from visalign.errors import UserError
from visalign.text import StoppingCriteria
from visalign.training import LatentFlowSettings, TextObjectiveSettings
from visalign.training.policy.reference import Reference
from visalign.training.text.latent_flow import KEY, LatentFlow

SETTINGS: dict[str, Any] = {"warmup": 1, "width": 16, "batch": 64, "steps": 2, "right_at": 0.1}


def flow(policy: Any, **changes: Any) -> LatentFlow:
    settings = LatentFlowSettings(**{**SETTINGS, **changes})
    reference = Reference(policy, TextObjectiveSettings())
    return LatentFlow(policy, reference, settings, seed=0, accelerator=Accelerator(cpu=True))


def test_a_token_that_right_completions_do_not_have_strays_farthest() -> None:
    """After the states of one completion are learnt, an unrelated token is put into it."""
    policy = toy_policy()
    rollout = policy.generate(["b c"], seeds=3, stopping=StoppingCriteria(max_new_tokens=8))
    learnt = flow(policy, steps=300, batch=256, width=64, lr=3e-3, warmup=0)
    learnt.learn(rollout, torch.ones(1, dtype=torch.bool), 0)
    strange = rollout.rows(torch.tensor([0, 0]))
    strange.completion_ids[1, 2] = (int(strange.completion_ids[1, 2]) + 7) % policy.model.config.vocab_size
    states = dict(learnt._states(strange))
    usual, changed = (learnt._deviation(states[i], 5) for i in (0, 1))
    assert int((changed - usual).argmax()) >= 3 and float(changed.max()) > 2 * float(usual.max())
    assert torch.equal(changed[:3], usual[:3])  # states before the token are what they were
    cost = learnt.score_rollout(strange).tokens()
    assert bool((cost <= 0).all()) and bool((cost[1, 3:] < 0).any())


def test_it_pays_nothing_before_it_learnt_and_learns_from_right_completions_alone(tmp_path) -> None:
    policy = toy_policy()
    rollout = policy.generate(["b c", "g"], seeds=3, stopping=StoppingCriteria(max_new_tokens=5))
    first = flow(policy)
    before = first.state()
    assert not bool(first.score_rollout(rollout).tokens().any())
    first.learn(rollout, torch.zeros(2, dtype=torch.bool), 0)
    assert first.state().keys() == before.keys() and all(torch.equal(first.state()[k], before[k]) for k in before)
    first.learn(rollout, torch.tensor([True, False]), 0)
    assert bool(first.score_rollout(rollout).tokens().any()) and first.metrics()["latent_flow/loss"] > 0
    other = flow(policy)
    other.learn(rollout.rows(torch.tensor([0])), torch.ones(1, dtype=torch.bool), 0)
    assert all(torch.equal(value, other.state()[name]) for name, value in first.state().items())
    first.learn(rollout, torch.zeros(2, dtype=torch.bool), 0)
    assert first.metrics() == {}, "no loss of an earlier iteration"


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path) -> None:
    make = partial(toy_text_trainer, algorithm="rlfr", latent_flow=LatentFlowSettings(**SETTINGS))
    assert f"{KEY}.safetensors" in check_resume(make, tmp_path, 2, 4)[0][1]


def test_what_is_missing_is_named(tmp_path) -> None:
    with pytest.raises(UserError, match=r"rlfr adds rewards of single tokens.*Set latent_flow=\{\}"):
        toy_text_trainer(tmp_path, "rlfr", process=None)
    with pytest.raises(UserError, match=r"one advantage per completion.*single steps \(process, latent_flow\)"):
        toy_text_trainer(tmp_path, "grpo", latent_flow=LatentFlowSettings())
    with pytest.raises(UserError, match="latent_flow and process both score steps"):
        toy_text_trainer(tmp_path, "rlfr", latent_flow=LatentFlowSettings(), process=object())
