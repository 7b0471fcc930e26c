# SPDX-License-Identifier: Apache-2.0
"""Every algorithm on images and on text: two updates make good samples likelier, or it is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from tests.support.training.images import Brightness, Loud, toy_trainer
from tests.support.training.text import Letters, toy_text_trainer, weights_of
from visalign.core import NAMED, conditional_advantages, gdpo_advantages
from visalign.core.objective.decisions import ON_STEPS
from visalign.errors import UserError
from visalign.interfaces import Scores
from visalign.rewards import WeightedSum, WeightedTextSum
from visalign.training import DiffusionObjectiveSettings, TextObjectiveSettings

TEXT_ONLY = {
    *(
        "ppo",
        "ppo_kl",
        "ppo_ptx",
        "safe",
        "remax",
        "opo",
        "optimal_token_baseline",
        "dppo_tv",
        "dppo_kl",
        "cppo",
        "drpo",
    ),
    *("top_entropy", "clip_cov", "kl_cov", "aem", "empg", "perplexity", "siren", "epo", "tea"),
    *("clip_b", "clip_v", "steer", "pear", "ares", "likelihood", "jepo"),
    *("rank_bonus", "rlfr", "grpo_process", "prime", "aepo"),
    "canon",  # without objective.metric
}
"""Algorithms that are refused for denoising steps."""
STEPS_ONLY = {"flow_grpo", "flow_gspo", "grpo_guard", "flow_dppo", "pref_grpo"}
"""Algorithms that are refused for tokens."""


def _gain(advantage: torch.Tensor, weight: torch.Tensor, moved: torch.Tensor) -> float:
    """Σ A (log π − log π_old) over present decisions, per decision."""
    present = weight != 0
    return float((advantage * moved)[present].double().mean())


@pytest.mark.parametrize("name", sorted(set(NAMED) - TEXT_ONLY))
def test_an_algorithm_makes_good_images_likelier(name, tmp_path):
    trainer = toy_trainer(
        tmp_path,
        objective={"algorithm": name, "ratio_bound": 1e-4},
        optimizer={"lr": 1e-4, "micro_batch": 7},
        features=(lambda images: images.flatten(2).mean(2)) if name == "entrocraft" else None,
    )
    algorithm, context = trainer.algorithm, trainer.context
    experience = algorithm.collect(context).experience
    steps = algorithm.prepare(experience, context)
    before = algorithm._log_probs(experience, 64)
    trainer._update(experience)
    moved = algorithm._log_probs(experience, 64) - before
    assert len(steps) == trainer.counters.updates == 2 and trainer.counters.skipped == 0
    order = torch.cat([step.sample for step in steps]).argsort()
    advantage = torch.cat([step.prepared.advantage for step in steps])[order]
    weight = torch.cat([step.prepared.weight for step in steps])[order]
    assert _gain(advantage, weight, moved) > 0


@pytest.mark.parametrize("name", sorted(set(NAMED) - STEPS_ONLY))
def test_an_algorithm_makes_good_texts_likelier(name, tmp_path):
    trainer = toy_text_trainer(tmp_path, name, optimizer={"lr": 1e-4})
    algorithm, context = trainer.algorithm, trainer.context
    start = weights_of(trainer)
    experience = algorithm.collect(context).experience
    steps = algorithm.prepare(experience, context)
    policy, old = algorithm.parts.policy, experience.trajectories.old_log_prob
    trainer._update(experience)
    assert trainer.counters.updates == 2 and not torch.equal(start, weights_of(trainer))
    if name == "ppo_ptx":  # 27.8 times the demonstrations' pull
        return
    with torch.no_grad():
        moved = policy.log_probs(experience.rollout).log_prob.cpu() - old
    order = torch.cat([step.sample for step in steps]).argsort()
    advantage = torch.cat([step.prepared.advantage for step in steps])[order]
    weight = torch.cat([step.prepared.weight for step in steps])[order]
    assert _gain(advantage, weight, moved) > 0


@pytest.mark.parametrize(
    ("kind", "names"),
    [(DiffusionObjectiveSettings, TEXT_ONLY), (TextObjectiveSettings, STEPS_ONLY)],
    ids=["images", "text"],
)
def test_what_means_nothing_is_refused_with_what_to_take_instead(kind: Any, names: set[str]):
    for name in names:
        with pytest.raises(UserError, match=rf"{name}.*(Take|Use) "):
            kind(algorithm=name)
    assert ON_STEPS, "the table that says why"


@pytest.mark.parametrize("kind", [DiffusionObjectiveSettings, TextObjectiveSettings])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantage_options": {"scale": "grop"}}, "scale must be one of group, batch, none; got 'grop'"),
        ({"advantage": "given", "advantage_options": {}}, "needs Trajectories.advantage, which is None"),
    ],
)
def test_values_that_a_stage_refuses_are_refused_with_the_settings(kind: Any, changes: Any, message: str):
    """Before the model is loaded and an iteration's samples are made and judged."""
    with pytest.raises(UserError, match=f"^objective: .*{message}"):
        kind(algorithm="grpo", changes=changes)


