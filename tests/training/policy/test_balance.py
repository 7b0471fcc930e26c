# SPDX-License-Identifier: Apache-2.0
"""MARBLE in the trainers of images and texts: its numbers, its linearity, its resume, its cost, what it
refuses; and GDPO's signal of the regressions."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.support.training.images import Brightness, Loud, ToyPolicy, check_resume, toy_trainer
from tests.support.training.text import Letters, toy_text_trainer
from visalign.core import gdpo_advantages
from visalign.errors import UserError
from visalign.rewards import WeightedSum, WeightedTextSum
from visalign.training import DiffusionObjectiveSettings, TextObjectiveSettings, forward_equivalents_per_image
from visalign.training.policy.balance import KEY, RewardBalance


def _several() -> WeightedSum:
    """The second drowns the first in a sum."""
    return WeightedSum({"light": (Brightness(), 1.0), "red": (Loud(), 0.5)}, allow_mixed_units=True)


def _three() -> WeightedSum:
    terms = {"light": (Brightness(), 1.0), "red": (Loud(), 0.5), "blue": (Loud(2), 2.0)}
    return WeightedSum(terms, allow_mixed_units=True)


def _trainer(folder: Any, name: str = "flow_grpo", policy: ToyPolicy | None = None, **more: Any) -> Any:
    objective = {"algorithm": name, "balance_every": 2, "changes": {"kl": 0.1}, **more.pop("objective", {})}
    if name == "flow_grpo":
        objective["changes"] |= {"surrogate_options": {"eps_low": 0.1, "eps_high": 0.1}}
    return toy_trainer(folder, policy=policy, reward=_three(), objective=objective, **more)


def test_the_weights_of_three_gradients_by_hand(tmp_path):
    """α = (5, 5, 2)/12 of (1, 0, 0), (−.6, .8, 0), (0, 0, 1), as worked by hand; then ᾱ = .7/3 + .3 α."""
    terms = {label: (Brightness(), 1.0) for label in "abc"}
    balance = RewardBalance(WeightedSum(terms), 2)
    run = toy_trainer(tmp_path).context
    parameter = torch.nn.Parameter(torch.zeros(3))
    rows = torch.tensor([[7.0, 0, 0], [-0.6, 0.8, 0], [0, 0, 0.01]])  # their lengths do not count

    def gradient(weights: Any) -> None:
        parameter.grad = torch.tensor(weights) @ rows

    assert balance.weights(run) == [1 / 3] * 3
    balance.measure(run, [("w", parameter)], gradient)
    expected = [0.7 / 3 + 0.3 * alpha / 12 for alpha in (5, 5, 2)]
    assert balance.weights(run) == pytest.approx(expected, abs=1e-6) and parameter.grad is None
    rows[0, 0] = float("inf")
    balance.measure(run, [("w", parameter)], gradient)
    rows.zero_()
    balance.measure(run, [("w", parameter)], gradient)
    assert balance.weights(run) == pytest.approx(expected, abs=1e-6)


def _of_texts(folder: Any, name: str = "grpo", **more: Any) -> Any:
    terms = {"light": (Letters("a"), 1.0), "red": (Letters("e"), 0.001), "blue": (Letters("i"), 2.0)}
    objective = {"balance_every": 2, "changes": {"kl": 0.1, "entropy": 0.1}, **more.pop("objective", {})}
    return toy_text_trainer(folder, name, reward=WeightedTextSum(terms), objective=objective, **more)


@pytest.mark.parametrize("name", ["flow_grpo", "ram", "grpo"])
def test_the_gradient_is_the_weighted_sum_of_the_rewards_own(name, tmp_path):
    """Before anything is clipped or clamped, whatever the rewards' units; for texts without the KL and
    entropy terms."""
    if name == "grpo":
        trainer = _of_texts(tmp_path, name, optimizer={"updates_per_iteration": 1})
    else:
        policy = ToyPolicy(torch.float64)
        trainer = _trainer(tmp_path, name, policy, objective={"changes": {"kl": 0.0}})
    algorithm, context = trainer.algorithm, trainer.context
    gradients = []

    class Watched(RewardBalance):
        def measure(self, run: Any, named: Any, gradient: Any) -> None:
            for weights in ([1.0, 0.0, 0], [0.0, 1.0, 0], [0.25, 0.75, 0]):
                gradient(weights)
                gradients.append(torch.cat([p.grad.flatten() for _, p in named]))
                trainer.weights.clear()

    algorithm.balance = Watched(_three(), 1)
    algorithm.prepare(algorithm.collect(context).experience, context)
    light, red, both = gradients
    rtol, atol = (1e-3, 1e-6) if name == "grpo" else (1e-8, 1e-12)
    torch.testing.assert_close(both, 0.25 * light + 0.75 * red, rtol=rtol, atol=atol)
    assert 0.05 < light.norm() / red.norm() < 20  # in a sum it would be 1e4


@pytest.mark.parametrize("name", ["flow_grpo", "grpo"])
def test_rows_learn_both_rewards_and_a_resume_is_exact(name, tmp_path):
    outcome, trainer = check_resume(partial(_of_texts if name == "grpo" else _trainer, name=name), tmp_path, 3, 4)
    assert trainer.counters.updates == 8 and not trainer.counters.skipped
    rows = outcome[2]
    weights = [[row[f"reward_weight/{label}"] for label in ("light", "red", "blue")] for row in rows]
    assert weights[0] == weights[1] != weights[2] == weights[3] and weights[0] != [1 / 3] * 3
    assert trainer.counters.own[KEY] == weights[3] and sum(weights[3]) == pytest.approx(1.0)


def test_the_cost_of_measuring_is_the_planned_one(tmp_path):
    trainer = _trainer(tmp_path, objective={"balance_every": 1})
    record = trainer.iterate()
    planned = forward_equivalents_per_image(steps=4, trained=3, guided=False, reference=1, measured=3 / 2)
    assert record["forward_equivalents_per_image"] == pytest.approx(planned) == 4 + 1.5 * 3 * 3 + 3 * 4


def test_gdpo_of_a_regression_hears_each_term_of_a_sum(tmp_path):
    gdpo = {"algorithm": "awm", "changes": {"signal": "gdpo", "signal_options": {"ddof": 0}, "clamp": None}}
    trainer = toy_trainer(tmp_path, reward=_several(), objective=gdpo)
    experience = trainer.algorithm.collect(trainer.context).experience
    images = experience.images
    expected = gdpo_advantages(images.columns, [1.0, 0.5], images.group, ddof=0)
    torch.testing.assert_close(experience.signal, expected.double())


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"algorithm": "gdpo"}, "advantage='gdpo': it weighs advantages, advantage='group'. Take flow_grpo"),
        ({"algorithm": "rloo"}, "algorithm=rloo with kl_in_reward is no sum over the rewards"),
        ({"algorithm": "dmd2"}, "balance_every weighs advantages of a loss, which objective.algorithm=dmd2 has"),
        ({"algorithm": "draft"}, "balance_every weighs advantages of a loss, which objective.algorithm=draft has"),
    ],
)
def test_what_cannot_be_balanced_is_refused(objective: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        DiffusionObjectiveSettings(balance_every=10, **objective)
    with pytest.raises(UserError, match="algorithm=flowrl whose loss squares the advantage is no sum"):
        TextObjectiveSettings(balance_every=10, algorithm="flowrl")


def test_one_reward_has_nothing_to_balance(tmp_path):
    with pytest.raises(UserError, match=r"rewards.terms has 1 terms .*\(brightness\). Give 2 to 12"):
        toy_trainer(tmp_path, objective={"balance_every": 10})
