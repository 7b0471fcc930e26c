# SPDX-License-Identifier: Apache-2.0
"""A reference that follows the policy (GARDO): when it moves, what a resume restores, what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.support.training.images import ToyPolicy, check_resume, toy_trainer
from tests.support.training.text import toy_text_trainer
from visalign.training.policy.reference import KEY

FLOW = {"algorithm": "flow_grpo", "changes": {"surrogate_options": {"eps_low": 0.1, "eps_high": 0.1}}}
ROWS: dict[str, dict[str, Any]] = {
    "flow_grpo": FLOW,
    "diffusion_nft": {"algorithm": "diffusion_nft", "changes": {"kl": 0.1}},
    "draft": {"algorithm": "draft", "changes": {"kl": 0.1, "last": 2}},
}


def _weights(trainer: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for _, parameter in trainer.weights.named]


def test_the_reference_is_the_policy_of_the_last_reset(tmp_path):
    """After every second iteration; the gradient of a graph that was built before its block is unchanged."""
    policy = ToyPolicy()
    trainer = toy_trainer(tmp_path, policy=policy, objective={**FLOW, "reset_reference_every": 2})
    history, ages = [], []
    for _ in range(5):
        history.append(_weights(trainer))
        with trainer.algorithm.reference.applied():
            ages.append(next(n for n, w in enumerate(history) if torch.equal(w[0], policy.net.shift)))
        assert all(torch.equal(a, b) for a, b in zip(history[-1], _weights(trainer), strict=True))
        trainer.iterate()
    assert ages == [0, 0, 2, 2, 4]
    x = torch.ones(1, 4, requires_grad=True)
    loss = policy.net.mix(x).square().sum()
    with trainer.algorithm.reference.applied():
        policy.net.mix(x)
    (slope,) = torch.autograd.grad(loss, x)
    expected = 2 * policy.net.mix.weight.T @ (policy.net.mix.weight @ torch.ones(4))
    torch.testing.assert_close(slope[0], expected)


@pytest.mark.parametrize("name", ROWS)
def test_a_bound_resets_after_the_iteration_that_exceeds_it(name, tmp_path):
    trainer = toy_trainer(tmp_path, objective={**ROWS[name], "reset_reference_above": 1e9})
    for _ in range(2):
        trainer.iterate()
    divergence = trainer.algorithm.divergence
    assert divergence > 0 and KEY not in trainer.counters.own
    again = toy_trainer(tmp_path, objective={**ROWS[name], "reset_reference_above": divergence / 2})
    while KEY not in again.counters.own:
        again.iterate()
        assert again.counters.iteration <= 2
        assert (again.algorithm.divergence > divergence / 2) == (KEY in again.counters.own)


@pytest.mark.parametrize("name", ROWS)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(name, tmp_path):
    make = partial(toy_trainer, objective={**ROWS[name], "reset_reference_every": 2})
    assert "reference.safetensors" in check_resume(make, tmp_path, 3, 5)[0][1]


def test_texts_reset_theirs_and_resume(tmp_path):
    make = partial(toy_text_trainer, objective={"changes": {"kl": 0.5}, "reset_reference_every": 1})
    _, trainer = check_resume(make, tmp_path, 2, 3)
    trained = _weights(trainer)
    with trainer.algorithm.parts.reference.applied():
        assert all(torch.equal(a, b) for a, b in zip(trained, _weights(trainer), strict=True))
