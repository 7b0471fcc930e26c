# SPDX-License-Identifier: Apache-2.0
"""Settings of the image rollout, and the rules that tie the objective to it.

The defaults are Flow-GRPO's published ones for SD3.5-M (arXiv 2505.05470).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from visalign.core.regression.rows import GUIDANCE, Regression
from visalign.errors import UserError
from visalign.flow.rollout import visited_steps
from visalign.flow.transitions import REPLACING, SHARES, Solver
from visalign.flow.tree import tree_nodes
from visalign.flow.windows import WindowOrder, window_steps
from visalign.interfaces import RewardCapabilities
from visalign.memory import AutoCount
from visalign.seeds import sample_seed
from visalign.settings import (
    Count,
    Natural,
    NonNegative,
    Positive,
    PositiveShare,
    Share,
    Side,
    Steps,
    refuse,
    settings,
)
from visalign.training.loop.dynamic_groups import DynamicSettings
from visalign.training.loop.sampler import check_batch_algebra, check_batch_reward, check_whole_groups
from visalign.training.policy.settings import stale_message
from visalign.training.policy.winners import ReplaySettings

from .settings import (
    BranchSettings,
    DiffusionObjectiveSettings,
    ScoutSettings,
    broken_branch,
    check_discriminators,
    is_no_subset,
)


@settings("rollout")
class RolloutSettings:
    """Sampling of an iteration's images."""

    prompts_per_iteration: Count = 48
    """P, different prompts per iteration (over all processes)."""
    group_size: Count = 24
    """G, samples per prompt; at least 2 where an algorithm compares them."""
    steps: Steps = 10
    """T, denoising steps."""
    timestep_schedule: Literal["diffusers", "plain"] = "diffusers"
    """Timestep schedule: "diffusers" (the model's scheduler, whose shift is applied twice) or "plain"."""
    schedule: Literal["flow", "dance", "cps", "ddim", "precise", "dance_precise", "linear"] = "flow"
    """Noise schedule of the stochastic steps: "flow" (Flow-GRPO), "dance" (DanceGRPO), "cps" (coefficients-
    preserving), "ddim" (DDPO), "precise" (keeps the variance of narrow data; published η: 1.5 at 20 steps), its
    Dance form, "dance_precise", or "linear" (Flash-GRPO; its η is 1)."""
    noise_level: Positive = 0.7
    """Noise level a (η for "dance", "ddim", "precise" and "linear")."""
    sde_steps: list[Natural] | None = None
    """Steps that are stochastic, 0 to T-1; the others are deterministic. null: all but the last."""
    sde_window: Count | None = None
    """Number of `sde_steps` to draw in each iteration; only these are then stochastic (Flow-GRPO-Fast,
    MixGRPO). null: all of them."""
    sde_window_order: WindowOrder = "subset"
    """Rule that draws them: "subset" (any), "random" (neighbours), "progressive", "decay" or "exp_decay"
    (neighbours that move along the timestep schedule, with the last two ever faster, MixGRPO)."""
    sde_window_every: Count = 25
    """Iterations before a moving window moves."""
    sde_window_stride: Count = 1
    """Steps by which a moving window moves (MixGRPO's prog_overlap_step)."""
    sde_window_roll_back: bool = True
    """Start a moving window again after the end of the schedule; false: it stays there."""
    ode_compression: PositiveShare | None = None
    """Share of the steps after the last stochastic one that are taken, along the ODE (MixGRPO-Flash: 0.4,
    with rollout.solver=dpmpp_2m); null: all."""
    shared_noise: bool = False
    """Start all samples of a group from one noise (DanceGRPO): only the noise of the steps differs, and the
    steps up to the first stochastic one are computed once for the group."""
    branch: BranchSettings | None = None
    """Share the first steps of a group's samples and branch on the way; shared steps are sampled and trained
    once. Needs `objective.credit=branches`. null: every sample on its own."""
    scout: ScoutSettings | None = None
    """Draw a larger pool in few steps first, for regressions only, and train on its extremes. null: no pool."""
    train_steps: list[Natural] | None = None
    """Those of `sde_steps` that are trained on; null: all that are stochastic."""
    guidance: NonNegative | None = None
    """Guidance scale of the rollout, for regressions only, whose loss does not depend on how an image was
    sampled; null: the model's."""
    merge_adapters: bool = False
    """Add LoRA to the weights while training samples are generated, for regressions only: a forward then
    costs what it costs without adapters, and those weights are in memory twice."""
    solver: Solver = "euler"
    """Solver of the deterministic steps: "euler" or "dpmpp_2m", DPM-Solver++(2M). Evaluations have their own
    solver."""
    image_sizes: Annotated[list[Side | tuple[Side, Side]], Field(min_length=1)] | None = None
    """Sizes in pixels, one side or [height, width], that the iterations take in turn: the images of an
    iteration share a size, with the timestep schedule that the model has there. monitor.window is a multiple
    of their number. Evaluations use model.image_size. null: that one only."""
    log_prob_reduction: Literal["mean", "sum"] = "mean"
    """Log-probability of a step: "mean" over the latent's numbers, as published, or their "sum"."""
    batch_size: AutoCount = 64
    """Samples that go through the network together while sampling; bounds memory only. auto: measured before training
    on a GPU, doubled until it would take 85 % of the free memory, at the largest of image_sizes. batches.json of the
    run keeps the number. Without a GPU, and in a plan, it is the default."""
    overlap: Count = 1
    """Chunks in which an iteration is sampled: while one is sampled, the previous one is scored in a thread.
    It helps where the reward runs elsewhere (a server, another GPU), and changes no sample."""
    staleness: Literal[0, 1] = 0
    """1: sample an iteration before the update of the previous one, which hides the reward behind it. The
    samples come from weights one iteration old, so the objective needs `importance_sampling`."""
    keep_images: bool = False
    """Write all images that are sampled (by the first process) to rollouts/ROUND, with tables as `visalign sample`
    has them: to look at, to vote on, or to learn from. A video is its middle frame."""
    max_failure_rate: Share = 0.2
    """Largest share of samples that the reward may fail on before the run stops."""

    def __post_init__(self) -> None:
        refuse(_broken_rules(self))

    @property
    def measured_batch_size(self) -> int:
        """`batch_size`, which is a number once auto was measured."""
        if self.batch_size == "auto":
            raise UserError("rollout.batch_size is auto, which `visalign train` measures. In Python give a number.")
        return self.batch_size

    @property
    def stochastic(self) -> list[int]:
        """Steps that may be stochastic, ascending."""
        return list(range(max(1, self.steps - 1))) if self.sde_steps is None else sorted(self.sde_steps)

    @property
    def trained(self) -> list[int]:
        """Steps that may be trained on, ascending."""
        return self.stochastic if self.train_steps is None else sorted(self.train_steps)

    def choose_steps(self, seed: int, iteration: int) -> tuple[list[int], tuple[int, ...]]:
        """Choose an iteration's stochastic steps, and the indices among them that are trained on."""
        steps = self.stochastic
        if self.sde_window is None:
            return steps, tuple(steps.index(step) for step in self.trained)
        indices = window_steps(
            len(steps),
            self.sde_window,
            iteration,
            order=self.sde_window_order,
            every=self.sde_window_every,
            stride=self.sde_window_stride,
            roll_back=self.sde_window_roll_back,
            draw=np.random.default_rng(sample_seed(seed, "noise steps", iteration)),
        )
        return [steps[index] for index in indices], tuple(range(len(indices)))

    @property
    def sampled_per_image(self) -> float:
        """Denoising steps per image, Σ_k n_k / G over the steps taken with n_k = `paths(k)`; mean over windows."""
        routes = [visited_steps(self.steps, [window[-1]], self.ode_compression) for window in self.windows]
        exact = sum(sum(map(self.paths, route[:-1])) for route in routes) / len(routes) / self.group_size
        return exact if self.scout is None else exact + self.scouts_per_image * self.scout.steps

    @property
    def scouts_per_image(self) -> float:
        """Samples of the pool per image that is trained on."""
        return 0.0 if self.scout is None else self.scout.pool / self.group_size

    @property
    def windows(self) -> list[list[int]]:
        """Stochastic steps of each window, all equally likely; a random subset counts as the last window."""
        steps, size, order = self.stochastic, self.sde_window, self.sde_window_order
        if size is None or order == "subset":
            return [steps[-(size or len(steps)) :]]
        last = len(steps) - size if order == "random" else len(steps) - 1
        return [steps[start : start + size] for start in range(0, last + 1, self.sde_window_stride)]

    def paths(self, step: int) -> int:
        """Count n_k, the different latents of a group before a step, or at the end (T)."""
        if self.branch is not None:
            return self.branch.paths(self.group_size, step)
        return 1 if self.shared_noise and step <= self.stochastic[0] else self.group_size

    def arguments(self, group: Tensor, sde_steps: Sequence[int]) -> dict[str, Any]:
        """Return the settings' part of the arguments of `visalign.flow.rollout.rollout` for groups [b] of samples."""
        nodes = None
        if self.branch is not None:
            nodes = tree_nodes(group, self.steps, at=self.branch.at, children=self.branch.children)
        elif self.shared_noise:
            nodes = tree_nodes(group, self.steps, at=sde_steps[:1], children=self.group_size)
        return {
            "sde_steps": sde_steps,
            "schedule": self.schedule,
            "noise_level": self.noise_level,
            "log_prob_reduction": self.log_prob_reduction,
            "batch_size": self.batch_size,
            "nodes": nodes,
            "solver": self.solver,
            "compression": self.ode_compression,
        }

    @property
    def completed_per_image(self) -> float:
        """ODE steps that complete an image from each of its stochastic steps; the mean with a window."""
        steps = self.stochastic
        return sum(self.steps - step for step in steps) * (self.sde_window or len(steps)) / len(steps)

    @property
    def trained_per_image(self) -> int:
        """Largest number of steps of one image that are trained on in an iteration."""
        return self.sde_window or len(self.trained)

    @property
    def pairs_per_image(self) -> float:
        """Trained (sample, step) pairs per image, Σ_k n_{k+1} / G over the trained steps; mean over windows."""
        if self.branch is not None:
            return sum(self.paths(step + 1) for step in self.trained) / self.group_size
        if self.sde_window is not None:
            return sum(map(len, self.windows)) / len(self.windows)
        return self.trained_per_image


