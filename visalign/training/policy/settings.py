# SPDX-License-Identifier: Apache-2.0
"""Which objective a policy is trained with: a row of the table, and what differs from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from visalign.core import Objective, PolicyOutput, Trajectories, named_objective
from visalign.core.objective.data import Decisions
from visalign.core.objective.decisions import check_decisions
from visalign.core.objective.stages import ADVANTAGES
from visalign.core.regression.ascents import ASCENTS, named_ascent
from visalign.core.regression.rows import REGRESSIONS, named_regression
from visalign.errors import UserError
from visalign.training.loop.optimizer import above_zero, at_least

MATRIX_ADVANTAGES = ("gdpo", "normalise_then_sum")
"""Advantages of several rewards, [B, M]."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """What is optimized."""

    algorithm: str = "grpo"
    """A row of `visalign.core.NAMED`; `docs` has the table of what each means for images and for texts."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields of `visalign.core.Objective` that differ from the row, e.g. {kl: 0.01}."""
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Row -> changes that apply where it is the chosen one, before `changes`; so that a file can suit several
    rows, and another one can be chosen on the command line."""
    epochs: int = 1
    """Passes over the samples of an iteration (PPO's K)."""
    reset_reference_every: int | None = None
    """Iterations after which the reference becomes the present policy (GARDO, arXiv 2512.24138); null: never,
    it is the model before training."""
    reset_reference_above: float | None = None
    """The same once an iteration's mean divergence from the reference exceeds this: the metric kl; of
    regressions and ascents mean |v − v_ref|². null: never."""
    balance_every: int | None = None
    """Iterations between two measurements of the rewards' weights from their gradients (MARBLE, arXiv
    2605.06507: 10); the advantages are then each reward's own within its group. null: the weights of the
    rewards' sum."""
    ratio_bound: float | None = None
    """Largest |log r| at the first update, where r must be 1; null: what float32 keeps."""

    def __post_init__(self) -> None:
        for name, value in self.build(length=1).surrogate_options.items():
            above = isinstance(value, int | float) and value > 0  # infinity switches the limit off
            if name.startswith("eps_") and not above:
                raise UserError(f"objective: {name} of surrogate_options is {value}; it must be above 0.")
        at_least("objective.epochs", self.epochs, 1)
        if self.ratio_bound is not None:
            above_zero("objective.ratio_bound", self.ratio_bound)
        self.check_reset(needs_reference(self.build(length=1)))

    def check_reset(self, leans: bool) -> None:
        """Refuse resets that are no numbers, or of a reference that nothing leans on."""
        if self.reset_reference_every is not None:
            at_least("objective.reset_reference_every", self.reset_reference_every, 1)
        if self.reset_reference_above is not None:
            above_zero("objective.reset_reference_above", self.reset_reference_above)
        for name in ("reset_reference_every", "reset_reference_above"):
            if getattr(self, name) is not None and not leans:
                raise UserError(
                    f"objective.{name} is {getattr(self, name)}, and objective.algorithm={self.algorithm} "
                    f"asks no reference. Set objective.changes.kl above 0, or objective.{name}=null."
                )

    def build(self, *, length: int) -> Objective:
        """The objective; Dr.GRPO's length is the given one unless `changes` has one, and with `balance_every`
        the advantage is the sum of each reward's own.

        Args:
            length: most decisions of a sample: tokens, or trained denoising steps.

        Raises:
            UserError: an unknown algorithm, field or option, with the nearest name.
        """
        changes = merged_changes(self.rows.get(self.algorithm, {}), self.changes)
        try:
            for name, fields in self.rows.items():
                known = {
                    **dict.fromkeys(REGRESSIONS, named_regression),
                    **dict.fromkeys(ASCENTS, named_ascent),
                }
                known.get(name, named_objective)(name, **fields)
            if self.algorithm in (*REGRESSIONS, *ASCENTS):
                raise ValueError(
                    f"algorithm={self.algorithm} trains on velocities or pixels of images, and a text has "
                    "none. Take 'grpo', or 'reinforce_pp' without a clip."
                )
            objective = named_objective(self.algorithm, **changes)
            if objective.aggregation == "dr_grpo" and objective.length is None:
                objective = named_objective(self.algorithm, **{**changes, "length": length})
        except (ValueError, TypeError) as error:
            raise UserError(f"objective: {error}") from error
        return objective if self.balance_every is None else self._balanced(objective)

    def _balanced(self, row: Objective) -> Objective:
        self.check_balanced("advantage", row.advantage, "group")
        if row.kl_in_reward:
            raise UserError(
                f"objective: kl_in_reward is {row.kl_in_reward}, and objective.balance_every keeps the KL "
                "out of the rewards that it weighs. Set objective.changes.kl_in_reward=0 and kl."
            )
        if row.surrogate in ("flow_balance", "dro"):
            raise UserError(
                f"objective.balance_every is {self.balance_every}, and surrogate={row.surrogate!r} squares "
                "the advantage: the gradient of the rewards' sum is not the sum of their gradients. Take "
                "'grpo', or set objective.balance_every=null."
            )
        return replace(row, advantage="normalise_then_sum", advantage_options={"ddof": 0})

    def check_balanced(self, field: str, given: str, plain: str) -> None:
        """Refuse a row whose loss is not made of an advantage that several can be added to."""
        at_least("objective.balance_every", self.balance_every or 0, 1)
        if given not in (plain, "normalise_then_sum"):
            raise UserError(
                f"objective.balance_every is {self.balance_every}, and objective.algorithm="
                f"{self.algorithm} has {field}={given!r}: it weighs advantages, {field}={plain!r}. Take "
                "flow_grpo, grpo_guard, diffusion_nft, awm, v_grpo or ram of images, grpo, gspo or dapo of "
                "texts, or set objective.balance_every=null."
            )

    def check(self, decisions: Decisions, given: Sequence[str] = ()) -> None:
        """Refuse a row that means nothing for such decisions, or that the trainers cannot feed.

        Args:
            decisions: what T counts.
            given: which of `EXTRA` of `core.objective.decisions` the trainer has.

        Raises:
            UserError: with the row to take instead.
        """
        objective = self.build(length=1)
        try:
            check_decisions(objective, decisions, name=self.algorithm, given=given)
        except ValueError as error:
            raise UserError(f"objective: {error}") from error
        try:
            _rehearse(objective, decisions, given)
        except (ValueError, TypeError) as error:
            raise UserError(f"objective: {error}") from error


def needs_reference(objective: Objective) -> bool:
    """Whether a loss asks for the policy before training."""
    asks = objective.surrogate == "flow_balance" or objective.advantage == "par"
    return bool(objective.kl or objective.kl_in_reward or asks or away_from_reference(objective))


def away_from_reference(objective: Objective) -> bool:
    """Whether the advantages look at log π/π_ref."""
    return "ref_log_prob" in ADVANTAGES[objective.advantage].needs


def _rehearse(objective: Objective, decisions: Decisions, given: Sequence[str]) -> None:
    """One update on made-up samples with all that a trainer hands over, so that a value which a stage refuses
    is refused before a model is loaded.

    Raises:
        ValueError, TypeError: what a stage says of its options, or of what it lacks.
    """
    some, reward = torch.zeros(4, 2), torch.tensor([0.0, 1.0, 1.0, 0.0])
    one_by_one = objective.advantage in MATRIX_ADVANTAGES
    rows = {"metric": reward, "process_reward": some + reward[:, None]}
    more: dict[str, Any] = {"loss_weight": some + 1, **{name: rows[name] for name in given}}
    says: dict[str, Any] = {"kl": some, "divergence": some}
    if decisions == "tokens":
        names = ("value", "entropy", "expected_score", "nucleus_entropy", "uniform", "process_reward")
        references = objective.advantage_options.get("references", 1)
        more = {
            **{name: rows[name] for name in given},
            **dict.fromkeys(names, some),
            "greedy_reward": some[:, 0],
            "step": some.long(),
            "bundle": some[:, 0].long(),
            "likelihood": reward,
            "rank": torch.zeros(4, 3),
            "reference_reward": torch.zeros(4, references),
        }
        names = ("value", "entropy", "nucleus_entropy", "ptx_log_prob", "ptx_weight")
        says = {**dict.fromkeys(names, some), "log_z": some[:, 0]}
    prepared = objective.prepare(
        Trajectories(
            weight=some + 1,
            old_log_prob=some,
            ref_log_prob=some,
            rollout_log_prob=some,
            group=[0, 0, 1, 1],
            reward=torch.stack([reward, reward], 1) if one_by_one else reward,
            reward_weights=(1.0, 1.0) if one_by_one else (),
            ptx_weight=some if objective.ptx else None,
            decisions=decisions,
            **more,
        )
    )
    objective.loss(prepared, PolicyOutput(log_prob=some, **says))


def merged_changes(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of both, the second's where both have one; options are merged one by one."""
    both = {**first, **second}
    for key in first.keys() & second.keys():
        if isinstance(first[key], Mapping) and isinstance(second[key], Mapping):
            both[key] = {**first[key], **second[key]}
    return both


def check_overlap(overlap: int, staleness: int) -> None:
    """Refuse values of `rollout.overlap` and `rollout.staleness` that mean nothing.

    Raises:
        UserError: with what is allowed.
    """
    at_least("rollout.overlap", overlap, 1)
    if staleness not in (0, 1):
        raise UserError(f"rollout.staleness is {staleness}; it must be 0 or 1 iterations.")


def check_stale(objective: Objective | None, algorithm: str) -> None:
    """Refuse samples of older weights for an objective that would take them for its own.

    Raises:
        UserError: names what corrects for it, or that nothing does.
    """
    stale = f"rollout.staleness=1 hands on samples of older weights, and objective.algorithm={algorithm}"
    if objective is None:
        raise UserError(
            f"{stale} has no log-probs to correct them by. Set rollout.staleness=0; rollout.overlap hides "
            "the judge without it."
        )
    if objective.importance_sampling is None:
        raise UserError(
            f"{stale} takes them for the policy's own. Set objective.changes={{importance_sampling: {{level: "
            "token, mode: truncate, high: 2.0}}, or rollout.staleness=0."
        )
