# SPDX-License-Identifier: Apache-2.0
"""The trainer on a toy: it learns, its micro-batches add up, its numbers are those of the plan."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.training.images import Brightness, ToyPolicy, gradients_of, none_owned, policy_weights, toy_trainer
from tests.support.training.metric_families import ASCENT_ONLY, MONITOR_ONLY, REGRESSION_ONLY, TEXT_ONLY
from visalign.core.surrogates.ratio_check import RatioError
from visalign.errors import UserError
from visalign.flow import initial_noise, rollout, sample_seed
from visalign.interfaces import RewardCapabilities
from visalign.training import (
    METRICS,
    FlowGRPO,
    RewardFailure,
    RolloutSettings,
    Trainer,
    forward_equivalents_per_image,
    read_metrics,
)

GSPO = {"algorithm": "flow_gspo", "changes": {"kl": 0.1, "surrogate_options": {"eps_low": 0.1, "eps_high": 0.1}}}
GUARD = {"algorithm": "grpo_guard", "step_weights": [1.0, 2.0, 0.5, 0.0], "changes": {"kl": 0.1}}


def _gradient(tmp_path, micro_batch: int, objective: dict) -> torch.Tensor:
    """The sum of the gradients of an iteration's two updates, in float64; the policy moves in between."""
    policy = ToyPolicy(torch.float64, guided=True)
    with torch.no_grad():
        policy.net.shift.normal_(generator=torch.Generator().manual_seed(1)).mul_(0.01)
    cut = {"micro_batch": micro_batch}
    return _two_updates(toy_trainer(tmp_path, policy=policy, objective=objective, optimizer=cut), policy)


def _two_updates(trainer: Trainer[FlowGRPO], policy: ToyPolicy, all_live: bool = False) -> torch.Tensor:
    algorithm = trainer.algorithm
    experience = algorithm.collect(trainer.context).experience
    with torch.no_grad():
        policy.net.shift.add_(0.003)  # so that ratios differ from 1
    matches = []
    for step in algorithm.prepare(experience, trainer.context):
        if all_live:
            step = replace(step, live=torch.ones_like(step.live))
        sums = algorithm.backward(experience, step, trainer.context)
        matches.append(sums["decisions"] == 3 * int(step.live.sum()))
    assert len(matches) == trainer.context.optimizer.updates_per_iteration and all(matches)
    return gradients_of(policy)


BALANCE = {"algorithm": "flowrl", "changes": {"surrogate_options": {"beta": 0.1}}}


@pytest.mark.parametrize("objective", [{}, GUARD, GSPO, BALANCE], ids=["published", "guard", "gspo", "flowrl"])
def test_accumulation_equals_one_big_batch(tmp_path, objective):
    """GSPO couples the steps of a sample: at 1 and 2 pairs its gradient comes from two passes."""
    expected = _gradient(tmp_path, 10_000, objective)
    assert expected.norm() > 1e-4
    for micro_batch in (2, 7):
        torch.testing.assert_close(_gradient(tmp_path, micro_batch, objective), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("objective", [{"changes": {"kl": 0.1}}, GSPO], ids=["published", "gspo"])
def test_a_process_without_a_sample_sends_one_pair_and_moves_nothing(tmp_path, objective):
    """Never more than a micro-batch holds: with one pair at a time, all steps of a sample may not fit."""
    policy = ToyPolicy()
    trainer = toy_trainer(tmp_path, policy=policy, objective=objective, optimizer={"micro_batch": 1})
    experience = trainer.algorithm.collect(trainer.context).experience
    experience.shares = none_owned(experience.shares)
    for step in trainer.algorithm.prepare(experience, trainer.context):
        before = policy.count.forward_backward
        sums = trainer.algorithm.backward(experience, step, trainer.context)
        assert policy.count.forward_backward - before == 1
        assert sums["decisions"] == sums["loss/policy"] == sums["loss/kl"] == 0
    assert not gradients_of(policy).any()


_WHOLE = {"updates_per_iteration": 1}
VELOCITY = {"kl": 0.5, "kl_form": "velocity"}


@pytest.mark.parametrize("algorithm", ["flow_grpo", "flow_gspo"])
def test_the_kl_of_velocities_is_what_the_weights_moved_them_by(tmp_path, algorithm):
    """v − v_ref of the toy is the shift of the prompt in each channel, at all places and steps."""
    policy = ToyPolicy(torch.float64)
    trainer = toy_trainer(
        tmp_path, policy=policy, objective={"algorithm": algorithm, "changes": VELOCITY}, optimizer=_WHOLE
    )
    grpo = trainer.algorithm
    experience = grpo.collect(trainer.context).experience
    with torch.no_grad():
        policy.net.shift.copy_(torch.arange(12, dtype=torch.float64).view(3, 4) / 100)
    moved = policy.net.shift.detach()[experience.condition.index].square().mean(1)
    (step,) = grpo.prepare(experience, trainer.context)
    sums = grpo.backward(experience, step, trainer.context)
    record = grpo.record(experience, [sums])
    assert record["kl"] == pytest.approx(float(moved.mean()), rel=1e-9)
    assert record["loss/kl"] == pytest.approx(0.5 * float(moved.mean()), rel=1e-9)
    gradient = gradients_of(policy)
    experience.objective = replace(experience.objective, kl=0.0)
    policy.net.zero_grad()
    grpo.backward(experience, step, trainer.context)
    share = torch.bincount(experience.condition.index, minlength=3).double() / len(experience.condition)
    pull = (gradient - gradients_of(policy))[: policy.net.shift.numel()].view(3, 4)
    expected = 0.5 * share[:, None] * 2 / 4 * policy.net.shift.detach()
    torch.testing.assert_close(pull, expected, rtol=1e-9, atol=1e-12)


class _Constant(Brightness):
    """Groups of "dark" carry no signal."""

    def score(self, images, prompts, metadata=None):
        scores = super().score(images, prompts, metadata)
        dark = torch.tensor([p == "dark" for p in prompts])
        return replace(scores, value=torch.where(dark, 0.3, scores.value))


def test_leaving_out_samples_without_signal_changes_nothing_but_the_cost(tmp_path):
    gradients, passes = [], []
    for all_live in (False, True):
        policy = ToyPolicy(torch.float64)
        trainer = toy_trainer(tmp_path, policy=policy, reward=_Constant())
        gradients.append(_two_updates(trainer, policy, all_live))
        passes.append(policy.count.forward_backward)
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-14)
    assert passes == [32 * 3, 48 * 3]


