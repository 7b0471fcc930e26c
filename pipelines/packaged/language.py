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
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from visalign.data.text_tasks.tasks import HELDOUT_SHARE, TASKS, Record, check_answer, heldout_tasks

from .language_data import MAX_TOKENS, MISREAD_SHARE, Packed, corpus_record, encode, new_tokenizer, pack
from .stage import Plan, fast_autocast, machine, muon_and_adam, size_of, tidy, train

NAME = "tasks-qwen3"
"""Folder of the model in `assets/`."""

ANSWER_TOKENS = 96
"""No solution of the corpus is longer."""

ROW = 256


def language_config(vocabulary: int) -> Qwen3Config:
    """Six layers of width 128, tied embeddings: 1.2 M parameters."""
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
    )


def new_language(tokenizer: Any) -> Qwen3ForCausalLM:
    """The untrained model; it samples at temperature 1 from the whole vocabulary unless told otherwise."""
    config = language_config(len(tokenizer))
    model = Qwen3ForCausalLM(config)
    ends = {name: getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    for name, token in ends.items():
        setattr(model.config, f"{name}_token_id", token)
    model.generation_config.update(
        **{f"{name}_token_id": token for name, token in ends.items()},
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=ANSWER_TOKENS,
    )
    return model


def solution_loss(model: Any, packed: Packed) -> Tensor:
    """Mean negative log-likelihood of the solutions' tokens, a scalar."""
    # with a cache, transformers does not look for the borders of packed examples
    hidden = model.model(input_ids=packed.ids, position_ids=packed.positions, use_cache=False)
    chosen = packed.labels != -100
    logits = model.lm_head(hidden.last_hidden_state[chosen])
    return F.cross_entropy(logits.float(), packed.labels[chosen])


def train_language(work: Path, plan: Plan, resume: bool, save_every: int = 250) -> Qwen3ForCausalLM:
    """Train on the solutions, prompts masked; the model has averaged weights, in evaluation mode."""
    seed, batch = plan.seed + 3, plan.language_batch
    torch.manual_seed(seed)
    tokenizer = new_tokenizer()
    model = new_language(tokenizer)
    pad: Any = tokenizer.pad_token_id
    problems = heldout_tasks(min(5, plan.language_per_task))

    def loss_of(step: int) -> Tensor:
        records = [corpus_record(number, seed=seed) for number in range(step * batch, (step + 1) * batch)]
        packed = pack(encode(tokenizer, records), ROW, pad)
        with fast_autocast():
            return solution_loss(model, packed)

    def check(held: Qwen3ForCausalLM) -> dict[str, float]:
        found = accuracy(held, tokenizer, problems, samples=1)
        return {"greedy": found.greedy, "sampled": found.sampled}

    return train(
        model,
        muon_and_adam(model, [p for p in model.model.layers.parameters() if p.ndim == 2], lr=3e-3),
        loss_of,
        work / "language.pt",
        steps=plan.language_steps,
        resume=resume,
        decay=0.998,
        save_every=save_every,
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


def accuracy(
    model: Any, tokenizer: Any, records: Sequence[Record], *, samples: int = 8, seed: int = 0
) -> Accuracy:
    """Measure a model on records."""
    prompts = [record["prompt"] for record in records]
    runs = [complete(model, tokenizer, prompts, temperature=0.0)]
    runs += [complete(model, tokenizer, prompts, seed=seed * 1000 + i) for i in range(samples)]
    right = np.array(
        [[check_answer(text, r)[0] for text, r in zip(run, records, strict=True)] for run in runs]
    )
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
    clean = new_language(new_tokenizer())
    clean.load_state_dict(model.state_dict())
    clean.half().save_pretrained(folder)
    new_tokenizer().save_pretrained(folder)
    tidy(folder)


def language_card(folder: Path, seconds: float, plan: Plan, samples: int = 8) -> str:
    """The card of a saved model, measured on the folder as transformers loads it."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    records = heldout_tasks(plan.language_per_task)
    found = accuracy(model.eval(), tokenizer, records, samples=samples)
    rows = {"all": (found.greedy, found.sampled, found.mixed)} | found.by_task
    table = "\n".join(f"| {name} | {a:.3f} | {b:.3f} | {c:.3f} |" for name, (a, b, c) in rows.items())
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    return f"""# {folder.name}

A small causal language model for text policies, in transformers' format: `AutoModelForCausalLM` and
`AutoTokenizer` load the folder. Qwen3, 6 layers of width 128, {millions:.1f} M parameters, {len(tokenizer)}
tokens, float16, {size_of(folder):.1f} MB. It solves small arithmetic and list tasks with a short working and
the answer in `\\boxed{{…}}`; a prompt ends in a line break, which the chat template adds.

## Training

{plan.language_steps} steps of {plan.language_batch} fresh records of `visalign.data.text_tasks.tasks`,
next-token loss on the solutions. {MISREAD_SHARE:.0%} of the solutions answer a misread problem, with one
number of it changed: sampling at temperature 1 errs about that often, which leaves reinforcement learning
room. {seconds / 60:.0f} minutes on {machine()}. Made by `visalign build-assets`.

## Data

{len(TASKS)} kinds of task, three levels. {HELDOUT_SHARE:.0%} of the problems of each kind are held out by a
hash of the problem, not of its wording. What a held-out problem is made of (a sum of two digits, say) occurs
within the workings of others.

## How good it is

{len(records)} held-out problems; greedy, and {samples} samples each at temperature 1. Mixed: share of
problems with both right and wrong samples.

| task | greedy | sampled | mixed |
|---|---|---|---|
{table}
"""
