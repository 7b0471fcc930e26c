# SPDX-License-Identifier: Apache-2.0
"""PickScore, HPSv2's ranks, ICT and HP: hand values, and what upstream does otherwise.

Values and gradients of the released codes stand in tests/golden.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.core import assert_values, f64, normal
from visalign.core.preference.ict import IctLabels, hp_loss, ict_hp_loss, ict_labels
from visalign.core.standalone.clip_losses import pickscore_loss, rank_margin_loss


def units(*shape: int, seed: int = 0) -> Tensor:
    return F.normalize(normal(*shape, seed=seed), dim=-1)


class TestPickScore:
    def test_a_tie_is_best_at_zero(self) -> None:
        text, image = units(3, 4), units(3, 4, seed=1)
        loss = pickscore_loss(text, image, image, f64(0.5, 0.5, 0.5), logit_scale=50.0)
        assert loss.item() == pytest.approx(0, abs=1e-12)
        assert pickscore_loss(text, image, units(3, 4, seed=2), f64(0.5, 0.5, 0.5), logit_scale=50.0) > 0


class TestSeveralImages:
    def test_ranks_by_hand(self) -> None:
        """Leads of 1, 0.5 and 1.5 times differences of rank of 1, 1 and 2, against a margin of 2."""
        loss = rank_margin_loss(f64(1.5, 0.5, 0), f64(0, 1, 2), [7, 7, 7], margin=2.0)
        assert_values(loss, (1 + 1.5 + 0) / 3)
        assert_values(rank_margin_loss(f64(1, 2), f64(0, 0), [1, 1]), 0)
        assert_values(rank_margin_loss(f64(1, 2, 9), f64(0, 1, 0), [1, 1, 2]), 2, 0)

    def test_upstream_ranks_depend_on_the_other_prompts(self) -> None:
        score, rank = f64(3, 0), f64(0, 1)
        single = rank_margin_loss(score, rank, [0, 0], mode="upstream")
        assert_values(single, 2 / 3)  # the diagonal: two constants of 1 among three entries
        wide = rank_margin_loss(torch.cat([score, f64(5, 1, 0)]), f64(0, 1, 0, 1, 2), [0, 0, 1, 1, 1], mode="upstream")
        assert wide[0] != single[0]
        ours = rank_margin_loss(torch.cat([score, f64(5, 1, 0)]), f64(0, 1, 0, 1, 2), [0, 0, 1, 1, 1])
        assert_values(ours, 0, 0)


class TestIctLabels:
    def test_hand_values(self) -> None:
        labels = ict_labels(f64(0.35, 0.63), f64(0.56, 0.14), f64(0.5, 0.9), theta=0.7)
        assert_values(labels.easy1, 0.5, 0.2)
        assert_values(labels.easy2, 0.8, 0.2)
        assert_values(labels.refined1, 0.25, 0.18)
        assert_values(labels.refined2, 0.4, 0.18)
        assert_values(labels.easy3, 1, 1)
        assert_values(labels.refined3, 1, 1)

    def test_upstream_trains_the_winner_as_the_loser_of_another_prompt(self) -> None:
        inputs = (f64(0.21), f64(0.63), f64(0.5))
        ours, theirs = ict_labels(*inputs), ict_labels(*inputs, mode="upstream")
        assert_values(ours.easy2, 0.9)
        assert_values(theirs.easy2, 0.15)
        assert torch.equal(theirs.easy2, theirs.refined1) and theirs.easy2 < theirs.easy1


class TestIctLosses:
    LABELS = IctLabels(*(f64(*row) for row in ([0.2, 0.4], [0.6, 0.7], [1, 1], [0.1, 0.3], [0.5, 0.6], [1, 1])))

    def test_hp_by_hand(self) -> None:
        hp = torch.stack([f64(0, 1), f64(0.2, 0), f64(1, 2)])
        assert hp_loss(hp).item() == pytest.approx((0.1 + 0 + 1.3 + 0) / 2)
        cosine = torch.stack([f64(0.3), f64(0.6), f64(0.9)])
        even = ict_hp_loss(cosine, torch.zeros(3, 1))  # thirds: leads of 0.1
        assert even.item() == pytest.approx(0.4)
        twice = ict_hp_loss(cosine.expand(3, 2), torch.zeros(3, 2), reduction="sum")
        assert twice.item() == pytest.approx(0.8)
