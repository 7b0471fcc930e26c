# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimisation: the gradient is that of the whole batch, it learns, a resume is the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.nn.functional import logsigmoid

from tests.support.models.language import tiny_model, tiny_tokenizer
from tests.support.training.images import check_resume
from visalign.adapters.causal_lm.demonstrations import DemonstrationBatches, with_mismatched
from visalign.adapters.causal_lm.policy import CausalLMPolicy
from visalign.core.preference.direct import DIRECT, implicit_reward
from visalign.training.loop.algorithm import Context, Counters
from visalign.training.loop.metrics import read_metrics
from visalign.training.loop.optimizer import OptimizerSettings
from visalign.training.loop.trainer import PhaseClock, RunSettings, Trainer
from visalign.training.text.dpo import DPO, DPOSettings

PAIRS = [
    {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    for prompt, chosen, rejected in (
        ("ab", "a", "bb b"),
        ("cd", "cc c", "d"),
        ("e", "a long answer", "e!"),
        ("fg", "f!", "g g g"),
        ("h", "hi hi", "h"),
    )
]
VOTES = [
    {"prompt": p["prompt"], "completion": p[side], "label": side == "chosen"}
    for p in PAIRS
    for side in ("chosen", "rejected")
]


def _policy(**options: Any) -> CausalLMPolicy:
    return CausalLMPolicy(tiny_model(seed=3), tiny_tokenizer(), reference=False, **options)


def _dpo(policy: CausalLMPolicy, size: int = 5, heldout: bool = False, **settings: Any) -> DPO:
    dpo_settings = DPOSettings(**settings)
    records = with_mismatched(policy, VOTES) if dpo_settings.votes else PAIRS
    stream = DemonstrationBatches(policy, records, size=size, seed=5, field=dpo_settings.fields)
    good = [bool(record["label"]) for record in records] if dpo_settings.votes else None
    return DPO(
        policy,
        stream,
        settings=dpo_settings,
        good=good,
        heldout=stream if heldout else None,
        heldout_good=good if heldout else None,
        accelerator=Accelerator(cpu=True),
    )


def _trainer(folder: Path, iterations: int = 6, *, policy: Any = None, **settings: Any) -> Trainer[DPO]:
    updates = settings.pop("updates", 2)
    run = {"folder": folder, "iterations": iterations, "config": {"seed": 0}, "checkpoint_every": 2}
    return Trainer(
        _dpo(policy or _policy(), settings.pop("size", 3), **settings),
        optimizer=OptimizerSettings(
            lr=1e-2, weight_decay=0.0, micro_batch=2, ema_decay=0.0, ema_every=1, updates_per_iteration=updates
        ),
        run=RunSettings(**run),
    )


def _moved(policy: CausalLMPolicy) -> None:
    """Weights that differ from the reference's."""
    with torch.no_grad():
        for number, (_, weight) in enumerate(policy.trainable_parameters()):
            weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))


def _gradient(algorithm: DPO, micro_batch: int) -> tuple[dict[str, float], torch.Tensor]:
    """Of the first batch."""
    policy: Any = algorithm.policy
    policy.model.zero_grad()
    context = Context(counters=Counters(), optimizer=OptimizerSettings(micro_batch=micro_batch), clock=PhaseClock())
    sums = algorithm.backward(None, algorithm.data.completions.batch(0), context)
    return sums, torch.cat([p.grad.flatten() for _, p in policy.trainable_parameters()])


def _said(policy: CausalLMPolicy, prompt: str, answer: str) -> torch.Tensor:
    """log π of an answer and its end by transformers' own logits."""
    before = policy.tokenizer(prompt)["input_ids"]
    after = [*policy.tokenizer(answer)["input_ids"], policy.tokenizer.eos_token_id]
    logits = policy.model(input_ids=torch.tensor([before + after])).logits[0, len(before) - 1 : -1]
    return logits.float().log_softmax(-1)[torch.arange(len(after)), torch.tensor(after)].sum()


