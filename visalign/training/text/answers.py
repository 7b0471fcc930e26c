# SPDX-License-Identifier: Apache-2.0
"""Likelihood of the reference answer after a completion, as its reward."""

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
    """Refuse records without an answer, if the objective uses its likelihood."""
    if "likelihood" in ADVANTAGES[objective.advantage].needs:
        for record in records:
            reference_answer(record)


def reference_answer(record: Mapping[str, Any]) -> str:
    """Return the answer whose likelihood is the reward."""
    answer = record.get("answer")
    if not isinstance(answer, str) or not answer:
        raise UserError(
            f'The record of the prompt {str(record["prompt"])[:60]!r} has no text "answer" '
            f"(it is {answer!r}), whose likelihood is the reward. Give every record one, or use 'grpo'."
        )
    return answer


def answer_likelihood(
    parts: TextParts,
    rollout: TextRollout,
    records: Mapping[Hashable, Mapping[str, Any]],
    prefix: str,
    kind: Likelihood,
) -> Tensor:
    """Compute `likelihood_reward` [B] of each record's answer after the completion, by the present weights.

    The policy reads the prompt, the completion up to the first `prefix`, and `prefix`; the completion is
    tokenized again. The answer's tokens are scored at temperature 1, over the whole vocabulary. NaN where
    prompt, completion and answer are longer than the context.

    Likelihood-based reward designs, arXiv 2602.03979.
    """
    if not len(rollout):
        return torch.zeros(0)
    contexts, answers = [], []
    for row, label in enumerate(rollout.group):
        prompt = rollout.prompt_ids[row][rollout.prompt_mask[row] != 0].tolist()
        contexts.append(prompt + _ids(parts, rollout.text[row].split(prefix)[0] + prefix))
        answers.append(_ids(parts, reference_answer(records[label])))
    limit = getattr(parts.policy, "context_length", None)
    fits = [limit is None or len(c) + len(a) <= limit for c, a in zip(contexts, answers, strict=True)]
    contexts, answers = (
        [ids if fit else ids[:1] for ids, fit in zip(column, fits, strict=True)]
        for column in (contexts, answers)
    )
    scored = _with_tokens(rollout, contexts, answers)
    reward = likelihood_reward(parts.policy.log_probs(scored).log_prob.cpu(), scored.loss_mask, kind=kind)
    return torch.where(torch.tensor(fits), reward, torch.nan)


def _ids(parts: TextParts, text: str) -> list[int]:
    return list(parts.tokenizer(text, add_special_tokens=False)["input_ids"])


def _with_tokens(
    rollout: TextRollout, prompts: Sequence[list[int]], completions: Sequence[list[int]]
) -> TextRollout:
    """Replace prompts and completions of a rollout; padded ids are 0."""
    width, size = max(map(len, prompts)), max(map(len, completions))
    zeros = torch.zeros(len(prompts), size)
    return replace(
        rollout,
        prompt_ids=torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts]),
        prompt_mask=torch.tensor([[0.0] * (width - len(ids)) + [1.0] * len(ids) for ids in prompts]),
        completion_ids=torch.tensor([ids + [0] * (size - len(ids)) for ids in completions]),
        loss_mask=torch.tensor([[1.0] * len(ids) + [0.0] * (size - len(ids)) for ids in completions]),
        log_prob=zeros,
        full_log_prob=zeros,
        entropy=zeros,
        sampling=Sampling(),
        kept=None,
        routes=None,  # they belong to other tokens
    )