FLASH = {"sde_steps": [0, 1], "sde_window": 1, "sde_window_order": "progressive", "sde_window_every": 1}
FLASH |= {"ode_compression": 0.5, "solver": "dpmpp_2m"}


@pytest.mark.parametrize(
    ("guided", "beta", "steps"), [(False, 0.0, FLASH), (True, 0.0, {"train_steps": [1]}), (True, 0.1, {})]
)
def test_counted_cost_is_the_planned_minimum(tmp_path, guided, beta, steps):
    """MixGRPO-Flash by DPM-Solver: of the 3 and 2 steps behind windows at 0 and 1, 2 and 1 stay."""
    trainer = toy_trainer(
        tmp_path,
        policy=ToyPolicy(guided=guided),
        reward=_Constant(),
        rollout=steps,
        objective={"changes": {"kl": beta}},
        run={"iterations": 2},
    )
    trainer.train()
    for record in read_metrics(tmp_path / "metrics.jsonl"):
        planned = forward_equivalents_per_image(
            steps=3 if steps is FLASH else 4,
            trained=trainer.algorithm.rollout.trained_per_image,
            guided=guided,
            reference=beta > 0,
            trained_share=record["trained_share"],
        )
        assert record["forward_equivalents_per_image"] == pytest.approx(planned, rel=1e-12)
        assert record["trained_share"] == (1.0 if beta else pytest.approx(2 / 3))


def test_each_iteration_logs_the_table(tmp_path):
    trainer = toy_trainer(tmp_path, run={"iterations": 1, "evaluate_every": 1}, evaluate=lambda _: {"accuracy": 0.5})
    trainer.train()
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    families = {key.split("/")[0] + "/*" if "/" in key else key for key in record}
    assert families == set(METRICS) - {*TEXT_ONLY, *REGRESSION_ONLY, *ASCENT_ONLY, *MONITOR_ONLY} - {
        "loss/*",
        "kl",
        "loss_scale",
        "reward_weight/*",
        "reward_multiplier/*",
    }
    assert record["heldout/accuracy"] == 0.5
    assert record["ratio_floor"] < 1e-5 < record["ratio_std"]
    assert record["valid_share"] == 1 and record["frac_reward_zero_std"] == 0
    assert {"seconds/rollout", "seconds/decode", "seconds/reward", "seconds/update", "seconds/other"} <= set(record)


@pytest.mark.parametrize(("objective", "micro_batch"), [({"changes": {"kl": 0.1}}, 64), (GSPO, 1)])
def test_a_log_prob_that_is_not_finite_costs_its_update_and_not_the_run(tmp_path, objective, micro_batch):
    class Broken(ToyPolicy):
        broken = False

        def velocity(self, x, sigma, condition, time=None):
            v = super().velocity(x, sigma, condition, time)
            return v * torch.nan if self.broken else v

    policy = Broken()
    trainer = toy_trainer(tmp_path, policy=policy, objective=objective, optimizer={"micro_batch": micro_batch})
    trainer.iterate()
    experience = trainer.algorithm.collect(trainer.context).experience
    moved, policy.broken = policy_weights(policy), True
    record, _ = trainer._update(experience)
    assert trainer.counters.skipped == 2 and math.isnan(record["ratio_max"])
    assert torch.equal(policy_weights(policy), moved)
    policy.broken = False
    assert trainer.iterate()["updates_skipped"] == 2


