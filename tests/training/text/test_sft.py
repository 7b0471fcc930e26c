# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning: the gradient is that of the whole batch, a resumed run is the run, it learns."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

from tests.support.models.language import tiny_model, tiny_tokenizer
from tests.support.training.images import outcome
from visalign.adapters.causal_lm.demonstrations import DemonstrationBatches, demonstration_rollout
from visalign.adapters.causal_lm.policy import CausalLMPolicy
from visalign.text import Sampling, StoppingCriteria, TextRollout
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
PACE = {"lr": 1e-2, "weight_decay": 0.0, "micro_batch": 2, "ema_decay": 0.5, "ema_every": 1}


def _policy(**options: Any) -> CausalLMPolicy:
    return CausalLMPolicy(tiny_model(seed=3), tiny_tokenizer(), **options)


def _trainer(
    folder: Path, iterations: int = 6, *, policy: CausalLMPolicy | None = None, batches: Any = None, **more: Any
) -> Trainer[SFT]:
    policy = policy or _policy()
    pace = OptimizerSettings(**{**PACE, "updates_per_iteration": 2, **more.pop("optimizer", {})})
    keeping = {"folder": folder, "iterations": iterations, "config": {"seed": 0}, "checkpoint_every": 2}
    batches = batches or DemonstrationBatches(policy, RECORDS, size=3, seed=5)
    return Trainer(
        SFT(policy, batches, accelerator=Accelerator(cpu=True)),
        optimizer=pace,
        run=RunSettings(**{**keeping, **more.pop("run", {})}),
        **more,
    )


def backward_nll(policy: CausalLMPolicy, batch: TextRollout, **options: Any) -> float:
    """In one process."""
    return shared_backward_nll(TextReplay(policy), batch, Accelerator(cpu=True), **options)


def _gradient(policy: CausalLMPolicy) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for _, p in policy.trainable_parameters() if p.grad is not None])


def _batch(policy: CausalLMPolicy) -> TextRollout:
    return demonstration_rollout(policy, [r["prompt"] for r in RECORDS], [r["completion"] for r in RECORDS])


def test_the_loss_is_the_mean_cross_entropy_of_the_completions_tokens():
    """By transformers' own logits and torch's cross entropy, one completion at a time, prompts left out."""
    policy, tokenizer = _policy(), tiny_tokenizer()
    loss = backward_nll(policy, _batch(policy), micro_batch=2)
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


@pytest.mark.parametrize("size", [1, 3])
def test_micro_batches_change_nothing(size):
    """Five demonstrations of very different lengths: means of means would differ by far."""
    policy = _policy()
    batch = _batch(policy)
    loss = backward_nll(policy, batch, micro_batch=64)
    expected = _gradient(policy).clone()
    policy.model.zero_grad()
    assert backward_nll(policy, batch, micro_batch=size) == pytest.approx(loss, rel=1e-5)
    assert float((_gradient(policy) - expected).norm()) < 1e-5 * float(expected.norm())


def _greedy(policy: CausalLMPolicy) -> list[str]:
    prompts = [r["prompt"] for r in RECORDS]
    stopping = StoppingCriteria(max_new_tokens=20)
    return list(policy.generate(prompts, seeds=0, sampling=Sampling(temperature=0.0), stopping=stopping).text)


def test_a_random_model_learns_the_demonstrations_and_where_they_end(tmp_path):
    policy = _policy()
    completions = [r["completion"] for r in RECORDS]
    assert sum(a == b for a, b in zip(_greedy(policy), completions, strict=True)) == 0
    result = _trainer(tmp_path, 30, policy=policy, optimizer={"ema_decay": 0.0}).train()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert rows[-1]["loss"] < 0.2 * rows[0]["loss"] and rows[-1]["perplexity"] < 2 < rows[0]["perplexity"]
    assert sum(a == b for a, b in zip(_greedy(policy), completions, strict=True)) >= 4, _greedy(policy)
    assert result.stopped == "finished" and result.counters.samples == 3 * result.counters.updates == 180


def test_interrupted_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path):
    _trainer(tmp_path / "whole").train()

    def ctrl_c(iteration: int) -> dict[str, float]:
        if iteration == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return {}

    cut = _trainer(tmp_path / "cut", run={"evaluate_every": 1}, evaluate=ctrl_c)
    result = cut.train()
    assert result.stopped == "interrupted" and result.counters.iteration == 3
    again = _trainer(tmp_path / "cut")
    assert again.resume()
    assert again.train().stopped == "finished"
    assert outcome(tmp_path / "whole") == outcome(tmp_path / "cut")
    assert len(read_metrics(tmp_path / "whole" / "metrics.jsonl")) == 6


def test_an_update_that_is_not_finite_is_left_out(tmp_path):
    trainer = _trainer(tmp_path, 1)
    with torch.no_grad():
        trainer.weights.named[0][1][:] = torch.inf
    weights = [p.detach().clone() for _, p in trainer.weights.named[1:]]
    with pytest.raises(checkpoint.CheckpointError, match=r"after iteration 1 the weight .* is not finite"):
        trainer.train()
    assert not (tmp_path / "checkpoints").exists()
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row["updates"] == row["updates_skipped"] == 2 and row["loss"] is None and row["grad_norm"] is None
    assert all(torch.equal(p, q) for (_, p), q in zip(trainer.weights.named[1:], weights, strict=True))
