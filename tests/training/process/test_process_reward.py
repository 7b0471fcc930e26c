# SPDX-License-Identifier: Apache-2.0
"""Training judges of steps: losses by hand, learning on held-out problems, equal runs, records by message."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3ForTokenClassification

from tests.support.models.language import tiny_config, tiny_model, tiny_tokenizer
from visalign.adapters.causal_lm.policy import CausalLMPolicy
from visalign.errors import UserError
from visalign.text import Sampling, StoppingCriteria
from visalign.training.loop.optimizer import AdamWSettings
from visalign.training.loop.trainer import RunSettings, Trainer
from visalign.training.process.implicit import ImplicitTexts
from visalign.training.process.label_fit import (
    FitSettings,
    LabelFit,
    LabelOutputs,
    fit_labels,
    label_trainer,
    report_labels,
)
from visalign.training.process.trainer import evaluate_process_reward, step_label_loss, train_process_reward

TOKENIZER = tiny_tokenizer()
RECORDS = [
    {"prompt": "q", "steps": ["1+1=2", "2+2=5\n"], "labels": [1, 0]},
    {"prompt": "q", "steps": ["3"], "labels": [True]},
    {"prompt": "q", "steps": ["4", "5", "6"], "labels": [None, 0.25, 1]},
]


def classifier(seed: int = 0, **changes: Any) -> Qwen3ForTokenClassification:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        settings = {"num_labels": 2, "max_position_embeddings": 128, "initializer_range": 0.2}
        return Qwen3ForTokenClassification(tiny_config(**{**settings, **changes}))


# the loss


def test_the_loss_is_the_cross_entropy_of_two_labels() -> None:
    logits = torch.tensor([[0.3, -1.0], [2.0, 0.5], [0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    label = torch.tensor([1, 0, 1])
    loss = step_label_loss(logits[:, 1] - logits[:, 0], label.double())
    expected = nn.functional.cross_entropy(logits, label, reduction="none")
    assert torch.allclose(loss, expected) and loss[2].item() == pytest.approx(math.log(2))
    slope, expected_slope = (torch.autograd.grad(losses.sum(), logits)[0] for losses in (loss, expected))
    assert torch.allclose(slope, expected_slope)
    soft = step_label_loss(torch.tensor([1.0]), torch.tensor([0.25]))
    by_hand = 0.25 * math.log1p(math.exp(-1)) + 0.75 * math.log1p(math.e)
    assert soft.item() == pytest.approx(by_hand)
    odds = torch.tensor([1.0, -2.0], requires_grad=True)
    unknown = step_label_loss(odds, torch.tensor([math.nan, 0.0]))
    (slope,) = torch.autograd.grad(unknown.sum(), odds)
    assert unknown[0] == slope[0] == 0 and slope[1].item() == pytest.approx(1 / (1 + math.exp(2)))


def test_the_report_by_hand() -> None:
    odds, label = torch.tensor([1.0, -1.0, 2.0, 3.0]), torch.tensor([1.0, 0.0, 0.0, math.nan])
    report = report_labels([LabelOutputs(odds=odds, label=label, loss=torch.tensor([1.0, 2.0, 6.0, 0.0]))])
    assert (report.loss, report.accuracy, report.labels) == (3, pytest.approx(2 / 3), 3)
    assert (report.accuracy_right, report.accuracy_wrong) == (1, 0.5)
    assert math.isnan(report_labels([]).accuracy)


# learning


def test_one_batch_by_hand() -> None:
    """The mean over its labelled steps, of the logits at the separators; by one update the bias of "right"
    moves by rate · mean (y − σ(z))."""
    model = classifier(classifier_dropout=0.0)
    before = model.score.bias.detach().clone()
    texts = (("q1+1=2\n2+2=5\n", (6, 12)), ("q3\n", (2,)), ("q4\n5\n6\n", (4, 6)))
    with torch.no_grad():
        logits = [model(torch.tensor([TOKENIZER(text)["input_ids"]])).logits[0, list(e)] for text, e in texts]
    odds, label = torch.cat([pair[:, 1] - pair[:, 0] for pair in logits]), torch.tensor([1, 0, 1, 0.25, 1])
    expected = nn.functional.binary_cross_entropy_with_logits(odds, label).item()
    report = evaluate_process_reward(model, TOKENIZER, RECORDS, batch_size=2)
    assert report.loss == pytest.approx(expected, abs=1e-5)
    descent = plain_descent(model.named_parameters(), lr=0.1)
    (report,) = train_process_reward(model, TOKENIZER, RECORDS, trainer=descent)
    assert report.loss == pytest.approx(expected, abs=1e-5) and report.labels == 5
    mean = (label - torch.sigmoid(odds)).mean()
    assert torch.allclose(model.score.bias - before, 0.1 * mean * torch.tensor([-1.0, 1.0]), atol=1e-6)


def plain_descent(parameters: Any, lr: float) -> Trainer[LabelFit]:
    """With an ε far above every gradient, AdamW's first step is rate · gradient."""
    huge = 1e7
    return Trainer(
        LabelFit(parameters, FitSettings()),
        run=RunSettings(folder=Path(), iterations=1),
        optimizer=AdamWSettings(lr=lr * huge, eps=huge, weight_decay=0.0, max_grad_norm=math.inf),
    )