def _broken_rules(s: RolloutSettings) -> Iterator[str]:
    steps, last = s.stochastic, s.steps - 1
    if is_no_subset(s.sde_steps, range(s.steps)):
        yield (
            f"rollout.sde_steps is {s.sde_steps}; list different steps from 0 to rollout.steps - 1 (rollout.steps is "
            f"{s.steps}), or use an algorithm that needs no noise, e.g. objective.algorithm=diffusion_nft."
        )
    if s.schedule in SHARES and s.noise_level > 1:
        yield (
            f"rollout.noise_level is {s.noise_level}; for rollout.schedule={s.schedule} it must be at most 1 (DDPO "
            "uses 1, Flow-CPS 0.8)."
        )
    if s.schedule in REPLACING and last in steps:
        yield (
            f"rollout.sde_steps {steps} holds the last of {s.steps} steps, in which {s.schedule} adds no noise, so it "
            f"has no log-probability. Take {last} out, or set rollout.schedule to flow or dance."
        )
    if is_no_subset(s.train_steps, steps):
        yield f"rollout.train_steps is {s.train_steps}; list different steps among the stochastic steps {steps}."
    if (s.sde_window or 0) > len(steps):
        yield f"rollout.sde_window is {s.sde_window}; with {len(steps)} sde_steps it must be 1 to {len(steps)}."
    if s.sde_window is not None and s.train_steps is not None:
        yield (
            "rollout.sde_window draws the steps to train in each iteration, so rollout.train_steps cannot be fixed as "
            "well. Remove one of the two."
        )
    order = f"rollout.sde_window_order is {s.sde_window_order}"
    if s.sde_window is None and s.sde_window_order != "subset":
        yield f"{order} and there is no window. Set rollout.sde_window to its size."
    if s.sde_window_order in ("subset", "random") and (s.sde_window_stride != 1 or not s.sde_window_roll_back):
        yield (
            "rollout.sde_window_stride and rollout.sde_window_roll_back are of a window that moves, and "
            f"{order}. Set it to progressive, decay or exp_decay."
        )
    if s.ode_compression is not None and max(last - window[-1] for window in s.windows) < 2:
        yield (
            f"rollout.ode_compression is {s.ode_compression}, and there are no two steps to compress after the "
            f"stochastic steps {steps}. Set rollout.sde_steps to earlier steps."
        )
    if s.image_sizes and s.staleness:
        yield (
            "rollout.staleness=1 samples the next iteration before this one is trained on, and rollout.image_sizes "
            f"{s.image_sizes} gives it another size. Leave one of the two out."
        )
    if s.branch is not None:
        yield from broken_branch(s, s.branch)
    if (scout := s.scout) and not (scout.pool > s.group_size >= (scout.best or 0) and scout.steps < s.steps):
        yield (
            f"rollout.scout has pool={scout.pool}, steps={scout.steps} and best={scout.best}, with rollout.group_size="
            f"{s.group_size} and rollout.steps={s.steps}. The pool must be larger than the group, its steps fewer "
            "than those of the rollout, and best at most the group."
        )


