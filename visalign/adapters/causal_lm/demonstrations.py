# SPDX-License-Identifier: Apache-2.0
"""Demonstrations (prompts with completions): as a rollout, in batches, and how long they are for a model.

Supervised fine-tuning, PPO-ptx and direct preference optimisation learn from them. A completion that ran tools has the
spans of characters that they wrote beside it (`tool_answers_field`); those are read and not learnt.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from visalign.data.sets.prompt_files import tool_answers_field, with_answer
from visalign.errors import UserError
from visalign.seeds import sample_seed
from visalign.text import Prompt, StoppingCriteria, TextRollout
from visalign.text.messages import text_messages
from visalign.text.rollout import undrawn_rollout

from .loading import end_tokens, pad_id
from .policy import CausalLMPolicy
from .prompts import left_pad

Spans = Sequence[Sequence[int]]  # beginnings and ends of characters, one behind the other
Record = Mapping[str, Any]  # prompt and completions of one demonstration


def demonstration_rollout(
    policy: CausalLMPolicy,
    prompts: Sequence[Prompt],
    completions: Sequence[str],
    *,
    answers: Sequence[Spans] | None = None,
) -> TextRollout:
    """Put B given completions, and the end token behind each, in the form of a rollout for `policy.log_probs`.

    Their log-probs and entropies are 0. `answers` are B lists of spans that a tool wrote: loss mask 0.
    """
    ends = end_tokens(policy.model, policy.prompts, StoppingCriteria())
    encoded, pad = policy.encode(prompts), pad_id(policy.tokenizer, ends)
    spans = [()] * len(completions) if answers is None else answers
    completion_ids, masks = [], []
    for row, text in enumerate(completions):
        ids, mask = _tokens(policy, prompts[row], text, spans[row])
        ids, mask = [*ids, policy.prompts.end_token(prompts[row], ends)], [*mask, 1.0]
        used, room = len(encoded.ids[row]), policy.context_length
        if room is not None and used + len(ids) > room:
            raise UserError(
                f"Prompt and completion {row} have {used} + {len(ids)} tokens; the model reads {room}. Shorten them."
            )
        completion_ids.append(ids)
        masks.append(mask)
    prompt_ids, prompt_mask = left_pad(encoded.ids, pad)
    length = max(map(len, completion_ids))
    padded = torch.tensor([ids + [pad] * (length - len(ids)) for ids in completion_ids])
    loss_mask = torch.tensor([mask + [0.0] * (length - len(mask)) for mask in masks])
    images = None if encoded.images is None else [list(images) for images in encoded.images]
    rollout = undrawn_rollout(prompt_ids, prompt_mask.float(), padded, loss_mask)
    return replace(rollout, text=list(completions), prompt=list(prompts), images=images)


def _tokens(policy: CausalLMPolicy, prompt: Prompt, text: str, answers: Spans) -> tuple[list[int], list[float]]:
    """Return the tokens of a completion and their loss mask; what a tool wrote is tokenized by itself."""
    as_chat = policy.prompts.plain_as_chat and not answers
    if as_chat and isinstance(prompt, str) and (turns := text_messages(prompt))[0]["content"] != prompt:
        # a transcript, whose other turns have no blanks around them either; those behind a begun answer stay
        text = text.rstrip() if turns[-1]["role"] == "assistant" else text.strip()
    ids, mask = list[int](), list[float]()
    edges = [0, *(edge for span in answers for edge in span), len(text)]
    for number, (begin, stop) in enumerate(itertools.pairwise(edges)):
        token_ids = policy.tokenizer(text[begin:stop], add_special_tokens=False)["input_ids"]
        ids, mask = [*ids, *token_ids], [*mask, *[float(number % 2 == 0)] * len(token_ids)]
    return ids, mask


def tool_spans(index: int, record: Record, field: str, column: str | None = None) -> Spans:
    """Read the spans of a completion that a tool wrote, of their usual column; null in tables means none."""
    name, size = column or tool_answers_field(field), len(record[field])
    if (spans := record.get(name)) is None:
        return ()
    edges: list[Any] = [None]
    with suppress(TypeError, ValueError):
        edges = [0, *(edge for begin, end in spans for edge in (begin, end)), size]
    if any(type(edge) is not int for edge in edges) or edges != sorted(edges):
        raise UserError(
            f"Record {index} has {name} {spans!r}; give a list of [begin, end], characters of the {field} (it has "
            f"{size}) that a tool wrote, one behind the other."
        )
    return spans


class DemonstrationBatches:
    """Batches of demonstrations, in a new order each epoch, the same in every run of a seed; `field`: or several."""

    def __init__(
        self,
        policy: CausalLMPolicy,
        records: Sequence[Record],
        *,
        size: int,
        seed: int,
        field: str | Sequence[str] = "completion",
    ) -> None:
        fields = (field,) if isinstance(field, str) else tuple(field)
        for index, record in enumerate(records):  # a bad span stops a run before it trains
            for name in fields:
                tool_spans(index, record, name)
        self._policy, self._records, self._fields = policy, records, fields
        self.size, self._seed = size, seed
        self._epoch, self._order = -1, np.arange(0)

    def __len__(self) -> int:
        return len(self._records)

    def batch(self, number: int) -> TextRollout:
        """Batch 0, 1, 2, ... as a rollout."""
        return self.rows([self._record(visit) for visit in range(number * self.size, (number + 1) * self.size)])

    def rows(self, index: Sequence[int]) -> TextRollout:
        """Return records as a rollout, grouped by record: completions in the first field, then those in the next."""
        chosen = [self._records[row] for row in index]
        rollout = demonstration_rollout(
            self._policy,
            [record["prompt"] for record in chosen] * len(self._fields),
            [record[field] for field in self._fields for record in chosen],
            answers=[tool_spans(row, self._records[row], field) for field in self._fields for row in index],
        )
        return replace(rollout, group=list(index) * len(self._fields))

    def _record(self, visit: int) -> int:
        epoch, index = divmod(visit, len(self._records))
        if epoch != self._epoch:
            draw = np.random.default_rng(sample_seed(self._seed, "written", epoch))
            self._epoch, self._order = epoch, draw.permutation(len(self._records))
        return int(self._order[index])


def demonstration_lengths(policy: CausalLMPolicy, records: Sequence[Record], field: str = "completion") -> list[int]:
    """Count the tokens of prompt and completion of each record together, the end token included."""
    prompts = [record["prompt"] for record in records]
    return [
        len(ids) + len(_tokens(policy, prompts[index], record[field], tool_spans(index, record, field))[0]) + 1
        for index, (ids, record) in enumerate(zip(policy.encode(prompts).ids, records, strict=True))
    ]


def fitting_demonstrations(
    policy: CausalLMPolicy, records: Sequence[Record], *, too_long: str = "refuse", field: str = "completion"
) -> list[Record]:
    """Return the records that the model can read whole; another is an error, or with `too_long="drop"` left out."""
    lengths, room = demonstration_lengths(policy, records, field), policy.context_length
    if room is None:
        return list(records)
    fitting = [record for record, length in zip(records, lengths, strict=True) if length <= room]
    if not fitting or (too_long == "refuse" and len(fitting) < len(records)):
        first = next(index for index, length in enumerate(lengths) if length > room)
        raise UserError(
            f"{len(records) - len(fitting)} of {len(records)} records have more tokens than the {room} that the model "
            f"reads: record {first} has {lengths[first]} in prompt and {field}. Shorten them; data.too_long=drop "
            "leaves them out where others fit."
        )
    return fitting


def with_mismatched(policy: CausalLMPolicy, records: Sequence[Record]) -> list[dict[str, Any]]:
    """Give each record the completion of another prompt as "mismatched": that of the next record which the model
    can read behind this one's prompt, the first after the last; raises `UserError` if there is none.
    """
    keys = [json.dumps(record["prompt"], sort_keys=True) for record in records]
    mismatched, count, room = [dict(record) for record in records], len(records), policy.context_length
    unmatched = list(range(count))
    for step in range(1, count):
        for index in unmatched:
            other = records[(index + step) % count]
            mismatched[index] = with_answer(mismatched[index], "mismatched", other, "completion")
        lengths = demonstration_lengths(policy, [mismatched[index] for index in unmatched], "mismatched")
        unmatched = [
            index
            for index, length in zip(unmatched, lengths, strict=True)
            if keys[index] == keys[(index + step) % count] or (room is not None and length > room)
        ]
        if not unmatched:
            return mismatched
    raise UserError(
        f"Record {unmatched[0]} of {count} has no other prompt's completion that fits behind its own prompt, on which "
        "KTO's reference point is measured. Give completions to several prompts."
    )
