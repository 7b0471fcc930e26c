# SPDX-License-Identifier: Apache-2.0
"""`ObjectiveSettings`: the algorithm that a policy is trained with, and its changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from visalign.core import Objective, named_objective
from visalign.core.objective.data import Decisions
from visalign.core.objective.decisions import check_decisions
from visalign.core.regression.ascents import ASCENTS, named_ascent
from visalign.core.regression.few_step import FEW_STEP, named_few_step
from visalign.core.regression.rows import REGRESSIONS, named_regression
from visalign.errors import UserError
from visalign.settings import Count, Positive, settings

MATRIX_ADVANTAGES = ("gdpo", "normalise_then_sum")  # Advantages of several rewards, [B, M]


_OF_IMAGES: Any = ((REGRESSIONS, named_regression), (ASCENTS, named_ascent), (FEW_STEP, named_few_step))


@settings("objective")
class ObjectiveSettings:
    """Loss that a policy is trained with."""

    algorithm: str = "grpo"
    """A key of `visalign.core.NAMED`; the documentation says what each means for images and for texts."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields of `visalign.core.Objective` that differ from the algorithm's, e.g. {kl: 0.01}."""
    changes_for: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Algorithm -> changes that apply only if it is the chosen one, before `changes`; so that a file suits
    several algorithms, and the command line can choose."""
    epochs: Count = 1
    """Passes over the samples of an iteration (PPO's K)."""
    reset_reference_every: Count | None = None
    """Iterations after which the reference becomes the present policy (GARDO, arXiv 2512.24138); null: never,
    it is the model before training."""
    reset_reference_above: Positive | None = None
    """Mean divergence of an iteration from the reference above which the reference is reset too: the metric
    kl; for regressions and ascents mean |v − v_ref|². null: never."""
    balance_every: Count | None = None
    """Iterations between two measurements of the rewards' weights from their gradients (MARBLE, arXiv
    2605.06507: 10); the advantages are then each reward's own within its group. null: the weights of the
    rewards' sum."""
    ratio_bound: Positive | None = None
    """Largest |log r| at the first update, where r must be 1; null: the precision of float32."""

    def __post_init__(self) -> None:
        self.check_reset(needs_reference(self.build(length=1)))

    def check_reset(self, has_reference: bool) -> None:
        """Refuse resets of a reference that the loss does not use."""
        for name in ("reset_reference_every", "reset_reference_above"):
            if getattr(self, name) is not None and not has_reference:
                raise UserError(
                    f"objective.{name} is {getattr(self, name)}, and objective.algorithm={self.algorithm} "
                    f"has no reference. Set objective.changes.kl above 0, or objective.{name}=null."
                )

    def build(self, *, length: int) -> Objective:
        """Build the objective; with `balance_every` the advantage is the sum of each reward's own.

        `length` is the most decisions of a sample (tokens, or trained denoising steps): Dr.GRPO's length
        unless `changes` has one.
        """
        try:
            for name, fields in self.changes_for.items():
                look_up = next((of for table, of in _OF_IMAGES if name in table), named_objective)
                look_up(name, **fields)
            if any(self.algorithm in table for table, _ in _OF_IMAGES):
                raise ValueError(
                    f"algorithm={self.algorithm} trains on velocities or pixels of images, and a text has "
                    "none. Take 'grpo', or 'reinforce_pp' without a clip."
                )
            objective = self.change(named_objective)
        except (ValueError, TypeError) as error:
            raise UserError(f"objective: {error}") from error
        if objective.aggregation == "dr_grpo" and objective.length is None:
            objective = replace(objective, length=length)
        return objective if self.balance_every is None else self._balance(objective)

    def change(self, build: Callable[..., Any]) -> Any:
        """Build the named algorithm with `changes_for`, then `changes`, applied.

        Options of `changes_for` are dropped with the choice that they were written for.
        """
        first, second = self.changes_for.get(self.algorithm, {}), self.changes
        row = build(self.algorithm, **first)
        dropped = {f"{key}_options" for key, value in second.items() if getattr(row, key, value) != value}
        return build(self.algorithm, **_merge({key: first[key] for key in first if key not in dropped}, second))

    def _balance(self, objective: Objective) -> Objective:
        self.check_balanced("advantage", objective.advantage, "group")
        squares = objective.surrogate in ("flow_balance", "dro")
        if objective.kl_in_reward or squares:
            reason = "whose loss squares the advantage" if squares else "with kl_in_reward"
            raise UserError(
                f"objective.balance_every is {self.balance_every}, and objective.algorithm={self.algorithm} {reason} "
                "is no sum over the rewards. Take 'grpo' with kl_in_reward=0, or set objective.balance_every=null."
            )
        return replace(objective, advantage="normalise_then_sum", advantage_options={"ddof": 0})

    def check_balanced(self, field: str, value: str, required: str) -> None:
        """Refuse an algorithm whose loss does not add up over several advantages."""
        if value not in (required, "normalise_then_sum"):
            raise UserError(
                f"objective.balance_every is {self.balance_every}, and objective.algorithm={self.algorithm} has "
                f"{field}={value!r}: it weighs advantages, {field}={required!r}. Take flow_grpo, diffusion_nft or awm "
                "of images, grpo, gspo or dapo of texts, or set objective.balance_every=null."
            )

    def check(self, decisions: Decisions, available: Sequence[str] = ()) -> None:
        """Refuse an algorithm that means nothing for such decisions, or that the trainers cannot feed.

        `available` are fields that the trainer supplies: of `core.objective.decisions.EXTRA`, or "advantage".
        """
        objective = self.build(length=1)
        try:
            check_decisions(objective, decisions, name=self.algorithm, available=available)
        except ValueError as error:
            raise UserError(f"objective: {error}") from error
        if "advantage" in objective.trajectory_needs() and "advantage" not in available:
            raise UserError(
                "objective: advantage='given' needs Trajectories.advantage, which is None in all trainers; "
                "it is for your own loop. Take advantage='group'."
            )


def needs_reference(objective: Objective) -> bool:
    """True if a loss uses the policy before training."""
    return bool(objective.kl) or objective.advantage == "par" or needs_reference_log_prob(objective)


def needs_reference_log_prob(objective: Objective) -> bool:
    """True if the rewards, the advantages or the policy's loss depend on log π_ref."""
    return "ref_log_prob" in {**objective.trajectory_needs(), **objective.output_needs()}


def _merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the fields of both, the second's where both have one; options are merged one by one."""
    merged = {**first, **second}
    for key in first.keys() & second.keys():
        if isinstance(first[key], Mapping) and isinstance(second[key], Mapping):
            merged[key] = {**first[key], **second[key]}
    return merged


def stale_message(algorithm: str) -> str:
    """Say what to set where an algorithm does not correct for samples of older weights."""
    return (
        f"rollout.staleness=1 trains on samples of older weights, and objective.algorithm={algorithm} takes "
        "them for the policy's own. Set rollout.staleness=0, or for an algorithm on log-probs "
        "objective.changes={importance_sampling: {level: token, mode: truncate, high: 2.0}}."
    )
