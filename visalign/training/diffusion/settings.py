# SPDX-License-Identifier: Apache-2.0
"""What a training of images can be told of what is optimized.

The defaults are Flow-GRPO's published ones for SD3.5-M (arXiv 2505.05470 and its code); each field says where
ours differ. Values are checked when a setting is made, before anything is loaded or written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from visalign.core import Objective
from visalign.core.objective.algorithms import NAMED
from visalign.core.regression.ascents import ASCENTS, Ascent, named_ascent
from visalign.core.regression.rows import (
    MATRIX_SIGNALS,
    REGRESSIONS,
    PairOutput,
    Regression,
    named_regression,
)
from visalign.errors import UserError
from visalign.training.loop.optimizer import at_least, choice
from visalign.training.policy.settings import (
    MATRIX_ADVANTAGES,
    ObjectiveSettings,
    Positive,
    check_stale,
    merge_changes,
)
from visalign.training.policy.update import couples_decisions

from .published import instead_of
from .rollout_settings import RolloutSettings


@dataclass(frozen=True, kw_only=True)
class DiffusionObjectiveSettings(ObjectiveSettings):
    """What is optimized on denoising steps."""

    algorithm: str = "flow_grpo"
    """A row of `visalign.core.NAMED`: flow_grpo, flow_gspo, grpo_guard, flow_dppo, pref_grpo, and of the rows
    for text all that mean something on denoising steps: grpo, dr_grpo, rloo, reinforce_pp, dapo, cispo, sapo,
    gmpo, ... Or of `visalign.core.REGRESSIONS`, which need no log-prob: diffusion_nft, awm, v_grpo, ram,
    reward_weighted, rejection, crd, gdro, diffusion_dpo, opd, ... Or of `visalign.core.ASCENTS`, which go
    through the reward's own gradient: draft, draft_lv, refl."""
    step_weights: list[float] | None = None
    """Factor of the policy's loss at each of the T steps, in place of the row's `step_weight`."""
    credit: str = "image"
    """What a denoising step earns: "image", the advantage of its image; "turning_points", by how much its
    noise raised the reward of the deterministic rest, a turning point all that was still to come (TP-GRPO,
    arXiv 2602.06422), at the price of completing and judging every sample from every stochastic step;
    "one_step", by how much it raised the reward of the prediction x − σ v, at the price of judging alone;
    "branches", the mean reward of the images that came of it, with `rollout.branch` (BranchGRPO)."""
    metric: str | None = None
    """The part of the reward, e.g. the label of a term of weight 0, at whose median advantage=canon splits a
    group."""
    multiplier_rate: float = 0.1
    """η of λ ← max(0, λ + η (bound − mean)), the multiplier of a reward that has a bound
    (`rewards.terms.LABEL.bound`), after each iteration's judgement; in units of 1 / (weight · reward)."""
    experts: dict[str, str] | None = None
    """Of algorithm=opd: tag of the prompts, or "*" for all that are not named -> folder of the trained
    policy (a run's lora/ or model/) whose velocity is learnt there; made with the same model settings."""
    ratio_bound: Positive | None = None
    """Largest |log r| allowed at the run's first update, where r must be 1. null: 1e-5, times the
    latent's numbers where the ratio sums over them; networks in bfloat16 may need more."""

    def __post_init__(self) -> None:
        if self.algorithm not in (*NAMED, *REGRESSIONS, *ASCENTS):
            raise UserError(
                f"objective: there is no algorithm {self.algorithm!r}. {instead_of(self.algorithm)}"
            )
        choice("objective.credit", self.credit, CREDITS)
        if self.experts and (self.regression is None or self.regression.anchor != "expert"):
            raise UserError(
                f"objective.experts is {self.experts}, and objective.algorithm={self.algorithm} has none. "
                "Set objective.algorithm=opd, or objective.experts=null."
            )
        if not 0 < self.multiplier_rate < math.inf:
            raise UserError(f"objective.multiplier_rate is {self.multiplier_rate}; set it above 0.")
        if self.regression is not None:
            self._check_regression(self.regression)
            self.check_reset(self.regression.asks_reference)
            return
        if self.ascent is not None:
            self._check_absent("; objective.changes.stop_range says where sampling stops")
            self.check_reset(self.ascent.kl > 0)
            if self.balance_every is not None:
                raise UserError(
                    f"objective.balance_every is {self.balance_every}, and objective.algorithm="
                    f"{self.algorithm} adds the rewards' own gradients, with "
                    "objective.changes.normalise each of one length. Set objective.balance_every=null."
                )
            return
        super().__post_init__()
        given = {"metric": self.metric is not None, "process_reward": self.credit != "image"}
        self.check("denoising_steps", [name for name, there in given.items() if there])
        if self.metric is not None and self.build(length=1).advantage != "canon":
            raise UserError(
                f"objective.metric is {self.metric!r}, which splits the groups of advantage='canon' alone. "
                "Set objective.algorithm=canon, or objective.metric=null."
            )
        if self.step_weights is not None and not all(math.isfinite(w) and w >= 0 for w in self.step_weights):
            raise UserError(
                f"objective.step_weights is {self.step_weights}; weights are finite and not negative."
            )

    @property
    def regression(self) -> Regression | None:
        """The row where `algorithm` names a regression, else None."""
        if self.algorithm not in REGRESSIONS:
            return None
        try:
            row = named_regression(
                self.algorithm, **merge_changes(self.changes_for.get(self.algorithm, {}), self.changes)
            )
        except (ValueError, TypeError) as error:
            raise UserError(f"objective: {error}") from error
        if self.balance_every is None:
            return row
        self.check_balanced("signal", row.signal, "advantage")
        return replace(row, signal="normalise_then_sum", signal_options={"ddof": 0})

    def build(self, *, length: int) -> Objective:
        """The objective, with `credit` of each step."""
        row = super().build(length=length)
        return row if self.credit == "image" else self._by_step(row)

    def _by_step(self, row: Objective) -> Objective:
        """The row with an advantage of each step, z-scores within the group as in TP-GRPO's code."""
        if row.advantage != "group" or self.balance_every is not None or row.kl_in_reward:
            raise UserError(
                f"objective.credit is {self.credit!r}, which makes an advantage of each step. It goes with "
                "advantage='group', kl_in_reward=0 and objective.balance_every=null, as in flow_grpo; else "
                "set objective.credit=image."
            )
        if self.credit == "branches" and couples_decisions(row):
            raise UserError(
                "objective.credit='branches' trains once what several images have in common, and "
                f"objective.algorithm={self.algorithm} joins the steps of an image. Take flow_grpo, "
                "grpo_guard or grpo."
            )
        return replace(row, advantage="steps", advantage_options={"scale": "group", "ddof": 0})

    @property
    def ascent(self) -> Ascent | None:
        """The row where `algorithm` goes through the reward's gradient, else None."""
        if self.algorithm not in ASCENTS:
            return None
        try:
            return named_ascent(
                self.algorithm, **merge_changes(self.changes_for.get(self.algorithm, {}), self.changes)
            )
        except (ValueError, TypeError) as error:
            raise UserError(f"objective: {error}") from error

    def check_constrained(self, reward: Any) -> None:
        """Refuse rewards with a bound where the sum of all is not what is learnt from.

        Raises:
            UserError: with what to set instead.
        """
        constraints = reward.capabilities.constraints
        if not constraints:
            return
        name = f"objective.algorithm={self.algorithm}"
        why = {
            f"{name} follows the rewards' own gradients": self.ascent is not None,
            f"objective.balance_every={self.balance_every} weighs them": self.balance_every is not None,
            f"objective.credit={self.credit} judges more than images": self.credit in COMPLETIONS,
            f"{name} takes each reward by itself": self._takes_columns,
        }
        for reason, there in why.items():
            if there:
                raise UserError(
                    f"rewards.terms has a bound ({', '.join(constraints)}), which moves the weight of "
                    f"that term, and {reason}. Take flow_grpo, grpo_guard, diffusion_nft, awm or ram with "
                    "one advantage of the sum, or set the bound to null."
                )

    @property
    def _takes_columns(self) -> bool:
        """Whether the advantage is made of the rewards one by one."""
        if self.ascent is not None:
            return False
        row = self.regression
        if row is not None:
            return row.signal in MATRIX_SIGNALS
        return self.build(length=1).advantage in MATRIX_ADVANTAGES

    def _check_absent(self, of_steps: str) -> None:
        """Refuse what means nothing without log-probs of stochastic steps."""
        at_least("objective.epochs", self.epochs, 1)
        absent = {
            "ratio_bound": ("ratio", ""),
            "metric": ("halves of a group", ""),
            "step_weights": ("log-probs of steps", of_steps),
        }
        if self.credit != "image":
            raise UserError(
                f"objective.credit is {self.credit!r}, and objective.algorithm={self.algorithm} has no "
                "log-probs of steps that could earn it. Set objective.credit=image, or take flow_grpo."
            )
        for name, (what, instead) in absent.items():
            if getattr(self, name) is not None:
                raise UserError(
                    f"objective.{name} is {getattr(self, name)}, and objective.algorithm={self.algorithm} "
                    f"has no {what}. Set objective.{name}=null{instead}."
                )

    def _check_regression(self, row: Regression) -> None:
        """Refuse what means nothing to a regression, and values that its functions refuse."""
        self._check_absent("; objective.changes.weighting weighs noise levels")
        some, one = torch.zeros(4, 2), torch.full((4,), 0.5)
        reward = torch.tensor([0.0, 1.0, 1.0, 0.0])
        several = row.signal in MATRIX_SIGNALS
        pairs = PairOutput(v=some, target=some, sigma=one, anchor=some, guidance=some)
        try:
            signal, _ = row.prepare(reward[:, None] if several else reward, [0, 0, 1, 1], weights=[1.0])
            if row.of_groups:
                row.group_loss(one[:2], one[:2], signal[:2])
            else:
                row.pair_loss(pairs, signal)
        except (ValueError, TypeError) as error:
            raise UserError(f"objective: {error}") from error


