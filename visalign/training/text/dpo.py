# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimisation of a text policy, from pairs of completions or from single votes.

The reference is the policy before training: its log-probs of all completions are computed once, before the
first update, and no copy of it is kept. Batches, processes and resuming are those of supervised fine-tuning
(`.sft`); the loss of an update is the mean over its whole batch, whatever the micro-batch. Each pair may have
a label of its own that moves once per visit; checkpoints hold the labels.

    pairs = DemonstrationBatches(policy, records, size=32, seed=0, field=("chosen", "rejected"))
    Trainer(DPO(policy, pairs, settings=DPOSettings(row="ipo")), run=run).train()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from accelerate import Accelerator
from pydantic import Field
from torch import Tensor, nn

from visalign.core.preference.direct import (
    DIRECT,
    direct_preference_loss,
    dynamic_labels,
    implicit_reward,
    kto_loss,
    kto_reference_point,
)
from visalign.errors import UserError
from visalign.settings import Finite, NonNegative, Positive, Share, check_rules, settings
from visalign.text import TextPolicy, TextRollout
from visalign.training.loop.algorithm import Algorithm, Collected, Context
from visalign.training.loop.processes import get_accelerator, no_sync_unless_last
from visalign.training.loop.sharding import pad_batches, unsharded

from .parts import CompletionPairs
from .replay import TextReplay, distribute

MEANS = ("loss", "chosen", "rejected", "right", "logps_chosen", "logps_rejected", "label")
"""Quantities summed over a batch; chosen and rejected completions of votes have counts of their own."""
KEY = "labels"
"""File stem of the pairs' labels in a checkpoint."""
RECORDS_AT_ONCE = 256
"""Records whose log-probs are computed in one call; memory only."""


@settings("loss")
class DPOSettings:
    """Loss of direct preference optimisation."""

    row: str = "sigmoid"
    """An entry of `visalign.core.DIRECT`: sigmoid (DPO), robust, hinge, ipo, sigmoid_norm, simpo, power,
    kto."""
    beta: Positive | None = None
    """β, how near the policy stays to its reference; null: the loss's own (0.1, sigmoid_norm 5, simpo and
    power 2)."""
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
        check_rules(self, DPO_RULES)

    @property
    def votes(self) -> bool:
        """True if the loss learns from single votes instead of pairs."""
        return DIRECT[self.row].loss is None

    @property
    def fields(self) -> tuple[str, str]:
        """Fields of the two completions in a record."""
        return ("completion", "mismatched") if self.votes else ("chosen", "rejected")

    def pair_loss(self, *inputs: Tensor, label: Tensor | None = None) -> Tensor:
        """Compute `direct_preference_loss` of log-probs, reference log-probs and lengths."""
        options: dict[str, Any] = {"row": self.row, "beta": self.beta, "gamma": self.gamma, "eta": self.eta}
        eps = self.label_smoothing if label is None else 0.0
        return direct_preference_loss(*inputs, **options, eps=eps, label=label)

    def vote_loss(self, log_prob: Tensor, ref: Tensor, good: Tensor, point: Tensor) -> Tensor:
        """Compute `kto_loss`."""
        return kto_loss(
            log_prob,
            ref,
            good,
            point,
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )


def _rows(feature: str) -> str:
    return ", ".join(name for name, row in DIRECT.items() if getattr(row, feature))


DPO_RULES = (
    (
        lambda s: s.row not in DIRECT and ", ".join(DIRECT),
        "loss.row is {s.row!r}; it must be one of {v}.",
    ),
    (
        lambda s: s.votes and (s.gamma is not None or s.label_smoothing or s.eta),
        "loss.row=kto learns from single votes; gamma, label_smoothing and eta belong to pairs. Leave them "
        "out, or use another loss.",
    ),
    (
        lambda s: s.eta and s.row != "power",
        "loss.eta is {s.eta}, and loss.row={s.row} has no η. Leave it out, or use power.",
    ),
    (
        lambda s: s.label_smoothing and not DIRECT[s.row].smooths and _rows("smooths"),
        "loss.label_smoothing is {s.label_smoothing}, and loss.row={s.row} has no place for wrong labels. "
        "Set it to 0, or use {v}.",
    ),
    (
        lambda s: s.label_rate and not DIRECT[s.row].labels and _rows("labels"),
        "loss.label_rate is {s.label_rate}, and loss.row={s.row} has no labels that could move. Set it to 0, "
        "or use {v}.",
    ),
    (
        lambda s: not s.votes and (s.desirable_weight, s.undesirable_weight) != (1.0, 1.0),
        "loss.row={s.row} learns from pairs; desirable_weight and undesirable_weight belong to kto. Leave "
        "them out.",
    ),
    (
        lambda s: s.row == "robust" and not s.label_smoothing,
        "loss.row=robust without label_smoothing is sigmoid. Give the share of wrong labels, for example "
        "0.1, or use sigmoid.",
    ),
)


