# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of the embedded language model, and the corpus that it is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from visalign.data.text_tasks.kinds import KINDS
from visalign.data.text_tasks.tasks import Record, make_record, problem_key, task_record
from visalign.data.text_tasks.workings import Problem

MAX_TOKENS = 256
"""Prompt and completion together."""

MISREAD_SHARE = 0.45
"""Share of the corpus whose solution answers a misread problem: one number of it changed.

Text found in the world is of mixed quality too. The model learns to misread about that often when it samples
at temperature 1, on every kind of task alike, while its likeliest answer stays right: reinforcement learning
has something to improve that a very small model can learn to do in minutes."""

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\\n' }}{% endfor %}"
)
"""A turn of the user ends in a line break, after which the model answers; so a plain prompt and a line break
are the same tokens as a chat of one turn."""

_PIECES = r" ?\\boxed\{| [-+*=<>] |[,:] (?=[-0-9])|[0-9]| ?[A-Za-z]+|[\s\S]"
"""The box, signs with their blanks, commas before a number, single digits, words with the blank before."""

_SAMPLE = 200
"""Records per kind in which the vocabulary's words are looked for: every wording and working occurs."""


def new_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each digit, sign and word of the tasks; any other text falls back to its bytes."""
    cut = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    words = {piece for text in _sample_texts() for piece, _ in cut.pre_tokenize_str(text)}
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [PAD, BOS, EOS, *letters, *sorted(words - set(letters))]
    vocabulary = {name: i for i, name in enumerate(names)}
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        padding_side="left",
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def _sample_texts() -> list[str]:
    records = [task_record(number, seed=0) for number in range(_SAMPLE * len(KINDS))]
    return [text for record in records for text in (record["prompt"], record["solution"])]


def misread(record: Record, rng: np.random.Generator) -> Record:
    """The record with the solution of another problem: one number changed by up to 3, or by tens."""
    task, problem = record["task"], record["problem"]
    changed = problem
    while problem_key(task, changed) == problem_key(task, problem) or not KINDS[task].valid(changed):
        changed = _one_changed(problem, rng)
    other = make_record(task, changed, record["level"], rng)
    return record | {"solution": other["solution"]}


def _one_changed(problem: Problem, rng: np.random.Generator) -> Problem:
    """One of the numbers, at any depth, replaced by another of as many digits or one near it."""
    places = [
        (i, j)
        for i, entry in enumerate(problem)
        if not isinstance(entry, str)
        for j in (range(len(entry)) if isinstance(entry, list) else [None])
    ]
    i, j = places[int(rng.integers(len(places)))]
    old = problem[i] if j is None else problem[i][j]
    step = int(rng.integers(1, 4)) * (10 if old >= 10 and rng.random() < 0.5 else 1)
    new = old + step if rng.random() < 0.5 or old - step < 1 else old - step
    if j is None:
        return [*problem[:i], new, *problem[i + 1 :]]
    return [*problem[:i], [*problem[i][:j], new, *problem[i][j + 1 :]], *problem[i + 1 :]]


def corpus_record(number: int, *, seed: int) -> Record:
    """Training record `number`, its solution that of a misread problem in `MISREAD_SHARE` of the cases."""
    record = task_record(number, seed=seed)
    rng = np.random.default_rng([seed, number, 1])
    return misread(record, rng) if rng.random() < MISREAD_SHARE else record


@dataclass(frozen=True)
class Packed:
    """Examples packed into R rows of L tokens; each attends to itself alone, by its positions."""

    ids: Tensor
    """[R, L] int64."""
    labels: Tensor
    """[R, L] int64: the next token where it belongs to a solution or ends one, else −100."""
    positions: Tensor
    """[R, L] int64, from 0 in each example: by these transformers finds the borders."""


def encode(tokenizer: PreTrainedTokenizerFast, records: Sequence[Record]) -> list[tuple[list[int], int]]:
    """(ids, length of the prompt in tokens) of each record."""
    eos: Any = tokenizer.eos_token_id
    prompts: Any = tokenizer([record["prompt"] + "\n" for record in records]).input_ids
    solutions: Any = tokenizer([r["solution"] for r in records], add_special_tokens=False).input_ids
    return [(p + s + [eos], len(p)) for p, s in zip(prompts, solutions, strict=True)]


def pack(examples: Sequence[tuple[Sequence[int], int]], row: int, pad: int) -> Packed:
    """Put examples into rows, the longest first, each into the first row with room.

    Args:
        examples: (ids, length of the prompt).
        row: L, tokens per row.
        pad: fills what is left of a row.

    Raises:
        ValueError: an example is longer than a row.
    """
    rows: list[tuple[list[int], list[int], list[int]]] = []
    for ids, prompt in sorted(examples, key=lambda example: -len(example[0])):
        if len(ids) > row:
            raise ValueError(f"an example of {len(ids)} tokens does not fit into rows of {row}.")
        place = next((r for r in rows if len(r[0]) + len(ids) <= row), None)
        if place is None:
            rows.append(place := ([], [], []))
        place[0].extend(ids)
        place[1].extend([-100] * (prompt - 1) + list(ids[prompt:]) + [-100])
        place[2].extend(range(len(ids)))
    for ids, labels, positions in rows:
        rest = row - len(ids)
        ids.extend([pad] * rest)
        labels.extend([-100] * rest)
        positions.extend(range(rest))
    columns = (torch.tensor([r[i] for r in rows], dtype=torch.int64) for i in range(3))
    return Packed(*columns)