COMPLETIONS = ("turning_points", "one_step")
"""Credits that judge more images than are made."""
CREDITS = ("image", *COMPLETIONS, "branches")

_OF_STEPS = (
    *("sde_steps", "sde_window", "sde_window_order", "sde_window_every", "sde_window_stride"),
    *("sde_window_roll_back", "ode_compression", "shared_noise", "branch"),
    *("train_steps", "schedule", "noise_level", "log_prob_reduction"),
)
"""Settings of stochastic steps; from one start the ODE makes one image."""


def check_sampling(objective: DiffusionObjectiveSettings, rollout: RolloutSettings) -> None:
    """Refuse settings of stochastic steps for a regression, which has none, and more levels than there are.

    Raises:
        UserError: with what to set instead.
    """
    row = objective.regression
    if objective.changes.get("kl_form", "divergence") != "divergence" and not objective.build(length=1).kl:
        raise UserError(
            f"objective.changes.kl_form is {objective.changes['kl_form']}, and objective.algorithm="
            f"{objective.algorithm} has no KL term. Set its weight too, e.g. objective.changes.kl=0.01."
        )
    _check_solver(objective, rollout)
    _check_credit(objective, rollout)
    if rollout.staleness:
        is_step = row is None and objective.ascent is None
        check_stale(objective.build(length=1) if is_step else None, objective.algorithm)
        if objective.credit == "turning_points":
            raise UserError(
                "objective.credit=turning_points completes images with the present weights, and "
                "rollout.staleness=1 made them with others. Set rollout.staleness=0, or "
                "objective.credit=one_step."
            )
    if row is None:
        if objective.ascent is not None:
            _check_no_noise(objective, rollout, "through the reward's gradient")
        why = "needs log-probs of" if objective.ascent is None else "climbs the reward's gradient through"
        for name, given, none in (
            ("guidance", rollout.guidance, "rollout.guidance=null and model.guidance"),
            ("merge_adapters", rollout.merge_adapters or None, "rollout.merge_adapters=false"),
        ):
            if given is not None:
                raise UserError(
                    f"rollout.{name} is {given}, and objective.algorithm={objective.algorithm} {why} "
                    f"the policy that sampled. Set {none}, or take a regression, e.g. "
                    "objective.algorithm=diffusion_nft."
                )
        return
    if row.anchor == "expert" and not objective.experts:
        raise UserError(
            f"objective.algorithm={objective.algorithm} learns from experts, and there are none. Set "
            'objective.experts to the folders of trained policies, e.g. {counting: runs/a/lora, "*": '
            "runs/b/lora}."
        )
    if row.visited and rollout.branch is not None:
        raise UserError(
            f"rollout.branch is {rollout.branch}, and objective.algorithm={objective.algorithm} learns at "
            "each image's own states. Set rollout.branch=null."
        )
    if row.visited:
        return
    _check_no_noise(objective, rollout, "at noised end points, objective.changes.levels of an image")
    if not row.continuous and (row.levels or 0) > rollout.steps:
        raise UserError(
            f"objective.changes.levels is {row.levels}, and the sampler has {rollout.steps} timesteps. "
            f"Take at most {rollout.steps}, or levels between them too: objective.changes.continuous=true."
        )


