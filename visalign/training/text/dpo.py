# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimisation of a text policy, from pairs of completions or from single votes.

The reference is the policy before training: it is asked once for all completions, before the first update,
and no copy of it is kept. Batches, processes and resuming are those of supervised fine-tuning (`.sft`); the
loss of an update is the mean over its whole batch, whatever the micro-batch. Each pair may have a label of
its own that moves once per visit; labels lie in checkpoints.

    pairs = DemonstrationBatches(policy, records, size=32, seed=0, field=("chosen", "rejected"))
    Trainer(DPO(policy, pairs, settings=DPOSettings(row="ipo")), run=run).train()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
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
from visalign.text import TextPolicy, TextRollout
from visalign.training.loop.algorithm import Algorithm, Collected, Context
from visalign.training.loop.processes import get_accelerator, no_sync_unless_last
from visalign.training.loop.sharding import pad_batches, unsharded

from .parts import CompletionPairs
from .replay import TextReplay, spread

MEANS = ("loss", "chosen", "rejected", "right", "logps_chosen", "logps_rejected", "label")
"""What is summed over a batch; the parts of chosen and of rejected completions have counts of their own."""
KEY = "labels"
"""File stem of the pairs' labels in a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class DPOSettings:
    """The loss."""

    row: str = "sigmoid"
    """A row of `visalign.core.DIRECT`: sigmoid (DPO), robust, hinge, ipo, sigmoid_norm, simpo,
    power, kto."""
    beta: float | None = None
    """β, how near the policy stays to its reference; null: the row's own (0.1, sigmoid_norm 5, simpo and
    power 2)."""
    gamma: float | None = None
    """γ, lead that the chosen completion should have; null: the row's own (0, simpo 1)."""
    label_smoothing: float = 0.0
    """ε, share of pairs that are thought to be the wrong way round: cDPO with sigmoid; robust needs it."""
    eta: float | None = None
    """η of power, weight of the chosen completion's own likelihood; null: the row's own (0.0005)."""
    label_rate: float = 0.0
    """γ of POWER-DL, share of the way to its stationary value σ(m) that the label of a pair goes at each
    visit; labels begin at 1 − label_smoothing. 0: they stay. For sigmoid, sigmoid_norm, simpo and power."""
    desirable_weight: float = 1.0
    """λ_D of kto."""
    undesirable_weight: float = 1.0
    """λ_U of kto."""

    def __post_init__(self) -> None:
        known, one = DIRECT.get(self.row), torch.ones(1)
        if known is None:
            raise UserError(f"loss.row is {self.row!r}; it must be one of {', '.join(DIRECT)}.")
        if self.votes and (self.gamma is not None or self.label_smoothing or self.eta):
            raise UserError(
                "loss.row=kto learns from single votes: gamma, label_smoothing and eta are of pairs. Leave "
                "them out, or take another loss."
            )
        if self.label_rate and not known.labels:
            raise UserError(
                f"loss.label_rate is {self.label_rate}, and loss.row={self.row} has no labels that could "
                f"move. Set it to 0, or take {', '.join(n for n, each in DIRECT.items() if each.labels)}."
            )
        if not self.votes and (self.desirable_weight, self.undesirable_weight) != (1.0, 1.0):
            raise UserError(
                f"loss.row={self.row} learns from pairs: desirable_weight and undesirable_weight are "
                "those of kto. Leave them out."
            )
        if self.row == "robust" and not self.label_smoothing:
            raise UserError(
                "loss.row=robust without label_smoothing is sigmoid; give the share of wrong labels, "
                "for example 0.1, or take sigmoid."
            )
        try:
            if self.votes:
                self.of_votes(one, one, one.bool(), one[0])
            else:
                self.of_pairs(one, one, one, one, one, one)
                dynamic_labels(one, one, rate=self.label_rate)
        except ValueError as error:
            raise UserError(f"loss: {error}") from error

    @property
    def votes(self) -> bool:
        """Whether it learns from single votes in place of pairs."""
        return DIRECT[self.row].loss is None

    @property
    def fields(self) -> tuple[str, str]:
        """Of the completions in a record."""
        return ("completion", "mismatched") if self.votes else ("chosen", "rejected")

    def of_pairs(self, *completions: Tensor, label: Tensor | None = None) -> Tensor:
        """`direct_preference_loss` of the log-probs, those of the reference, and the lengths."""
        options: dict[str, Any] = {"row": self.row, "beta": self.beta, "gamma": self.gamma, "eta": self.eta}
        eps = self.label_smoothing if label is None else 0.0
        return direct_preference_loss(*completions, **options, eps=eps, label=label)

    def of_votes(self, log_prob: Tensor, ref: Tensor, good: Tensor, point: Tensor) -> Tensor:
        """`kto_loss`."""
        weights = {
            "desirable_weight": self.desirable_weight,
            "undesirable_weight": self.undesirable_weight,
        }
        return kto_loss(log_prob, ref, good, point, beta=self.beta, **weights)


