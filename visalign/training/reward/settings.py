# SPDX-License-Identifier: Apache-2.0
"""What the training of a judge can be told: which labels become which loss, and how the weights move."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from visalign.errors import UserError, suggestion
from visalign.training.loop.optimizer import AdamWSettings, at_least, choice

TIES = ("half", "rao_kupper", "davidson")
PAIR_WEIGHTS = ("pair", "votes")

TASK_NAMES = (
    "bradley_terry",
    "uncertainty",
    "uncertainty_upstream",
    "upstream_monte_carlo",
    "ict",
    "hp",
    "yes_no",
    "rating",
    "rating_fidelity",
    "checklist",
)
"""The keys of `visalign.training.reward.tasks.TASKS`, which has the losses."""

_UNCERTAIN = ("uncertainty", "uncertainty_upstream", "upstream_monte_carlo")
_PAIRS = ("bradley_terry", *_UNCERTAIN, "hp", "yes_no", "checklist")

USED_BY: dict[str, tuple[str, ...]] = {
    "margin": ("bradley_terry", "hp"),
    "centre": ("bradley_terry", *_UNCERTAIN),
    "displacement": ("bradley_terry",),
    "ties": ("bradley_terry",),
    "tie_strength": ("bradley_terry",),
    "smoothing": _PAIRS,
    "pair_weight": _PAIRS,
    "negatives": ("ict",),
    "likelihood": ("yes_no",),
    "mass": ("yes_no", "rating", "rating_fidelity", "checklist"),
    "samples": ("upstream_monte_carlo",),
    "penalty": ("checklist",),
}
"""Setting of the objective -> tasks whose loss it enters; with another task only its default is taken."""

_NO_TIES = ("margin", "centre", "displacement")
"""Settings that Bradley-Terry has only while a tie is half a vote."""


@dataclass(frozen=True, kw_only=True)
class RewardObjectiveSettings:
    """What is optimized on the labels."""

    task: str = "uncertainty"
    """A row of `visalign.training.reward.tasks.TASKS`: bradley_terry, uncertainty, uncertainty_upstream,
    upstream_monte_carlo, ict, hp, yes_no, rating, rating_fidelity, checklist."""
    margin: float = 0.0
    """Lead by which the better answer should win, in units of the score; ICT-HP trains hp with 0.3."""
    centre: float = 0.0
    """Weight of (l + r)², which keeps scores of pairs near 0; TRL uses 0.01."""
    displacement: float = 1.0
    """bradley_terry: HPSv3's factor τ on the rejected score."""
    ties: str = "half"
    """bradley_terry: a tie is half a vote for either side, or an outcome of its own under rao_kupper or
    davidson."""
    tie_strength: float = 2.0
    """θ > 1 of rao_kupper, ν > 0 of davidson."""
    smoothing: float = 0.5
    """Votes added to either side before they become a label; 0.5 is Jeffreys' prior, 0 takes them as they
    are."""
    pair_weight: str = "pair"
    """A pair counts once ("pair"), or as often as people voted ("votes", the binomial likelihood)."""
    negatives: float = 0.5
    """ict: weight of the mean squared cosine with other prompts' pictures; 0.5 is published."""
    likelihood: float = 0.1
    """yes_no on pairs: weight of the likelihood of "yes" for the better and "no" for the worse one, beside
    Bradley-Terry on the log-odds."""
    mass: float = 1.0
    """yes_no, rating, rating_fidelity, checklist: weight of −ln of the probability that the answers asked for
    have together. Without it a judge that is trained on their ratio alone comes to say something else."""
    samples: int = 1000
    """upstream_monte_carlo: draws per pair."""
    penalty: float = 1e-3
    """checklist: λ of λ/2 |w|²; with 0 the weight of a question that separates all pairs grows without
    bound."""

    def __post_init__(self) -> None:
        if self.task not in TASK_NAMES:
            raise UserError(
                f"objective.task is {self.task!r}. {suggestion(self.task, TASK_NAMES)}Allowed: "
                f"{', '.join(TASK_NAMES)}."
            )
        self._refuse_unused()
        choice("objective.ties", self.ties, TIES)
        choice("objective.pair_weight", self.pair_weight, PAIR_WEIGHTS)
        for name in ("margin", "centre", "smoothing", "negatives", "likelihood", "mass", "penalty"):
            at_least(f"objective.{name}", getattr(self, name), 0.0)
        at_least("objective.samples", self.samples, 1)
        least = 1.0 if self.ties == "rao_kupper" else 0.0
        if self.ties != "half" and not least < self.tie_strength < math.inf:
            raise UserError(
                f"objective.tie_strength is {self.tie_strength}; for {self.ties} it must be above {least:g}."
            )

    def _refuse_unused(self) -> None:
        default = {field.name: field.default for field in fields(self)}
        changed = {name: getattr(self, name) for name in USED_BY if getattr(self, name) != default[name]}
        for name, given in changed.items():
            if self.task not in USED_BY[name]:
                raise UserError(
                    f"objective.{name} is {given!r}, and the task {self.task} does not use it; tasks that "
                    f"do: {', '.join(USED_BY[name])}. Leave it out, or set objective.task to one of these."
                )
            if name in _NO_TIES and self.ties != "half":
                raise UserError(
                    f"objective.{name} is {given!r}, and objective.ties is {self.ties}, whose likelihood "
                    "does not use it. Leave it out, or set objective.ties to half."
                )
        if "tie_strength" in changed and self.ties == "half":
            raise UserError(
                f"objective.tie_strength is {self.tie_strength!r}, and objective.ties is half, which does "
                "not use it. Leave it out, or set objective.ties to rao_kupper or davidson."
            )


@dataclass(frozen=True, kw_only=True)
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
