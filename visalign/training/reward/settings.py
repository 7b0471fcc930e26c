# SPDX-License-Identifier: Apache-2.0
"""Settings of reward training: the loss for each kind of labels, and the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import Field

from visalign.errors import UserError, suggestion
from visalign.settings import Count, Finite, NonNegative, Positive, Share, refuse, settings
from visalign.training.loop.optimizer import AdamWSettings


@settings("objective")
class RewardObjectiveSettings:
    """Objective on labels; `task` selects the class, which has the settings that its loss reads."""

    task: str = "uncertainty"
    """A key of `visalign.training.reward.tasks.TASKS`: bradley_terry, uncertainty, uncertainty_upstream,
    upstream_monte_carlo, plackett_luce, mse, bce, ict, hp, ict_hp, yes_no, rating, rating_fidelity,
    rating_distribution, critique, checklist, checklist_answers, heie."""

    def __new__(cls, task: str = "uncertainty", **values: Any) -> RewardObjectiveSettings:
        if cls is not RewardObjectiveSettings:
            return object.__new__(cls)
        if task not in OBJECTIVES:
            raise UserError(
                f"objective.task is {task!r}. {suggestion(task, OBJECTIVES)}Allowed: {', '.join(OBJECTIVES)}."
            )
        return object.__new__(OBJECTIVES[task])


@settings("objective")
class VotesSettings(RewardObjectiveSettings):
    """Base of tasks on pairs."""

    smoothing: NonNegative = 0.5
    """Votes added to either side before they become a label; 0.5 is Jeffreys' prior, 0 takes them as they are."""
    pair_weight: Literal["pair", "votes"] = "pair"
    """Weight of a pair: 1 ("pair"), or its number of votes ("votes", the binomial likelihood)."""


@settings("objective")
class BradleyTerrySettings(VotesSettings):
    """Logistic loss of a score difference."""

    task: Literal["bradley_terry"] = "bradley_terry"
    margin: NonNegative = 0.0
    """Lead by which the better answer should win, in units of the score."""
    centre: NonNegative = 0.0
    """Weight of (l + r)², which keeps scores of pairs near 0; TRL uses 0.01."""
    displacement: Finite = 1.0
    """HPSv3's factor τ on the rejected score."""
    sign: NonNegative = 0.0
    """Weight of max(0, −better) + max(0, worse), which gives good answers scores above 0 and bad ones below."""
    l2: NonNegative = 0.0
    """Weight of l² + r²."""
    ties: Literal["half", "rao_kupper", "davidson"] = "half"
    """Treatment of a tie: half a vote for either side, or an outcome of its own ("rao_kupper" is HPSv3's "btt")."""
    tie_strength: Positive = 2.0
    """θ > 1 of rao_kupper (HPSv3: 5), ν > 0 of davidson."""

    def __post_init__(self) -> None:
        refuse(_broken_tie_rules(self))


def _broken_tie_rules(s: BradleyTerrySettings) -> Iterator[str]:
    """Yield messages: a likelihood with ties has a strength and nothing of the plain loss."""
    strength = f"objective.tie_strength is {s.tie_strength}"
    if s.ties == "half" and s.tie_strength != 2.0:
        yield f"{strength}; objective.ties=half does not use it. Set rao_kupper or davidson."
    if s.ties == "rao_kupper" and s.tie_strength <= 1:
        yield f"{strength}; for rao_kupper it must be above 1."
    if s.ties != "half" and (s.margin, s.centre, s.displacement, s.sign, s.l2) != (0, 0, 1, 0, 0):
        yield (
            "objective.margin, centre, displacement, sign and l2 are of the plain loss, and objective.ties is "
            f"{s.ties}; leave them out, or set objective.ties=half."
        )


@settings("objective")
class UncertaintySettings(VotesSettings):
    """Probability of a win under two normal distributions."""

    task: Literal["uncertainty", "uncertainty_upstream"] = "uncertainty"
    """uncertainty, or uncertainty_upstream as HPSv3's released code computes it."""
    centre: NonNegative = 0.0
    """Weight of (l + r)², which keeps scores of pairs near 0; TRL uses 0.01."""


@settings("objective")
class MonteCarloSettings(UncertaintySettings):
    """The same by sampling, as HPSv3's released code does."""

    task: Literal["upstream_monte_carlo"] = "upstream_monte_carlo"  # type: ignore[assignment]  # another task
    samples: Count = 1000
    """Draws per pair."""


