# SPDX-License-Identifier: Apache-2.0
"""Several rewards for text as one, with the distance between them as a standard deviation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from visalign.interfaces import Metadata, Prompt, RewardCapabilities, Scores, TextReward
from visalign.rewards.base.contract import RewardError
from visalign.rewards.combine.ensemble import Ensemble

from .contract import read_text_request


class TextEnsemble(Ensemble):
    """Mean, or a careful bound, of several rewards for text, and as `Scores.std` how far they are apart.

    `Ensemble` of rewards for text: the same formulas, options, refusals and parts. With several reward models
    of other seeds or data it gives what `rewards.terms.LABEL.uncertainty` uses. A completion that any member
    could not judge has no score, unless `min_members` lets it.
    """

    noun = "completion"

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
        """Load the members and check that they can be averaged.

        Args:
            members: names for `load_text_reward`, or label -> a reward, its name, or its options, among which
                `name` is the reward's where the label is not; two or more.
            how: "mean", "min", "lower_bound" or "uwo", see `Ensemble`, as the next five.
            strength: λ ≥ 0 of the last two.
            ddof: of the variance between members.
            min_members: least members that judged a completion; all when None.
            calibration: label -> (mean, std) for every member.
            name: of the ensemble.
            device: where members with a network run that name no other.

        Raises:
            RewardError: a member twice, or one that cannot be loaded.
            ValueError: as `Ensemble`.
        """
        if not isinstance(members, Mapping):
            names = members if isinstance(members, list | tuple) else ()
            if not names or not all(isinstance(each, str) for each in names) or len({*names}) < len(names):
                raise RewardError(
                    f"{name}: members is {members!r}; give different names, or {{label: {{name: "
                    "reward, option: value}}}} for one reward with several options."
                )
            members = {each: each for each in members}
        loaded = {label: _member(name, label, each, device) for label, each in members.items()}
        several: Any = loaded
        super().__init__(
            several,
            how=how,
            strength=strength,
            ddof=ddof,
            min_members=min_members,
            calibration=calibration,
            name=name,
        )
        needs = [member.capabilities for member in self.members.values()]
        self.capabilities = RewardCapabilities(
            needs_group=any(each.needs_group for each in needs),
            needs_batch=any(each.needs_batch for each in needs),
        )

    def score(
        self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None
    ) -> Scores:
        """Judge with every member; each gets lists of its own."""
        request = read_text_request(self.name, completions, prompts, metadata)

        def judge(member: TextReward) -> Scores:
            return member.score(list(request.completions), list(request.prompts), list(request.metadata))

        return self.judged_by(judge, list(range(len(request))), [None] * len(request))


def _member(name: str, label: str, given: Any, device: str | None) -> TextReward:
    from visalign.rewards.catalogue import load_text_reward

    if isinstance(given, str):
        return load_text_reward(given, run_device=device)
    if isinstance(given, Mapping):
        options = {"name": label, **given}
        return load_text_reward(options.pop("name"), run_device=device, **options)
    if not hasattr(given, "score"):
        what = "empty" if given is None else repr(given)
        raise RewardError(f"{name}: member {label!r} is {what}; give a reward's name or its options.")
    return given