@dataclass(frozen=True)
class PreferenceData:
    """A stream of completions with what the reference says of them."""

    completions: CompletionPairs
    ref: Tensor
    """[N, 2] summed log-probs of the reference."""
    good: Tensor | None
    """bool [N], the votes; None of pairs."""

    def of(self, rollout: TextRollout) -> tuple[Tensor, Tensor | None]:
        """(ref [n, 2], good [n]) of the n records of a rollout."""
        places = torch.tensor(rollout.group[: len(rollout) // 2])
        return self.ref[places], None if self.good is None else self.good[places]


class DPO(Algorithm):
    """Trains a text policy on preferences; an `Algorithm` for `Trainer`.

    Args:
        policy: on its device, with the weights of the reference.
        completions: the stream of batches (`visalign.adapters.DemonstrationBatches` with two fields: chosen
            and rejected; of votes completion and mismatched, see `with_mismatched`); each update takes one.
        settings: the loss.
        good: N votes of the completions' records, for kto.
        heldout: the same of records that are measured alone.
        heldout_good: their votes.
        accelerator: processes, which share each batch, and trackers. None makes one on the policy's device.
        sharding: divide the model, its gradients and AdamW's moments among the processes (FSDP2).

    Raises:
        UserError: a model that cannot be divided, or votes that are not there.
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
        self.trained = self._with_reference(completions, good)
        self.labels: Tensor | None = None
        """[N] of the pairs, where they move; the same in all processes."""
        if self.settings.label_rate:
            self.labels = torch.full((len(completions),), 1 - self.settings.label_smoothing)
        self.heldout = None if heldout is None else self._with_reference(heldout, heldout_good)
        self.module = spread(TextReplay(policy), self.accelerator, sharding)

    def _with_reference(self, completions: CompletionPairs, good: Sequence[bool] | None) -> PreferenceData:
        """Completions and what the policy, which is the reference yet, says of them."""
        if self.settings.votes != (good is not None) or (good is not None and len(good) != len(completions)):
            given = "no votes" if good is None else f"{len(good)} votes of {len(completions)} completions"
            raise UserError(
                f"loss.row={self.settings.row} and {given}: kto takes a vote for each completion, the "
                "other losses take pairs."
            )
        ref = torch.zeros(len(completions), 2)
        if DIRECT[self.settings.row].reference:
            ref = shared_log_probs(self.policy, completions, self.accelerator)
        return PreferenceData(
            completions, ref, None if good is None else torch.tensor(good, dtype=torch.bool)
        )

    def unsharded(self) -> AbstractContextManager[Any]:
        """Inside, each process has all of the model."""
        return unsharded(self.module)

    def parameters(self) -> Sequence[tuple[str, nn.Parameter]]:
        """What of the policy is trained."""
        return self.policy.trainable_parameters()

    def compute_dtype(self) -> torch.dtype:
        """Of the policy's network."""
        return getattr(self.policy, "compute_dtype", torch.float32)

    def collect(self, run: Context) -> Collected:
        """The next batches of the stream."""
        first, count = run.counters.updates, run.optimizer.updates_per_iteration
        batches = [self.trained.completions.batch(first + i) for i in range(count)]
        return Collected(
            experience=batches,
            samples=sum(len(batch) for batch in batches) // 2,
            tokens=sum(int(batch.loss_mask.sum()) for batch in batches),
        )

    def backward(self, experience: Any, step: TextRollout, run: Context) -> dict[str, float]:
        """Add the gradient of the mean loss of a batch."""
        ref, good = self.trained.of(step)
        count, world = len(ref), self.accelerator.num_processes
        longest_first = torch.argsort(step.loss_mask.sum(1).view(2, -1).sum(0), stable=True, descending=True)
        own = longest_first[self.accelerator.process_index :: world].split(run.micro_batch)
        parts = pad_batches(own, self.module, self.accelerator)
        point = None if good is None else self._reference_point(step, ref, parts)
        places: Any = step.group[:count]
        label = None if self.labels is None else self.labels[torch.tensor(places)]
        sums, lead = torch.zeros(2, len(MEANS), dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
        for number, rows in enumerate(parts):
            with no_sync_unless_last(self.module, self.accelerator, last=number == len(parts) - 1):
                completions = rows if good is not None else torch.cat([rows, rows + count])
                log_prob = self.module(step, completions).log_prob.sum(1)
                votes, own_label = (None if each is None else each[rows] for each in (good, label))
                loss, found, lead[rows] = self._loss(
                    step, completions, log_prob, ref[rows], votes, point, own_label
                )
                self.accelerator.backward(loss.sum() / count * (run.counters.loss_scale * world))
            sums += found
        total: Any = self.accelerator.reduce(sums.to(self.accelerator.device), "sum")
        means = _means(total.cpu())
        self._move(places, lead)
        means["tokens"], means["samples"] = float(step.loss_mask.sum()), float(len(step))
        if point is not None:
            means["kl"] = float(point)
        return means

    def _move(self, places: Sequence[int], lead: Tensor) -> None:
        """Labels after a visit of the pairs at `places`, whose leads one process knows each, the others as
        0."""
        if self.labels is None:
            return
        total: Any = self.accelerator.reduce(lead.to(self.accelerator.device), "sum")
        for place, own in zip(places, total.cpu().split(1), strict=True):  # a pair may be there twice
            one = slice(place, place + 1)
            self.labels[one] = dynamic_labels(self.labels[one], own, rate=self.settings.label_rate)

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
        """(loss [n], sums and counts [2, len(MEANS)], lead [n] of pairs) of n records, whose completions
        `rows` have these sums."""
        form: dict[str, Any] = {"row": self.settings.row, "beta": self.settings.beta}
        length = rollout.loss_mask[rows].sum(1).to(log_prob.device)
        ref = ref.to(log_prob.device)
        if good is not None and point is not None:
            good = good.to(log_prob.device)
            loss = self.settings.of_votes(log_prob, ref[:, 0], good, point)
            reward = implicit_reward(log_prob, ref[:, 0], **form)
            better, worse, said, refused = reward[good], reward[~good], log_prob[good], log_prob[~good]
            beta = self.settings.beta or DIRECT["kto"].beta
            right, lead = (reward > beta * point) == good, torch.zeros(len(good))
        else:
            (said, refused), lengths = log_prob.chunk(2), length.chunk(2)
            loss = self.settings.of_pairs(said, refused, *ref.T, *lengths, label=label)
            better = implicit_reward(said, ref[:, 0], lengths[0], **form)
            worse = implicit_reward(refused, ref[:, 1], lengths[1], **form)
            right = better > worse
            gamma = DIRECT[self.settings.row].gamma if self.settings.gamma is None else self.settings.gamma
            lead = better - worse - gamma
        labels = torch.zeros(0) if label is None else label
        columns = [each.detach().double() for each in (loss, better, worse, right, said, refused, labels)]
        counts = torch.tensor([len(each) for each in columns], dtype=torch.float64)
        sums = torch.stack([each.sum().cpu() for each in columns])
        return loss, torch.stack([sums, counts]), lead.detach().double().cpu()

    @torch.no_grad()
    def _reference_point(self, step: TextRollout, ref: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """z₀ of KTO: of all mismatched completions of the batch, under the present weights."""
        gained, count = torch.zeros((), dtype=torch.float64), len(ref)
        for rows in parts:
            said = self.module(step, rows + count).log_prob.sum(1).cpu()
            gained += (said - ref[rows, 1]).double().sum()
        total: Any = self.accelerator.reduce(gained.to(self.accelerator.device), "sum")
        return kto_reference_point(total[None] / count, torch.zeros_like(total)[None])

    def record(self, experience: Any, sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Losses and rewards of the batches; of votes, a part without one of its kind is left out."""
        found = {}
        for name in dict.fromkeys(name for each in sums for name in each):
            known = [each[name] for each in sums if name in each]
            found[name] = sum(known) / len(known)
        length = found.pop("tokens") / found.pop("samples")
        del found["grad_norm"]
        return {**_named(found), "length_mean": length}

    def finish(self, run: Context) -> None:
        """Keep the labels."""
        if self.labels is not None:
            run.tensors[KEY] = {KEY: self.labels}

    def restore(self, run: Context) -> None:
        """Take up the labels of a checkpoint."""
        if self.labels is not None:
            self.labels = run.tensors[KEY][KEY].clone()

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Loss, rewards and accuracy on held-out completions under the present weights; empty without any."""
        if self.heldout is None:
            return {}
        said = shared_log_probs(self.policy, self.heldout.completions, self.accelerator)
        rollout = self.heldout.completions.rows(range(len(said)))
        ref, good = self.heldout.of(rollout)
        point = None if good is None else kto_reference_point(said[:, 1], ref[:, 1])
        rows = torch.arange(len(said) if good is not None else 2 * len(said))
        _, sums, _ = self._loss(rollout, rows, said.T.flatten()[: len(rows)], ref, good, point)
        return _named(_means(sums))


NAMES = {
    "chosen": "rewards/chosen",
    "rejected": "rewards/rejected",
    "right": "rewards/accuracies",
    "logps_chosen": "logps/chosen",
    "logps_rejected": "logps/rejected",
    "label": "label_mean",
}
"""TRL's names, but for the label's."""


def _named(means: Mapping[str, float]) -> dict[str, float]:
    found = {NAMES.get(name, name): value for name, value in means.items()}
    if "chosen" in means and "rejected" in means:
        found["rewards/margins"] = means["chosen"] - means["rejected"]
    return found


def _means(sums: Tensor) -> dict[str, float]:
    """Sums and counts [2, len(MEANS)] -> the means of what is there."""
    return {name: total / count for name, total, count in zip(MEANS, *sums.tolist(), strict=True) if count}


ASKED = 256
"""Records that are asked about together; memory only."""


@torch.no_grad()
def shared_log_probs(policy: TextPolicy, completions: CompletionPairs, accelerator: Accelerator) -> Tensor:
    """Summed log-probs [N, 2] of both completions of N records under the present weights, without gradient.

    Args:
        policy: whose weights each process has whole.
        completions: the records.
        accelerator: of the processes, each of which asks about its share; all call it.
    """
    found = torch.zeros(len(completions), 2)
    own = range(accelerator.process_index, len(completions), accelerator.num_processes)
    for start in range(0, len(own), ASKED):
        places = own[start : start + ASKED]
        said = policy.log_probs(completions.rows(places)).log_prob.sum(1)
        found[torch.tensor(places)] = said.view(2, -1).T.cpu()
    total: Any = accelerator.reduce(found.to(accelerator.device), "sum")
    return total.cpu()
