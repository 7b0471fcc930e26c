# SPDX-License-Identifier: Apache-2.0
"""An objective is one row: what is picked at each of the eight stages, and the weights of its terms.

    objective = named_objective("dapo", kl=0.01)
    prepared = objective.prepare(trajectories)            # once per optimizer step, all samples
    for index in micro_batches:                           # any split: the same gradient
        loss = objective.loss(prepared.rows(index), policy(index))
        loss.total.backward()

T may count tokens or denoising steps; PPO is the terms policy, value, entropy and ptx.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from visalign.core.advantages.group import clamp_advantages
from visalign.core.surrogates.aggregation import Mode, aggregate, count_step, row_tokens
from visalign.core.surrogates.kl import Estimator, kl_penalty
from visalign.core.surrogates.off_policy import importance_weights, off_policy_mask
from visalign.core.surrogates.ratios import LEVELS, Level, log_ratio, ratio_level
from visalign.core.surrogates.value import value_loss
from visalign.errors import suggestion

from . import stages
from .data import Decisions, Loss, PolicyOutput, Prepared, Trajectories, check_finite
from .decisions import EXTRA, check_decisions
from .entropy_stage import ENTROPY_TERMS, entropy_loss
from .loss_statistics import loss_statistics
from .options import pick

Ratio = Literal["log_prob", "guard"]
StepWeight = Literal["uniform", "inverse_dt"]
KLForm = Literal["divergence", "velocity"]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """One row of the table; all fields are plain values: a row can be compared, printed, written as YAML.

    Raises:
        ValueError: a choice or an option that does not exist, with the nearest name; a negative weight.
    """

    source: str = ""
    """Paper, arXiv id, equation."""
    decisions: Decisions | None = None
    """What the row is made for; None for either. `check_decisions` has what else does not fit."""
    advantage: str = "group"
    """A key of `ADVANTAGES`."""
    advantage_options: Mapping[str, Any] = field(default_factory=dict)
    advantage_clamp: float | None = None
    kl_in_reward: float = 0.0
    """β of −β k1 in the reward, units of the reward per nat. Denoising steps have it from their log-probs;
    `kl` with their exact divergence has no variance."""
    drop_zero_signal: bool = False
    """Samples whose advantage is 0 leave the loss and the counts (dynamic sampling without refill)."""
    ratio: Ratio = "log_prob"
    """"guard": log_prob is `guard_log_ratio` and old_log_prob 0, so that each denoising step's ratio is
    centred at 1 and free of the step's own scale."""
    step_weight: StepWeight = "uniform"
    """"inverse_dt": Trajectories.loss_weight is `guard_step_weight` of each step, up to a constant factor."""
    level: Level = "token"
    """A key of `LEVELS`: at which level the ratio is taken."""
    surrogate: str = "ppo_clip"
    """A key of `SURROGATES`."""
    surrogate_options: Mapping[str, Any] = field(default_factory=dict)
    importance_sampling: Mapping[str, Any] | None = None
    """The off-policy correction: arguments of `importance_weights`; needs Trajectories.rollout_log_prob."""
    off_policy_delta: float | None = None
    """δ of `off_policy_mask`, nats per decision."""
    selection: str | None = None
    """A key of `SELECTIONS`."""
    selection_options: Mapping[str, Any] = field(default_factory=dict)
    kl: float = 0.0
    """β of the KL term, units of the advantage per nat, or per unit of what `kl_form` names."""
    kl_form: KLForm = "divergence"
    """"velocity": PolicyOutput.kl is `velocity_kl` of each denoising step, mean |v_θ − v_ref|², as in
    DiffusionNFT and Flow-Factory; it weighs all steps alike, the divergence those of little noise more."""
    kl_value: Estimator = "k3"
    """What the term shows; see `kl_penalty`."""
    kl_gradient: Estimator = "k2"
    """What the term follows; see `kl_penalty`."""
    kl_weighted: bool = False
    """Multiply the KL term by the ratio, for samples of an older policy. An exact PolicyOutput.kl is the mean
    over the decision's own draw, which needs no weight: there it changes nothing."""
    aggregation: Mode = "seq_mean_token_mean"
    length: int | None = None
    """L of "dr_grpo", in decisions: the limit of the generation, the same for every step. None takes the T of
    the trajectories, their padded length, which changes from step to step and with it the learning rate."""
    empty: Literal["drop", "keep"] = "drop"
    """Samples without a present decision (overlong and filtered, failed, without signal) in the means over
    sequences or groups: "drop" averages over what takes part, as the papers' sums of non-empty completions
    do; "keep" counts every sample that was handed in as a loss of 0 (TRL): 2 of 24 empty, 22/24 of the
    step."""
    mean_rows: int | None = None
    """For "token_mean": take it over blocks of so many samples, in their order, and average the blocks, as
    TRL's "bnpo" does with a device's micro-batch: tokens of a block of short completions count more, and the
    loss depends on how samples were dealt out. None: over the whole step, whatever the micro-batches."""
    value: float = 0.0
    """Weight of the value loss, which is averaged over decisions."""
    value_clip: float | None = None
    entropy: float = 0.0
    """Weight of the entropy term; 0 is off."""
    entropy_term: str = "bonus"
    """A key of `ENTROPY_TERMS`. "bonus" is aggregated as the policy's loss is."""
    entropy_term_options: Mapping[str, Any] = field(default_factory=dict)
    ptx: float = 0.0
    """γ of −log π on pretraining tokens, averaged over them."""

    def __post_init__(self) -> None:
        pick("advantage", self.advantage, stages.ADVANTAGES, self.advantage_options)
        pick("surrogate", self.surrogate, stages.SURROGATES, self.surrogate_options)
        pick("entropy_term", self.entropy_term, ENTROPY_TERMS, self.entropy_term_options)
        if self.selection is not None:
            penalty, rest = self._penalty_options()
            pick("selection", self.selection, stages.SELECTIONS, rest)
            if penalty:
                pick("penalty of selection", self.selection, stages.PENALTIES, penalty)
        if self.importance_sampling is not None:
            name, table = "importance_sampling", stages.IMPORTANCE_SAMPLING
            pick(name, "importance_weights", table, self.importance_sampling, complete=True)
        for name, chosen, allowed in (
            ("ratio", self.ratio, get_args(Ratio)),
            ("step_weight", self.step_weight, get_args(StepWeight)),
            ("kl_form", self.kl_form, get_args(KLForm)),
            ("level", self.level, LEVELS),
            ("aggregation", self.aggregation, get_args(Mode)),
            ("empty", self.empty, ("drop", "keep")),
            ("kl_value", self.kl_value, get_args(Estimator)),
            ("kl_gradient", self.kl_gradient, get_args(Estimator)),
        ):
            if chosen not in allowed:
                raise ValueError(
                    f"{name} is {chosen!r}. {suggestion(str(chosen), allowed)}Choose one of: "
                    f"{', '.join(allowed)}."
                )
        for name in ("kl_in_reward", "kl", "value", "entropy", "ptx"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0 (0 is off).")
        if self.mean_rows is not None and (self.mean_rows < 1 or self.aggregation != "token_mean"):
            raise ValueError(
                "mean_rows is a number of samples, at least 1, and needs aggregation='token_mean'; got "
                f"mean_rows={self.mean_rows}, aggregation={self.aggregation!r}."
            )
        if self.decisions not in (None, *get_args(Decisions)):
            raise ValueError(
                f"decisions is {self.decisions!r}. Choose one of: {', '.join(get_args(Decisions))}, None."
            )
        if self.advantage == "ares" and self.entropy and self.entropy_term in ("siren", "epo"):
            raise ValueError(
                f"advantage='ares' and entropy_term={self.entropy_term!r} each keep a number of their own in "
                "Trajectories.entropy_before. Take one of the two, or entropy_term='bonus'."
            )
        if self.ratio == "guard" and (self.kl_in_reward or self.importance_sampling is not None):
            choice = "kl_in_reward" if self.kl_in_reward else "importance_sampling"
            raise ValueError(
                f"{choice} needs log-probs, and under ratio='guard' there are none: log_prob is a ratio. "
                f"Take ratio='log_prob'{', or the exact kl' if self.kl_in_reward else ''}."
            )

    def prepare(self, trajectories: Trajectories) -> Prepared:
        """Settle everything that depends on the whole step: advantages, selections, denominators.

        Args:
            trajectories: of the whole optimizer step.

        Returns:
            Tensors without gradient; micro-batches take their rows.

        Raises:
            ValueError: something that this objective needs is missing, or a stage refuses its input.
        """
        return self.prepare_steps(trajectories, [slice(None)])[0]

    def prepare_steps(self, trajectories: Trajectories, steps: Sequence[Tensor | slice]) -> list[Prepared]:
        """Settle several optimizer steps on one rollout's samples, as PPO's minibatches are; see `prepare`.

        Args:
            trajectories: of the whole rollout; its ptx_weight is that of each step.
            steps: the samples of each step, integers or a slice.

        Returns:
            One entry per step: advantages of the whole rollout, selections and denominators of the step.
        """
        t = trajectories
        check_decisions(self, t.decisions, given=EXTRA)
        self._check_needs(t)
        finite = (
            "old_log_prob",
            "ref_log_prob",
            "rollout_log_prob",
            "value",
            "nucleus_entropy",
            "process_reward",
            "loss_weight",
        )
        for name in finite:
            if getattr(t, name) is not None:
                check_finite(name, getattr(t, name), t.weight)
        weight = torch.where(t.present()[:, None], t.weight.detach(), 0.0)
        made, returns = stages.ADVANTAGES[self.advantage].apply(
            t, self.kl_in_reward, **self.advantage_options
        )
        known = torch.isfinite(made) if made.ndim == 1 else torch.isfinite(made).all(1)
        weight = torch.where(known[:, None], weight, 0.0)
        advantage = made[:, None].expand(weight.shape) if made.ndim == 1 else made
        advantage = torch.where(weight != 0, advantage, 0.0)
        if self.advantage_clamp is not None:
            advantage = clamp_advantages(advantage, self.advantage_clamp)
        if self.drop_zero_signal:
            weight = torch.where((advantage != 0).any(1, keepdim=True), weight, 0.0)
        return [
            self._settle(t.rows(i), weight[i], advantage[i], None if returns is None else returns[i])
            for i in steps
        ]

    def _settle(self, t: Trajectories, weight: Tensor, advantage: Tensor, returns: Tensor | None) -> Prepared:
        """Selections and denominators of one step."""
        chosen = self._select(t, advantage, weight)
        weight = weight if chosen.weight is None else chosen.weight
        group = t.group if self.aggregation == "group_token_mean" else None
        if self.mean_rows is not None:
            group = torch.arange(len(weight)) // self.mean_rows
        counts = count_step(weight, length=self.length, group=group, empty=self.empty)
        held = ENTROPY_TERMS[self.entropy_term if self.entropy else "bonus"].apply(
            t, advantage, weight, counts, **(self.entropy_term_options if self.entropy else {})
        )
        return Prepared(
            weight=weight,
            old_log_prob=t.old_log_prob.detach(),
            advantage=advantage,
            row_tokens=row_tokens(weight, group),
            counts=counts,
            importance_weight=self._importance_weight(t, weight),
            keep=chosen.keep,
            selected=chosen.penalised,
            loss_weight=_product(weight, t.loss_weight, chosen.loss_weight),
            entropy_weight=held.weight,
            entropy_level=held.level,
            returns=returns,
            ref_log_prob=None if t.ref_log_prob is None else t.ref_log_prob.detach(),
            value=None if t.value is None else t.value.detach(),
            ptx_counts=None if t.ptx_weight is None else count_step(t.ptx_weight),
        )

    def loss(self, rows: Prepared, policy: PolicyOutput) -> Loss:
        """The share of a micro-batch in the step's loss.

        Args:
            rows: `prepared.rows(index)`, or all of `prepared`.
            policy: the policy's numbers for the same rows.

        Returns:
            Differentiable; the shares of any split of the step add up to the same loss and gradient.

        Raises:
            ValueError: shapes that do not fit, or an output that this objective needs is missing.
        """
        self._check_output(rows, policy)
        decisions = {"policy": self._policy_loss(rows, policy)}
        if self.kl:
            decisions["kl"] = self.kl * self._kl(rows, policy)
        mode: Mode = self.aggregation if self.mean_rows is None else "group_token_mean"
        modes: dict[str, Mode] = {"policy": mode, "kl": mode}
        if self.entropy:
            found = entropy_loss(self.entropy_term, self.entropy, rows, policy, mode)
            decisions["entropy"], modes["entropy"] = found
        terms = {
            name: aggregate(value, rows.weight, modes[name], rows.counts, denominator=rows.row_tokens)
            for name, value in decisions.items()
        }
        if self.value:
            assert policy.value is not None and rows.returns is not None
            old = None if self.value_clip is None else rows.value
            given = {"old_values": old, "clip": self.value_clip, "weight": rows.weight}
            critics = policy.value.unbind(-1) if policy.value.ndim == 3 else [policy.value]
            losses = [value_loss(value, rows.returns, **given) for value in critics]
            decisions["value"] = self.value * torch.stack(losses).mean(0)
            terms["value"] = aggregate(decisions["value"], rows.weight, "token_mean", rows.counts)
        if self.ptx and policy.ptx_log_prob is not None:
            assert policy.ptx_weight is not None and rows.ptx_counts is not None
            decisions["ptx"] = -self.ptx * policy.ptx_log_prob
            terms["ptx"] = aggregate(decisions["ptx"], policy.ptx_weight, "token_mean", rows.ptx_counts)
        measured = loss_statistics(
            terms["policy"],
            policy.log_prob,
            rows.old_log_prob,
            rows.advantage,
            rows.weight,
            kl=policy.kl,
            ref_log_prob=rows.ref_log_prob,
        )
        return Loss(torch.stack(list(terms.values())).sum(), terms, decisions, measured)

    def _policy_loss(self, rows: Prepared, policy: PolicyOutput) -> Tensor:
        own = log_ratio(policy.log_prob, rows.old_log_prob, rows.weight)
        at_level = ratio_level(own, rows.weight, self.level)
        inputs = stages.SurrogateInputs(log_ratio=at_level, policy=policy, rows=rows)
        result = stages.SURROGATES[self.surrogate].apply(inputs, **self.surrogate_options)
        if rows.selected is not None:
            assert self.selection is not None
            penalty, _ = self._penalty_options()
            result = result + stages.PENALTIES[self.selection].apply(own, rows.selected, **penalty)
        if rows.keep is not None:
            result = torch.where(rows.keep, result, 0.0)
        if self.off_policy_delta is not None:
            kept = off_policy_mask(own, rows.advantage, rows.weight, delta=self.off_policy_delta)
            result = torch.where(kept, result, 0.0)
        # ω · w_step · ℓ
        for factor in (rows.importance_weight, rows.loss_weight):
            result = result if factor is None else result * factor
        return result

    def _kl(self, rows: Prepared, policy: PolicyOutput) -> Tensor:
        if policy.kl is not None:
            return policy.kl
        assert rows.ref_log_prob is not None
        own = log_ratio(policy.log_prob, rows.old_log_prob, rows.weight) if self.kl_weighted else None
        return kl_penalty(
            policy.log_prob,
            rows.ref_log_prob,
            value=self.kl_value,
            gradient=self.kl_gradient,
            log_ratio=own,
            weight=rows.weight,
        )

    def _select(self, t: Trajectories, advantage: Tensor, weight: Tensor) -> stages.Selected:
        if self.selection is None:
            return stages.Selected()
        return stages.SELECTIONS[self.selection].apply(t, advantage, weight, **self._penalty_options()[1])

    def _importance_weight(self, t: Trajectories, weight: Tensor) -> Tensor | None:
        if self.importance_sampling is None:
            return None
        assert t.rollout_log_prob is not None
        off = log_ratio(t.old_log_prob.detach(), t.rollout_log_prob, weight)
        return importance_weights(off, weight, **self.importance_sampling).value

    def _penalty_options(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(options of the selection's penalty, options of its thresholds)."""
        own = {"coefficient", "form"} if self.selection in stages.PENALTIES else set()
        penalty = {k: v for k, v in self.selection_options.items() if k in own}
        return penalty, {k: v for k, v in self.selection_options.items() if k not in own}

    def _check_needs(self, t: Trajectories) -> None:
        term = ENTROPY_TERMS[self.entropy_term]
        needs = {
            **dict.fromkeys(stages.ADVANTAGES[self.advantage].needs, f"advantage={self.advantage!r}"),
            **({"ref_log_prob": "kl_in_reward"} if self.kl_in_reward else {}),
            **({"rollout_log_prob": "importance_sampling"} if self.importance_sampling is not None else {}),
            **({"ptx_weight": "ptx"} if self.ptx else {}),
            **(dict.fromkeys(term.needs, f"entropy_term={self.entropy_term!r}") if self.entropy else {}),
            **({"loss_weight": f"step_weight={self.step_weight!r}"} if self.step_weight != "uniform" else {}),
        }
        if self.selection is not None:
            for name in stages.SELECTIONS[self.selection].needs:
                needs[name] = f"selection={self.selection!r}"
        for name, why in needs.items():
            if getattr(t, name) is None:
                raise ValueError(f"{why} needs Trajectories.{name}, which is None.")
        if self.value and self.advantage not in ("gae",):
            raise ValueError(
                f"value={self.value} needs returns to fit, which advantage='gae' gives; got "
                f"advantage={self.advantage!r}."
            )
        if self.ratio == "guard" and bool((t.old_log_prob[t.weight != 0] != 0).any()):
            raise ValueError(
                "ratio='guard' takes guard_log_ratio for log_prob, whose old_log_prob is 0; got others."
            )

    def _check_output(self, rows: Prepared, policy: PolicyOutput) -> None:
        if policy.log_prob.shape != rows.weight.shape:
            raise ValueError(
                f"log_prob {tuple(policy.log_prob.shape)} and the prepared rows {tuple(rows.weight.shape)} "
                "must have one shape, [b, T]: take prepared.rows(index) of the same samples."
            )
        check_finite("log_prob", policy.log_prob, rows.weight)
        needs: dict[str, str] = {}
        for name in stages.SURROGATES[self.surrogate].needs:
            needs[name] = f"surrogate={self.surrogate!r}"
        if self.kl and policy.kl is None:
            if self.ratio == "guard" or self.kl_form == "velocity":
                choice, made_by = (
                    ("kl_form='velocity'", "velocity_kl")
                    if self.kl_form == "velocity"
                    else ("ratio='guard'", "gaussian_kl")
                )
                raise ValueError(
                    f"kl under {choice} needs the exact PolicyOutput.kl, as `{made_by}` gives it: there are "
                    "no log-probs to estimate it from."
                )
            needs["ref_log_prob"] = "kl (without PolicyOutput.kl)"
        term = "nucleus_entropy" if self.entropy_term == "siren" else "entropy"
        for name, coefficient in (("value", self.value), (term, self.entropy)):
            if coefficient:
                needs[name] = f"{name}={coefficient}"
        for name, why in needs.items():
            holder = rows if name == "ref_log_prob" else policy
            if getattr(holder, name) is None:
                where = "Trajectories" if name == "ref_log_prob" else "PolicyOutput"
                raise ValueError(f"{why} needs {where}.{name}, which is None.")


def _product(weight: Tensor, *factors: Tensor | None) -> Tensor | None:
    """Of the factors that are there, 0 where absent; None without one."""
    result = None
    for factor in factors:
        if factor is not None:
            result = torch.where(weight != 0, factor.detach() * (1.0 if result is None else result), 0.0)
    return result
