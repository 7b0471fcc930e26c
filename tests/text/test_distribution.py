# SPDX-License-Identifier: Apache-2.0
"""The distribution that is sampled: values by hand, transformers' own filters, inversion, gradients."""

import math

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from visalign.core import log_prob_entropy
from visalign.text import (
    Sampling,
    TokenSets,
    chosen_log_prob,
    draw_seeds,
    draw_tokens,
    kept_tokens,
    log_distribution,
    sample_uniforms,
)

SHARES = torch.tensor([[0.1, 0.4, 0.05, 0.3, 0.15]], dtype=torch.float64)


def sampled_log_prob(logits, target, sampling, allowed=None):
    """Of tokens under the distribution that was sampled; without `allowed`, that of these logits."""
    if allowed is None and sampling.truncates:
        allowed = kept_tokens(log_distribution(logits.detach(), sampling.scale), sampling)
    return chosen_log_prob(log_distribution(logits, sampling.scale, allowed), target)


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"top_p": 0.7 - 1e-9}, [1, 3]),
        ({"top_p": 0.7 + 1e-9}, [1, 3, 4]),
        ({"top_p": 1e-6}, [1]),
        ({"top_k": 2, "top_p": 0.5}, [1]),  # top-k comes first and leaves 4/7 and 3/7
    ],
)
def test_the_fewest_tokens_that_hold_the_share_are_kept(options, tokens) -> None:
    mask = kept_tokens(SHARES.log(), Sampling(**options))
    assert mask is not None and mask[0].nonzero()[:, 0].tolist() == tokens


def test_the_chosen_token_is_renormalised() -> None:
    output = sampled_log_prob(SHARES.log(), torch.tensor([3]), Sampling(top_k=2))
    assert output.log_prob.item() == pytest.approx(math.log(3 / 7), abs=1e-12)
    assert output.entropy.item() == pytest.approx(-(3 / 7) * math.log(3 / 7) - (4 / 7) * math.log(4 / 7), abs=1e-12)
    assert sampled_log_prob(SHARES.log(), torch.tensor([0]), Sampling(top_k=2)).log_prob.item() == -math.inf


@pytest.mark.parametrize("options", [{}, {"top_k": 7}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.6}])
def test_equals_the_filters_of_transformers(options) -> None:
    logits = 3 * torch.randn(40, 33, generator=torch.Generator().manual_seed(1))
    filters = LogitsProcessorList([TemperatureLogitsWarper(0.7)])
    if "top_k" in options:
        filters.append(TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        filters.append(TopPLogitsWarper(options["top_p"]))
    theirs = filters(torch.zeros(40, 1, dtype=torch.int64), logits.clone()).log_softmax(-1)  # type: ignore[arg-type]
    sampling = Sampling(temperature=0.7, **options)
    full = log_distribution(logits, 0.7)
    torch.testing.assert_close(log_distribution(full, kept=kept_tokens(full, sampling)), theirs)


def test_without_truncation_it_is_the_core_function() -> None:
    logits = torch.randn(4, 5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    target = torch.arange(20).view(4, 5) % 9
    ours = sampled_log_prob(logits, target, Sampling(temperature=0.6))
    theirs = log_prob_entropy(logits, target, temperature=0.6)
    torch.testing.assert_close(ours.log_prob, theirs.log_prob)
    torch.testing.assert_close(ours.entropy, theirs.entropy)


def test_gradients_are_finite_and_zero_outside_the_kept_tokens() -> None:
    logits = SHARES.log().requires_grad_()
    allowed = torch.tensor([[False, True, False, True, True]])
    output = sampled_log_prob(logits, torch.tensor([4]), Sampling(top_p=0.5), allowed)
    (output.log_prob + output.entropy).sum().backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all()
    assert logits.grad[~allowed].abs().max() == 0
    assert torch.autograd.gradcheck(
        lambda z: sampled_log_prob(z, torch.tensor([4]), Sampling(top_p=0.5), allowed).entropy,
        [logits.detach().requires_grad_()],
    )


def test_remembered_sets_keep_a_token_that_left_the_nucleus() -> None:
    later = torch.tensor([[0.9, 0.02, 0.03, 0.03, 0.02]]).log()
    sampling, target = Sampling(top_p=0.7), torch.tensor([3])
    remembered = kept_tokens(SHARES.log(), sampling)
    assert sampled_log_prob(later, target, sampling).log_prob.item() == -math.inf
    output = sampled_log_prob(later, target, sampling, remembered)
    # top-p 0.7 in float64 keeps 0.4 and 0.3 up to the rounding of their sum, perhaps 0.15 too
    mass = later.exp()[remembered].sum().item()
    assert output.log_prob.item() == pytest.approx(math.log(0.03 / mass), abs=1e-6)


def test_drawing_inverts_the_cumulative_probability_and_never_takes_an_excluded_token() -> None:
    u = torch.tensor([0.0, 0.0999, 0.1001, 0.4999, 0.5001, 1 - 1e-12], dtype=torch.float64)
    assert draw_tokens(SHARES.log().expand(6, 5), u).tolist() == [0, 0, 1, 1, 2, 4]
    log_p = torch.tensor([[-math.inf, 0.0, -math.inf], [0.0, -math.inf, -math.inf]])
    for value in (0.0, 0.5, 1 - 2**-53):
        assert draw_tokens(log_p, torch.full((2,), value, dtype=torch.float64)).tolist() == [1, 0]
    with pytest.raises(ValueError, match="logits of row 1 are NaN"):
        draw_tokens(torch.tensor([[0.0, -1.0], [math.nan, 0.0]]), u[:2])


def test_a_seed_gives_its_own_numbers_whatever_the_batch() -> None:
    single, together = sample_uniforms([7], 5), sample_uniforms([3, 7, 9], 40)
    torch.testing.assert_close(single[0], together[1, :5], rtol=0, atol=0)
    assert together.min() >= 0 and together.max() < 1 and len(together.unique()) == 120
    assert draw_seeds(5, 3) == draw_seeds(5, 9)[:3] and draw_seeds(5, 3) != draw_seeds(6, 3)
    assert len(set(draw_seeds(0, 1000))) == 1000 and draw_seeds([7, 3], 2) == [7, 3]


def test_token_sets_give_back_their_masks() -> None:
    sets = TokenSets.from_lists([[torch.tensor([2, 0]), torch.tensor([1])], [], [torch.tensor([3, 1, 0])]], 3)
    assert sets.count.tolist() == [[2, 1, 0], [0, 0, 0], [3, 0, 0]]
    mask = sets.mask(torch.tensor([2, 0]), torch.tensor([0, 1]), 4)
    assert mask.int().tolist() == [[1, 1, 0, 1], [0, 1, 0, 0]]
    chosen = sets.rows(torch.tensor([2, 0, 2]))
    assert chosen.count.tolist() == [[3, 0, 0], [2, 1, 0], [3, 0, 0]]
    assert chosen.mask(torch.tensor([1]), torch.tensor([0]), 4).int().tolist() == [[1, 0, 1, 0]]
