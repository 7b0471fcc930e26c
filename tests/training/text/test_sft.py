# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning: the gradient is that of the whole batch, and one that is not finite moves nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

from tests.support.models.language import tiny_model, tiny_tokenizer
from visalign.adapters.causal_lm.demonstrations import DemonstrationBatches, demonstration_rollout
from visalign.adapters.causal_lm.policy import CausalLMPolicy
from visalign.text import TextRollout
from visalign.training.loop import checkpoint
from visalign.training.loop.metrics import read_metrics
from visalign.training.loop.optimizer import OptimizerSettings
from visalign.training.loop.trainer import RunSettings, Trainer
from visalign.training.text.replay import TextReplay
from visalign.training.text.sft import SFT
from visalign.training.text.sft import backward_nll as shared_backward_nll

RECORDS = [
    {"prompt": prompt, "completion": text}
    for prompt, text in (("ab", "a"), ("cd", "cc c"), ("e", "a long answer"), ("fg", "f!"), ("h", "hi hi"))
]


def _policy() -> CausalLMPolicy:
    return CausalLMPolicy(tiny_model(seed=3), tiny_tokenizer())


def backward_nll(policy: CausalLMPolicy, batch: TextRollout, **options: Any) -> float:
    """In one process."""
    return shared_backward_nll(TextReplay(policy), batch, Accelerator(cpu=True), **options)


def _gradient(policy: CausalLMPolicy) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for _, p in policy.trainable_parameters() if p.grad is not None])


def _batch(policy: CausalLMPolicy) -> TextRollout:
    return demonstration_rollout(policy, [r["prompt"] for r in RECORDS], [r["completion"] for r in RECORDS])


@pytest.mark.parametrize("size", [1, 3, 64])
def test_the_loss_is_the_mean_cross_entropy_of_the_completions_tokens_whatever_the_micro_batch(size):
    """By transformers' own logits and torch's cross entropy, one completion at a time, prompts left out.

    The demonstrations are of very different lengths: means of means would differ by far.
    """
    policy, tokenizer = _policy(), tiny_tokenizer()
    loss = backward_nll(policy, _batch(policy), micro_batch=size)
    gradient = _gradient(policy)
    policy.model.zero_grad()
    losses = []
    for record in RECORDS:
        before = tokenizer(record["prompt"])["input_ids"]
        after = [*tokenizer(record["completion"])["input_ids"], tokenizer.eos_token_id]
        logits = policy.model(input_ids=torch.tensor([before + after])).logits[0]
        losses.append(cross_entropy(logits[len(before) - 1 : -1].float(), torch.tensor(after), reduction="none"))
    expected = torch.cat(losses).mean()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    torch.testing.assert_close(gradient, _gradient(policy), rtol=1e-4, atol=1e-6)


def test_an_update_that_is_not_finite_is_left_out(tmp_path):
    policy = _policy()
    trainer = Trainer(
        SFT(policy, DemonstrationBatches(policy, RECORDS, size=3, seed=5), accelerator=Accelerator(cpu=True)),
        optimizer=OptimizerSettings(lr=1e-2, micro_batch=2, updates_per_iteration=2),
        run=RunSettings(folder=tmp_path, iterations=1, config={"seed": 0}),
    )
    with torch.no_grad():
        trainer.weights.named[0][1][:] = torch.inf
    weights = [p.detach().clone() for _, p in trainer.weights.named[1:]]
    with pytest.raises(checkpoint.CheckpointError, match=r"after iteration 1 the weight .* is not finite"):
        trainer.train()
    assert not (tmp_path / "checkpoints").exists()
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row["updates"] == row["updates_skipped"] == 2 and row["loss"] is None and row["grad_norm"] is None
    assert all(torch.equal(p, q) for (_, p), q in zip(trainer.weights.named[1:], weights, strict=True))