@pytest.mark.parametrize("metric", ["entropy", "length"])
def test_canon_of_texts_compares_the_halves_by_entropy_or_length(metric, tmp_path):
    settings = {"metric": metric} if metric == "length" else {}
    trainer = toy_text_trainer(tmp_path, "canon", objective=settings)
    experience = trainer.algorithm.collect(trainer.context).experience
    steps = trainer.algorithm.prepare(experience, trainer.context)
    t = experience.trajectories
    assert t.entropy is not None
    length = t.weight.sum(1)
    number = length if metric == "length" else (t.entropy * t.weight).sum(1) / length
    expected = conditional_advantages(t.reward, number, t.group)
    for step in steps:
        advantage, present = step.prepared.advantage, step.prepared.weight != 0
        assert torch.allclose(torch.where(present, advantage - expected[step.sample, None], 0.0), torch.zeros(()))
    with pytest.raises(UserError, match=r"objective\.metric is 'age'"):
        TextObjectiveSettings(algorithm="canon", metric=cast(Any, "age"))
    with pytest.raises(UserError, match=r"algorithm=grpo does not read objective.metric of canon"):
        TextObjectiveSettings(algorithm="grpo", metric="length")


def test_canon_of_images_compares_the_halves_by_a_part_of_the_reward(tmp_path):
    """Light is compared across the median of red, which is recorded and not optimised."""
    reward = WeightedSum({"light": (Brightness(), 1.0), "red": (Loud(), 0.0)})
    objective = {"algorithm": "canon", "metric": "red"}
    optimizer = {"updates_per_iteration": 1}
    trainer = toy_trainer(tmp_path, reward=reward, objective=objective, optimizer=optimizer)
    experience = trainer.algorithm.collect(trainer.context).experience
    t = experience.trajectories
    (step,) = trainer.algorithm.prepare(experience, trainer.context)
    advantage, value, red = (x.double()[:8] for x in (step.prepared.advantage[:, 0], t.reward, t.metric))
    low, high = red.argsort()[:4], red.argsort()[4:]
    torch.testing.assert_close(advantage[low], value[low] - value[high].mean())
    torch.testing.assert_close(advantage[high], value[high] - value[low].mean())
    other = toy_trainer(tmp_path, reward=reward, objective={**objective, "metric": "blue"})
    with pytest.raises(UserError, match=r"metric is 'blue', and the parts .*light, .*red.*weight 0"):
        other.iterate()


def test_changes_of_a_row_apply_where_it_is_chosen():
    rows = {"grpo_guard": {"surrogate_options": {"eps_low": 0.001}}}
    guard = DiffusionObjectiveSettings(algorithm="grpo_guard", changes_for=rows, changes={"kl": 0.1})
    assert guard.build(length=3).surrogate_options == {"eps_low": 0.001, "eps_high": 2e-6}
    assert guard.build(length=3).kl == 0.1
    assert DiffusionObjectiveSettings(algorithm="cispo", changes_for=rows).build(length=3).surrogate == "cispo"
    both = DiffusionObjectiveSettings(
        algorithm="grpo_guard", changes_for=rows, changes={"surrogate_options": {"eps_high": 0.5}}
    )
    assert both.build(length=3).surrogate_options == {"eps_low": 0.001, "eps_high": 0.5}
    with pytest.raises(UserError, match="no algorithm 'grpo_gard'"):
        DiffusionObjectiveSettings(changes_for={"grpo_gard": {}})


def test_options_of_a_file_leave_with_the_choice_that_they_belong_to():
    rows = {"grpo_guard": {"advantage_options": {"scale": "group"}}, "awm": {"signal_options": {"scale": "group"}}}
    for advantage, options in (("group", "group"), ("gdpo", None)):
        guard = DiffusionObjectiveSettings(
            algorithm="grpo_guard", changes_for=rows, changes={"advantage": advantage}
        ).build(length=3)
        assert (guard.advantage, guard.advantage_options.get("scale")) == (advantage, options)
    awm = DiffusionObjectiveSettings(algorithm="awm", changes_for=rows, changes={"signal": "gdpo", "clamp": None})
    assert awm.regression is not None and "scale" not in awm.regression.signal_options


def test_an_off_policy_correction_compares_rollout_and_replay(tmp_path):
    """They agree here, so the correction changes nothing: same weights to the bit."""
    ends = []
    for options in (None, {"level": "token", "mode": "truncate", "high": 2.0}):
        changes = {} if options is None else {"importance_sampling": options}
        trainer = toy_trainer(tmp_path, objective={"algorithm": "grpo", "changes": {**changes, "kl": 0.0}})
        trainer.iterate()
        ends.append(torch.cat([p.detach().flatten() for _, p in trainer.weights.named]))
        if options is not None:
            collected = trainer.algorithm.collect(trainer.context).experience.trajectories
            assert collected.rollout_log_prob is not None
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-6)


class _LoudLetters(Letters):
    def score(self, completions: Any, prompts: Any, metadata: Any = None) -> Scores:
        scores = super().score(completions, prompts, metadata)
        return replace(scores, value=1e4 * scores.value)


def test_gdpo_of_texts_hears_each_term_of_a_sum(tmp_path):
    terms = {"a": (Letters("a"), 1.0), "e": (_LoudLetters("e"), 0.5)}
    reward = WeightedTextSum(terms, allow_mixed_units=True)
    optimizer = {"updates_per_iteration": 1}
    trainer = toy_text_trainer(tmp_path, "gdpo", reward=reward, dynamic={}, optimizer=optimizer)
    algorithm, context = trainer.algorithm, trainer.context
    experience = algorithm.collect(context).experience
    steps = algorithm.prepare(experience, context)
    order = torch.cat([step.sample for step in steps]).argsort()
    advantage = torch.cat([step.prepared.advantage for step in steps])[order].reshape(len(order), -1)[:, 0]
    t = experience.trajectories
    assert t.reward.shape == (len(order), 2) and list(t.reward_weights) == [1.0, 0.5]
    expected = gdpo_advantages(t.reward, [1.0, 0.5], t.group, ddof=0)
    torch.testing.assert_close(advantage.double(), expected.double(), rtol=1e-4, atol=1e-5)
