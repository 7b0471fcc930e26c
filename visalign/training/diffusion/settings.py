# SPDX-License-Identifier: Apache-2.0
"""What a Flow-GRPO run can be told: how to roll out, what to optimize, how to move the weights.

The defaults are Flow-GRPO's published ones for SD3.5-M (arXiv 2505.05470 and its code); each field says where
ours differ. Values are checked when a setting is made, before anything is loaded or written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

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
from visalign.errors import UserError, suggestion
from visalign.flow.rollout import visited
from visalign.flow.transitions import LAST_IS_EXACT, SOLVERS
from visalign.flow.tree import tree_nodes
from visalign.flow.windows import WINDOW_ORDERS
from visalign.training.loop.optimizer import at_least, choice
from visalign.training.policy.settings import (
    MATRIX_ADVANTAGES,
    ObjectiveSettings,
    check_overlap,
    check_stale,
    merged_changes,
)
from visalign.training.policy.update import couples_decisions

from .branching import BranchSettings


def _steps(name: str, given: Sequence[int], allowed: Sequence[int], which: str) -> None:
    if not given or len(set(given)) != len(given) or not set(given) <= set(allowed):
        raise UserError(
            f"{name} is {list(given)}; it needs at least one step, none twice, all among {which} "
            f"{list(allowed)}."
        )


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """How the samples of an iteration are made."""

    prompts_per_iteration: int = 48
    """P, different prompts per iteration (over all processes)."""
    group_size: int = 24
    """G, samples per prompt; at least 2."""
    steps: int = 10
    """T, denoising steps."""
    timestep_schedule: str = "diffusers"
    """Time grid: "diffusers" (the model's scheduler, whose shift is applied twice) or "plain"."""
    schedule: str = "flow"
    """Noise schedule of the stochastic steps: "flow" (Flow-GRPO), "dance" (DanceGRPO), "cps" (coefficients-
    preserving), "ddim" (DDPO)."""
    noise_level: float = 0.7
    """Noise level a (η for "dance" and "ddim")."""
    sde_steps: list[int] | None = None
    """Steps that are stochastic, 0 to T-1; the others are deterministic. null: all but the last."""
    sde_window: int | None = None
    """Draw this many of `sde_steps` anew in each iteration and make only them stochastic (Flow-GRPO-Fast,
    MixGRPO). null: all of them."""
    sde_window_order: str = "subset"
    """How they are drawn: "subset" (any), "random" (neighbours), "progressive", "decay" or "exp_decay"
    (neighbours that move along the grid, with the last two ever faster, MixGRPO)."""
    sde_window_every: int = 25
    """Iterations that a moving window stays."""
    sde_window_stride: int = 1
    """Steps that it moves on."""
    sde_window_roll_back: bool = True
    """Whether it begins anew after the end of the grid; otherwise it stays there."""
    ode_compression: float | None = None
    """Share of the steps after the last stochastic one that are made, along the ODE (MixGRPO-Flash: 0.4, with
    rollout.solver=dpmpp_2m); null: all."""
    shared_noise: bool = False
    """Start all samples of a group from one noise (DanceGRPO): they differ by their steps' noise alone, and
    the steps up to the first stochastic one are made once for the group."""
    branch: BranchSettings | None = None
    """Let the samples of a group have their first steps in common and part on the way; what they have in
    common is made once and trained once. It goes with `objective.credit=branches`. null: each goes alone."""
    train_steps: list[int] | None = None
    """Those of `sde_steps` that are trained on; null: all that are stochastic."""
    guidance: float | None = None
    """Guidance scale while samples for training are made, in regressions alone, whose loss does not ask how a
    picture came about; null: the model's."""
    solver: str = "euler"
    """Of the deterministic steps: "euler" or "dpmpp_2m", DPM-Solver++(2M). Evaluations take Euler steps."""
    log_prob_reduction: str = "mean"
    """Log-probability of a step: "mean" over the latent's numbers, as published, or their "sum"."""
    batch_size: int = 64
    """Samples that go through the network together while sampling; memory only, no effect on a sample."""
    overlap: int = 1
    """Stretches that an iteration's samples are made in: while one is made, the one before is judged in a
    thread. 1: all are made, then all are judged. It gains where the judge works elsewhere (a server, another
    GPU, processes that run code), and changes no sample, nor a score that neither the batch nor torch's
    own random numbers are part of."""
    staleness: int = 0
    """1: the samples of an iteration are made before the update of the one before, which hides the judge
    behind it. They come from weights one iteration old, so the objective needs `importance_sampling`."""
    max_failure_rate: float = 0.2
    """Largest share of samples that the reward may fail on before the run stops."""

    def __post_init__(self) -> None:
        at_least("rollout.steps", self.steps, 1)
        at_least("rollout.batch_size", self.batch_size, 1)
        check_overlap(self.overlap, self.staleness)
        if self.guidance is not None:
            at_least("rollout.guidance", self.guidance, 0.0)
        choice("rollout.timestep_schedule", self.timestep_schedule, ("diffusers", "plain"))
        choice("rollout.schedule", self.schedule, ("flow", "dance", *LAST_IS_EXACT))
        choice("rollout.sde_window_order", self.sde_window_order, WINDOW_ORDERS)
        at_least("rollout.sde_window_every", self.sde_window_every, 1)
        at_least("rollout.sde_window_stride", self.sde_window_stride, 1)
        choice("rollout.solver", self.solver, SOLVERS)
        choice("rollout.log_prob_reduction", self.log_prob_reduction, ("mean", "sum"))
        if not (math.isfinite(self.noise_level) and self.noise_level > 0):
            raise UserError(
                f"rollout.noise_level is {self.noise_level}; without noise there is no log-probability: set "
                "it above 0."
            )
        if not 0.0 <= self.max_failure_rate <= 1.0:
            raise UserError(
                f"rollout.max_failure_rate is {self.max_failure_rate}; it is a share from 0 to 1."
            )
        noisy = self.stochastic
        _steps("rollout.sde_steps", noisy, range(self.steps), "steps")
        if self.schedule in LAST_IS_EXACT:
            self._check_exact_last(noisy)
        if self.train_steps is not None:
            _steps("rollout.train_steps", self.train_steps, noisy, "the stochastic steps")
        if self.sde_window is not None:
            if not 1 <= self.sde_window <= len(noisy):
                raise UserError(
                    f"rollout.sde_window is {self.sde_window}; with {len(noisy)} sde_steps it must "
                    f"be 1 to {len(noisy)}."
                )
            if self.train_steps is not None:
                raise UserError(
                    "rollout.sde_window draws the steps to train anew in each iteration, so "
                    "rollout.train_steps cannot be fixed as well. Remove one of the two."
                )
        elif self.sde_window_order != "subset":
            raise UserError(
                f"rollout.sde_window_order is {self.sde_window_order} and there is no window. Set "
                "rollout.sde_window to its size."
            )
        if self.ode_compression is not None:
            if not 0 < self.ode_compression <= 1:
                raise UserError(
                    f"rollout.ode_compression is {self.ode_compression}; it is a share above 0, at most 1."
                )
            if max(self.steps - 1 - end for end in self._ends) < 2:
                raise UserError(
                    f"rollout.ode_compression is {self.ode_compression}, and after the stochastic steps "
                    f"{noisy} there are no two steps to make fewer of. Set rollout.sde_steps to earlier "
                    "steps, or a rollout.sde_window with rollout.sde_window_order=progressive."
                )
        if self.branch is not None:
            self._check_branch(self.branch)

    def _check_branch(self, branch: BranchSettings) -> None:
        """Refuse branches beside what else makes samples alike, and steps that do not fit."""
        for name, given, none in (
            ("shared_noise", self.shared_noise, "false"),
            ("sde_window", self.sde_window, "null"),
        ):
            if given:
                raise UserError(
                    f"rollout.branch says for good which steps are whose, and rollout.{name} is {given}. Set "
                    f"rollout.{name}={none}, or rollout.branch=null."
                )
        _steps("rollout.branch.at", branch.at, self.stochastic, "the stochastic steps")
        branch.check(self.group_size, self.trained)

    def _check_exact_last(self, noisy: Sequence[int]) -> None:
        """The limits of kernels that replace part of the predicted noise."""
        if self.noise_level > 1:
            usual = "which replaces all of the noise (published: 0.8)" if self.schedule == "cps" else "DDPO's"
            raise UserError(
                f"rollout.noise_level is {self.noise_level}; for rollout.schedule={self.schedule} it must "
                f"be at most 1, {usual}."
            )
        if self.steps - 1 in noisy:
            raise UserError(
                f"rollout.sde_steps {list(noisy)} holds the last of {self.steps} steps, in which "
                f"{self.schedule} adds no noise, so it has no log-probability. Take {self.steps - 1} out, or "
                "set rollout.schedule to flow or dance."
            )

    @property
    def judged_beside(self) -> bool:
        """Whether the judge is asked in a thread."""
        return self.overlap > 1 or self.staleness > 0

    @property
    def stochastic(self) -> list[int]:
        """The steps that may be stochastic, ascending."""
        return list(range(max(1, self.steps - 1))) if self.sde_steps is None else sorted(self.sde_steps)

    @property
    def trained(self) -> list[int]:
        """The steps that may be trained on, ascending."""
        return self.stochastic if self.train_steps is None else sorted(self.train_steps)

    @property
    def sampled_per_image(self) -> float:
        """Denoising steps that a picture costs: Σ_k n_k / G over those that are made, n_k = `paths(k)`. With
        a window that begins later it is less."""
        ways = [visited(self.steps, [end], self.ode_compression) for end in self._ends]
        made = [sum(map(self.paths, way[:-1])) for way in ways]
        return sum(made) / len(made) / self.group_size

    @property
    def _ends(self) -> list[int]:
        """The last stochastic step of each window, as if each stayed equally long; any subset counts as one
        that reaches the end."""
        noisy, size, order = self.stochastic, self.sde_window, self.sde_window_order
        if size is None or order == "subset":
            return noisy[-1:]
        starts = (
            range(len(noisy) - size + 1)
            if order == "random"
            else range(0, len(noisy), self.sde_window_stride)
        )
        return [noisy[min(start + size, len(noisy)) - 1] for start in starts]

    def paths(self, step: int) -> int:
        """n_k, different latents of a group before a step, or at the end (T)."""
        if self.branch is not None:
            return self.branch.paths(self.group_size, step)
        return 1 if self.shared_noise and step <= self.stochastic[0] else self.group_size

    def nodes(self, group: Tensor, sde_steps: Sequence[int]) -> Tensor | None:
        """[T + 1, B] who has its latent in common with whom (`tree_nodes`); None: nobody.

        Args:
            group: [B] labels.
            sde_steps: the iteration's stochastic steps.
        """
        if self.branch is not None:
            return tree_nodes(group, self.steps, at=self.branch.at, children=self.branch.children)
        if not self.shared_noise:
            return None
        return tree_nodes(group, self.steps, at=sde_steps[:1], children=self.group_size)

    @property
    def completed_per_image(self) -> float:
        """ODE steps that complete a picture from each of its stochastic steps; with a window, on average."""
        noisy = self.stochastic
        return sum(self.steps - step for step in noisy) * (self.sde_window or len(noisy)) / len(noisy)

    @property
    def trained_per_image(self) -> int:
        """How many steps of one image are trained on in one iteration."""
        return self.sde_window or len(self.trained)

    @property
    def pairs_per_image(self) -> float:
        """Pairs of sample and step that are trained on for an image, Σ_k n_{k+1} / G over the trained steps:
        what images have in common counts once."""
        if self.branch is None:
            return self.trained_per_image
        return sum(self.paths(step + 1) for step in self.trained) / self.group_size


@dataclass(frozen=True, kw_only=True)
class DiffusionObjectiveSettings(ObjectiveSettings):
    """What is optimized on denoising steps."""

    algorithm: str = "flow_grpo"
    """A row of `visalign.core.NAMED`: flow_grpo, flow_gspo, grpo_guard, flow_dppo, pref_grpo, and of the rows
    for text all that mean something on denoising steps: grpo, dr_grpo, rloo, reinforce_pp, dapo, cispo, sapo,
    gmpo, ... Or of `visalign.core.REGRESSIONS`, which need no stochastic step: diffusion_nft, awm, v_grpo,
    ram, reward_weighted, rejection, crd, gdro, diffusion_dpo, ... Or of `visalign.core.ASCENTS`, which go
    through the reward's own gradient: draft, draft_lv, refl."""
    step_weights: list[float] | None = None
    """Factor of the policy's loss at each of the T steps, in place of the row's `step_weight`."""
    credit: str = "picture"
    """What a denoising step earns: "picture", the advantage of its picture; "turning_points", by how much its
    noise raised the reward of the deterministic rest, a turning point all that was still to come (TP-GRPO,
    arXiv 2602.06422), at the price of completing and judging every sample from every stochastic step;
    "one_step", by how much it raised the reward of the prediction x − σ v, at the price of judging alone;
    "branches", the mean reward of the pictures that came of it, with `rollout.branch` (BranchGRPO)."""
    metric: str | None = None
    """The part of the reward, e.g. the label of a term of weight 0, at whose median advantage=canon splits a
    group."""
    multiplier_rate: float = 0.1
    """η of λ ← max(0, λ + η (bound − mean)), the multiplier of a reward that has a bound
    (`rewards.terms.LABEL.bound`), after each iteration's judgement; in units of 1 / (weight · reward)."""
    experts: dict[str, str] | None = None
    """Of algorithm=opd: tag of the prompts, or "*" for all that are not named -> folder of the trained
    policy (a run's lora/ or model/) whose velocity is learnt there; made with the same model settings."""
    ratio_bound: float | None = None
    """Largest |log r| allowed at the run's first update, where r must be 1. null: 1e-5, times the
    latent's numbers where the ratio sums over them; networks in bfloat16 may need more."""

    def __post_init__(self) -> None:
        allowed = [*NAMED, *REGRESSIONS, *ASCENTS]
        if self.algorithm not in allowed:
            raise UserError(
                f"objective: there is no algorithm {self.algorithm!r}. {suggestion(self.algorithm, allowed)}"
                f"Choose one of: {', '.join(allowed)}."
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
        given = {"metric": self.metric is not None, "process_reward": self.credit != "picture"}
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
                self.algorithm, **merged_changes(self.rows.get(self.algorithm, {}), self.changes)
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
        return row if self.credit == "picture" else self._by_step(row)

    def _by_step(self, row: Objective) -> Objective:
        """The row with an advantage of each step, z-scores within the group as in TP-GRPO's code."""
        if row.advantage != "group" or self.balance_every is not None or row.kl_in_reward:
            raise UserError(
                f"objective.credit is {self.credit!r}, which makes an advantage of each step. It goes with "
                "advantage='group', kl_in_reward=0 and objective.balance_every=null, as in flow_grpo; else "
                "set objective.credit=picture."
            )
        if self.credit == "branches" and couples_decisions(row):
            raise UserError(
                "objective.credit='branches' trains once what several pictures have in common, and "
                f"objective.algorithm={self.algorithm} joins the steps of a picture. Take flow_grpo, "
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
                self.algorithm, **merged_changes(self.rows.get(self.algorithm, {}), self.changes)
            )
        except (ValueError, TypeError) as error:
            raise UserError(f"objective: {error}") from error

    def check_constrained(self, reward: Any) -> None:
        """Refuse rewards with a bound where the sum of all is not what is learnt from.

        Raises:
            UserError: with what to set instead.
        """
        if not getattr(reward, "constraints", {}):
            return
        name = f"objective.algorithm={self.algorithm}"
        why = {
            f"{name} follows the rewards' own gradients": self.ascent is not None,
            f"objective.balance_every={self.balance_every} weighs them": self.balance_every is not None,
            f"objective.credit={self.credit} judges more than pictures": self.credit in COMPLETIONS,
            f"{name} takes each reward by itself": self._takes_columns,
        }
        for reason, there in why.items():
            if there:
                raise UserError(
                    f"rewards.terms has a bound ({', '.join(reward.constraints)}), which moves the weight of "
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
        """Refuse what means nothing without stochastic steps."""
        at_least("objective.epochs", self.epochs, 1)
        absent = {
            "ratio_bound": ("ratio", ""),
            "metric": ("halves of a group", ""),
            "step_weights": ("stochastic steps", of_steps),
        }
        if self.credit != "picture":
            raise UserError(
                f"objective.credit is {self.credit!r}, and objective.algorithm={self.algorithm} has no "
                "stochastic steps that could earn it. Set objective.credit=picture, or take flow_grpo."
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
"""Credits that judge more pictures than are made."""
CREDITS = ("picture", *COMPLETIONS, "branches")

_OF_STEPS = (
    *("sde_steps", "sde_window", "sde_window_order", "sde_window_every", "sde_window_stride"),
    *("sde_window_roll_back", "ode_compression", "shared_noise", "branch"),
    *("train_steps", "schedule", "noise_level", "log_prob_reduction"),
)
"""Settings of stochastic steps; from one start the ODE makes one picture."""


def check_sampling(objective: DiffusionObjectiveSettings, rollout: RolloutSettings) -> None:
    """Refuse settings of stochastic steps for a regression, which has none, and more levels than there are.

    Raises:
        UserError: with what to set instead.
    """
    row = objective.regression
    _check_solver(objective, rollout)
    _check_credit(objective, rollout)
    if rollout.staleness:
        is_step = row is None and objective.ascent is None
        check_stale(objective.build(length=1) if is_step else None, objective.algorithm)
        if objective.credit == "turning_points":
            raise UserError(
                "objective.credit=turning_points completes pictures with the present weights, and "
                "rollout.staleness=1 made them with others. Set rollout.staleness=0, or "
                "objective.credit=one_step."
            )
    if row is None:
        if objective.ascent is not None:
            _check_no_noise(objective, rollout, "through the reward's gradient")
        if rollout.guidance is not None:
            raise UserError(
                f"rollout.guidance is {rollout.guidance}, and objective.algorithm={objective.algorithm} "
                "needs log-probs of the policy that sampled. Set rollout.guidance=null and model.guidance, "
                "or take a regression, e.g. objective.algorithm=diffusion_nft."
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
            "each picture's own states. Set rollout.branch=null."
        )
    if row.visited:
        return
    _check_no_noise(objective, rollout, "at noised end points, objective.changes.levels of an image")
    if not row.continuous and (row.levels or 0) > rollout.steps:
        raise UserError(
            f"objective.changes.levels is {row.levels}, and the sampler's grid has {rollout.steps} levels. "
            f"Take at most {rollout.steps}, or levels between them too: objective.changes.continuous=true."
        )


def _check_solver(objective: DiffusionObjectiveSettings, rollout: RolloutSettings) -> None:
    """Refuse what completes a picture, or carries a gradient, by Euler steps on the whole grid."""
    if objective.credit == "turning_points" and rollout.ode_compression is not None:
        raise UserError(
            f"rollout.ode_compression is {rollout.ode_compression}, and objective.credit=turning_points "
            "completes pictures on the whole grid. Set rollout.ode_compression=null, or "
            "objective.credit=one_step."
        )
    if objective.ascent is not None and rollout.solver != "euler":
        raise UserError(
            f"rollout.solver is {rollout.solver}, and objective.algorithm={objective.algorithm} sends the "
            "reward's gradient through Euler steps. Set rollout.solver=euler."
        )


def _check_credit(objective: DiffusionObjectiveSettings, rollout: RolloutSettings) -> None:
    """Refuse branches whose steps would earn what one picture does, and their credit without any."""
    if objective.credit == "branches" and rollout.branch is None:
        raise UserError(
            "objective.credit is 'branches', and rollout.branch is null. Set rollout.branch={at: [0], "
            "children: 2}, or where else pictures shall part, or objective.credit=picture."
        )
    is_step = objective.regression is None and objective.ascent is None
    if is_step and rollout.branch is not None and objective.credit != "branches":
        raise UserError(
            f"objective.credit is {objective.credit!r}, and with rollout.branch a step that several pictures "
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
