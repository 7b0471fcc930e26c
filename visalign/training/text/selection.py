# SPDX-License-Identifier: Apache-2.0
"""Selection of training data from sampled completions: all, the best of n, or those that are good enough.

Random choices use a generator of (seed, group), so that the choice within a group does not depend on the
rest of the batch. A completion that could not be scored is never chosen.

Sources: best-of-n, arXiv 2112.09332, section 3.2; rejection sampling that keeps several distinct completions
per prompt, arXiv 2308.01825, section 3.3 (there at most one of each reasoning path; here repeats fill up what
distinct completions leave free).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from visalign.seeds import sample_seed

from .sampling_grid import Completions


def every_valid(valid: Tensor) -> list[int]:
    """Select all valid completions."""
    return valid.nonzero()[:, 0].tolist()


def worth_learning(
    completions: Completions, selectable: Tensor, *, threshold: float, skip_solved: bool = False
) -> Tensor:
    """Apply the rules of rejective fine-tuning that precede rewards (SPCT, arXiv 2504.02495, section 3.2).

    Completions with a hint stay where no selectable [B] one without it reaches the threshold. With
    `skip_solved`, prompts go whose scored completions without a hint all reach it.
    """
    hinted = torch.tensor([point.hinted for point in completions.point])
    plain, right = completions.scored & ~hinted, completions.reward >= threshold
    prompt = torch.tensor(completions.prompt)
    prompts = int(prompt.max()) + 1 if len(prompt) else 0

    def count(mask: Tensor) -> Tensor:
        """Count per prompt, [B]."""
        return torch.zeros(prompts).index_add_(0, prompt, mask.float())[prompt]

    keep = ~hinted | (count(plain & right & selectable) == 0)
    solved = (count(plain) > 0) & (count(plain & right) == count(plain))
    return keep & ~solved if skip_solved else keep


def best_of_group(reward: Tensor, group: Sequence[Hashable], *, seed: int, valid: Tensor | None = None) -> list[int]:
    """Select the completion of the highest finite reward in each group, ascending; ties are broken at random."""
    chosen = []
    for label, index in _groups(group, _present(reward, valid)):
        highest = max(float(reward[i]) for i in index)
        ties = [i for i in index if float(reward[i]) == highest]
        chosen.append(ties[int(_generator(seed, "best", label).integers(len(ties)))])
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
    """Rejection sampling: select completions of at least a reward, at most `per_group` of each group, ascending.

    Where more are good enough, chance decides and not the reward: the selection is a sample of the policy's own good
    completions. Distinct completions go before repeats (texts that differ in blanks alone are the same).
    """
    chosen: list[int] = []
    for label, index in _groups(group, _present(reward, valid) & (reward >= threshold).cpu()):
        order = [index[i] for i in _generator(seed, "accepted", label).permutation(len(index)).tolist()]
        chosen += _distinct_first(order, text)[:per_group]
    return sorted(chosen)


def normalised_text(text: str) -> str:
    """Remove differences in blanks.

    >>> normalised_text(" 1 + 1\\n= 2 ") == normalised_text("1 + 1 = 2")
    True
    """
    return " ".join(text.split())


def _distinct_first(index: Sequence[int], text: Sequence[str]) -> list[int]:
    """Sort by repeats: the first of each text, then the second of each, and so on."""
    repeats: dict[str, int] = {}
    turn = {}
    for i in index:
        key = normalised_text(text[i])
        turn[i] = repeats[key] = repeats.get(key, -1) + 1
    return sorted(index, key=lambda i: turn[i])


def _present(reward: Tensor, valid: Tensor | None) -> Tensor:
    finite = torch.isfinite(reward).cpu()
    return finite if valid is None else finite & valid.cpu().bool()


def _groups(group: Sequence[Hashable], present: Tensor) -> Iterator[tuple[Hashable, list[int]]]:
    groups: dict[Hashable, list[int]] = {}
    for i in every_valid(present):
        groups.setdefault(group[i], []).append(i)
    yield from groups.items()


def _generator(seed: int, rule: str, label: Hashable) -> np.random.Generator:
    return np.random.default_rng(sample_seed(seed, rule, str(label)))
