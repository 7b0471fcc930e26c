# SPDX-License-Identifier: Apache-2.0
"""What the training of a judge can be told: which labels become which loss, and how the weights move."""

from __future__ import annotations

import math
from dataclasses import dataclass as plain_dataclass
from dataclasses import fields
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import Field
from pydantic.dataclasses import dataclass

from visalign.errors import UserError, suggestion
from visalign.schema import STRICT
from visalign.training.loop.optimizer import AdamWSettings

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardObjectiveSettings:
    """What is optimized on the labels; `task` chooses the class, which has the settings that its loss reads.

    Raises:
        UserError: no such task, or a setting that its loss does not read.
    """

    task: str = "uncertainty"
    """A row of `visalign.training.reward.tasks.TASKS`: bradley_terry, uncertainty, uncertainty_upstream,
    upstream_monte_carlo, ict, hp, yes_no, rating, rating_fidelity, critique, checklist."""

    def __new__(cls, task: str = "uncertainty", **given: Any) -> RewardObjectiveSettings:
        """The class of the task, where this one is called."""
        if cls is not RewardObjectiveSettings:
            return object.__new__(cls)
        if task not in OBJECTIVES:
            raise UserError(
                f"objective.task is {task!r}. {suggestion(task, OBJECTIVES)}Allowed: {', '.join(OBJECTIVES)}."
            )
        for name in given.keys() - {field.name for field in fields(OBJECTIVES[task])}:
            readers = [other for other, kind in OBJECTIVES.items() if hasattr(kind, name)]
            raise UserError(
                f"objective.{name} is {given[name]!r}, and the task {task} does not use it; tasks that do: "
                f"{', '.join(readers) or 'none'}. Leave it out, or set objective.task to one of these."
            )
        return object.__new__(OBJECTIVES[task])


@dataclass(frozen=True, kw_only=True, config=STRICT)
class VotesSettings(RewardObjectiveSettings):
    """Of tasks that learn from pairs."""

    smoothing: Weight = 0.5
    """Votes added to either side before they become a label; 0.5 is Jeffreys' prior, 0 takes them as they
    are."""
    pair_weight: Literal["pair", "votes"] = "pair"
    """A pair counts once ("pair"), or as often as people voted ("votes", the binomial likelihood)."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BradleyTerrySettings(VotesSettings):
    """The logistic loss of a difference of scores."""

    task: Literal["bradley_terry"] = "bradley_terry"
    """bradley_terry."""
    margin: Weight = 0.0
    """Lead by which the better answer should win, in units of the score."""
    centre: Weight = 0.0
    """Weight of (l + r)², which keeps scores of pairs near 0; TRL uses 0.01."""
    displacement: float = 1.0
    """HPSv3's factor τ on the rejected score."""
    ties: Literal["half", "rao_kupper", "davidson"] = "half"
    """A tie is half a vote for either side, or an outcome of its own under rao_kupper or davidson."""
    tie_strength: float = 2.0
    """θ > 1 of rao_kupper, ν > 0 of davidson."""

    def __post_init__(self) -> None:
        plain = {field.name: field.default for field in fields(BradleyTerrySettings)}
        for name in ("margin", "centre", "displacement"):
            if self.ties != "half" and getattr(self, name) != plain[name]:
                raise UserError(
                    f"objective.{name} is {getattr(self, name)!r}, and objective.ties is {self.ties}, whose "
                    "likelihood does not use it. Leave it out, or set objective.ties to half."
                )
        if self.ties == "half" and self.tie_strength != plain["tie_strength"]:
            raise UserError(
                f"objective.tie_strength is {self.tie_strength!r}, and objective.ties is half, which does "
                "not use it. Leave it out, or set objective.ties to rao_kupper or davidson."
            )
        least = 1.0 if self.ties == "rao_kupper" else 0.0
        if self.ties != "half" and not least < self.tie_strength < math.inf:
            raise UserError(
                f"objective.tie_strength is {self.tie_strength}; for {self.ties} it must be above {least:g}."
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class UncertaintySettings(VotesSettings):
    """The probability of a win under two normal distributions."""

    task: Literal["uncertainty", "uncertainty_upstream"] = "uncertainty"
    """uncertainty, or uncertainty_upstream as HPSv3's released code computes it."""
    centre: Weight = 0.0
    """Weight of (l + r)², which keeps scores of pairs near 0; TRL uses 0.01."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MonteCarloSettings(UncertaintySettings):
    """The same by sampling, as HPSv3's released code does."""

    task: Literal["upstream_monte_carlo"] = "upstream_monte_carlo"  # type: ignore[assignment]  # another row
    """upstream_monte_carlo."""
    samples: Annotated[int, Field(ge=1)] = 1000
    """Draws per pair."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class IctSettings(RewardObjectiveSettings):
    """ICT's cosines."""

    task: Literal["ict"] = "ict"
    """ict."""
    negatives: Weight = 0.5
    """Weight of the mean squared cosine with other prompts' images; 0.5 is published."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HpSettings(VotesSettings):
    """HP's margin ranking."""

    task: Literal["hp"] = "hp"
    """hp."""
    margin: Weight = 0.0
    """Lead by which the better answer should win, in units of the score; ICT-HP trains with 0.3."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RatingSettings(RewardObjectiveSettings):
    """A rating by the expectation over score tokens."""

    task: Literal["rating", "rating_fidelity"] = "rating"
    """rating (its squared error) or rating_fidelity (who is rated higher)."""
    mass: Weight = 1.0
    """Weight of −ln of the probability that the answers asked for have together. Without it a judge that is
    trained on their ratio alone comes to say something else."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CritiqueSettings(RewardObjectiveSettings):
    """The log-odds that what a judge wrote is right, by cross-entropy."""

    task: Literal["critique"] = "critique"
    """critique."""
    mass: Weight = 1.0
    """As of a rating."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class YesNoSettings(VotesSettings):
    """The log-odds of yes."""

    task: Literal["yes_no"] = "yes_no"
    """yes_no."""
    likelihood: Weight = 0.1
    """On pairs: weight of the likelihood of "yes" for the better and "no" for the worse one, beside
    Bradley-Terry on the log-odds."""
    mass: Weight = 1.0
    """As of a rating."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ChecklistSettings(VotesSettings):
    """Logistic regression on weighted answers."""

    task: Literal["checklist"] = "checklist"
    """checklist."""
    mass: Weight = 1.0
    """As of a rating."""
    penalty: Weight = 1e-3
    """λ of λ/2 |w|²; with 0 the weight of a question that separates all pairs grows without bound."""


AnyObjective = Annotated[
    BradleyTerrySettings
    | UncertaintySettings
    | MonteCarloSettings
    | IctSettings
    | HpSettings
    | YesNoSettings
    | RatingSettings
    | CritiqueSettings
    | ChecklistSettings,
    Field(discriminator="task"),
]
OBJECTIVES: dict[str, type[RewardObjectiveSettings]] = {
    task: kind
    for kind in get_args(get_args(AnyObjective)[0])
    for task in get_args(get_type_hints(kind)["task"])
}
"""Task -> its settings."""


@plain_dataclass(frozen=True, kw_only=True)
class RewardOptimizerSettings(AdamWSettings):
    """How the weights of a judge move; HPSv3's 7B model was trained with a learning rate of 2e-6."""

    lr: float = 1e-3
    """Learning rate after the warm-up."""
    lr_end: float = 0.0
    """Share of the learning rate that is left after `decay_updates`."""
    weight_decay: float = 0.0
    """AdamW decoupled weight decay."""
    updates_per_iteration: int = 20
    """Optimizer updates per iteration (one line of metrics)."""
