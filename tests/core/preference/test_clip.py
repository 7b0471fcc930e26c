# SPDX-License-Identifier: Apache-2.0
"""PickScore, HPSv2's list losses, ICT and HP: hand values, loops, gradients, what upstream does otherwise."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.core import assert_values, f64, normal
from visalign.core.preference.ict import IctLabels, hp_loss, ict_hp_loss, ict_labels, ict_loss
from visalign.core.standalone.clip_losses import listwise_choice_loss, pickscore_loss, rank_margin_loss


def units(*shape: int, seed: int = 0) -> Tensor:
    return F.normalize(normal(*shape, seed=seed), dim=-1)


class TestPickScore:
    def test_hand_value(self) -> None:
        """One prompt along x; images at cosines 1 and 0: the odds are e^scale."""
        text, left, right = (torch.tensor([row]).double() for row in ([1, 0], [1, 0], [0, 1]))
        for label, wanted in ((1, math.log1p(math.exp(-2))), (0, math.log1p(math.exp(2)))):
            assert pickscore_loss(text, left, right, f64(label), logit_scale=2.0).item() == pytest.approx(wanted)

    def test_a_tie_is_best_at_zero(self) -> None:
        text, image = units(3, 4), units(3, 4, seed=1)
        loss = pickscore_loss(text, image, image, f64(0.5, 0.5, 0.5), logit_scale=50.0)
        assert loss.item() == pytest.approx(0, abs=1e-12)
        assert pickscore_loss(text, image, units(3, 4, seed=2), f64(0.5, 0.5, 0.5), logit_scale=50.0) > 0

    def test_in_batch_equals_loops(self) -> None:
        text, left, right = units(4, 5), units(4, 5, seed=1), units(4, 5, seed=2)
        label, many, scale = f64(1, 0, 0.5, 0.3), f64(1, 2, 4, 4), 7.0
        ours = pickscore_loss(text, left, right, label, many, logit_scale=scale, in_batch_negatives=True)
        images = torch.cat([left, right])
        total = 0.0
        for i in range(4):
            by_text = [scale * (text[i] @ image).item() for image in images]
            each = 0.0
            for share, own in ((label[i].item(), i), (1 - label[i].item(), 4 + i)):
                by_image = [scale * (images[own] @ word).item() for word in text]
                each -= share * (by_text[own] - math.log(sum(map(math.exp, by_text))))
                each -= share * (by_image[i] - math.log(sum(map(math.exp, by_image))))
            each -= math.log(2) * (label[i].item() == 0.5)
            total += each / 2 / many[i].item() / (1 / many).sum().item()
        assert ours.item() == pytest.approx(total, rel=1e-12)

    @pytest.mark.parametrize("negatives", [False, True])
    def test_gradient(self, negatives: bool) -> None:
        leaves = [units(3, 4, seed=s).requires_grad_() for s in range(3)]
        scale = f64(5.0).requires_grad_()
        assert torch.autograd.gradcheck(
            lambda t, a, b, k: pickscore_loss(t, a, b, f64(1, 0.5, 0), logit_scale=k, in_batch_negatives=negatives),
            (*leaves, scale),
        )


class TestSeveralImages:
    def test_choice_equals_cross_entropy(self) -> None:
        score, group = 30 * normal(9), ["a", "a", "b", "b", "b", "b", "c", "c", "c"]
        share = f64(0, 1, 0, 1, 0, 0, 0.5, 0.5, 0)
        found = listwise_choice_loss(score, share, group)
        for place, (start, stop) in enumerate(((0, 2), (2, 6), (6, 9))):
            theirs = -(share[start:stop] * score[start:stop].log_softmax(0)).sum()
            torch.testing.assert_close(found[place], theirs)
        leaf = normal(9).requires_grad_()
        assert torch.autograd.gradcheck(lambda s: listwise_choice_loss(s, share, group), (leaf,))

    def test_ranks_by_hand(self) -> None:
        """Leads of 1, 0.5 and 1.5 times differences of rank of 1, 1 and 2, against a margin of 2."""
        loss = rank_margin_loss(f64(1.5, 0.5, 0), f64(0, 1, 2), [7, 7, 7], margin=2.0)
        assert_values(loss, (1 + 1.5 + 0) / 3)
        assert_values(rank_margin_loss(f64(1, 2), f64(0, 0), [1, 1]), 0)
        assert_values(rank_margin_loss(f64(1, 2, 9), f64(0, 1, 0), [1, 1, 2]), 2, 0)

    def test_upstream_ranks_depend_on_the_other_prompts(self) -> None:
        score, rank = f64(3, 0), f64(0, 1)
        alone = rank_margin_loss(score, rank, [0, 0], mode="upstream")
        assert_values(alone, 2 / 3)  # the diagonal: two constants of 1 among three entries
        wide = rank_margin_loss(torch.cat([score, f64(5, 1, 0)]), f64(0, 1, 0, 1, 2), [0, 0, 1, 1, 1], mode="upstream")
        assert wide[0] != alone[0]
        ours = rank_margin_loss(torch.cat([score, f64(5, 1, 0)]), f64(0, 1, 0, 1, 2), [0, 0, 1, 1, 1])
        assert_values(ours, 0, 0)


class TestIctLabels:
    def test_hand_values(self) -> None:
        found = ict_labels(f64(0.35, 0.63), f64(0.56, 0.14), f64(0.5, 0.9), theta=0.7)
        assert_values(found.easy1, 0.5, 0.2)
        assert_values(found.easy2, 0.8, 0.2)
        assert_values(found.refined1, 0.25, 0.18)
        assert_values(found.refined2, 0.4, 0.18)
        assert_values(found.easy3, 1, 1)
        assert_values(found.refined3, 1, 1)

    def test_upstream_trains_the_winner_as_the_loser_of_another_prompt(self) -> None:
        given = (f64(0.21), f64(0.63), f64(0.5))
        ours, theirs = ict_labels(*given), ict_labels(*given, mode="upstream")
        assert_values(ours.easy2, 0.9)
        assert_values(theirs.easy2, 0.15)
        assert torch.equal(theirs.easy2, theirs.refined1) and theirs.easy2 < theirs.easy1


class TestIctLosses:
    LABELS = IctLabels(*(f64(*row) for row in ([0.2, 0.4], [0.6, 0.7], [1, 1], [0.1, 0.3], [0.5, 0.6], [1, 1])))

    def test_equals_loops(self) -> None:
        easy, refined, images = units(2, 5), units(2, 5, seed=1), units(3, 2, 5, seed=2)
        targets = [
            [self.LABELS.easy1, self.LABELS.easy2, self.LABELS.easy3],
            [self.LABELS.refined1, self.LABELS.refined2, self.LABELS.refined3],
        ]
        own, foreign = 0.0, 0.0
        for prompt, target in zip((easy, refined), targets, strict=True):
            for i in range(3):
                for n in range(2):
                    own += ((images[i, n] @ prompt[n]).item() - target[i][n].item()) ** 2 / 6
                    foreign += (images[i, n] @ prompt[1 - n]).item() ** 2 / 6
        ours = ict_loss(easy, refined, images, self.LABELS)
        assert ours.item() == pytest.approx(own + 0.5 * foreign, rel=1e-12)

    def test_gradients(self) -> None:
        leaves = [
            normal(2, 4).requires_grad_(),
            normal(2, 4, seed=1).requires_grad_(),
            normal(3, 2, 4, seed=2).requires_grad_(),
        ]
        assert torch.autograd.gradcheck(lambda e, r, i: ict_loss(e, r, i, self.LABELS), leaves)
        hp, cosine = normal(3, 4).requires_grad_(), normal(3, 4, seed=1).requires_grad_()
        assert torch.autograd.gradcheck(lambda h: hp_loss(h), (hp,))
        assert torch.autograd.gradcheck(lambda c, h: ict_hp_loss(c, h), (cosine, hp))

    def test_hp_by_hand(self) -> None:
        hp = torch.stack([f64(0, 1), f64(0.2, 0), f64(1, 2)])
        assert hp_loss(hp).item() == pytest.approx((0.1 + 0 + 1.3 + 0) / 2)
        cosine = torch.stack([f64(0.3), f64(0.6), f64(0.9)])
        even = ict_hp_loss(cosine, torch.zeros(3, 1))  # thirds: leads of 0.1
        assert even.item() == pytest.approx(0.4)
        twice = ict_hp_loss(cosine.expand(3, 2), torch.zeros(3, 2), reduction="sum")
        assert twice.item() == pytest.approx(0.8)