def test_a_trainer_goes_on_where_it_is_and_two_passes_are_one_run_of_two() -> None:
    """PRIME's way: the moments and the order go on; without the trainer they start anew."""

    def weights(*epochs: int, prefetch_next: bool) -> list[torch.Tensor]:
        model = classifier(classifier_dropout=0.0)
        trainer = None
        for count in epochs:
            settings = FitSettings(epochs=count, batch_size=2, learning_rate=1e-2)
            if trainer is None or not prefetch_next:
                trainer = label_trainer(model.named_parameters(), settings)
            train_process_reward(model, TOKENIZER, RECORDS, trainer=trainer)
        return [parameter.detach() for parameter in model.parameters()]

    assert all(map(torch.equal, weights(2, prefetch_next=True), weights(1, 1, prefetch_next=True)))
    assert not all(map(torch.equal, weights(2, prefetch_next=True), weights(1, 1, prefetch_next=False)))


# the progress estimator


def test_the_squared_error_of_a_sum_by_hand() -> None:
    """Completions without a step or a finite reward take no part."""
    model = classifier(num_labels=1, classifier_dropout=0.0)
    totals = []
    for text, ends in (("q1+1=2\n2+2=5\n", (6, 12)), ("q3\n", (2,))):
        with torch.no_grad():
            totals.append(model(torch.tensor([TOKENIZER(text)["input_ids"]])).logits[0, list(ends), 0].sum())
    rows = [("1+1=2\n\n2+2=5", 1), ("3", 0.25), (" \n", 1.0), ("4", None), ("5", math.nan), ("6", math.inf)]
    records = [{"prompt": "q", "completion": text, "reward": reward} for text, reward in rows]
    expected = ((totals[0] - 1) ** 2 + (totals[1] - 0.25) ** 2).item() / 2
    report = evaluate_process_reward(model, TOKENIZER, records)
    assert report.loss == pytest.approx(expected, rel=1e-5) and report.labels == 2
    hits = [float((total > 0.5) == right) for total, right in zip(totals, (True, False), strict=True)]
    assert [report.accuracy_right, report.accuracy_wrong] == hits
    before = model.score.bias.item()
    train_process_reward(model, TOKENIZER, records, trainer=plain_descent(model.named_parameters(), lr=0.01))
    slope = (2 * (totals[0] - 1) * 2 + 2 * (totals[1] - 0.25)).item() / 2
    assert model.score.bias.item() - before == pytest.approx(-0.01 * slope, rel=1e-3)


def test_judged_completions_that_cannot_be_used() -> None:
    for record, message in (
        ({"prompt": "q", "steps": ["1"], "labels": [1]}, "Record 0 has no completion, reward; its keys are"),
        ({"prompt": "q", "completion": "1", "reward": "1"}, "completion '1' and the reward '1'; needed are"),
        ({"prompt": "q", "completion": None, "reward": 1}, "the completion None and the reward 1"),
    ):
        with pytest.raises(UserError, match=message):
            train_process_reward(classifier(num_labels=1), TOKENIZER, [record])


