# SPDX-License-Identifier: Apache-2.0
"""Yes/no answers from the next token: log-odds of two sets of tokens, and their total probability.

Peers compare one spelling ("Yes") and score 0 for any other answer. Here every one-token spelling counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visalign.core import yes_no_answer

from .template import Template

YES = ("yes", "Yes", "YES", " yes", " Yes", " YES")
NO = ("no", "No", "NO", " no", " No", " NO")  # Default spellings; those that are several tokens are left out

MIN_MASS = 0.1  # Least probability of yes and no together that counts as an answer
SUREST = 87.0  # Bound of the log-odds: a probability of 0 counts as e^−87, which float32 still holds


@dataclass(frozen=True)
class Odds:
    """Answers of a model to B yes/no questions."""

    log_odds: Tensor  # [B] float32 ln(p_yes / p_no) within ±`SUREST`; NaN where there is a reason
    mass: Tensor  # [B] float32 p_yes + p_no over the whole vocabulary; NaN where it was not computed
    decision: list[str]  # The likelier answer in its likeliest spelling
    reasons: list[str | None]  # Why an answer is missing; None for the others


class YesNoReader:
    """Reader of a vision-language engine's answers to one yes/no template.

    `yes` and `no` are spellings instead of the template's, each one token of the model. `min_mass` is the least
    probability of both together that counts as an answer; 0 reads the odds whatever else the model would say.
    """

    def __init__(
        self,
        engine: Any,
        template: Template,
        *,
        yes: Sequence[str] | None = None,
        no: Sequence[str] | None = None,
        min_mass: float = MIN_MASS,
    ) -> None:
        self.engine, self.template, self.min_mass = engine, template, min_mass
        self._yes = token_set(engine, template.words.get("yes") if yes is None else yes, YES)
        self._no = token_set(engine, template.words.get("no") if no is None else no, NO)
        both = sorted(set(self._yes) & set(self._no))
        if both or not 0 <= min_mass < 1:
            words = engine.processor.tokenizer.convert_ids_to_tokens(both)
            raise ValueError(
                f"min_mass is {min_mass}, and {words} are of yes and no; allowed are [0, 1), and words that differ."
            )
        self.ids = [*self._yes, *self._no]

    def __call__(self, queries: Sequence[Any], *, gradient: bool = False) -> Odds:
        """Read the answers to B requests; with `gradient` the log-odds have that of the images that require one."""
        if not queries:
            return Odds(torch.zeros(0), torch.zeros(0), [], [])
        reply = self.engine.answer_logits(self.template, queries, self.ids, left_over=True, gradient=gradient)
        logits = reply.logits.double()  # float32 rounding would depend on the batch
        log_prob = logits - reply.log_total.double()[:, None]
        split, size = len(self._yes), len(self.ids)
        answer = yes_no_answer(log_prob, range(split), range(split, size), normalised=True)
        odds = answer.log_odds.clamp(-SUREST, SUREST).float()
        mass = answer.mass.detach().clamp(max=1.0).float()
        reasons = list(reply.reasons)
        for row, share in enumerate(mass.tolist()):
            if reasons[row] is None and not share >= self.min_mass:
                mass_needed = f"both have {share:.2g} of the probability, and {self.min_mass:g} is needed"
                reasons[row] = f"the model answers neither yes nor no: {mass_needed}"
            elif reasons[row] is None and not math.isfinite(odds[row].item()):
                reasons[row] = "the model's log-odds are no number"
        valid = torch.tensor([reason is None for reason in reasons])
        return Odds(torch.where(valid, odds, torch.nan), mass, self._decisions(logits, odds), reasons)

    def _decisions(self, logits: Tensor, odds: Tensor) -> list[str]:
        split, spellings = len(self._yes), []
        for row, is_yes in zip(logits.nan_to_num(-math.inf), (odds > 0).tolist(), strict=True):
            best = int(row[:split].argmax()) if is_yes else split + int(row[split:].argmax())
            spellings.append(self.engine.processor.tokenizer.decode([self.ids[best]]))
        return spellings

    @property
    def spellings(self) -> dict[str, list[int]]:
        return {"yes": list(self._yes), "no": list(self._no)}


def token_set(engine: Any, words: Sequence[str] | None, default: Sequence[str]) -> list[int]:
    """Ids of the words, which must be one token each, or of the default words that are one token."""
    if isinstance(words, str):
        raise ValueError(f"Words come as a list; given is the string {words!r}. Write [{words!r}].")
    if words is not None:
        return list(engine.token_ids(list(words)))
    return list(engine.token_ids(list(default), skip_missing=True))
