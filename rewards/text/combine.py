# SPDX-License-Identifier: Apache-2.0
"""Several rewards for text as one: their weighted sum, or an ensemble with the deviation between its members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from visalign.interfaces import Metadata, Prompt, RewardCapabilities, Scores, TextReward
from visalign.rewards.base.contract import RewardError
from visalign.rewards.combine.ensemble import Ensemble
from visalign.rewards.combine.weighted_sum import WeightedSum

from .contract import read_text_request


class WeightedTextSum(WeightedSum):
    """`WeightedSum` for completions; normalise="batch" takes z-scores over the completions of a call."""

    noun = "completion"

    def score(self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None) -> Scores:
        """Score with every reward and add up; each reward gets its own copies of the lists."""
        request = read_text_request(self.name, completions, prompts, metadata)
        return self.add_up(request.score_with, list(range(len(request))), [None] * len(request))


class TextEnsemble(Ensemble):
    """Mean or lower bound of several rewards for text; `Scores.std` is the deviation between them.

    `Ensemble` for completions: the same formulas, options and parts. Reward models of other seeds or data give the
    deviation that `rewards.terms.LABEL.uncertainty` uses. A completion that some member could not score is invalid,
    unless `min_members` allows it.

    Args:
        members: two or more names for `load_text_reward`, or label -> a reward, its name, or its options (their `name`
            is the reward; the label when missing).
        how: "mean", "min", "lower_bound" or "uwo", see `Ensemble`.
        strength: λ ≥ 0 of the last two.
        min_members: smallest number of members that scored a completion; all when None.
        calibration: label -> (mean, std) for every member.
    """

    def __init__(
        self,
        members: Sequence[str] | Mapping[str, TextReward | str | Mapping[str, Any]],
        *,
        how: str = "mean",
        strength: float = 1.0,
        ddof: int = 1,
        min_members: int | None = None,
        calibration: Mapping[str, tuple[float, float]] | None = None,
        name: str = "ensemble",
        device: str | None = None,
    ) -> None:
        if not isinstance(members, Mapping):
            names = [member for member in members if isinstance(member, str)] if isinstance(members, list) else []
            if not names or len(set(names)) < len(members):
                raise RewardError(
                    f"{name}: members is {members!r}; give different names, or {{label: {{name: X, option: value}}}}."
                )
            members = {member: member for member in names}
        # YAML reads a label 1 as a number
        loaded: Any = {str(label): _load_member(name, str(label), member, device) for label, member in members.items()}
        options: Any = {"min_members": min_members, "calibration": calibration, "name": name}
        super().__init__(loaded, how=how, strength=strength, ddof=ddof, **options)
        needs = [member.capabilities for member in self.members.values()]
        self.capabilities = RewardCapabilities(
            needs_group=any(member.needs_group for member in needs),
            needs_batch=any(member.needs_batch for member in needs),
            read_answer=next((member.read_answer for member in needs if member.read_answer), None),
        )

    def score(self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None) -> Scores:
        """Score with every member; each gets its own copies of the lists."""
        request = read_text_request(self.name, completions, prompts, metadata)
        return self.judged_by(request.score_with, list(range(len(request))), [None] * len(request))


def _load_member(name: str, label: str, member: Any, device: str | None) -> TextReward:
    from visalign.rewards.catalogue import load_text_reward

    if isinstance(member, str | Mapping):
        options = {"name": label, **({"name": member} if isinstance(member, str) else member)}
        return load_text_reward(options.pop("name"), run_device=device, **options)
    if not hasattr(member, "score"):
        raise RewardError(f"{name}: member {label!r} is {member!r}; give a reward's name or its options.")
    return member
