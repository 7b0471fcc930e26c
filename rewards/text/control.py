# SPDX-License-Identifier: Apache-2.0
"""Random reward: a control that shows what training changes without any signal."""

from __future__ import annotations

import json
from collections.abc import Sequence

from visalign.interfaces import Metadata, Prompt, Scores
from visalign.seeds import sample_seed

from .contract import TextVerdict, read_text_request, text_scores


class RandomReward:
    """Random 1 or 0, a function of seed, prompt and completion, so that equal completions score equal.

    Random rewards as controls for clipping and drift: arXiv 2512.16912.
    """

    unit = "by lot"
    range = (0.0, 1.0)
    higher_is_better = True

    def __init__(self, share: float = 0.5, *, seed: int = 0, name: str = "random") -> None:
        """Set the probability `share` of a 1, and the random seed."""
        if not 0 < share < 1:
            raise ValueError(f"{name}: share is {share}; allowed are numbers between 0 and 1, without them.")
        self.name, self._share, self._seed = name, share, seed

    def score(self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None) -> Scores:
        """Draw for each completion."""
        request = read_text_request(self.name, completions, prompts, metadata)
        verdicts = []
        for prompt, completion in zip(request.prompts, request.completions, strict=True):
            key = json.dumps(prompt, sort_keys=True, default=str)
            uniform = sample_seed(self._seed, "random reward", key, completion) / 2**63
            verdicts.append(TextVerdict(value=float(uniform < self._share)))
        return text_scores(verdicts, self.unit)
