# SPDX-License-Identifier: Apache-2.0
"""What a training of images can be told of how they are made.

The defaults are Flow-GRPO's published ones for SD3.5-M (arXiv 2505.05470 and its code).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from torch import Tensor

from visalign.errors import UserError
from visalign.flow.rollout import visited_steps
from visalign.flow.schedules import LAST_IS_EXACT
from visalign.flow.transitions import SOLVERS
from visalign.flow.tree import tree_nodes
from visalign.flow.windows import WINDOW_ORDERS
from visalign.training.loop.optimizer import at_least, choice
from visalign.training.policy.settings import check_overlap

from .branching import BranchSettings

_NO_LOG_PROB = "without noise a step has no log-probability"
_OTHER_ROW = "or leave it out with a row that needs no log-probs, e.g. objective.algorithm=diffusion_nft"


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
    """Timestep schedule: "diffusers" (the model's scheduler, whose shift is applied twice) or "plain"."""
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
    (neighbours that move along the timestep schedule, with the last two ever faster, MixGRPO)."""
    sde_window_every: int = 25
    """Iterations that a moving window stays."""
    sde_window_stride: int = 1
    """Steps that it moves on."""
    sde_window_roll_back: bool = True
    """Whether it begins anew after the end of the schedule; otherwise it stays there."""
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
    """Guidance scale of the rollout, in regressions alone, whose loss does not ask how an
    image came about; null: the model's."""
    merge_adapters: bool = False
    """Add LoRA to the weights while samples for training are made, in regressions alone: a forward then costs
    what it costs without adapters, and those weights lie in memory twice."""
    solver: str = "euler"
    """Of the deterministic steps: "euler" or "dpmpp_2m", DPM-Solver++(2M). Evaluations have a solver of
    their own."""
    image_sizes: list[int | tuple[int, int]] | None = None
    """Sizes in pixels, one side or [height, width], that the iterations take in turn: an iteration's images
    are alike in size, with the timestep schedule that the model has there. monitor.window is a multiple of
    their number. Evaluations have model.image_size. null: that alone."""
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
        self._check_sizes()
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
                f"rollout.noise_level is {self.noise_level}; {_NO_LOG_PROB}. Set it above 0, {_OTHER_ROW}."
            )
        if not 0.0 <= self.max_failure_rate <= 1.0:
            raise UserError(
                f"rollout.max_failure_rate is {self.max_failure_rate}; it is a share from 0 to 1."
            )
        noisy = self.stochastic
        if not noisy:
            raise UserError(
                f"rollout.sde_steps is []; {_NO_LOG_PROB}. Set some of 0 to {self.steps - 1}, {_OTHER_ROW}."
            )
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
        self._check_moving()
        if self.ode_compression is not None:
            if not 0 < self.ode_compression <= 1:
                raise UserError(
                    f"rollout.ode_compression is {self.ode_compression}; it is a share above 0, at most 1."
                )
            if max(self.steps - 1 - window[-1] for window in self._windows) < 2:
                raise UserError(
                    f"rollout.ode_compression is {self.ode_compression}, and after the stochastic steps "
                    f"{noisy} there are no two steps to make fewer of. Set rollout.sde_steps to earlier "
                    "steps, or a rollout.sde_window with rollout.sde_window_order=progressive."
                )
        if self.branch is not None:
            self._check_branch(self.branch)

    def _check_sizes(self) -> None:
        sizes = self.image_sizes
        if sizes is None:
            return
        sides = [side for size in sizes for side in ((size,) if isinstance(size, int) else size)]
        if not sides or min(sides) < 1:
            raise UserError(
                f"rollout.image_sizes is {sizes}; give sizes in pixels above 0, each one side or "
                "[height, width], or null for model.image_size alone."
            )
        if self.staleness:
            raise UserError(
                "rollout.staleness=1 makes images of the next iteration before this one is learnt from, "
                f"and rollout.image_sizes {sizes} gives them another size. Leave one of the two out."
            )

    def _check_moving(self) -> None:
        """Refuse what only a window has, or one that moves."""
        usual = {item.name: item.default for item in fields(RolloutSettings)}
        moves = self.sde_window is not None and self.sde_window_order not in ("subset", "random")
        if self.sde_window is None and self.sde_window_order != "subset":
            raise UserError(
                f"rollout.sde_window_order is {self.sde_window_order} and there is no window. Set "
                "rollout.sde_window to its size."
            )
        for name in ("sde_window_every", "sde_window_stride", "sde_window_roll_back"):
            if not moves and getattr(self, name) != usual[name]:
                raise UserError(
                    f"rollout.{name} is {getattr(self, name)}, and no window moves. Set rollout.sde_window "
                    "to its size and rollout.sde_window_order=progressive, decay or exp_decay."
                )

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
    def scores_in_thread(self) -> bool:
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
        """Denoising steps that an image costs: Σ_k n_k / G over those that are made, n_k = `paths(k)`. With
        a window that begins later it is less."""
        ways = [visited_steps(self.steps, [window[-1]], self.ode_compression) for window in self._windows]
        made = [sum(map(self.paths, way[:-1])) for way in ways]
        return sum(made) / len(made) / self.group_size

    @property
    def _windows(self) -> list[list[int]]:
        """The stochastic steps of each window, as if each stayed equally long; any subset counts as one that
        reaches the end."""
        noisy, size, order = self.stochastic, self.sde_window, self.sde_window_order
        if size is None or order == "subset":
            return [noisy[-(size or len(noisy)) :]]
        last = len(noisy) - size if order == "random" else len(noisy) - 1
        stride = 1 if order == "random" else self.sde_window_stride
        return [noisy[start : start + size] for start in range(0, last + 1, stride)]

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
        """ODE steps that complete an image from each of its stochastic steps; with a window, on average."""
        noisy = self.stochastic
        return sum(self.steps - step for step in noisy) * (self.sde_window or len(noisy)) / len(noisy)

    @property
    def trained_per_image(self) -> int:
        """How many steps of one image are trained on in one iteration, at most."""
        return self.sde_window or len(self.trained)

    @property
    def pairs_per_image(self) -> float:
        """Pairs of sample and step that are trained on for an image, Σ_k n_{k+1} / G over the trained steps:
        what images have in common counts once. Moving windows are shorter at the end of the schedule."""
        if self.branch is None and self.sde_window is not None:
            return sum(map(len, self._windows)) / len(self._windows)
        if self.branch is None:
            return self.trained_per_image
        return sum(self.paths(step + 1) for step in self.trained) / self.group_size
