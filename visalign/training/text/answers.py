# SPDX-License-Identifier: Apache-2.0
"""How likely the policy holds the reference answer after what it wrote."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from visalign.core import Objective
from visalign.core.objective.stages import ADVANTAGES
from visalign.core.rewards.likelihood import Likelihood, likelihood_reward
from visalign.errors import UserError
from visalign.text import Sampling, TextRollout

from .parts import TextParts


def check_answers(objective: Objective, records: Sequence[Mapping[str, Any]]) -> None:
    """Refuse records without an answer, if the objective looks at its likelihood.

    Raises:
        UserError: names the first one.
    """
    if "likelihood" in ADVANTAGES[objective.advantage].needs:
        for record in records:
            reference_answer(record)


def reference_answer(record: Mapping[str, Any]) -> str:
    """The answer whose likelihood is the reward.

    Raises:
        UserError: the record has none.
    """
    wanted = record.get("answer")
    if not isinstance(wanted, str) or not wanted:
        raise UserError(
            f'The record of the prompt {str(record["prompt"])[:60]!r} has no text "answer" '
            f"(it is {wanted!r}), whose likelihood is the reward. Give every record one, or take 'grpo'."
        )
    return wanted


def answer_likelihood(
    parts: TextParts,
    rollout: TextRollout,
    records: Mapping[Hashable, Mapping[str, Any]],
    prefix: str,
    kind: Likelihood,
) -> Tensor:
    """`likelihood_reward` of each record's answer after the completion, by the present weights.

    The policy reads the prompt, the completion up to the first `prefix`, and `prefix`; what it wrote is
    tokenised anew. The answer's tokens are scored at temperature 1, over the whole vocabulary.

    Args:
        parts: the policy, with its tokenizer.
        rollout: B completions.
        records: group label -> record with the text "answer".
        prefix: what the answer follows.
        kind: see `likelihood_reward`.

    Returns:
        [B] float32; NaN where prompt, completion and answer are longer than the context.

    Raises:
        UserError: a record without an answer.

    Likelihood-based reward designs, arXiv 2602.03979.
    """
    if not len(rollout):
        return torch.zeros(0)
    read, answer = [], []
    for row, label in enumerate(rollout.group):
        prompt = rollout.prompt_ids[row][rollout.prompt_mask[row] != 0].tolist()
        read.append(prompt + _ids(parts, rollout.text[row].split(prefix)[0] + prefix))
        answer.append(_ids(parts, reference_answer(records[label])))
    room = getattr(parts.policy, "context_length", None)
    fits = [room is None or len(a) + len(b) <= room for a, b in zip(read, answer, strict=True)]
    short = [(a, b) if fit else (a[:1], b[:1]) for a, b, fit in zip(read, answer, fits, strict=True)]
    scored = _given(rollout, [a for a, _ in short], [b for _, b in short])
    found = likelihood_reward(parts.policy.log_probs(scored).log_prob.cpu(), scored.loss_mask, kind=kind)
    return torch.where(torch.tensor(fits), found, torch.nan)


def _ids(parts: TextParts, text: str) -> list[int]:
    return list(parts.tokenizer(text, add_special_tokens=False)["input_ids"])


def _given(rollout: TextRollout, read: Sequence[list[int]], answer: Sequence[list[int]]) -> TextRollout:
    """The rollout with other prompts and completions; padded ids are 0."""
    width, size = max(map(len, read)), max(map(len, answer))
    blank = torch.zeros(len(read), size)
    return replace(
        rollout,
        prompt_ids=torch.tensor([[0] * (width - len(ids)) + ids for ids in read]),
        prompt_mask=torch.tensor([[0.0] * (width - len(ids)) + [1.0] * len(ids) for ids in read]),
        completion_ids=torch.tensor([ids + [0] * (size - len(ids)) for ids in answer]),
        loss_mask=torch.tensor([[1.0] * len(ids) + [0.0] * (size - len(ids)) for ids in answer]),
        log_prob=blank,
        full_log_prob=blank,
        entropy=blank,
        sampling=Sampling(),
        kept=None,
        shared=None,
        routes=None,  # they are of other tokens
    )
