# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimisation of a text policy, from pairs of completions or from single votes.

The reference is the policy before training: its log-probs of all completions are computed once, before the
first update, and no copy of it is kept. Batches, processes and resuming are those of supervised fine-tuning
(`.sft`); the loss of an update is the mean over its whole batch, whatever the micro-batch. Each pair may have
a label of its own that moves once per visit; checkpoints hold the labels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import torch
from accelerate import Accelerator
from pydantic import Field
from torch import Tensor

from visalign.core.preference.direct import (
    DIRECT,
    direct_preference_loss,
    dynamic_labels,
    implicit_reward,
    kto_loss,
    kto_reference_point,
)
from visalign.settings import Finite, NonNegative, Positive, Share, refuse, settings
from visalign.text import TextPolicy, TextRollout
from visalign.training.loop.algorithm import Collected, Context
from visalign.training.loop.processes import get_accelerator, synced_last
from visalign.training.loop.sharding import pad_batches

from .parts import CompletionPairs
from .replay import TextAlgorithm, TextReplay, distribute

MEANS = (
    *("loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies"),
    *("logps/chosen", "logps/rejected", "label_mean"),
)
"""Metrics that are means over a batch; TRL's names, but for the label's. Chosen and rejected completions of
votes have counts of their own."""
KEY = "labels"  # File stem of the pairs' labels in a checkpoint
RECORDS_AT_ONCE = 256  # Records whose log-probs are computed in one call; memory only