@settings("objective")
class RankingSettings(RewardObjectiveSettings):
    """Likelihood of whole rankings, of texts alone."""

    task: Literal["plackett_luce"] = "plackett_luce"


@settings("objective")
class ValueSettings(RewardObjectiveSettings):
    """Regression on scores, of texts and of artefacts."""

    task: Literal["mse", "bce"] = "mse"
    """mse (squared error of the score) or bce (cross-entropy of σ(score), for scores from 0 to 1)."""


@settings("objective")
class IctSettings(RewardObjectiveSettings):
    """ICT's cosines."""

    task: Literal["ict"] = "ict"
    negatives: NonNegative = 0.5
    """Weight of the mean squared cosine with other prompts' images; 0.5 is published."""


@settings("objective")
class HpSettings(VotesSettings):
    """HP's margin ranking."""

    task: Literal["hp"] = "hp"
    margin: NonNegative = 0.0
    """Lead by which the better answer should win, in units of the score; ICT-HP trains with 0.3."""


@settings("objective")
class IctHpSettings(RewardObjectiveSettings):
    """HP on triples, next to a trained ICT."""

    task: Literal["ict_hp"] = "ict_hp"
    margin: NonNegative = 0.3
    """Lead of I2 over I1 and of I3 over I2."""
    product: NonNegative = 1.0
    """Weight of the same margins on ICT's cosine times HP's softmax over the triple; 1 in the released code."""


@settings("objective")
class RatingSettings(RewardObjectiveSettings):
    """Rating by the expectation over score tokens."""

    task: Literal["rating", "rating_fidelity", "rating_distribution"] = "rating"
    """rating (its squared error), rating_fidelity (the order of ratings) or rating_distribution (a student of a larger
    judge, or of several raters: the distribution over the scores that mos and std of a row describe)."""
    mass: NonNegative = 1.0
    """Weight of −ln of the total probability of the allowed answers. Without it, training on their ratio
    alone moves the model to other words."""


@settings("objective")
class AnswerSettings(RewardObjectiveSettings):
    """Cross-entropy of log-odds."""

    task: Literal["critique", "checklist_answers"] = "critique"
    """critique (is what a judge wrote right), or checklist_answers (of a checklist, with people's shares of yes)."""
    mass: NonNegative = 1.0
    """As in a rating."""


@settings("objective")
class YesNoSettings(VotesSettings):
    """Log-odds of yes."""

    task: Literal["yes_no"] = "yes_no"
    likelihood: NonNegative = 0.1
    """Weight, on pairs, of the likelihood of "yes" for the better and "no" for the worse image, added to
    Bradley-Terry on the log-odds."""
    mass: NonNegative = 1.0
    """As in a rating."""


@settings("objective")
class ChecklistSettings(VotesSettings):
    """Logistic regression on weighted answers."""

    task: Literal["checklist"] = "checklist"
    mass: NonNegative = 1.0
    """As in a rating."""
    penalty: NonNegative = 1e-3
    """λ of λ/2 |w|²; with 0 the weight of a question that separates all pairs grows without bound."""


@settings("objective")
class HeieObjectiveSettings(RewardObjectiveSettings):
    """HEIE's maps of faults and its score of plausibility."""

    task: Literal["heie"] = "heie"
    wrong_weight: NonNegative = 4.0
    """Additional weight of cells that everybody boxed, which are rare."""


AnyObjective = Annotated[
    BradleyTerrySettings
    | UncertaintySettings
    | MonteCarloSettings
    | RankingSettings
    | ValueSettings
    | IctSettings
    | HpSettings
    | IctHpSettings
    | YesNoSettings
    | RatingSettings
    | AnswerSettings
    | ChecklistSettings
    | HeieObjectiveSettings,
    Field(discriminator="task"),
]
OBJECTIVES: dict[str, type[RewardObjectiveSettings]] = {
    task: kind for kind in get_args(get_args(AnyObjective)[0]) for task in get_args(get_type_hints(kind)["task"])
}
"""Task -> its settings."""


@settings("optimizer")
class RewardOptimizerSettings(AdamWSettings):
    """Optimizer of a reward; HPSv3's 7B model was trained with a learning rate of 2e-6."""

    lr: Positive = 1e-3
    """Learning rate after the warm-up."""
    lr_end: Share = 0.0
    """Share of the learning rate that is left after `decay_updates`."""
    weight_decay: NonNegative = 0.0
    """AdamW decoupled weight decay."""
    updates_per_iteration: Count = 20
    """Optimizer updates per iteration (one line of metrics)."""
