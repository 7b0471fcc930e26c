# SPDX-License-Identifier: Apache-2.0
"""Settings of the objective on images, and of trees and pools of samples.

The defaults are Flow-GRPO's published ones for SD3.5-M (arXiv 2505.05470).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from visalign.core import Objective
from visalign.core.objective.algorithms import NAMED
from visalign.core.regression.ascents import ASCENTS, Ascent, named_ascent
from visalign.core.regression.few_step import FEW_STEP, FewStep, named_few_step
from visalign.core.regression.rows import MATRIX_SIGNALS, REGRESSIONS, Regression, named_regression
from visalign.errors import UserError
from visalign.settings import MOST_COUNTED, Count, Natural, NonNegative, Positive, Steps, refuse, settings
from visalign.training.policy.settings import MATRIX_ADVANTAGES, ObjectiveSettings
from visalign.training.policy.update import couples_decisions

from .published import SUPPLIED, published_alternative

COMPLETIONS = ("turning_points", "one_step")  # Credits that score more images than are sampled


@settings("objective")
class DiffusionObjectiveSettings(ObjectiveSettings):
    """Objective on denoising steps."""

    algorithm: str = "flow_grpo"
    """A name in `visalign.core.NAMED`: flow_grpo, flow_gspo, grpo_guard, flow_dppo, pref_grpo, and the text
    algorithms that mean something on denoising steps: grpo, dr_grpo, rloo, reinforce_pp, dapo, cispo, sapo,
    gmpo, ... Or in `visalign.core.REGRESSIONS`, which need no log-prob: diffusion_nft, awm, v_grpo, ram,
    reward_weighted, rejection, crd, gdro, diffusion_dpo, opd, ... Or in `visalign.core.ASCENTS`, which use
    the reward's own gradient: draft, draft_lv, refl. Or in `visalign.core.FEW_STEP`, for students of few steps:
    dmd2 and tdm, which learn from a guided teacher without a reward, and tdm_r1."""
    step_weights: list[NonNegative] | None = None
    """Factor of the policy's loss at each of the T steps, instead of the algorithm's `step_weight`."""
    credit: Literal["image", "turning_points", "one_step", "branches"] = "image"
    """Advantage of a denoising step: "image", that of its image; "turning_points", how much its noise raised
    the reward of the deterministic rest, at a turning point all that was still to come (TP-GRPO, arXiv
    2602.06422), which completes and scores every sample from every stochastic step; "one_step", how much it
    raised the reward of the prediction x − σ v, which only scores; "branches", the mean reward of the images
    that descend from it, with `rollout.branch` (BranchGRPO)."""
    metric: str | None = None
    """Part of the reward, e.g. the label of a term of weight 0, at whose median advantage=canon splits a group."""
    multiplier_rate: Positive = 0.1
    """η of λ ← max(0, λ + η (bound − mean)), the multiplier of a reward that has a bound
    (`rewards.terms.LABEL.bound`), after each iteration is scored; in units of 1 / (weight · reward)."""
    experts: dict[str, str] | None = None
    """For algorithm=opd: tag of the prompts, or "*" for all others -> folder of the trained policy (a run's
    lora/ or model/) whose velocity is learned there; trained with the same model settings."""
    teacher: str | None = None
    """For dmd2, tdm and tdm_r1: folder or hub id of the model before its distillation, the same network as
    model.path, which teaches; null: model.path itself, without adapters."""
    ratio_bound: Positive | None = None
    """Largest |log r| allowed at the run's first update, where r must be 1. null: 1e-5, times the latent's
    numbers where the ratio sums over them; networks in bfloat16 may need more."""

    def __post_init__(self) -> None:
        refuse(_broken_rules(self))
        if self.regression is not None:
            self.check_reset(self.regression.asks_reference)
        elif self.ascent is not None:
            self.check_reset(self.ascent.kl > 0)
        elif self.few_step is not None:
            self.check_reset(False)
        else:
            super().__post_init__()
            extra = {"metric": self.metric is not None, "process_reward": self.credit != "image"}
            extra["advantage"] = self.credit == "branches"
            supplied = [name for name, needed in extra.items() if needed]
            self.check("denoising_steps", [*supplied, *SUPPLIED])

    @property
    def is_policy_gradient(self) -> bool:
        """True for algorithms on the log-probs of steps: neither a regression nor an ascent."""
        return self.algorithm in NAMED

    @property
    def regression(self) -> Regression | None:
        """The regression that `algorithm` names, else None."""
        if self.algorithm not in REGRESSIONS:
            return None
        row = self._build(named_regression)
        if self.balance_every is None:
            return row
        self.check_balanced("signal", row.signal, "advantage")
        return replace(row, signal="normalise_then_sum", signal_options={"ddof": 0})

    @property
    def ascent(self) -> Ascent | None:
        """The reward-gradient algorithm that `algorithm` names, else None."""
        return self._build(named_ascent) if self.algorithm in ASCENTS else None

    @property
    def few_step(self) -> FewStep | None:
        """The few-step algorithm that `algorithm` names, else None."""
        return self._build(named_few_step) if self.algorithm in FEW_STEP else None

    @property
    def compares(self) -> bool:
        """True if samples are learnt from by what the others of their group are worth."""
        if (few_step := self.few_step) is not None:
            return few_step.surrogate
        return self.regression is None or self.regression.compares

    def _build(self, build: Any) -> Any:
        try:
            return self.change(build)
        except (ValueError, TypeError) as error:
            raise UserError(f"objective: {error}") from error

    def build(self, *, length: int) -> Objective:
        """Build the objective; with `credit` its advantages are z-scores of each step within the group.

        Those of branches are computed by the trainer, over the nodes of its trees.
        """
        objective = super().build(length=length)
        if self.credit == "image":
            return objective
        refuse(_credit_conflicts(self, objective))
        if self.credit == "branches":
            return replace(objective, advantage="given", advantage_options={})
        return replace(objective, advantage="steps", advantage_options={"scale": "group", "ddof": 0})

    def check_reward(self, reward: Any, *, renewed: bool) -> None:
        """Refuse a bound where training does not use the sum of all rewards, and with PAR comparing rewards.

        `renewed` says that the references of a reward are.
        """
        capabilities, name = reward.capabilities, f"objective.algorithm={self.algorithm}"
        advantage = self.build(length=1).advantage if self.is_policy_gradient else None
        is_par = advantage == "par"
        if is_par and (capabilities.needs_group or capabilities.needs_batch):
            raise UserError(
                f"{name} compares each reward with that of an image of the reference, and "
                f"{reward.name} compares the samples of an iteration with each other. Take a reward of single "
                "images, or objective.algorithm=flow_grpo."
            )
        if is_par and (renewed or capabilities.at_iteration is not None):
            raise UserError(
                f"{name} compares with stored rewards of the reference, and "
                + (
                    "the references of rewards.terms are renewed. Set references.every=null"
                    if renewed
                    else "a weight or the ramp of rewards.terms changes. Give numbers, or none"
                )
                + ", or take objective.algorithm=flow_grpo."
            )
        if not (bounds := capabilities.constraints):
            return
        row = self.regression
        by_term = advantage in MATRIX_ADVANTAGES or (row is not None and row.signal in MATRIX_SIGNALS)
        reasons = {
            f"{name} follows the rewards' own gradients": self.ascent is not None,
            f"objective.balance_every={self.balance_every} weighs them": self.balance_every is not None,
            f"objective.credit={self.credit} scores more than images": self.credit in COMPLETIONS,
            f"{name} takes each reward by itself": by_term,
            f"{name} compares with stored rewards of the reference": is_par,
        }
        if reason := next((reason for reason, applies in reasons.items() if applies), None):
            raise UserError(
                f"rewards.terms has a bound ({', '.join(bounds)}), which changes the weight of that term, "
                f"and {reason}. Take flow_grpo, grpo_guard, diffusion_nft, awm or ram with one advantage of "
                "the sum, or set the bound to null."
            )

    def check_features(self, has_features: bool) -> None:
        """Refuse Entrocraft, whose monitor is the variety of images here, without features to measure it."""
        if self.is_policy_gradient and self.build(length=1).selection == "entrocraft" and not has_features:
            raise UserError(
                f"objective.algorithm={self.algorithm} holds the metric diversity in a band, and there are no "
                "features of images to measure it. Set monitor.features to a CLIP model, or take "
                "objective.algorithm=dapo."
            )


def _credit_conflicts(s: DiffusionObjectiveSettings, objective: Objective) -> Iterator[str]:
    if objective.advantage != "group" or s.balance_every is not None or objective.kl_in_reward:
        yield (
            f"objective.credit is {s.credit!r}, which computes an advantage of each step. It needs advantage='group', "
            "kl_in_reward=0 and objective.balance_every=null, as in flow_grpo; else set objective.credit=image."
        )
    if s.credit == "branches" and couples_decisions(objective):
        yield (
            f"objective.credit='branches' trains shared steps once, and objective.algorithm={s.algorithm} joins the "
            "steps of an image. Take flow_grpo, grpo_guard or grpo."
        )


def _broken_rules(s: DiffusionObjectiveSettings) -> Iterator[str]:
    name = f"objective.algorithm={s.algorithm}"
    if s.algorithm not in (*NAMED, *REGRESSIONS, *ASCENTS, *FEW_STEP) and (
        other := published_alternative(s.algorithm)
    ):
        yield f"objective: there is no algorithm {s.algorithm!r}. {other}"
    if s.experts and (s.regression is None or s.regression.anchor != "expert"):
        yield (
            f"objective.experts is {s.experts}, and {name} has none. Set objective.algorithm=opd, or "
            "objective.experts=null."
        )
    if not s.is_policy_gradient:
        defaults = {"ratio_bound": None, "metric": None, "step_weights": None, "credit": "image"}
        for setting in (setting for setting, default in defaults.items() if getattr(s, setting) != default):
            yield (
                f"objective.{setting} is for log-probs of steps, which {name} has not. Set "
                f"objective.{setting}={defaults[setting] or 'null'}, or take flow_grpo."
            )
    if (s.ascent or s.few_step) is not None and s.balance_every is not None:
        yield f"objective.balance_every weighs advantages of a loss, which {name} has not. Set it to null."
    if s.few_step is None and s.teacher is not None:
        yield (
            f"objective.teacher is {s.teacher}, and {name} has no teacher. Set objective.teacher=null, or take dmd2, "
            "tdm or tdm_r1."
        )
    if s.metric is not None and s.build(length=1).advantage != "canon":
        yield (
            f"objective.metric is {s.metric!r}, which splits groups with advantage='canon' only. Set "
            "objective.algorithm=canon, or objective.metric=null."
        )


def check_discriminators(objective: DiffusionObjectiveSettings, rollout: Any, replay: Any, reward: Any) -> None:
    """Refuse settings under which scores before and after the reward has learnt would be compared."""
    is_par = objective.is_policy_gradient and objective.build(length=1).advantage == "par"
    reasons = {
        "rollout.staleness=1 scores images meanwhile. Set rollout.staleness=0": rollout.staleness > 0,
        f"objective.credit={objective.credit} scores more images then. Set it to image": objective.credit
        in COMPLETIONS,
        "self_imitation replays earlier scores. Set self_imitation=null": replay is not None,
        f"objective.algorithm={objective.algorithm} stores scores of the reference. Take flow_grpo": is_par,
    }
    labels = list(reward.capabilities.discriminators)
    if reason := next((reason for reason, applies in reasons.items() if labels and applies), None):
        raise UserError(f"rewards.terms.{labels[0]} learns after each iteration, and {reason}.")


@settings("rollout.branch")
class BranchSettings:
    """Steps at which the images of a prompt branch (BranchGRPO, arXiv 2509.06040)."""

    at: list[Natural]
    """Stochastic steps at which every path splits into `children`, each with its own noise."""
    children: Annotated[int, Field(ge=2, le=MOST_COUNTED)] = 2
    """K, children per split. A tree has K^len(at) images; `group_size` holds one or more trees, each with its
    own initial noise."""

    @property
    def leaves(self) -> int:
        """Images of one tree, K^len(at)."""
        return self.children ** len(self.at)

    def paths(self, group_size: int, step: int) -> int:
        """Count the different latents of a group before a step: n_k = G / K^#{a ∈ at: a ≥ k}."""
        return group_size // self.children ** sum(a >= step for a in self.at)


