# SPDX-License-Identifier: Apache-2.0
"""A reward without a signal: what training does all the same is the trainer's doing."""

from __future__ import annotations

import json
from collections.abc import Sequence

from visalign.interfaces import Metadata, Scores
from visalign.seeds import sample_seed

from .contract import Prompt, TextVerdict, read_text_request, text_scores


class RandomReward:
    """1 or 0 by lot: the control of a run, for what clip and drift do without any signal.

    The lot is a function of seed, prompt and completion, so equal completions to a prompt have the same one.
    Random rewards as controls: arXiv 2512.16912.
    """

    unit = "by lot"
    range = (0.0, 1.0)
    higher_is_better = True

    def __init__(self, share: float = 0.5, *, seed: int = 0, name: str = "random") -> None:
        """Choose how many are rewarded.

        Args:
            share: probability of 1, between 0 and 1.
            seed: of the lots.
            name: for messages and logs.

        Raises:
            ValueError: a share that leaves nothing to draw.
        """
        if not 0 < share < 1:
            raise ValueError(f"{name}: share is {share}; allowed are numbers between 0 and 1, without them.")
        self.name, self._share, self._seed = name, share, seed

    def score(
        self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None
    ) -> Scores:
        """Draw for each completion."""
        request = read_text_request(self.name, completions, prompts, metadata)
        asked = [json.dumps(prompt, sort_keys=True, default=str) for prompt in request.prompts]
        lots = [
            sample_seed(self._seed, "random reward", prompt, completion) / 2**63
            for prompt, completion in zip(asked, request.completions, strict=True)
        ]
        return text_scores([TextVerdict(value=float(lot < self._share)) for lot in lots], self.unit)
