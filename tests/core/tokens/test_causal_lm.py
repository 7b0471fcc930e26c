# SPDX-License-Identifier: Apache-2.0
"""Log-probs of tokens from a causal model: values by hand, padding on either side, what is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from visalign.core import token_log_probs

IDS = torch.tensor([[3, 1, 4, 1, 5], [2, 6, 5, 3, 5]])


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=7, n_positions=9, n_embd=8, n_layer=2, n_head=2)).eval()


def test_each_token_is_predicted_by_what_precedes_it() -> None:
    model = gpt2()
    result = token_log_probs(model, IDS, temperature=0.7)
    for row in range(2):
        assert float(result.log_prob[row, 0].detach()) == float(result.entropy[row, 0].detach()) == 0
        for t in range(1, 5):
            p = (model(IDS[row : row + 1, :t]).logits[0, -1] / 0.7).softmax(-1)
            torch.testing.assert_close(result.log_prob[row, t], p[IDS[row, t]].log())
            torch.testing.assert_close(result.entropy[row, t], -(p * p.log()).sum())
    assert result.log_prob.dtype == torch.float32
    assert token_log_probs(model.bfloat16(), IDS).log_prob.dtype == torch.float32


@pytest.mark.parametrize("left", [0, 2])
def test_padding_on_either_side_changes_nothing_and_gets_no_gradient(left: int) -> None:
    model = gpt2()
    plain = token_log_probs(model, IDS).log_prob
    ids = torch.full((2, 8), 6)
    ids[:, left : left + 5] = IDS
    mask = torch.zeros(2, 8, dtype=torch.long)
    mask[:, left : left + 5] = 1
    padded = token_log_probs(model, ids, mask)
    torch.testing.assert_close(padded.log_prob[:, left : left + 5], plain)
    assert bool((padded.log_prob[mask == 0] == 0).all() and (padded.entropy[mask == 0] == 0).all())
    logits = torch.randn(2, 8, 7)
    logits[mask == 0] = float("nan")
    logits.requires_grad_()
    token_log_probs(lambda **_: logits, ids, mask).log_prob.sum().backward()
    assert logits.grad is not None
    assert bool((logits.grad[mask == 0] == 0).all()) and bool(torch.isfinite(logits.grad).all())
