# SPDX-License-Identifier: Apache-2.0
"""Gradients of vision-language judges in the pixels: values of the score, finite differences, nothing shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.judges.vision_language import KINDS, ask_text, given, tiny_engine, tiny_judge
from visalign.rewards.catalogue import load_judge
from visalign.rewards.hpsv3.judge import HPSv3
from visalign.rewards.hpsv3.model import HPSv3Model
from visalign.rewards.questions.reward_dance import RewardDance, RewardDancePairs

LETTERS: dict[str, Any] = {"yes": ["y", "s"], "no": ["n"], "min_mass": 0.0}
PROMPTS = ["a cat", "a dog"]


def noise(height: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (2, 3, height, width), generator=generator).float() / 255


def check_gradient(value: Callable[[Tensor], Tensor], pixels: Tensor, *, rtol: float = 0.1) -> None:
    """Compare with central differences by a whole level in a tenth of the pixels, where rounding is exact."""
    step = 1 / 255
    leaf = pixels.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(leaf).sum(), leaf)
    some = torch.rand(pixels.shape, generator=torch.Generator().manual_seed(2)) < 0.1
    direction = gradient.sign() * (some & (pixels > 0.01) & (pixels < 0.99))
    expected = (gradient * direction).flatten(1).sum(1)
    difference = (value(pixels + step * direction) - value(pixels - step * direction)) / (2 * step)
    assert (expected > 0).all()
    torch.testing.assert_close(difference.detach(), expected, rtol=rtol, atol=0.0)


@pytest.mark.parametrize("size", [(16, 16), (21, 40)])  # the second is resized
@pytest.mark.parametrize("kind", KINDS)
def test_answer_yes_has_a_gradient_in_the_pixels(kind: str, size: tuple[int, int]) -> None:
    judge, pixels = RewardDance(tiny_engine(kind), template=ask_text("ok {prompt}?"), **LETTERS), noise(*size)
    value = judge.score_with_gradient(pixels.clone().requires_grad_(), PROMPTS)
    torch.testing.assert_close(value.detach(), judge.score(pixels, PROMPTS).value, rtol=1e-5, atol=1e-5)
    rtol = 0.1 if size == (16, 16) and kind != "smolvlm" else 0.3  # resized levels are rounded
    check_gradient(lambda x: judge.score_with_gradient(x, PROMPTS), pixels, rtol=rtol)


@pytest.mark.parametrize("name", ["reward_dance", "hpsv3"])
def test_packaged_judges_have_the_gradient_of_their_score(name: str) -> None:
    judge: Any = load_judge(name)
    pixels = noise(64, 64)
    value = judge.score_with_gradient(pixels.clone().requires_grad_(), ["a red circle", "a blue square"])
    expected = judge.score(pixels, ["a red circle", "a blue square"]).value
    torch.testing.assert_close(value.detach(), expected, rtol=1e-5, atol=1e-5)
    check_gradient(lambda x: judge.score_with_gradient(x, ["a red circle", "a blue square"]), pixels)


@pytest.mark.parametrize("both_orders", [True, False])
def test_pairs_have_a_gradient_in_the_images_that_ask_for_one(both_orders: bool) -> None:
    options = {"template": ask_text("better {prompt}?", images=2), "both_orders": both_orders, **LETTERS}
    judge, left, right = RewardDancePairs(tiny_engine(), **options), noise(16, 16), list(noise(24, 16, 1))
    value = judge.compare_with_gradient(list(left.clone().requires_grad_()), right, PROMPTS)
    expected = judge.compare(left, torch.stack(right), PROMPTS).log_odds
    torch.testing.assert_close(value.detach(), given(expected), rtol=1e-5, atol=1e-5)
    check_gradient(lambda x: judge.compare_with_gradient(list(x), right, PROMPTS), left)


def test_equal_images_have_their_own_gradients_and_weights_none() -> None:
    judge = HPSv3(HPSv3Model.new(tiny_judge(positions="1d")))
    leaf = noise(16, 16)[:1].expand(2, -1, -1, -1).clone().requires_grad_()
    value = judge.score_with_gradient(leaf, ["a cat", "a cat"])
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    torch.testing.assert_close(gradient[0], gradient[1])
    assert (gradient[0] != 0).any() and not judge.model.engine.network.cache.bytes
    assert all(weight.grad is None for weight in judge.model.parameters())


@pytest.mark.parametrize("kind", ["reward_dance", "hpsv3"])
def test_rows_without_an_answer_are_nan_and_leave_the_others_alone(kind: str) -> None:
    judge: Any = RewardDance(tiny_engine(), template=ask_text("ok {prompt}?"), **LETTERS)
    judge = judge if kind == "reward_dance" else HPSv3(HPSv3Model.new(tiny_judge()))
    leaf = noise(16, 16).requires_grad_()
    value = judge.score_with_gradient(leaf, [" ", "a dog"])
    assert value.isnan().tolist() == [True, False]
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    assert gradient.isfinite().all() and (gradient[0] == 0).all() and (gradient[1] != 0).any()
