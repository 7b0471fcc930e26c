# SPDX-License-Identifier: Apache-2.0
"""`Objective`: the choice at each of eight stages, and the weights of its terms.

    objective = named_objective("dapo", kl=0.01)
    prepared = objective.prepare(trajectories)            # once per optimizer step, all samples
    for index in micro_batches:                           # any split: the same gradient
        loss = objective.loss(prepared.rows(index), policy(index))
        loss.total.backward()

T may count tokens or denoising steps; PPO is the terms policy, value, entropy and ptx.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from visalign.core.advantages.group import clamp_advantages
from visalign.core.checks import check_rules
from visalign.core.surrogates.aggregation import Mode, aggregate, count_step, row_tokens
from visalign.core.surrogates.kl import Estimator, kl_penalty
from visalign.core.surrogates.off_policy import off_policy_mask
from visalign.core.surrogates.ratios import Level, log_ratio, ratio_level
from visalign.core.surrogates.value import value_loss
from visalign.core.tokens.selection import kl_cov_penalty

from . import stages
from .data import Decisions, Loss, PolicyOutput, Prepared, Trajectories, check_finite
from .decisions import EXTRA, check_decisions
from .entropy_stage import ENTROPY_TERMS, EntropyTarget, entropy_loss
from .loss_statistics import loss_statistics
from .options import Stage, check_row, pick

Ratio = Literal["log_prob", "guard"]
StepWeight = Literal["uniform", "inverse_dt", "std", "inverse_gradient"]
KLForm = Literal["divergence", "velocity"]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Choices and weights of a policy loss; plain values that can be compared, printed, written as YAML."""

    source: str = ""
    """Paper, arXiv id, equation."""
    decisions: Decisions | None = None
    """Decisions that the algorithm is for; None for both. See also `check_decisions`."""
    advantage: str = "group"
    """A key of `ADVANTAGES`."""
    advantage_options: Mapping[str, Any] = field(default_factory=dict)
    advantage_clamp: float | None = None
    kl_in_reward: float = 0.0
    """β of −β k1 in the reward, units of the reward per nat; denoising steps have it from their log-probs."""
    drop_zero_signal: bool = False
    """Samples whose advantage is 0 leave the loss and the counts: dynamic sampling without refill, and the filter of
    Flow-GRPO's code, whose mean is over what is kept. False leaves them in the denominator: a batch of which 8 of 12
    have no signal takes a third of the published step."""
    ratio: Ratio = "log_prob"
    """"guard": log_prob is `guard_log_ratio` and old_log_prob 0: each denoising step's ratio is centred at 1."""
    step_weight: StepWeight = "uniform"
    """"inverse_dt": Trajectories.loss_weight is `guard_step_weight` of each step, up to a constant factor."""
    level: Level = "token"
    """Level at which the ratio is taken, a key of `LEVELS`."""
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
    """β of the KL term, units of the advantage per nat, or per unit of `kl_form`."""
    kl_form: KLForm = "divergence"
    """"velocity": PolicyOutput.kl is `velocity_kl` of each denoising step, mean |v_θ − v_ref|², as in
    DiffusionNFT and Flow-Factory; it weighs all steps alike, the divergence those of little noise more."""
    kl_value: Estimator = "k3"
    """Estimator of the term's value; see `kl_penalty`."""
    kl_gradient: Estimator = "k2"
    """Estimator whose gradient the term has; see `kl_penalty`."""
    kl_weighted: bool = False
    """Multiply the KL term by the ratio, for samples of an older policy. An exact PolicyOutput.kl is the mean
    over the decision's own draw, which needs no weight: there it changes nothing."""
    aggregation: Mode = "seq_mean_token_mean"
    length: int | None = None
    """L of "dr_grpo", in decisions: the limit of the generation, the same for every step. None takes the T of
    the trajectories, their padded length, which changes from step to step and with it the learning rate."""
    empty: Literal["drop", "keep"] = "drop"
    """Samples without a present decision (overlong and filtered, failed, without signal) in the means over sequences
    or groups: "drop" averages over what takes part, as the papers' sums of non-empty completions do; "keep" counts
    every sample that was handed in as a loss of 0 (TRL): 2 of 24 empty, 22/24 of the step."""
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
        check_row("objective", self)
        for label, table in STAGES.items():
            if (name := getattr(self, label)) is not None:
                pick(label, name, table).check(label, name, getattr(self, f"{label}_options"))
        if self.importance_sampling is not None:
            stages.IMPORTANCE_WEIGHTS.check("importance_sampling", "importance_weights", self.importance_sampling)
        check_rules(self, RULES)

    def trajectory_needs(self) -> dict[str, str]:
        """Fields of `Trajectories` that are None by default and that this objective needs -> the choice."""
        optional = {f.name for f in fields(Trajectories) if f.default is None} - {"reward"}
        needs = {name: f"advantage={self.advantage!r}" for name in stages.ADVANTAGES[self.advantage].needs}
        later = [("entropy_term", bool(self.entropy)), ("selection", self.selection is not None)]
        for label in (label for label, is_on in later if is_on):
            name = getattr(self, label)
            # their advantage is the step's own
            needs |= dict.fromkeys({*STAGES[label][name].needs} - {"advantage"}, f"{label}={name!r}")
        for choice, is_on, name in (
            (f"kl_in_reward={self.kl_in_reward:g}", self.kl_in_reward, "ref_log_prob"),
            ("importance_sampling", self.importance_sampling is not None, "rollout_log_prob"),
            (f"ptx={self.ptx:g}", self.ptx, "ptx_weight"),
            (f"step_weight={self.step_weight!r}", self.step_weight != "uniform", "loss_weight"),
        ):
            needs |= {name: choice} if is_on else {}
        return {name: choice for name, choice in needs.items() if name in optional}

    def output_needs(self) -> dict[str, str]:
        """Field of `PolicyOutput` that this objective needs, or "ref_log_prob" (for a KL without kl) -> the choice."""
        optional = {f.name for f in fields(PolicyOutput) if f.default is None} | {"ref_log_prob"}
        choice = f"surrogate={self.surrogate!r}"
        needs = {name: choice for name in stages.SURROGATES[self.surrogate].needs if name in optional}
        if self.value:
            needs["value"] = f"value={self.value:g}"
        if self.entropy:
            needs["nucleus_entropy" if self.entropy_term == "siren" else "entropy"] = f"entropy={self.entropy:g}"
        return needs

    def prepare(self, trajectories: Trajectories) -> Prepared:
        """Compute everything that depends on the whole step: advantages, selections, denominators."""
        return self.prepare_steps(trajectories, [slice(None)])[0]

    def prepare_steps(self, trajectories: Trajectories, steps: Sequence[Tensor | slice]) -> list[Prepared]:
        """Prepare several optimizer steps, given by their samples, on one rollout, as PPO's minibatches are.

        Advantages are those of the whole rollout, selections and denominators those of the step; ptx_weight
        is that of each step.
        """
        t = trajectories
        self._check_trajectories(t)
        weight = torch.where(t.present()[:, None], t.weight.detach(), 0.0)  # a failed reward moves nothing
        inputs = stages.AdvantageInputs(t, self.kl_in_reward, self._importance_weight(t, weight))
        result = stages.ADVANTAGES[self.advantage](inputs, self.advantage_options)
        advantage, returns = result if isinstance(result, tuple) else (result, None)
        finite = torch.isfinite(advantage) if advantage.ndim == 1 else torch.isfinite(advantage).all(1)
        weight = torch.where(finite[:, None], weight, 0.0)  # no advantage: out of the denominators too
        advantage = advantage[:, None].expand(weight.shape) if advantage.ndim == 1 else advantage
        advantage = torch.where(weight != 0, advantage, 0.0)  # NaN · 0 would be NaN
        if self.advantage_clamp is not None:
            advantage = clamp_advantages(advantage, self.advantage_clamp)
        if self.drop_zero_signal:
            weight = torch.where((advantage != 0).any(1, keepdim=True), weight, 0.0)
        return [
            self._prepare_step(t.rows(i), weight[i], advantage[i], None if returns is None else returns[i])
            for i in steps
        ]

    def _prepare_step(self, t: Trajectories, weight: Tensor, advantage: Tensor, returns: Tensor | None) -> Prepared:
        selected = stages.Selected()
        if self.selection is not None:
            step = replace(t, advantage=advantage, weight=weight)
            selected = stages.SELECTIONS[self.selection](step, self.selection_options)
        weight = weight if selected.weight is None else selected.weight
        group = t.group if self.aggregation == "group_token_mean" else None  # no other mode looks at groups
        counts = count_step(weight, length=self.length, group=group, empty=self.empty)
        target = EntropyTarget()
        if self.entropy:
            step = SimpleNamespace(**{**vars(t), "advantage": advantage, "weight": weight, "counts": counts})
            target = ENTROPY_TERMS[self.entropy_term](step, self.entropy_term_options)
        factors = [w.detach() for w in (t.loss_weight, selected.loss_weight) if w is not None]
        return Prepared(
            weight=weight,
            old_log_prob=t.old_log_prob.detach(),
            advantage=advantage,
            row_tokens=row_tokens(weight, group),
            counts=counts,
            importance_weight=self._importance_weight(t, weight),
            keep=selected.keep,
            penalty=selected.penalty,
            loss_weight=torch.where(weight != 0, math.prod(factors), 0.0) if factors else None,
            entropy_weight=target.weight,
            entropy_level=target.level,
            returns=returns,
            ref_log_prob=None if t.ref_log_prob is None else t.ref_log_prob.detach(),
            value=None if t.value is None else t.value.detach(),
            ptx_counts=None if t.ptx_weight is None else count_step(t.ptx_weight),
        )

    def _importance_weight(self, t: Trajectories, weight: Tensor) -> Tensor | None:
        """Compute ω = f(π_old/μ), [B, T], μ the engine that sampled; None without an off-policy correction."""
        if self.importance_sampling is None or t.rollout_log_prob is None:
            return None
        off_policy = log_ratio(t.old_log_prob.detach(), t.rollout_log_prob, weight)
        step = SimpleNamespace(log_ratio=off_policy, weight=weight)
        return stages.IMPORTANCE_WEIGHTS(step, self.importance_sampling).value

    def loss(self, rows: Prepared, policy: PolicyOutput) -> Loss:
        """Compute the share of a micro-batch in the step's loss, from `prepared.rows(index)` and the policy's
        outputs for the same rows.

        The shares of any split of the step add up to the same loss and gradient.
        """
        self._check_output(rows, policy)
        modes: dict[str, Mode] = {"policy": self.aggregation, "kl": self.aggregation}
        losses = {"policy": self._policy_loss(rows, policy)}
        if self.kl:
            losses["kl"] = self.kl * self._kl(rows, policy)
        if self.entropy:
            losses["entropy"], modes["entropy"] = entropy_loss(
                self.entropy_term, self.entropy, rows, policy, self.aggregation
            )
        terms = {
            name: aggregate(value, rows.weight, modes[name], rows.counts, denominator=rows.row_tokens)
            for name, value in losses.items()
        }
        if self.value:
            losses["value"] = self.value * self._value_loss(rows, policy)
            terms["value"] = aggregate(losses["value"], rows.weight, "token_mean", rows.counts)
        if self.ptx and policy.ptx_log_prob is not None:
            assert policy.ptx_weight is not None and rows.ptx_counts is not None
            losses["ptx"] = -self.ptx * policy.ptx_log_prob
            terms["ptx"] = aggregate(losses["ptx"], policy.ptx_weight, "token_mean", rows.ptx_counts)
        statistics = loss_statistics(
            terms["policy"],
            policy.log_prob,
            rows.old_log_prob,
            rows.advantage,
            rows.weight,
            kl=policy.kl,
            ref_log_prob=rows.ref_log_prob,
        )
        return Loss(torch.stack(list(terms.values())).sum(), terms, losses, statistics)

    def _policy_loss(self, rows: Prepared, policy: PolicyOutput) -> Tensor:
        token_ratio = log_ratio(policy.log_prob, rows.old_log_prob, rows.weight)
        at_level = ratio_level(token_ratio, rows.weight, self.level)
        step = SimpleNamespace(**{**vars(rows), **vars(policy), "log_ratio": at_level})
        result = stages.SURROGATES[self.surrogate](step, self.surrogate_options)
        if rows.penalty is not None:
            result = result + kl_cov_penalty(token_ratio, rows.penalty)  # of tokens, whatever the level
        if rows.keep is not None:
            result = torch.where(rows.keep, result, 0.0)
        if self.off_policy_delta is not None:
            on_policy = off_policy_mask(token_ratio, rows.advantage, rows.weight, delta=self.off_policy_delta)
            result = torch.where(on_policy, result, 0.0)
        # ω · w_step · ℓ
        for factor in (rows.importance_weight, rows.loss_weight):
            result = result if factor is None else result * factor
        return result

    def _kl(self, rows: Prepared, policy: PolicyOutput) -> Tensor:
        if policy.kl is not None:
            return policy.kl
        assert rows.ref_log_prob is not None
        ratio = log_ratio(policy.log_prob, rows.old_log_prob, rows.weight) if self.kl_weighted else None
        estimators: dict[str, Any] = {"value": self.kl_value, "gradient": self.kl_gradient}
        return kl_penalty(policy.log_prob, rows.ref_log_prob, **estimators, log_ratio=ratio, weight=rows.weight)

    def _value_loss(self, rows: Prepared, policy: PolicyOutput) -> Tensor:
        assert policy.value is not None and rows.returns is not None
        old = None if self.value_clip is None else rows.value
        critics = policy.value.unbind(-1) if policy.value.ndim == 3 else [policy.value]
        losses = [
            value_loss(value, rows.returns, old_values=old, clip=self.value_clip, weight=rows.weight)
            for value in critics
        ]
        return torch.stack(losses).mean(0)  # every critic is fitted alone; their soft minimum only makes A

    def _check_trajectories(self, t: Trajectories) -> None:
        check_decisions(self, t.decisions, available=EXTRA)
        for name, choice in self.trajectory_needs().items():
            if getattr(t, name) is None:
                raise ValueError(f"{choice} needs Trajectories.{name}, which is None.")
        if self.ratio == "guard" and bool((t.old_log_prob[t.weight != 0] != 0).any()):
            raise ValueError("ratio='guard' takes guard_log_ratio for log_prob, whose old_log_prob is 0; got others.")
        for name in FINITE:
            if getattr(t, name) is not None:
                check_finite(name, getattr(t, name), t.weight)

    def _check_output(self, rows: Prepared, policy: PolicyOutput) -> None:
        if policy.log_prob.shape != rows.weight.shape:
            raise ValueError(
                f"log_prob {tuple(policy.log_prob.shape)} and the prepared rows {tuple(rows.weight.shape)} "
                "must have one shape, [b, T]: take prepared.rows(index) of the same samples."
            )
        check_finite("log_prob", policy.log_prob, rows.weight)
        needs = self.output_needs()
        if self.kl and policy.kl is None:
            is_exact = self.kl_form == "velocity" or self.ratio == "guard"  # no log-probs to estimate it from
            choice = f"kl={self.kl:g} with kl_form={self.kl_form!r}, ratio={self.ratio!r}"
            needs["kl" if is_exact else "ref_log_prob"] = choice
        for name, choice in needs.items():
            owner, label = (rows, "Trajectories") if name == "ref_log_prob" else (policy, "PolicyOutput")
            if getattr(owner, name) is None:
                raise ValueError(f"{choice} needs {label}.{name}, which is None.")