_STOCHASTIC_STEPS = (
    *("sde_steps", "sde_window", "sde_window_order", "sde_window_every", "ode_compression"),
    *("shared_noise", "branch", "train_steps", "schedule", "noise_level", "log_prob_reduction"),
)
"""Settings of stochastic steps; along the ODE one initial noise gives one image."""


def _conflicts(objective: DiffusionObjectiveSettings, rollout: RolloutSettings) -> Iterator[str]:
    row, name, steps = objective.regression, f"objective.algorithm={objective.algorithm}", rollout.steps
    if objective.credit == "turning_points" and rollout.ode_compression is not None:
        yield (
            f"rollout.ode_compression is {rollout.ode_compression}, and objective.credit=turning_points completes "
            "images on all timesteps. Set rollout.ode_compression=null, or objective.credit=one_step."
        )
    if (objective.ascent or objective.few_step) is not None and rollout.solver != "euler":
        yield f"rollout.solver is {rollout.solver}, and {name} trains Euler steps. Set rollout.solver=euler."
    if objective.is_policy_gradient and (objective.credit == "branches") != (rollout.branch is not None):
        yield (
            f"objective.credit is {objective.credit!r} and rollout.branch is {rollout.branch}: a shared step earns "
            "the mean of its images. Set objective.credit=branches and rollout.branch, e.g. {at: [0]}, or neither."
        )
    if rollout.staleness and objective.credit == "turning_points":
        yield (
            "objective.credit=turning_points completes images with the current weights, and rollout.staleness=1 "
            "sampled them with older ones. Set rollout.staleness=0, or objective.credit=one_step."
        )
    if rollout.scout is not None and (row is None or row.visited):
        yield (
            "rollout.scout trains on the extremes of a pool, which are no draws of the policy, and "
            f"{name} learns from the probability or the states of what it drew. Set rollout.scout=null, or take a "
            "regression at noised end points, e.g. objective.algorithm=diffusion_nft."
        )
    if row is None and (rollout.guidance is not None or rollout.merge_adapters):
        yield (
            "rollout.guidance and rollout.merge_adapters sample with another policy than the trained one, whose "
            f"log-probs or gradient {name} needs. Set rollout.guidance=null and rollout.merge_adapters=false, or take "
            "a regression, e.g. objective.algorithm=diffusion_nft."
        )
    if not objective.is_policy_gradient and (row is None or not row.visited):
        defaults = {item.name: item.default for item in fields(RolloutSettings)}
        for unused in (unused for unused in _STOCHASTIC_STEPS if getattr(rollout, unused) != defaults[unused]):
            yield (
                f"{name} samples along the ODE, without stochastic steps. Set "
                f"rollout.{unused}={json.dumps(defaults[unused])}."
            )
    if objective.ascent and objective.ascent.last > steps:
        yield (
            f"objective.changes.last is {objective.ascent.last}, and rollout.steps is {steps}. Take at most {steps}."
        )
    if rollout.staleness:
        if not objective.is_policy_gradient or objective.build(length=1).importance_sampling is None:
            yield stale_message(objective.algorithm)
    if objective.step_weights is not None and len(objective.step_weights) != steps:
        yield (
            f"objective.step_weights is {objective.step_weights} for {steps} steps; give one weight for each step, 0 "
            "for those that are not trained."
        )
    elif objective.step_weights is not None and not any(objective.step_weights[step] for step in rollout.trained):
        yield (
            f"objective.step_weights is {objective.step_weights}, 0 at all steps that are trained {rollout.trained}. "
            "Give one of them a weight above 0."
        )