@settings("rollout.scout")
class ScoutSettings:
    """Pool of samples per prompt that few steps draw and the reward ranks (Sol-RL, arXiv 2604.06916).

    Its best and worst are drawn again in all steps, from the same seeds, and these alone are trained on.
    """

    pool: Count = 96
    """M, samples per prompt in the pool; `group_size` of them are trained on."""
    steps: Steps = 6
    """Denoising steps of the pool, fewer than `rollout.steps`."""
    best: Natural | None = None
    """Trained samples that are the best of the pool, the others being its worst; null: half of `group_size`."""


def is_no_subset(steps: Sequence[int] | None, allowed: Collection[int]) -> bool:
    """Return True for a list that is empty, repeats, or leaves what is allowed."""
    return steps is not None and (not steps or len(set(steps)) < len(steps) or not set(steps) <= set(allowed))


def broken_branch(s: Any, branch: BranchSettings) -> Iterator[str]:
    """Yield what is wrong with branches."""
    steps = s.stochastic
    if s.shared_noise or s.sde_window:
        yield (
            "rollout.branch fixes which steps samples share, and rollout."
            f"{'shared_noise' if s.shared_noise else 'sde_window'} is set too. Leave one of the two out."
        )
    if is_no_subset(branch.at, steps):
        yield f"rollout.branch.at is {branch.at}; list different steps among the stochastic steps {steps}."
    if s.group_size % branch.leaves:
        yield (
            f"rollout.group_size is {s.group_size}, and a tree with {branch.children} children at the steps "
            f"{branch.at} has {branch.leaves} images. Take a multiple of {branch.leaves}, or other "
            "rollout.branch.at and children."
        )
    for step in (step for step in s.trained if s.paths(step + 1) == 1):
        yield (
            f"rollout.branch.at is {branch.at}, and all images of a prompt share step {step}: there is nothing to "
            f"compare it with. Branch there, take {step} out of rollout.sde_steps or train_steps, or let "
            "rollout.group_size hold several trees."
        )