@dataclass(frozen=True)
class PreferenceData:
    """A stream of completions with the reference's log-probs."""

    completions: CompletionPairs
    ref: Tensor
    """[N, 2] summed log-probs of the reference."""
    good: Tensor | None
    """bool [N], the votes; None for pairs."""

    def select(self, rollout: TextRollout) -> tuple[Tensor, Tensor | None]:
        """Return (ref [n, 2], good [n]) of the n records of a rollout."""
        index = torch.tensor(rollout.group[: len(rollout) // 2])
        return self.ref[index], None if self.good is None else self.good[index]


class DPO(Algorithm):
    """Training of a text policy on preferences; an `Algorithm` for `Trainer`.

    Args:
        policy: on its device, with the weights of the reference.
        completions: the stream of batches (`visalign.adapters.DemonstrationBatches` with two fields: chosen
            and rejected; for votes completion and mismatched, see `with_mismatched`); each update takes one.
        settings: the loss.
        good: N votes of the completions' records, for kto.
        heldout: completions of records that are only evaluated.
        heldout_good: their votes.
        accelerator: processes, which share each batch, and trackers. None creates one on the policy's device.
        sharding: divide the model, its gradients and AdamW's moments among the processes (FSDP2).

    Raises:
        UserError: a model that cannot be divided, or missing votes.
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
        self.labels: Tensor | None = None
        """[N] of the pairs, where they move; the same in all processes."""
        if self.settings.label_rate:
            self.labels = torch.full((len(completions),), 1 - self.settings.label_smoothing)
        self.heldout = None if heldout is None else self._with_reference(heldout, heldout_good)
        self.module = distribute(TextReplay(policy), self.accelerator, sharding)

    def _with_reference(self, completions: CompletionPairs, good: Sequence[bool] | None) -> PreferenceData:
        """Compute the log-probs of the policy, which is still the reference."""
        if self.settings.votes != (good is not None) or (good is not None and len(good) != len(completions)):
            votes = "no votes" if good is None else f"{len(good)} votes of {len(completions)} completions"
            raise UserError(
                f"loss.row={self.settings.row} and {votes}: kto takes a vote for each completion, the "
                "other losses take pairs."
            )
        ref = torch.zeros(len(completions), 2)
        if DIRECT[self.settings.row].reference:
            ref = shared_log_probs(self.policy, completions, self.accelerator)
        return PreferenceData(
            completions, ref, None if good is None else torch.tensor(good, dtype=torch.bool)
        )

    def unsharded(self) -> AbstractContextManager[Any]:
        """Give each process the whole model within the context."""
        return unsharded(self.module)

    def parameters(self) -> Sequence[tuple[str, nn.Parameter]]:
        """Return the policy's trained parameters."""
        return self.policy.trainable_parameters()

    def compute_dtype(self) -> torch.dtype:
        """Return the dtype of the policy's matrix products."""
        return getattr(self.policy, "compute_dtype", torch.float32)

    def collect(self, run: Context) -> Collected:
        """Read the next batches of the stream."""
        first, count = run.counters.updates, run.optimizer.updates_per_iteration
        batches = [self.data.completions.batch(first + i) for i in range(count)]
        return Collected(
            experience=batches,
            samples=sum(len(batch) for batch in batches) // 2,
            tokens=sum(int(batch.loss_mask.sum()) for batch in batches),
        )

    def backward(self, experience: Any, step: TextRollout, run: Context) -> dict[str, float]:
        """Add the gradient of the mean loss of a batch."""
        ref, good = self.data.select(step)
        count, world = len(ref), self.accelerator.num_processes
        length = step.loss_mask.sum(1).view(2, -1).sum(0)
        longest_first = torch.argsort(length, stable=True, descending=True)
        local = longest_first[self.accelerator.process_index :: world].split(run.micro_batch)
        micro_batches = pad_batches(local, self.module, self.accelerator)
        point = None if good is None else self._reference_point(step, ref, micro_batches)
        index = torch.tensor(step.group[:count])
        labels = None if self.labels is None else self.labels[index]
        sums, leads = torch.zeros(2, len(MEANS), dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
        for number, rows in enumerate(micro_batches):
            is_last = number == len(micro_batches) - 1
            with no_sync_unless_last(self.module, self.accelerator, last=is_last):
                completions = rows if good is not None else torch.cat([rows, rows + count])
                log_prob = self.module(step, completions).log_prob.sum(1)
                votes, label = (None if values is None else values[rows] for values in (good, labels))
                loss, parts, leads[rows] = self._loss(
                    step, completions, log_prob, ref[rows], votes, point, label
                )
                self.accelerator.backward(loss.sum() / count * (run.counters.loss_scale * world))
            sums += parts
        means = _means(self._sum(sums))
        self._move_labels(index.tolist(), leads)
        means["tokens"], means["samples"] = float(step.loss_mask.sum()), float(len(step))
        if point is not None:
            means["kl"] = float(point)
        return means

    def _sum(self, values: Tensor) -> Tensor:
        """Sum over the processes."""
        total: Any = self.accelerator.reduce(values.to(self.accelerator.device), "sum")
        return total.cpu()

    def _move_labels(self, index: Sequence[int], leads: Tensor) -> None:
        """Move the labels of visited pairs; each lead is known in one process, and 0 in the others."""
        if self.labels is None:
            return
        for i, lead in zip(index, self._sum(leads).split(1), strict=True):  # a pair may occur twice
            self.labels[i : i + 1] = dynamic_labels(
                self.labels[i : i + 1], lead, rate=self.settings.label_rate
            )

    def _loss(
        self,
        rollout: TextRollout,
        rows: Tensor,
        log_prob: Tensor,
        ref: Tensor,
        good: Tensor | None,
        point: Tensor | None,
        label: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute (loss [n], sums and counts [2, len(MEANS)], lead [n] of pairs) of n records, whose
        completions `rows` have these summed log-probs."""
        settings, default = self.settings, DIRECT[self.settings.row]
        form: dict[str, Any] = {"row": settings.row, "beta": settings.beta}
        length, ref = rollout.loss_mask[rows].sum(1).to(log_prob.device), ref.to(log_prob.device)
        if good is not None and point is not None:
            good = good.to(log_prob.device)
            loss = settings.vote_loss(log_prob, ref[:, 0], good, point)
            reward = implicit_reward(log_prob, ref[:, 0], **form)
            chosen_reward, rejected_reward = reward[good], reward[~good]
            chosen, rejected = log_prob[good], log_prob[~good]
            right = (reward > (settings.beta or default.beta) * point) == good
            lead = torch.zeros(len(good))
        else:
            (chosen, rejected), lengths = log_prob.chunk(2), length.chunk(2)
            loss = settings.pair_loss(chosen, rejected, *ref.T, *lengths, label=label)
            chosen_reward = implicit_reward(chosen, ref[:, 0], lengths[0], **form)
            rejected_reward = implicit_reward(rejected, ref[:, 1], lengths[1], **form)
            right = chosen_reward > rejected_reward
            gamma = default.gamma if settings.gamma is None else settings.gamma
            lead = chosen_reward - rejected_reward - gamma
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
        total: Any = self.accelerator.reduce(log_ratio.to(self.accelerator.device), "sum")
        return kto_reference_point(total[None] / count, torch.zeros_like(total)[None])

    def record(self, experience: Any, sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Return losses and rewards of the batches; for votes, a batch without one of a kind is left out."""
        means = {}
        for name in dict.fromkeys(name for update in sums for name in update):
            values = [update[name] for update in sums if name in update]
            means[name] = sum(values) / len(values)
        length = means.pop("tokens") / means.pop("samples")
        del means["grad_norm"]
        return {**_named(means), "length_mean": length}

    def finish(self, run: Context) -> None:
        """Save the labels for a checkpoint."""
        if self.labels is not None:
            run.tensors[KEY] = {KEY: self.labels}

    def restore(self, run: Context) -> None:
        """Continue with the labels of a checkpoint."""
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
        rows = torch.arange(len(log_prob) if good is not None else 2 * len(log_prob))
        _, sums, _ = self._loss(rollout, rows, log_prob.T.flatten()[: len(rows)], ref, good, point)
        return _named(_means(sums))


METRIC_NAMES = {
    "chosen": "rewards/chosen",
    "rejected": "rewards/rejected",
    "right": "rewards/accuracies",
    "logps_chosen": "logps/chosen",
    "logps_rejected": "logps/rejected",
    "label": "label_mean",
}
"""Mean -> metric; TRL's names, but for the label's."""


def _named(means: Mapping[str, float]) -> dict[str, float]:
    metrics = {METRIC_NAMES.get(name, name): value for name, value in means.items()}
    if "chosen" in means and "rejected" in means:
        metrics["rewards/margins"] = means["chosen"] - means["rejected"]
    return metrics


def _means(sums: Tensor) -> dict[str, float]:
    """Divide sums by counts [2, len(MEANS)], where there are any."""
    return {name: total / count for name, total, count in zip(MEANS, *sums.tolist(), strict=True) if count}


@torch.no_grad()
def shared_log_probs(policy: TextPolicy, completions: CompletionPairs, accelerator: Accelerator) -> Tensor:
    """Compute summed log-probs [N, 2] of both completions of N records under the present weights.

    Args:
        policy: each process has its whole weights.
        completions: the records.
        accelerator: processes, each of which computes its share; all call it.
    """
    log_probs = torch.zeros(len(completions), 2)
    local = range(accelerator.process_index, len(completions), accelerator.num_processes)
    for start in range(0, len(local), RECORDS_AT_ONCE):
        index = local[start : start + RECORDS_AT_ONCE]
        values = policy.log_probs(completions.rows(index)).log_prob.sum(1)
        log_probs[torch.tensor(index)] = values.view(2, -1).T.cpu()
    total: Any = accelerator.reduce(log_probs.to(accelerator.device), "sum")
    return total.cpu()