def _regression_conflicts(
    objective: DiffusionObjectiveSettings, row: Regression, rollout: RolloutSettings, stored: bool
) -> Iterator[str]:
    name, steps = f"objective.algorithm={objective.algorithm}", rollout.steps
    if row.anchor == "expert" and not objective.experts:
        yield (
            f"{name} learns from experts, and there are none. Set objective.experts to the folders of trained "
            'policies, e.g. {counting: runs/a/lora, "*": runs/b/lora}.'
        )
    if row.loss == "fdfo" and (rollout.group_size, rollout.shared_noise) != (2, True):
        yield (
            f"rollout.group_size is {rollout.group_size} and rollout.shared_noise is {rollout.shared_noise}, and "
            f"{name} compares two branches of one path. Set rollout.group_size=2 and rollout.shared_noise=true."
        )
    if row.visited and rollout.branch:
        yield (
            f"rollout.branch is {rollout.branch}, and {name} learns at each image's own states. Set "
            "rollout.branch=null."
        )
    if row.density == "sampler" and not row.visited and not row.continuous and (row.levels or 0) > steps:
        yield (
            f"objective.changes.levels is {row.levels}, and the sampler has {steps} timesteps. Take at most {steps}, "
            "or also levels between them: objective.changes.continuous=true."
        )
    if stored and rollout.scout is not None:
        yield (
            f"rollout.scout is {rollout.scout}, and stored images (data.pairs, data.images) are not sampled. Set "
            "rollout.scout=null."
        )
    if stored and row.learns_alike and rollout.group_size > 1:
        yield (
            f"rollout.group_size is {rollout.group_size}, and an image with its caption has no group. Set "
            "rollout.group_size=1; rollout.prompts_per_iteration is then the number of images."
        )
    if not stored and row.learns_alike:
        yield (
            f"{name} learns every image alike, good or bad. Set data.images to images with captions, or take "
            "objective.algorithm=rejection to learn from the best samples."
        )
    if not stored and row.loss_options.get("soft"):
        yield (
            f"{name} has loss_options soft=true, which takes votes for probabilities, and samples of the policy have "
            "none. Set data.pairs to stored pairs, or soft=false."
        )


