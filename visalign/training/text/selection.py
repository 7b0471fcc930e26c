# SPDX-License-Identifier: Apache-2.0
"""Which sampled completions become training data: all, the best of n, or those that are good enough.

Lots are drawn per group with a generator of (seed, group), so that the choice within a group does not depend
on what else is in the batch. A completion that could not be judged is never chosen.

Sources: best-of-n, arXiv 2112.09332, section 3.2; rejection sampling that keeps several distinct completions
per prompt, arXiv 2308.01825, section 3.3 (there at most one of each reasoning path; here repeats fill up what
distinct completions leave free).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

from visalign.errors import UserError
from visalign.seeds import sample_seed

from .sampling_grid import Completions


def every_valid(valid: Tensor) -> list[int]:
    """All completions that may be chosen."""
    return valid.nonzero()[:, 0].tolist()


def worth_learning(
    completions: Completions, free: Tensor, *, threshold: float, skip_solved: bool = False
) -> Tensor:
    """Bool [B]: what rejective fine-tuning leaves before it looks at rewards.

    Completions with a hint stand in for those without where none of these reaches the threshold. Where all of
    them do, the prompt is too easy: with `skip_solved` it goes.

    Args:
        completions: of whole prompts, with and without hints.
        free: bool [B], which of them may be chosen: one that may not keeps no hinted one out.
        threshold: reward from which a completion is right.
        skip_solved: leave out prompts all of whose judged completions without a hint are right.

    SPCT, arXiv 2504.02495, section 3.2.
    """
    hinted = torch.tensor([point.hinted for point in completions.point])
    plain, right = completions.judged & ~hinted, completions.reward >= threshold
    prompt = torch.tensor(completions.prompt)
    count = int(prompt.max()) + 1 if len(prompt) else 0
    solved, tried, had = (
        torch.zeros(count).index_add_(0, prompt, each.float())[prompt]
        for each in (plain & right, plain, plain & right & free)
    )
    kept = ~hinted | (had == 0)
    return kept & ~((tried > 0) & (solved == tried)) if skip_solved else kept


def best_of_group(
    reward: Tensor, group: Sequence[Hashable], *, seed: int, valid: Tensor | None = None
) -> list[int]:
    """The completion of the highest reward in each group; ties are drawn by lot.

    Args:
        reward: [B], higher is better; what is not finite cannot be chosen.
        group: B labels of the prompts.
        seed: of the lots.
        valid: bool [B], False for completions that may not be chosen.

    Returns:
        One place for each group that has a completion to choose, ascending.

    Raises:
        ValueError: lengths that differ.
    """
    present = _present(reward, group, valid)
    chosen = []
    for label, places in _groups(group, present).items():
        highest = max(float(reward[i]) for i in places)
        ties = [i for i in places if float(reward[i]) == highest]
        chosen.append(ties[int(_lots(seed, "best", label).integers(len(ties)))])
    return sorted(chosen)


def accepted_completions(
    reward: Tensor,
    group: Sequence[Hashable],
    text: Sequence[str],
    *,
    threshold: float,
    per_group: int | None = None,
    seed: int,
    valid: Tensor | None = None,
) -> list[int]:
    """Rejection sampling: completions of at least a reward, a limited number of each group.

    Where more are good enough than wanted, the lot decides and the reward does not: what is chosen is a
    sample of the policy's own good completions. Completions that differ go before repeats (texts that differ
    in blanks alone are the same).

    Args:
        reward: [B], higher is better; what is not finite is rejected.
        group: B labels of the prompts.
        text: B completions.
        threshold: smallest reward that is accepted.
        per_group: completions of one group at most; None for no limit.
        seed: of the lots.
        valid: bool [B], False for completions that may not be chosen.

    Returns:
        Places, ascending; none where no completion is good enough.

    Raises:
        UserError: a limit below 1, or a threshold that is not a number.
        ValueError: lengths that differ.
    """
    if per_group is not None and per_group < 1:
        raise UserError(f"per_group is {per_group}; it must be at least 1, or None for no limit.")
    if threshold != threshold:
        raise UserError("threshold is not a number; give the smallest reward that is accepted.")
    if len(text) != len(group):
        raise ValueError(f"text needs one entry per completion, {len(group)} as in group; got {len(text)}.")
    present = _present(reward, group, valid) & (reward >= threshold).cpu()
    chosen: list[int] = []
    for label, places in _groups(group, present).items():
        order = [places[i] for i in _lots(seed, "accepted", label).permutation(len(places)).tolist()]
        ranked = _distinct_first(order, text)
        chosen += ranked if per_group is None else ranked[:per_group]
    return sorted(chosen)


def same_completion(text: str) -> str:
    """What two completions have in common that count as one: the text without differences in blanks.

    >>> same_completion(" 1 + 1\\n= 2 ") == same_completion("1 + 1 = 2")
    True
    """
    return " ".join(text.split())


def _distinct_first(places: Sequence[int], text: Sequence[str]) -> list[int]:
    """In the given order, the first of each completion, then the second of each, and so on."""
    seen: dict[str, int] = {}
    turn = {}
    for place in places:
        key = same_completion(text[place])
        turn[place] = seen[key] = seen.get(key, -1) + 1
    return sorted(places, key=lambda place: turn[place])


def _present(reward: Tensor, group: Sequence[Hashable], valid: Tensor | None) -> Tensor:
    shape = tuple(reward.shape)
    if shape != (len(group),) or (valid is not None and tuple(valid.shape) != shape):
        given = "none" if valid is None else str(tuple(valid.shape))
        raise ValueError(
            f"reward must be [B] with a label and a valid flag for each; got reward {shape}, {len(group)} "
            f"labels and valid {given}."
        )
    known = torch.isfinite(reward).cpu()
    return known if valid is None else known & valid.cpu().bool()


def _groups(group: Sequence[Hashable], present: Tensor) -> dict[Hashable, list[int]]:
    found: dict[Hashable, list[int]] = {}
    for place in present.nonzero()[:, 0].tolist():
        found.setdefault(group[place], []).append(place)
    return found


def _lots(seed: int, rule: str, label: Hashable) -> np.random.Generator:
    return np.random.default_rng(sample_seed(seed, rule, str(label)))