FINITE = (
    *("old_log_prob", "ref_log_prob", "rollout_log_prob", "value", "nucleus_entropy"),
    *("process_reward", "loss_weight"),
)
"""Fields of `Trajectories` that must be finite at present decisions."""

STAGES: dict[str, dict[str, Stage]] = {
    "advantage": stages.ADVANTAGES,
    "surrogate": stages.SURROGATES,
    "selection": stages.SELECTIONS,
    "entropy_term": ENTROPY_TERMS,
}
"""Field of a choice with options -> its table."""

RULES: tuple[tuple[Callable[[Objective], bool], str], ...] = (
    (
        lambda o: bool(o.value) and o.advantage != "gae",
        "value={value} needs returns to fit, which advantage='gae' gives; got advantage={advantage!r}.",
    ),
    (
        lambda o: o.advantage == "ares" and bool(o.entropy) and o.entropy_term in ("siren", "epo"),
        "advantage='ares' and entropy_term={entropy_term!r} each keep a number of their own in "
        "Trajectories.entropy_before. Take one of the two, or entropy_term='bonus'.",
    ),
    (
        lambda o: (
            o.ratio == "guard"
            and (bool(o.kl_in_reward) or o.importance_sampling is not None or o.surrogate == "flow_balance")
        ),
        "kl_in_reward, importance_sampling and flow_balance need log-probs, and under ratio='guard' log_prob is a "
        "ratio. Take ratio='log_prob', or the exact kl.",
    ),
)
"""(condition that is refused, message)."""