def _needs_samples(objective: DiffusionObjectiveSettings) -> bool:
    """Return True where an algorithm cannot learn from images that another policy may have made."""
    row = objective.regression
    if row is None or row.loss not in ("dpo", "gdro", "kto", "weighted") or row.anchor == "old":
        return True
    signals = ("advantage",) if row.loss == "kto" else ("reward", "tilt", "best")
    return objective.balance_every is not None or row.signal not in signals or row.noise == "start"


def check_sampling(objective: DiffusionObjectiveSettings, rollout: RolloutSettings, *, stored: bool = False) -> None:
    """Refuse an objective and a rollout, or with `stored` stored pairs of images, that do not fit each other."""
    row = objective.regression
    check_batch_algebra(rollout.prompts_per_iteration, rollout.group_size, compared=objective.compares)
    refuse(_conflicts(objective, rollout))
    if stored and _needs_samples(objective):
        raise UserError(
            f"objective.algorithm={objective.algorithm} learns from samples of the policy itself, or does so by "
            "objective.changes, and images of data.pairs are from elsewhere. Take diffusion_dpo, gdro, diffusion_kto, "
            "reward_weighted or rejection as published, or leave data.pairs out."
        )
    if row is not None:
        refuse(_regression_conflicts(objective, row, rollout, stored))


