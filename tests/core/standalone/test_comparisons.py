# SPDX-License-Identifier: Apache-2.0
"""GDRO, Diffusion-KTO and MARBLE: hand values, loops, optimality, gradients, missing values."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.core import assert_values, f64, normal
from visalign.core.advantages.gradient_balance import combine_gradients, min_norm_weights, smooth_weights
from visalign.core.regression.groupwise import diffusion_kto_loss, gdro_loss, soft_plackett_luce

NAN = float("nan")


class TestRanking:
    def test_hand_values(self) -> None:
        pair = soft_plackett_luce(f64(0.3, -0.4)[None], f64(1, 0)[None], tau=0.01)
        assert_values(pair, math.log1p(math.exp(-0.7)))
        assert_values(soft_plackett_luce(torch.zeros(1, 3).double(), f64(5, 1, 2)[None]), math.log(6))
        three = soft_plackett_luce(f64(0.2, 0, -0.1)[None], f64(0.9, 0.5, 0.1)[None], tau=0.5)
        assert_values(three, 1.706335, atol=1e-6)

    def test_equals_loops_over_stages(self) -> None:
        score, reward = normal(5, 6), normal(5, 6, seed=1)
        ours = soft_plackett_luce(score, reward, tau=0.3)
        for row in range(5):
            order = sorted(range(6), key=lambda j: -reward[row, j].item())
            total = 0.0
            for i in range(5):
                rest = order[i:]
                mass = [math.exp(reward[row, j].item() / 0.3) for j in rest]
                target = sum(m * score[row, j].item() for m, j in zip(mass, rest, strict=True)) / sum(mass)
                total += math.log(sum(math.exp(score[row, j].item()) for j in rest)) - target
            assert ours[row].item() == pytest.approx(total, abs=1e-10)

    def test_missing_samples_leave_the_list(self) -> None:
        score = torch.tensor([[NAN, 0.3, -0.4, 9], [1, NAN, NAN, NAN], [NAN] * 4], dtype=torch.float64)
        score.requires_grad_()
        reward = torch.tensor([[NAN, 1, 0, NAN], [2, NAN, NAN, NAN], [NAN] * 4], dtype=torch.float64)
        loss = soft_plackett_luce(score, reward, tau=0.01)
        assert_values(loss.detach(), math.log1p(math.exp(-0.7)), 0, 0)
        (slope,) = torch.autograd.grad(loss.sum(), score)
        assert slope[reward.isnan()].eq(0).all()
        assert_values(slope[0, 1:3], -1 / (1 + math.exp(0.7)), 1 / (1 + math.exp(0.7)))
        assert soft_plackett_luce(torch.ones(2, 1), torch.ones(2, 1)).tolist() == [0, 0]

    def test_gdro(self) -> None:
        error, ref, reward = normal(3, 4).square(), normal(3, 4, seed=1).square(), normal(3, 4, seed=2)
        error.requires_grad_()
        loss = gdro_loss(error, ref, reward, beta=12, gamma=0.5)
        best = error.gather(1, reward.argmax(1, keepdim=True))[:, 0]
        torch.testing.assert_close(loss, soft_plackett_luce(-12 * (error - ref), reward) + 0.5 * best)
        start = gdro_loss(ref, ref, reward, beta=12, gamma=0)
        assert_values(start, *[math.log(24)] * 3)
        single = gdro_loss(f64(0.7)[None], f64(0.1)[None], f64(3)[None], beta=6, gamma=2)
        assert_values(single, 1.4)
        assert gdro_loss(f64(NAN)[None], f64(1)[None], f64(NAN)[None], beta=6, gamma=2).item() == 0
        assert torch.autograd.gradcheck(lambda e: gdro_loss(e, ref, reward, beta=3, gamma=0.5), (error,))

    def test_kto(self) -> None:
        """h = (0.3, 0.1, 0.2) less their mean 0.2 are (0.1, −0.1, 0); a signal of 0 has no loss and no gradient."""
        error = f64(0.1, 0.3, 0.2).requires_grad_()
        loss = diffusion_kto_loss(error, f64(0.4, 0.4, 0.4), f64(0.7, -2, 0), beta=2)
        sigmoid = 1 / (1 + math.exp(0.2))
        assert_values(loss.detach()[None], 2 * sigmoid / 3)
        (slope,) = torch.autograd.grad(loss, error)
        assert_values(slope, *(weight * 2 * sigmoid * (1 - sigmoid) / 3 for weight in (1, -1, 0)))
        worse = diffusion_kto_loss(f64(0.5, 0.3), f64(0.1, 0.1), f64(1, -1), beta=2)  # z is not below 0
        assert_values(worse[None], (1 / (1 + math.exp(-0.8)) + 1 / (1 + math.exp(0.4))) / 2)


class TestBalance:
    def test_hand_values(self) -> None:
        gradient = torch.tensor([[3.0, 0.0], [-0.3, 0.4]], dtype=torch.float64)
        alpha = min_norm_weights(gradient)
        assert_values(alpha, 0.5, 0.5)
        assert_values(combine_gradients(gradient, alpha), 0.2, 0.4)
        assert_values(combine_gradients(gradient, alpha, rescale=True), 0.2 * 1.75, 0.4 * 1.75)
        assert_values(min_norm_weights(gradient, normalise=False), 1.15 / 11.05, 9.9 / 11.05)
        three = torch.tensor([[1.0, 0, 0], [-0.6, 0.8, 0], [0, 0, 1]], dtype=torch.float64)
        assert_values(min_norm_weights(three), 5 / 12, 5 / 12, 1 / 6)
        assert_values(smooth_weights(f64(0.5, 0.5), f64(1, 0)), 0.65, 0.35)

    @pytest.mark.parametrize("rewards", [1, 2, 3, 5, 8])
    def test_no_reward_is_harmed_and_nothing_is_shorter(self, rewards: int) -> None:
        for seed in range(5):
            gradient = normal(rewards, 6, seed=seed) * torch.logspace(-3, 3, rewards).double()[:, None]
            alpha = min_norm_weights(gradient)
            assert alpha.sum().item() == pytest.approx(1) and alpha.min() >= 0
            unit = gradient / gradient.norm(dim=1, keepdim=True)
            direction = alpha @ unit
            torch.testing.assert_close(combine_gradients(gradient, alpha), direction)
            assert bool((unit @ direction >= direction.square().sum() - 1e-9).all())

    def test_scale_of_a_reward_does_not_matter(self) -> None:
        gradient = normal(4, 9)
        scaled = gradient * f64(1, 1e3, 1e-5, 7)[:, None]
        torch.testing.assert_close(min_norm_weights(scaled), min_norm_weights(gradient))

    def test_constant_rewards_are_left_out(self) -> None:
        gradient = normal(3, 5)
        padded = torch.cat([gradient[:1], torch.zeros(1, 5), gradient[1:]])
        alpha = min_norm_weights(padded)
        assert alpha[1] == 0
        torch.testing.assert_close(alpha[[0, 2, 3]], min_norm_weights(gradient))
        torch.testing.assert_close(
            combine_gradients(padded, alpha, rescale=True), combine_gradients(gradient, alpha[[0, 2, 3]], rescale=True)
        )
        assert_values(min_norm_weights(torch.zeros(4, 2).double()), *[0.25] * 4)
        assert combine_gradients(torch.zeros(2, 3), torch.ones(2) / 2, rescale=True).eq(0).all()

    def test_copies_and_opposites(self) -> None:
        vector = normal(1, 5)
        for gradient in (vector, vector.expand(3, 5), torch.cat([vector, 2 * vector, vector])):
            alpha = min_norm_weights(gradient)
            assert alpha.sum().item() == pytest.approx(1)
            torch.testing.assert_close(combine_gradients(gradient, alpha), (vector / vector.norm())[0])
        opposite = torch.cat([vector, -3 * vector])
        assert_values(min_norm_weights(opposite), 0.5, 0.5)
        half = min_norm_weights(opposite.half().requires_grad_())
        assert half.dtype == torch.float32 and not half.requires_grad