def test_a_policy_whose_ratio_is_not_one_is_stopped_before_it_moves(tmp_path):
    class Drifting(ToyPolicy):
        def velocity(self, x, sigma, condition, time=None):
            return super().velocity(x, sigma, condition, time) + (0.05 if torch.is_grad_enabled() else 0.0)

    policy = Drifting()
    trainer = toy_trainer(tmp_path, policy=policy)
    with pytest.raises(RatioError, match="Before the first update the ratio must be 1"):
        trainer.train()
    assert not policy_weights(policy).any()
    trainer = toy_trainer(tmp_path, policy=Drifting(), objective={"ratio_bound": 10.0}, run={"iterations": 1})
    assert trainer.train().stopped == "finished"


def test_no_ratio_is_checked_after_a_step_of_a_replay_alone(tmp_path, monkeypatch):
    trainer = toy_trainer(tmp_path, run={"iterations": 1})
    backward = trainer.algorithm.backward

    def replay_first(experience, step, context):
        change = {"largest": 1.0} if context.counters.updates else {"decisions": 0}
        return {**backward(experience, step, context), **change}

    monkeypatch.setattr(trainer.algorithm, "backward", replay_first)
    assert trainer.train().stopped == "finished" and trainer.counters.updates == 2


def test_training_replays_the_time_that_the_rollout_gave(tmp_path):
    """Times that follow from the grid and not from σ alone, so that only the recorded ones are right."""

    class Timed(ToyPolicy):
        def times(self, sigmas):
            return torch.linspace(1, 0, len(sigmas))

        def velocity(self, x, sigma, condition, time=None):
            times = self.times(sigma) if time is None else time
            return super().velocity(x, sigma, condition) + times.view(-1, 1, 1, 1)

    assert toy_trainer(tmp_path, policy=Timed(), run={"iterations": 1}).train().stopped == "finished"


def test_the_bound_of_the_first_ratio_grows_with_a_sum_only(tmp_path):
    """Latents of 64 numbers: 64 × 1e-5 for the sum, 1e-5 for the guard, whose log-ratio is always a mean."""
    rollout = {"log_prob_reduction": "sum"}
    bounds = [
        toy_trainer(tmp_path, rollout=rollout, objective={"algorithm": name}).algorithm.ratio_bound
        for name in ("flow_grpo", "grpo_guard")
    ]
    assert bounds == [pytest.approx(64e-5), 1e-5]


def test_a_reward_that_compares_within_groups_is_told_which_they_are(tmp_path):
    """Four groups of three prompts: the two groups of one prompt stay apart."""
    members = []

    class Grouped(Brightness):
        capabilities = RewardCapabilities(needs_group=True)

        def score(self, images, prompts, metadata=None):
            members.extend((record["group_id"], prompt) for record, prompt in zip(metadata, prompts, strict=True))
            return super().score(images, prompts, metadata)

    toy_trainer(tmp_path, reward=Grouped(), run={"iterations": 1}).train()
    groups = set(members)
    assert len(groups) == 6 > len({prompt for _, prompt in groups}) and len(members) == 48


class _Failing(Brightness):
    def __init__(self, share: float) -> None:
        self.share = share

    def score(self, images, prompts, metadata=None):
        scores = super().score(images, prompts)
        failed = torch.arange(len(prompts)) < self.share * len(prompts)
        value = torch.where(failed, torch.nan, scores.value)
        reason = ["judge timed out" if f else None for f in failed]
        return replace(scores, value=value, valid=~failed, reason=reason)


def test_too_many_failures_stop_the_run(tmp_path):
    message = r"'brightness' could not score 24 of 48 .*at most 20%.*timed out \(24×\)"
    with pytest.raises(RewardFailure, match=message):
        toy_trainer(tmp_path, reward=_Failing(0.5)).train()
    with pytest.raises(RewardFailure, match="could not score 48 of 48"):
        toy_trainer(tmp_path, reward=_Failing(1.0), rollout={"max_failure_rate": 1.0}).train()
    with pytest.warns(UserWarning, match="'brightness' could not score samples, which are left out: judge timed out"):
        toy_trainer(tmp_path / "half", reward=_Failing(0.5), rollout={"max_failure_rate": 0.5}).iterate()


