# SPDX-License-Identifier: Apache-2.0
"""How long given answers are for a model, known before training begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from visalign.errors import UserError

from .policy import CausalLMPolicy


def written_lengths(
    policy: CausalLMPolicy, records: Sequence[Mapping[str, Any]], field: str = "completion"
) -> list[int]:
    """Tokens of prompt and answer together, the end token included.

    Args:
        policy: whose tokenizer and prompt encoding are used.
        records: each with "prompt" and the answer.
        field: of the answer.

    Returns:
        One number per record.

    Raises:
        UserError: a prompt that cannot be encoded.
    """
    prompts = policy.prompts.encode([record["prompt"] for record in records])
    answers = policy.tokenizer([record[field] for record in records], add_special_tokens=False)["input_ids"]
    return [len(prompt) + len(answer) + 1 for prompt, answer in zip(prompts, answers, strict=True)]


def fitting_answers(
    policy: CausalLMPolicy,
    records: Sequence[Mapping[str, Any]],
    *,
    too_long: str = "refuse",
    field: str = "completion",
) -> list[Mapping[str, Any]]:
    """The records that the model can read whole; none is ever cut.

    Args:
        policy: whose context counts.
        records: each with "prompt" and the answer.
        too_long: "refuse" or "drop" those that do not fit.
        field: of the answer.

    Returns:
        At least one record, in the given order.

    Raises:
        UserError: a record that does not fit (with "refuse"), or none that does.
    """
    lengths, room = written_lengths(policy, records, field), policy.context_length
    if room is None:
        return list(records)
    long = [place for place, length in enumerate(lengths) if length > room]
    if long and too_long == "refuse":
        raise UserError(
            f"{len(long)} of {len(records)} records are longer than the {room} tokens that the model reads: "
            f"record {long[0]} has {lengths[long[0]]} in prompt and answer (the first record is 0). Leave "
            "them out or shorten them; data.too_long=drop leaves them out."
        )
    kept = [record for record, length in zip(records, lengths, strict=True) if length <= room]
    if not kept:
        raise UserError(
            f"None of the {len(records)} records fits the {room} tokens that the model reads; the shortest "
            f"has {min(lengths)} in prompt and answer. Shorten them, or take a model of a longer context."
        )
    return kept