def check_more_samples(
    objective: DiffusionObjectiveSettings,
    rollout: RolloutSettings,
    dynamic: DynamicSettings | None,
    replay: ReplaySettings | None,
    *,
    stored: bool = False,
    reward: Any = None,
    renewed: bool = False,
) -> None:
    """Refuse dynamic sampling or a replay that the algorithm, the reward or the rollout has no use for."""
    if renewed and rollout.staleness and objective.credit == "one_step":
        raise UserError(
            "objective.credit=one_step scores after the next iteration has renewed the references of rewards.terms. "
            "Set rollout.staleness=0, or references.every=null."
        )
    row, can = objective.regression, RewardCapabilities() if reward is None else reward.capabilities
    name, learns = f"objective.algorithm={objective.algorithm}", row is not None and row.loss != "distil"
    has_ratio = objective.is_policy_gradient or (row is not None and row.loss == "elbo")
    refusals = {
        f"{name} compares no rewards": not (learns or objective.is_policy_gradient),
        "stored images (data.pairs, data.images) are no samples": stored,
        f"a bound of rewards.terms ({', '.join(can.constraints)}) counts all samples alike": bool(can.constraints),
    }
    of_dynamic = {"rollout.staleness=1 samples before the last rewards are known": rollout.staleness > 0}
    of_replay = {
        f"{name} has a ratio to the policy that sampled, which is older": has_ratio,
        f"{name} learns at states of the iteration's own paths": row is not None and row.visited,
        "rollout.image_sizes gives the latents several sizes": bool(rollout.image_sizes),
        "the references of rewards.terms are renewed, so that stored rewards are of older ones": renewed,
        f"{'' if reward is None else reward.name} compares an iteration's samples": can.needs_group or can.needs_batch,
    }
    reasons = [reason for reason, applies in (refusals | of_dynamic).items() if applies]
    if dynamic is not None and dynamic.enabled and reasons:
        raise UserError(
            f"dynamic.enabled=true replaces groups whose rewards are equal, and {reasons[0]}. Set "
            "dynamic.enabled=false, or change the other, e.g. objective.algorithm=dapo on sampled images."
        )
    reasons = [reason for reason, applies in (of_replay | refusals).items() if applies]
    if replay is not None and reasons:
        raise UserError(
            f"self_imitation replays images of earlier iterations, and {reasons[0]}. Set self_imitation=null, or "
            "change the other, e.g. objective.algorithm=diffusion_nft, ram or reward_weighted on sampled images."
        )
    if reward is not None:
        check_discriminators(objective, rollout, replay, reward)


def check_processes(objective: DiffusionObjectiveSettings, rollout: RolloutSettings, reward: Any, world: int) -> None:
    """Refuse more processes than samples, and processes that would split what is compared."""
    row = objective.regression
    check_batch_algebra(rollout.prompts_per_iteration, rollout.group_size, world, compared=objective.compares)
    check_batch_reward(reward, world)
    by_group = row is not None and (row.of_groups or row.loss in GUIDANCE)
    if rollout.branch is not None or rollout.scout is not None or by_group or reward.capabilities.needs_group:
        check_whole_groups(rollout.prompts_per_iteration, world)


def check_sharding(
    objective: DiffusionObjectiveSettings, rollout: RolloutSettings, unsupported: Mapping[str, bool] = {}
) -> None:
    """Refuse settings that need all weights at once, which FSDP2 divides; `unsupported` has further reasons."""
    reasons = {
        "rollout.merge_adapters": rollout.merge_adapters,
        "objective.balance_every": objective.balance_every is not None,
        "objective.experts": bool(objective.experts),
        f"objective.algorithm={objective.algorithm}": objective.few_step is not None,
        "objective.reset_reference_every": objective.reset_reference_every is not None,
        "objective.reset_reference_above": objective.reset_reference_above is not None,
        **unsupported,
    }
    if names := [name for name, applies in reasons.items() if applies]:
        raise UserError(f"sharding does not work with {names[0]}. Leave one of the two out.")