def check_sharding(
    objective: DiffusionObjectiveSettings, rollout: RolloutSettings, found: Mapping[str, bool] | None = None
) -> None:
    """Refuse beside FSDP2 what looks at all weights at once.

    Args:
        objective: the loss.
        rollout: how images are made.
        found: what the training itself found to be refused, by name.

    Raises:
        UserError: with the name of the first.
    """
    refused = {
        "rollout.merge_adapters": rollout.merge_adapters,
        "objective.balance_every": objective.balance_every is not None,
        "objective.experts": bool(objective.experts),
        "objective.reset_reference_every": objective.reset_reference_every is not None,
        "objective.reset_reference_above": objective.reset_reference_above is not None,
        **(found or {}),
    }
    given = [name for name, is_there in refused.items() if is_there]
    if given:
        raise UserError(f"sharding goes without {given[0]}. Leave one of the two out.")


def _check_solver(objective: DiffusionObjectiveSettings, rollout: RolloutSettings) -> None:
    """Refuse what completes an image, or carries a gradient, by Euler steps on all timesteps."""
    if objective.credit == "turning_points" and rollout.ode_compression is not None:
        raise UserError(
            f"rollout.ode_compression is {rollout.ode_compression}, and objective.credit=turning_points "
            "completes images on all timesteps. Set rollout.ode_compression=null, or "
            "objective.credit=one_step."
        )
    if objective.ascent is not None and rollout.solver != "euler":
        raise UserError(
            f"rollout.solver is {rollout.solver}, and objective.algorithm={objective.algorithm} sends the "
            "reward's gradient through Euler steps. Set rollout.solver=euler."
        )


def _check_credit(objective: DiffusionObjectiveSettings, rollout: RolloutSettings) -> None:
    """Refuse branches whose steps would earn what one image does, and their credit without any."""
    if objective.credit == "branches" and rollout.branch is None:
        raise UserError(
            "objective.credit is 'branches', and rollout.branch is null. Set rollout.branch={at: [0], "
            "children: 2}, or where else images shall part, or objective.credit=image."
        )
    is_step = objective.regression is None and objective.ascent is None
    if is_step and rollout.branch is not None and objective.credit != "branches":
        raise UserError(
            f"objective.credit is {objective.credit!r}, and with rollout.branch a step that several images "
            "have in common earns the mean of theirs. Set objective.credit=branches, or rollout.branch=null."
        )


def _check_no_noise(objective: DiffusionObjectiveSettings, rollout: RolloutSettings, where: str) -> None:
    usual = {item.name: item.default for item in fields(RolloutSettings)}
    for name in _OF_STEPS:
        if getattr(rollout, name) != usual[name]:
            raise UserError(
                f"rollout.{name} is {getattr(rollout, name)}, and objective.algorithm={objective.algorithm} "
                f"samples along the ODE and learns {where}. Set rollout.{name}={json.dumps(usual[name])}."
            )