@settings("loss")
class DPOSettings:
    """Loss of direct preference optimisation."""

    row: Literal["sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "simpo", "power", "kto"] = "sigmoid"
    """An entry of `visalign.core.DIRECT`; sigmoid is DPO."""
    beta: Positive | None = None
    """β, how near the policy stays to its reference; null: the loss's own (0.1, sigmoid_norm 5, simpo and power 2)."""
    gamma: Finite | None = None
    """γ, lead that the chosen completion should have; null: the loss's own (0, simpo 1)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """ε, share of pairs that are assumed to be the wrong way round: cDPO with sigmoid; robust needs it."""
    eta: NonNegative | None = None
    """η of power, weight of the chosen completion's own likelihood; null: the loss's own (0.0005)."""
    label_rate: Share = 0.0
    """γ of POWER-DL, share of the way to its stationary value σ(m) that the label of a pair moves at each
    visit; labels start at 1 − label_smoothing. 0: fixed labels. For sigmoid, sigmoid_norm, simpo, power."""
    desirable_weight: Positive = 1.0
    """λ_D of kto."""
    undesirable_weight: Positive = 1.0
    """λ_U of kto."""

    def __post_init__(self) -> None:
        refuse(_broken_rules(self))

    @property
    def votes(self) -> bool:
        """True if the loss learns from single votes instead of pairs."""
        return DIRECT[self.row].loss is None

    @property
    def fields(self) -> tuple[str, str]:
        """Fields of the two completions in a record."""
        return ("completion", "mismatched") if self.votes else ("chosen", "rejected")


def _broken_rules(s: DPOSettings) -> Iterator[str]:
    row = DIRECT[s.row]
    read = {
        "gamma": not s.votes,
        "eta": s.row == "power",
        "label_smoothing": row.smooths and not s.votes,
        "label_rate": row.labels,
        "desirable_weight": s.votes,
        "undesirable_weight": s.votes,
    }
    defaults = {item.name: item.default for item in fields(DPOSettings)}
    for name in (name for name, is_read in read.items() if not is_read and getattr(s, name) != defaults[name]):
        yield f"loss.{name} is set, and loss.row={s.row} does not read it. Leave it out."
    if s.row == "robust" and not s.label_smoothing:
        yield (
            "loss.row=robust without label_smoothing is sigmoid. Give the share of wrong labels, for example 0.1, or "
            "use sigmoid."
        )


@dataclass(frozen=True)
class PreferenceData:
    """A stream of completions with the reference's log-probs."""

    completions: CompletionPairs
    ref: Tensor  # [N, 2] summed log-probs of the reference
    good: Tensor | None  # bool [N], the votes; None for pairs

    def select(self, rollout: TextRollout) -> tuple[Tensor, Tensor | None]:
        """Return (ref [n, 2], good [n]) of the n records of a rollout."""
        index = torch.tensor(rollout.group[: len(rollout) // 2])
        return self.ref[index], None if self.good is None else self.good[index]


class DPO(TextAlgorithm):
    """Training of a text policy, which has the weights of the reference, on preferences; an `Algorithm` for `Trainer`.

    Each update takes a batch of `completions` (`visalign.adapters.DemonstrationBatches` with the two
    `settings.fields`; for votes see `with_mismatched`). `good` are N votes of the records, for kto; `heldout`
    completions are only evaluated. `sharding` divides the model, its gradients and AdamW's moments among the
    processes (FSDP2).
    """

    def __init__(
        self,
        policy: TextPolicy,
        completions: CompletionPairs,
        *,
        settings: DPOSettings | None = None,
        good: Sequence[bool] | None = None,
        heldout: CompletionPairs | None = None,
        heldout_good: Sequence[bool] | None = None,
        accelerator: Accelerator | None = None,
        sharding: bool = False,
    ) -> None:
        self.accelerator = get_accelerator(accelerator, policy)
        self.policy, self.settings = policy, settings or DPOSettings()
        self.data = self._with_reference(completions, good)
        self.labels: Tensor | None = None  # [N] of the pairs, where they move; the same in all processes
        if self.settings.label_rate:
            self.labels = torch.full((len(completions),), 1 - self.settings.label_smoothing)
        self.heldout = None if heldout is None else self._with_reference(heldout, heldout_good)
        self.module = distribute(TextReplay(policy), self.accelerator, sharding)

    def _with_reference(self, completions: CompletionPairs, good: Sequence[bool] | None) -> PreferenceData:
        """Compute the log-probs of the policy, which is still the reference."""
        ref = torch.zeros(len(completions), 2)
        if DIRECT[self.settings.row].reference:
            ref = shared_log_probs(self.policy, completions, self.accelerator)
        return PreferenceData(completions, ref, None if good is None else torch.tensor(good, dtype=torch.bool))

    def collect(self, run: Context) -> Collected:
        return self.next_batches(self.data.completions, run, per_record=2)

    def backward(self, experience: Any, step: TextRollout, run: Context) -> dict[str, float]:
        ref, good = self.data.select(step)
        count, accelerator = len(ref), self.accelerator
        length = step.loss_mask.sum(1).view(2, -1).sum(0)
        longest_first = torch.argsort(length, stable=True, descending=True)
        local = longest_first[accelerator.process_index :: accelerator.num_processes].split(run.micro_batch)
        micro_batches = pad_batches(local, self.module, accelerator)
        point = None if good is None else self._reference_point(step, ref, micro_batches)
        index = torch.tensor(step.group[:count])
        labels = None if self.labels is None else self.labels[index]
        sums, leads = torch.zeros(2, len(MEANS), dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
        scale = run.counters.loss_scale * accelerator.num_processes
        for rows in synced_last(micro_batches, self.module, accelerator):
            completions = rows if good is not None else torch.cat([rows, rows + count])
            log_prob = self.module(step, completions).log_prob.sum(1)
            length = step.loss_mask[completions].sum(1)
            votes, label = (None if values is None else values[rows] for values in (good, labels))
            loss, parts, leads[rows] = self._loss(log_prob, length, ref[rows], votes, point, label)
            accelerator.backward(loss.sum() / count * scale)
            sums += parts
        means = _means(self._sum(sums))
        if self.labels is not None:  # each lead is computed in one process, and 0 in the others
            for i, lead in zip(index.tolist(), self._sum(leads).split(1), strict=True):  # a pair may occur twice
                self.labels[i : i + 1] = dynamic_labels(self.labels[i : i + 1], lead, rate=self.settings.label_rate)
        means["tokens"], means["samples"] = float(step.loss_mask.sum()), float(len(step))
        return means if point is None else {**means, "kl": float(point)}

    def _sum(self, values: Tensor) -> Tensor:
        total: Any = self.accelerator.reduce(values.to(self.accelerator.device), "sum")
        return total.cpu()

    def _loss(
        self,
        log_prob: Tensor,
        length: Tensor,
        ref: Tensor,
        good: Tensor | None,
        point: Tensor | None,
        label: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute (loss [n], sums and counts [2, len(MEANS)], lead [n] of pairs) of n records.

        Log-probs and lengths are those of their completions: [n] of votes, or [2n] of pairs, chosen ones first.
        """
        s, default = self.settings, DIRECT[self.settings.row]
        form: dict[str, Any] = {"row": s.row, "beta": s.beta}
        length, ref = length.to(log_prob.device), ref.to(log_prob.device)
        if good is not None and point is not None:
            good, lead = good.to(log_prob.device), torch.zeros(len(good))
            weights = {"desirable_weight": s.desirable_weight, "undesirable_weight": s.undesirable_weight}
            loss = kto_loss(log_prob, ref[:, 0], good, point, beta=s.beta, **weights)
            reward = implicit_reward(log_prob, ref[:, 0], **form)
            chosen_reward, rejected_reward = reward[good], reward[~good]
            chosen, rejected = log_prob[good], log_prob[~good]
            right = (reward > (s.beta or default.beta) * point) == good
        else:
            (chosen, rejected), lengths = log_prob.chunk(2), length.chunk(2)
            eps = s.label_smoothing if label is None else 0.0
            options = {"gamma": s.gamma, "eta": s.eta, "eps": eps, "label": label}
            loss = direct_preference_loss(chosen, rejected, *ref.T, *lengths, **form, **options)
            chosen_reward = implicit_reward(chosen, ref[:, 0], lengths[0], **form)
            rejected_reward = implicit_reward(rejected, ref[:, 1], lengths[1], **form)
            right = chosen_reward > rejected_reward
            lead = chosen_reward - rejected_reward - (default.gamma if s.gamma is None else s.gamma)
        labels = torch.zeros(0) if label is None else label
        columns = (loss, chosen_reward, rejected_reward, right, chosen, rejected, labels)  # as MEANS
        sums = torch.stack([column.detach().double().sum().cpu() for column in columns])
        counts = torch.tensor([len(column) for column in columns], dtype=torch.float64)
        return loss, torch.stack([sums, counts]), lead.detach().double().cpu()

    @torch.no_grad()
    def _reference_point(self, step: TextRollout, ref: Tensor, micro_batches: Sequence[Tensor]) -> Tensor:
        """Compute z₀ of KTO over all mismatched completions of the batch, under the present weights."""
        log_ratio, count = torch.zeros((), dtype=torch.float64), len(ref)
        for rows in micro_batches:
            log_prob = self.module(step, rows + count).log_prob.sum(1).cpu()
            log_ratio += (log_prob - ref[rows, 1]).double().sum()
        mean = self._sum(log_ratio)[None] / count
        return kto_reference_point(mean, torch.zeros_like(mean)).to(self.accelerator.device)

    def record(self, experience: Any, sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Return losses and rewards of the batches; for votes, a batch without one of a kind is left out."""
        means = {}
        for name in dict.fromkeys(name for update in sums for name in update):
            values = [update[name] for update in sums if name in update]
            means[name] = sum(values) / len(values)
        length = means.pop("tokens") / means.pop("samples")
        del means["grad_norm"]
        return {**_with_margins(means), "length_mean": length}

    def finish(self, run: Context) -> None:
        if self.labels is not None:
            run.tensors[KEY] = {KEY: self.labels}

    def restore(self, run: Context) -> None:
        if self.labels is not None:
            self.labels = run.tensors[KEY][KEY].clone()

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Evaluate loss, rewards and accuracy on held-out completions; empty without any."""
        if self.heldout is None:
            return {}
        log_prob = shared_log_probs(self.policy, self.heldout.completions, self.accelerator)
        rollout = self.heldout.completions.rows(range(len(log_prob)))
        ref, good = self.heldout.select(rollout)
        point = None if good is None else kto_reference_point(log_prob[:, 1], ref[:, 1])
        rows = slice(None if good is None else len(log_prob))  # of votes without the mismatched completions
        _, sums, _ = self._loss(log_prob.T.flatten()[rows], rollout.loss_mask.sum(1)[rows], ref, good, point)
        return _with_margins(_means(sums))


def _with_margins(means: Mapping[str, float]) -> dict[str, float]:
    chosen, rejected = (means.get(f"rewards/{side}", math.nan) for side in ("chosen", "rejected"))
    return dict(means) if math.isnan(chosen - rejected) else {**means, "rewards/margins": chosen - rejected}


def _means(sums: Tensor) -> dict[str, float]:
    return {name: total / count for name, total, count in zip(MEANS, *sums.tolist(), strict=True) if count}


@torch.no_grad()
def shared_log_probs(policy: TextPolicy, completions: CompletionPairs, accelerator: Accelerator) -> Tensor:
    """Compute summed log-probs [N, 2] of both completions of N records under the present weights.

    Each process has the whole weights and computes its share; all call it.
    """
    log_probs = torch.zeros(len(completions), 2)
    local = range(accelerator.process_index, len(completions), accelerator.num_processes)
    for start in range(0, len(local), RECORDS_AT_ONCE):
        index = local[start : start + RECORDS_AT_ONCE]
        log_probs[torch.tensor(index)] = policy.log_probs(completions.rows(index)).log_prob.sum(1).view(2, -1).T.cpu()
    total: Any = accelerator.reduce(log_probs.to(accelerator.device), "sum")
    return total.cpu()
