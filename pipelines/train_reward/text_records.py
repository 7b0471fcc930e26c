# SPDX-License-Identifier: Apache-2.0
"""Records of a text reward's training: read from any layout, tokenized, paired, balanced by length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from visalign.data.sets.completion_files import load_rankings
from visalign.data.sets.tables import listed
from visalign.data.text_tasks.tasks import check_answer, misread, text_tasks
from visalign.errors import UserError, excerpt
from visalign.pipelines.shared.parts import Records, name_key, split_records
from visalign.rewards.text.reward_model import answered_tokens
from visalign.text.chat import PromptEncoder

BINS = 8
"""Bins of the difference in length within which pairs are balanced."""


@dataclass(frozen=True, kw_only=True)
class RankedTexts:
    """A prompt with K completions, tokenized: one element of a batch."""

    number: int
    ids: tuple[list[int], ...]
    scores: tuple[float, ...]
    """Higher is better; targets of mse and bce."""
    pairs: tuple[tuple[int, int], ...]
    """(better, worse) of all completions of different score."""
    margin: float = 0.0


def read_rankings(config: Any) -> tuple[Records, Records, dict[str, int]]:
    """Read and check the records: trained ones, held-out ones, and reason -> count of those left out."""
    data = config.data
    with name_key("data.train"):
        if data.train.startswith("tasks:"):
            records, left_out = _task_pairs(data, config.seed), {}
        else:
            loaded = load_rankings(data.train, unusable=data.unusable, names=data.map)
            records, left_out = loaded.records, dict(loaded.left_out)
        _check_scores(records, config.objective.task)
    if config.compares:
        tied = [record for record in records if len(set(record["scores"])) < 2]
        records = [record for record in records if len(set(record["scores"])) > 1]
        left_out |= {"ties": len(tied)} if tied else {}
    if not isinstance(data.heldout, str):
        return *split_records(records, data.heldout, config.seed), left_out
    with name_key("data.heldout"):
        heldout = load_rankings(data.heldout, unusable=data.unusable, names=data.map).records
    measured = {str(record["prompt"]) for record in heldout}
    shared = list(dict.fromkeys(prompt for record in records if (prompt := str(record["prompt"])) in measured))
    new = [record for record in records if str(record["prompt"]) not in measured]
    if shared and (data.unusable == "refuse" or not new):
        raise UserError(
            f"{len(shared)} prompts of data.heldout are also in data.train: {listed([repr(p) for p in shared])}. Put "
            "each into one of the two; data.unusable=drop leaves them out of data.train."
        )
    return new, heldout, left_out | ({"shared": len(records) - len(new)} if shared else {})


def _task_pairs(data: Any, seed: int) -> list[dict[str, Any]]:
    """Pair the solution of each packaged task with that of a misread problem, which is wrong."""
    if data.train != "tasks:train":
        raise UserError(f"there is no {data.train!r}; the packaged pairs are tasks:train.")
    kinds = {name: tuple(value) for name in ("tasks", "levels") if (value := getattr(data, name)) is not None}
    tasks, rng = text_tasks(data.size, seed=seed, split="train", **kinds), np.random.default_rng([seed, 62])
    records = []
    for task in tasks:
        attempts = (misread(task, rng)["solution"] for _ in range(20))  # some are right all the same
        if wrong := next((text for text in attempts if not check_answer(text, task)[0]), None):
            completions = [task["solution"], wrong]
            records.append({"prompt": task["prompt"], "completions": completions, "scores": [1.0, 0.0]})
    return records


def _check_scores(records: Records, task: str) -> None:
    """Refuse scores from which the task learns nothing."""
    scores = [score for record in records for score in record["scores"]]
    if task == "bce" and (outside := [score for score in scores if not 0 <= score <= 1]):
        raise UserError(
            f"{len(outside)} scores, as {outside[0]:g}, are outside 0 to 1. Rescale them, or set objective.task=mse."
        )
    if task in ("mse", "bce") and len(set(scores)) < 2:
        raise UserError(f"all {len(scores)} scores are {scores[0]:g}, from which nothing is learnt. Add the others.")
    if task not in ("mse", "bce") and all(len(set(record["scores"])) < 2 for record in records):
        raise UserError(
            f"none of the {len(records)} prompts has two completions of different score, so no completion is better "
            "than another. Add completions to each prompt, or set objective.task=mse, which reads single scores."
        )


def tokenize(
    records: Records, tokenizer: Any, *, limit: int, drop: bool, compares: bool, left_out: dict[str, int]
) -> list[RankedTexts]:
    """Tokenize records; completions above `limit` tokens and records without a pair are counted in `left_out`."""
    encoder, counts, texts = PromptEncoder(tokenizer), Counter[str](), list[RankedTexts]()
    for number, record in enumerate(records):
        ids: list[list[int]] = []
        scores: list[float] = []
        for completion, score in zip(record["completions"], record["scores"], strict=True):
            tokens = answered_tokens(tokenizer, encoder, record["prompt"], completion)
            if len(tokens) > limit and not drop:
                raise UserError(
                    f"the completion {excerpt(completion)} with its prompt has {len(tokens)} tokens; the model reads "
                    f"at most {limit}. Shorten it; data.too_long=drop leaves such completions out."
                )
            if len(tokens) > limit:
                counts["too_long"] += 1
            else:
                ids.append(tokens)
                scores.append(score)
        pairs = [(i, j) for i, left in enumerate(scores) for j, right in enumerate(scores) if left > right]
        if ids and (pairs or not compares):
            margin = float(record.get("margin", 0.0))
            texts.append(RankedTexts(number=number, ids=(*ids,), scores=(*scores,), pairs=(*pairs,), margin=margin))
        elif len(ids) == len(record["completions"]):
            counts["ties"] += 1
    left_out |= Counter(left_out) + counts
    if not texts:
        raise UserError(f"no record is left: left out {left_out}. Give shorter texts, or a model that reads longer.")
    return texts


def longer_share(texts: Sequence[RankedTexts]) -> float:
    """Compute the share of the pairs whose better completion is the longer one, equal lengths half."""
    leads = [np.sign(lead) for text in texts for lead in _leads(text)]
    return float(np.mean(leads) + 1) / 2 if leads else float("nan")


def _leads(text: RankedTexts) -> list[int]:
    """List the leads in tokens of the better completion of each pair."""
    return [len(text.ids[better]) - len(text.ids[worse]) for better, worse in text.pairs]


def length_balanced(texts: Sequence[RankedTexts], seed: int) -> list[RankedTexts]:
    """Leave out pairs at random until the better completion is the longer one in half of them, at any difference.

    Within each of `BINS` bins of the absolute difference in length, equally full, the surplus of either kind goes;
    pairs of equal length stay.
    """
    leads = [(lead, i, pair) for i, t in enumerate(texts) for lead, pair in zip(_leads(t), t.pairs, strict=True)]
    unequal = sorted((entry for entry in leads if entry[0]), key=lambda entry: abs(entry[0]))
    rng, chosen = np.random.default_rng([seed, 63]), {(i, pair) for lead, i, pair in leads if not lead}
    for part in np.array_split(np.arange(len(unequal)), BINS):
        sides = [[unequal[n][1:] for n in part if (unequal[n][0] > 0) == is_longer] for is_longer in (True, False)]
        size = min(map(len, sides))
        chosen |= {side[n] for side in sides for n in rng.permutation(len(side))[:size]}
    if not chosen:
        raise UserError(
            f"data.length_balanced finds nothing to balance {len(leads)} pairs with: the better completion is the "
            f"longer one in {longer_share(texts):.0%}. Add pairs, or leave it out."
        )
    balanced = [replace(t, pairs=tuple(p for p in t.pairs if (i, p) in chosen)) for i, t in enumerate(texts)]
    return [text for text in balanced if text.pairs]
