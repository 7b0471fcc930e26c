# SPDX-License-Identifier: Apache-2.0
"""The embedded language model: a small Qwen3 with its tokenizer, trained on the text tasks' solutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from visalign.data.text_tasks.tasks import TASKS, Record, check_answer, heldout_tasks, misread, task_record

from .stage import Plan, fast_autocast, muon_and_adam, packaged, tidy, train

ANSWER_TOKENS = 96
"""No solution of the corpus is longer."""

ROW = 256
"""Tokens of a packed row."""

MISREAD_SHARE = 0.45
"""Share of the corpus whose solution answers a misread problem: one number of it changed.

Text found in the world is of mixed quality too. The model learns to misread about that often when it samples
at temperature 1, on every kind of task alike, while its likeliest answer stays right: reinforcement learning
has something to improve that a very small model can learn to do in minutes."""


def new_tokenizer() -> PreTrainedTokenizerFast:
    """Load the tokenizer: one token for each digit, sign and word of the tasks, bytes for other text."""
    return AutoTokenizer.from_pretrained(packaged("tasks-qwen3"))


def new_language() -> Qwen3ForCausalLM:
    """Create the untrained model: six layers of width 128, tied embeddings, 1.2 M parameters."""
    folder = packaged("tasks-qwen3")
    model = Qwen3ForCausalLM(Qwen3Config.from_pretrained(folder, dtype=torch.float32))
    model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


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
    """Put examples into rows, the longest first, each into the first row with room."""
    rows: list[tuple[list[int], list[int], list[int]]] = []
    for ids, prompt in sorted(examples, key=lambda example: -len(example[0])):
        slot = next((r for r in rows if len(r[0]) + len(ids) <= row), None)
        if slot is None:
            rows.append(slot := ([], [], []))
        slot[0].extend(ids)
        slot[1].extend([-100] * (prompt - 1) + list(ids[prompt:]) + [-100])
        slot[2].extend(range(len(ids)))
    for ids, labels, positions in rows:
        rest = row - len(ids)
        ids.extend([pad] * rest)
        labels.extend([-100] * rest)
        positions.extend(range(rest))
    columns = (torch.tensor([r[i] for r in rows], dtype=torch.int64) for i in range(3))
    return Packed(*columns)


def solution_loss(model: Any, packed: Packed) -> Tensor:
    """Mean negative log-likelihood of the solutions' tokens, a scalar."""
    # with a cache, transformers does not look for the borders of packed examples
    hidden = model.model(input_ids=packed.ids, position_ids=packed.positions, use_cache=False)
    chosen = packed.labels != -100
    logits = model.lm_head(hidden.last_hidden_state[chosen])
    return F.cross_entropy(logits.float(), packed.labels[chosen])


def train_language(plan: Plan) -> Qwen3ForCausalLM:
    """Train on the solutions, prompts masked; the model has averaged weights, in evaluation mode."""
    seed, batch = plan.seed + 3, plan.language_batch
    torch.manual_seed(seed)
    tokenizer = new_tokenizer()
    model = new_language()
    pad: Any = tokenizer.pad_token_id
    problems = heldout_tasks(min(5, plan.language_per_task))

    def loss_of(step: int) -> Tensor:
        records = [corpus_record(number, seed=seed) for number in range(step * batch, (step + 1) * batch)]
        packed = pack(encode(tokenizer, records), ROW, pad)
        with fast_autocast():
            return solution_loss(model, packed)

    def check(module: Qwen3ForCausalLM) -> dict[str, float]:
        result = accuracy(module, tokenizer, problems, samples=1)
        return {"greedy": result.greedy, "sampled": result.sampled}

    return train(
        model,
        muon_and_adam(model, [p for p in model.model.layers.parameters() if p.ndim == 2], lr=3e-3),
        loss_of,
        "language",
        steps=plan.language_steps,
        decay=0.998,
        report_every=250,
        check=check if problems else None,
    )


@torch.no_grad()
def complete(
    model: Any, tokenizer: Any, prompts: Sequence[str], *, temperature: float = 1.0, seed: int = 0
) -> list[str]:
    """One completion per prompt, special tokens removed; temperature 0 takes the likeliest token."""
    inputs = tokenizer([prompt + "\n" for prompt in prompts], padding=True, return_tensors="pt")
    sampling = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        ids = model.generate(**inputs, **sampling, max_new_tokens=ANSWER_TOKENS)
    return tokenizer.batch_decode(ids[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Share of right answers on a set of records."""

    greedy: float
    sampled: float
    """At temperature 1, mean of the samples."""
    mixed: float
    """Share of the records with both right and wrong samples: what reinforcement learning learns from."""
    by_task: dict[str, tuple[float, float, float]]
    """task -> (greedy, sampled, mixed)."""


def accuracy(model: Any, tokenizer: Any, records: Sequence[Record], *, samples: int = 8, seed: int = 0) -> Accuracy:
    """Measure a model on records."""
    prompts = [record["prompt"] for record in records]
    runs = [complete(model, tokenizer, prompts, temperature=0.0)]
    runs += [complete(model, tokenizer, prompts, seed=seed * 1000 + i) for i in range(samples)]
    right = np.array([[check_answer(text, r)[0] for text, r in zip(run, records, strict=True)] for run in runs])
    sampled = right[1:].mean(axis=0)
    rows = np.stack([right[0], sampled, (sampled > 0) & (sampled < 1)])
    names = np.array([record["task"] for record in records])
    by_task = {name: _means(rows[:, names == name]) for name in TASKS if (names == name).any()}
    greedy, mean, mixed = _means(rows)
    return Accuracy(greedy=greedy, sampled=mean, mixed=mixed, by_task=by_task)


def _means(rows: np.ndarray) -> tuple[float, float, float]:
    greedy, sampled, mixed = rows.astype(float).mean(axis=1)
    return float(greedy), float(sampled), float(mixed)


def save_language(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write model and tokenizer as transformers loads them: float16 weights, loaded as float32."""
    clean = new_language()
    clean.load_state_dict(model.state_dict())
    clean.half().save_pretrained(folder)
    new_tokenizer().save_pretrained(folder)
    tidy(folder)


def language_measures(folder: Path, per_task: int, samples: int = 8) -> dict[str, float]:
    """Measure the model of a folder, as transformers loads it, on held-out problems."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    result = accuracy(model.eval(), tokenizer, heldout_tasks(per_task), samples=samples)
    rows = {"all": (result.greedy, result.sampled, result.mixed)} | result.by_task
    names = ("greedy", "sampled", "mixed")
    return {f"{task} {name}": value for task, row in rows.items() for name, value in zip(names, row, strict=True)}
