# SPDX-License-Identifier: Apache-2.0
"""Rules of papers by their key: what the objective prepares is what their functions give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.core import LABELS, step
from visalign.core.advantages.entropy import aem_advantages
from visalign.core.advantages.group import group_advantages
from visalign.core.advantages.rules import conditional_advantages, online_dpo_advantages, prl_advantages
from visalign.core.objective.data import Trajectories
from visalign.core.objective.invariance import check_invariance
from visalign.core.objective.objective import Objective
from visalign.core.tokens.selection_rules import clip_b_keep, clip_b_thresholds, entropy_discriminator
from visalign.core.tokens.steer import steer_change, steer_thresholds, steer_weights

CLIP = {"eps_low": 0.2, "eps_high": 0.2}
METRIC = torch.tensor([3.0, 1, 4, 1, 5, 9, 2, 6])


def _group(t: Trajectories) -> Tensor:
    assert t.reward is not None
    return group_advantages(t.reward, LABELS)


def _expected(name: str, t: Trajectories) -> Tensor:
    assert t.reward is not None and t.entropy is not None and t.ref_log_prob is not None
    if name == "canon":
        return conditional_advantages(t.reward, METRIC, LABELS, mu=0.7)
    if name == "prl":
        return prl_advantages(_group(t), t.old_log_prob - t.ref_log_prob, t.weight, eta=2.0, block=2)
    if name == "online_dpo":
        away = ((t.old_log_prob - t.ref_log_prob) * (t.weight != 0)).sum(1)
        away[(t.weight == 0).all(1)] = torch.nan
        return online_dpo_advantages(t.reward, away, LABELS, beta=2.0)
    mean = torch.stack([h[w != 0].mean() for h, w in zip(t.entropy, t.weight, strict=True)])
    mean[~t.present()] = torch.nan
    return aem_advantages(_group(t), mean, LABELS, lam=2.0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("canon", {"mu": 0.7}),
        ("prl", {"eta": 2.0, "block": 2}),
        ("aem", {"lam": 2.0}),
        ("online_dpo", {"beta": 2.0}),
    ],
)
def test_advantages_by_key(name: str, options: dict) -> None:
    t, policy = step(11)
    t = replace(t, metric=METRIC)
    objective = Objective(advantage=name, advantage_options=options, surrogate_options=CLIP)
    prepared = objective.prepare(t)
    expected = _expected(name, t)
    expected = expected[:, None].expand_as(t.weight) if expected.ndim == 1 else expected
    present = prepared.weight != 0
    assert int(present.sum()) > 20
    torch.testing.assert_close(prepared.advantage[present], expected[present])
    assert max(check_invariance(objective, t, policy).values()) < 1e-6
    with pytest.raises(ValueError, match=f"advantage='{name}' needs Trajectories"):
        objective.prepare(replace(t, metric=None, entropy=None, ref_log_prob=None))


def test_a_sample_that_is_not_valid_has_no_say_in_the_others_of_its_group() -> None:
    """Its entropy moves neither minimum, maximum nor mean (AEM)."""
    t, _ = step(13)
    valid = torch.ones(len(t.weight), dtype=torch.bool)
    valid[2] = False
    found = []
    for factor in (1.0, 20.0):
        assert t.entropy is not None
        entropy = t.entropy.clone()
        entropy[2] *= factor
        objective = Objective(advantage="aem", surrogate_options=CLIP)
        found.append(objective.prepare(replace(t, entropy=entropy, valid=valid)).advantage[[3, 5]])
    assert torch.equal(*found) and found[0].abs().sum() > 0


def test_clip_b_leaves_tokens_out_and_steer_weighs_them() -> None:
    t, policy = step(12)
    plain = Objective(surrogate_options=CLIP)
    base = plain.prepare(t)
    assert t.entropy is not None
    clip_b = replace(plain, selection="clip_b", selection_options={"mu": 0.5})
    score = entropy_discriminator(t.old_log_prob, t.entropy)
    found = clip_b_thresholds(score, base.weight, mu=0.5)
    keep = clip_b_keep(score, base.advantage, base.weight, found)
    rows = clip_b.prepare(t)
    torch.testing.assert_close(rows.weight, base.weight * keep)
    assert 0 < int((rows.weight != 0).sum()) < int((base.weight != 0).sum())

    steer = replace(plain, selection="steer", selection_options={"w_min": 0.5, "decay": "exponential"})
    change = steer_change(t.old_log_prob, t.old_log_prob, t.entropy, base.advantage, base.weight)
    scale = steer_thresholds(change, base.weight, w_min=0.5)
    expected = steer_weights(change, base.weight, scale, decay="exponential")
    weighed = steer.prepare(replace(t, loss_weight=torch.full_like(t.weight, 2.0)))
    assert weighed.loss_weight is not None
    torch.testing.assert_close(weighed.loss_weight, 2 * expected)
    torch.testing.assert_close(weighed.counts.tokens, base.counts.tokens)
    loss, before = steer.loss(steer.prepare(t), policy), plain.loss(base, policy)
    inside = base.weight != 0
    torch.testing.assert_close(
        loss.decisions["policy"][inside], (expected * before.decisions["policy"])[inside]
    )
    for objective in (clip_b, steer):
        assert max(check_invariance(objective, t, policy).values()) < 1e-6
        with pytest.raises(ValueError, match="denoising steps of fixed variance"):
            objective.prepare(replace(t, decisions="denoising_steps"))