def test_the_loss_is_dpos_by_the_models_own_logits():
    policy = _policy()
    with torch.no_grad():
        ref = [[_said(policy, p["prompt"], p[side]) for side in ("chosen", "rejected")] for p in PAIRS]
    algorithm = _dpo(policy, beta=0.3)
    torch.testing.assert_close(algorithm.data.ref, torch.tensor(ref), rtol=1e-5, atol=1e-5)
    _moved(policy)
    sums, gradient = _gradient(algorithm, micro_batch=2)
    policy.model.zero_grad()
    losses = []
    for pair, (ref_chosen, ref_rejected) in zip(PAIRS, ref, strict=True):
        chosen, rejected = (_said(policy, pair["prompt"], pair[side]) for side in ("chosen", "rejected"))
        losses.append(-logsigmoid(0.3 * (chosen - ref_chosen - rejected + ref_rejected)))
    expected = torch.stack(losses).mean()
    assert sums["loss"] == pytest.approx(expected.item(), rel=1e-4)
    expected.backward()
    own = torch.cat([p.grad.flatten() for _, p in policy.trainable_parameters() if p.grad is not None])
    torch.testing.assert_close(gradient, own, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("loss", [*DIRECT])
def test_micro_batches_change_nothing(loss):
    policy = _policy()
    algorithm = _dpo(policy, row=loss, label_smoothing=0.1 if loss == "robust" else 0.0)
    _moved(policy)
    expected_sums, expected = _gradient(algorithm, micro_batch=64)
    for size in (1, 3):
        sums, gradient = _gradient(algorithm, micro_batch=size)
        assert sums == pytest.approx(expected_sums, rel=1e-4, abs=1e-5)
        assert float((gradient - expected).norm()) < 1e-4 * float(expected.norm())
    assert float(expected.norm()) > 0


def test_a_random_model_learns_which_answer_is_better(tmp_path):
    policy = _policy()
    trainer = _trainer(tmp_path, 16, policy=policy, size=5, beta=0.5, heldout=True, updates=1)
    assert trainer.algorithm.measure()["rewards/chosen"] == pytest.approx(0.0, abs=1e-4)
    trainer.train()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    names = {"rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"}
    assert {*names, "logps/chosen", "logps/rejected", "loss", "length_mean"} <= rows[0].keys()
    assert rows[0]["loss"] == pytest.approx(0.6931, abs=1e-3) and rows[-1]["loss"] < 0.1
    assert rows[-1]["rewards/accuracies"] == 1 and rows[-1]["samples"] == 5 * 16
    first, last = rows[0], trainer.algorithm.measure()
    assert last["rewards/accuracies"] == 1 and last["loss"] < 0.1
    assert last["rewards/margins"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"])
    assert last["logps/chosen"] - last["logps/rejected"] > first["logps/chosen"] - first["logps/rejected"] + 4


def test_the_reference_point_is_of_mismatched_answers_of_the_whole_batch():
    policy = _policy()
    algorithm = _dpo(policy, size=10, row="kto")
    _moved(policy)
    algorithm.data.ref[:, 1] -= 9.0  # a reference with lower log-probs, so that the point is above 0
    sums, _ = _gradient(algorithm, micro_batch=3)
    records = with_mismatched(policy, VOTES)
    assert all(r["mismatched"] != r["completion"] for r in records)
    with torch.no_grad():
        now = torch.stack([_said(policy, r["prompt"], r["mismatched"]) for r in records])
    gained = float((now - algorithm.data.ref[:, 1]).mean())
    assert sums["kl"] == pytest.approx(gained, rel=1e-4) and gained > 1


@pytest.mark.parametrize("loss", [{"row": "sigmoid"}, {"row": "kto"}, {"row": "power", "label_rate": 0.3}])
def test_interrupted_and_resumed_equals_uninterrupted_bit_for_bit(loss, tmp_path):
    """The whole model is trained: the reference of the resumed run is still that of before training; labels
    go on from where they were."""
    check_resume(lambda folder, run: _trainer(folder, **run, **loss), tmp_path, 2, 4)


@pytest.mark.parametrize("row", ["sigmoid", "power"])
def test_a_label_moves_once_per_visit_of_its_pair(row):
    """Whatever the micro-batch; a pair that a batch has twice moves twice by one lead."""
    policy = _policy()
    _moved(policy)
    every = _dpo(policy, row=row, label_rate=0.3, label_smoothing=0.1)
    answers = every.data.completions
    if row == "sigmoid":
        every.data.ref[:, 0] -= 2.0
    _gradient(every, micro_batch=2)
    with torch.no_grad():
        output = policy.log_probs(answers.rows(range(5)))
    better, worse = (
        implicit_reward(output.log_prob[rows].sum(1), every.data.ref[:, side], length, row=row)
        for side, rows in enumerate((slice(0, 5), slice(5, 10)))
        for length in [answers.rows(range(5)).loss_mask[rows].sum(1)]
    )
    once = 0.9 + 0.3 * (torch.sigmoid(better - worse) - 0.9)
    torch.testing.assert_close(every.labels, once, rtol=1e-4, atol=1e-5)
    assert float((once - 0.9).abs().max()) > 0.05
    torch.testing.assert_close(_gradient(every, 64)[0]["label_mean"], float(once.mean()), rtol=1e-4, atol=1e-5)

    twice = _dpo(policy, size=7, row=row, label_rate=0.3, label_smoothing=0.1)
    twice.data.ref[:] = every.data.ref
    again = torch.tensor(twice.data.completions.batch(0).group[:7]).bincount()
    assert sorted(again.tolist()) == [1, 1, 1, 2, 2]
    _gradient(twice, micro_batch=2)
    expected = torch.where(again == 2, once + 0.3 * (torch.sigmoid(better - worse) - once), once)
    torch.testing.assert_close(twice.labels, expected, rtol=1e-4, atol=1e-5)