def test_step_draws_are_reproducible_and_vary():
    settings = RolloutSettings(steps=10, sde_steps=[1, 2, 3, 4, 5], sde_window=2)
    draws = [tuple(settings.choose_steps(0, i)[0]) for i in range(20)]
    assert draws == [tuple(settings.choose_steps(0, i)[0]) for i in range(20)]
    assert len(set(draws)) > 4 and all(len(set(d)) == 2 and set(d) <= {1, 2, 3, 4, 5} for d in draws)
    fixed = RolloutSettings(steps=10, sde_steps=[1, 3, 5], train_steps=[5, 1])
    assert fixed.choose_steps(0, 7) == ([1, 3, 5], (0, 2))
    moving = RolloutSettings(
        steps=10, sde_steps=[1, 2, 4], sde_window=2, sde_window_order="progressive", sde_window_every=1
    )
    assert [moving.choose_steps(0, i)[0] for i in range(4)] == [[1, 2], [2, 4], [4], [1, 2]]
    one_way = replace(moving, sde_window_roll_back=False)
    assert [one_way.choose_steps(0, i)[0] for i in (3, 9)] == [[4], [4]]
    strided = replace(moving, sde_window_stride=2)
    assert [strided.choose_steps(0, i)[0] for i in range(3)] == [[1, 2], [4], [1, 2]]
    assert strided.pairs_per_image == (2 + 1) / 2
    with pytest.raises(UserError, match="are of a window that moves"):
        replace(moving, sde_window_order="subset", sde_window_roll_back=False)
    assert moving.pairs_per_image == (2 + 2 + 1) / 3 and moving.trained_per_image == 2


def test_a_group_makes_its_common_steps_once(tmp_path):
    """The same latents for 1 + 3/8 steps an image, not 4: the group shares its third forward too."""
    policy: Any = ToyPolicy(torch.float64)
    shared = {"shared_noise": True, "sde_steps": [2, 3]}
    trainer = toy_trainer(tmp_path, policy=policy, rollout=shared)
    source = trainer.algorithm
    scored = source.scored(source.sample(0, trainer.clock, [2, 3]), trainer.clock)
    assert policy.count.forward == 48 * 1 + 6 * 3 == 48 * trainer.algorithm.rollout.sampled_per_image
    separate = rollout(
        policy,
        scored.condition,
        sigmas=source.sigmas,
        sde_steps=[2, 3],
        noise_level=0.5,
        seeds=source.sample_seeds(scored.batch.sample_id),
        noise=initial_noise([sample_seed(source.seed, "group", i) for i in scored.batch.group_id.tolist()], (4, 4, 4)),
    )
    torch.testing.assert_close(scored.trajectory.latents, separate.latents)
    torch.testing.assert_close(scored.trajectory.x, separate.x)


def test_step_weights_must_fit_the_steps(tmp_path):
    with pytest.raises(UserError, match=r"step_weights is \[1.0, 1.0\] for 4 steps"):
        toy_trainer(tmp_path, objective={"step_weights": [1.0, 1.0]})
    with pytest.raises(UserError, match=r"0 at all steps that are trained \[0, 1, 2\]. Give one of them"):
        toy_trainer(tmp_path, objective={"step_weights": [0.0, 0.0, 0.0, 1.0]})


@pytest.mark.parametrize("kind", ["std", "inverse_gradient"])
def test_a_step_weighs_what_its_kernel_says_over_the_mean_of_all_that_may_train(kind, tmp_path):
    trainer = toy_trainer(tmp_path, objective={"changes": {"step_weight": kind}}, rollout={"sde_window": 1})
    experience, levels = trainer.algorithm.collect(trainer.context).experience, trainer.algorithm.sigmas
    weight = experience.trajectory.kernel.step_weight(kind, levels[:-1], levels[1:])
    expected = weight[list(experience.trajectory.sde_steps)] / weight[trainer.algorithm.rollout.trained].mean()
    torch.testing.assert_close(experience.trajectories.loss_weight.unique(), expected)


@pytest.mark.parametrize("attributes", [{}, {"image_size": None}, {"image_size": property(lambda self: 8)}])
def test_a_policy_of_one_size_refuses_several(tmp_path, attributes):
    policy = type("Own", (ToyPolicy,), attributes)()
    with pytest.raises(UserError, match=r"image_sizes is \[8\], and Own generates .* one size.*image_size"):
        toy_trainer(tmp_path, policy=policy, rollout={"image_sizes": [8]})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"records": ["bright"]}, r"Record 'bright' has no prompt\. Give records as"),
        ({"records": []}, "There are 0 prompts and 0 strata"),
        ({"reward": len}, r"without score\. Give e\.g\. FunctionReward\(function\)"),
    ],
)
def test_wrong_records_and_rewards_are_refused(tmp_path, wrong, message):
    with pytest.raises(UserError, match=message):
        toy_trainer(tmp_path, **wrong)