# records


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "q", "completions": ["1"], "labels": [1]}, "has no steps; its keys are prompt, comp"),
        ({"prompt": "q", "steps": [], "labels": []}, r"has the steps \[\] and the labels \[\]; needed"),
        ({"prompt": None, "steps": ["1"], "labels": [1]}, "The prompt of record 1 is None; needed is text"),
        ({"prompt": "q", "steps": ["1", " "], "labels": [1, 1]}, "Step 1 of record 1 is empty"),
        ({"prompt": "q", "steps": ["1\n2"], "labels": [1]}, r"Step 0 of record 1 has the separator '\\n'"),
        ({"prompt": "q", "steps": ["1"], "labels": [-1]}, "Label 0 of record 1 is -1; allowed are 1"),
        ({"prompt": "q", "steps": ["1" * 130], "labels": [1]}, "has 132 tokens; the model reads at most 128"),
    ],
)
def test_records_that_cannot_be_used(record, message) -> None:
    with pytest.raises(UserError, match=message):
        train_process_reward(classifier(), TOKENIZER, [RECORDS[0], record])


def test_nothing_to_learn() -> None:
    unlabelled = [{"prompt": "q", "steps": ["1"], "labels": [None]}]
    with pytest.raises(UserError, match="There are 0 labelled texts"):
        train_process_reward(classifier(), TOKENIZER, unlabelled)


def test_a_loss_that_is_no_number_moves_nothing() -> None:
    parameter = nn.Parameter(torch.ones(1))

    def judge(rows: list[int]) -> LabelOutputs:
        odds = parameter * math.nan
        return LabelOutputs(odds=odds, label=torch.ones(1), loss=odds)

    with pytest.raises(ValueError, match=r"The loss of the texts \[4\] is nan"):
        fit_labels(judge, [4], label_trainer([("one", parameter)]))
    assert parameter.item() == 1


# the implicit one


def train_implicit_process_reward(policy: Any, rollout: Any, label: Any, **options: Any) -> Any:
    settings, trainer = options.pop("settings", None), options.pop("trainer", None)
    texts = ImplicitTexts(policy, rollout, label, **options)
    return fit_labels(texts.outputs, texts.rows, trainer or label_trainer(policy.trainable_parameters(), settings))


def completions(policy: CausalLMPolicy) -> Any:
    sampling = Sampling(temperature=0.8, top_k=20)
    stopping = StoppingCriteria(max_new_tokens=8)
    return policy.generate(["q", "1+1"], seeds=0, num_generations=8, sampling=sampling, stopping=stopping)


def test_one_implicit_update_by_hand() -> None:
    """At the reference σ(q) = ½: with SGD each weight moves by rate · mean (y − ½) β ∇ Σ_t log π."""
    policy = CausalLMPolicy(tiny_model(), TOKENIZER)
    rollout = completions(policy)
    label = torch.full((len(rollout),), math.nan)
    label[:3] = torch.tensor([1.0, 0.0, 1.0])
    parameters = [parameter for _, parameter in policy.trainable_parameters()]
    score = 0
    for row, sign in ((0, 1), (1, -1), (2, 1)):
        prompt = rollout.prompt_ids[row, rollout.prompt_mask[row] != 0]
        ids = torch.cat([prompt, rollout.completion_ids[row, rollout.loss_mask[row] != 0]])
        count = int(rollout.loss_mask[row].sum())
        log_p = policy.model(ids[None]).logits[0].log_softmax(-1)[-count - 1 : -1]
        score = score + sign * 0.5 * 0.1 * log_p.gather(1, ids[-count:, None]).sum() / 3
    assert isinstance(score, torch.Tensor)
    gradient = torch.autograd.grad(score, parameters)
    before = [parameter.detach().clone() for parameter in parameters]
    trainer = plain_descent(policy.trainable_parameters(), lr=1e-2)
    train_implicit_process_reward(policy, rollout, label, beta=0.1, trainer=trainer)
    for old, new, slope in zip(before, parameters, gradient, strict=True):
        assert torch.allclose(new.detach() - old, 1e-2 * slope, atol=2e-6)


def test_outcomes_that_do_not_fit() -> None:
    policy = CausalLMPolicy(tiny_model(), TOKENIZER)
    rollout = completions(policy)
    for label, message in (
        ([1.0], r"label is \[1\.0\] for 16 completions; give one number per completion"),
        ([2.0] * 16, r"label is \[2\.0, .* 1 \(right\), 0 \(wrong\)"),
        ([math.nan] * 16, "There are 0 labelled texts"),
    ):
        with pytest.raises(UserError, match=message):
            train_implicit_process_reward(policy, rollout, label)
