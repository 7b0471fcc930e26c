# SPDX-License-Identifier: Apache-2.0
"""The embedded language model: a small Qwen3 with its tokenizer, trained on the text tasks' solutions."""

from __future__ import annotations

import json
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
from .stage import Average, Stage

NAME = "tasks-qwen3"
"""Folder of the model in `assets/`."""

ANSWER_TOKENS = 96
"""No solution of the corpus is longer."""

ROW = 256
MUON_RATE, ADAM_RATE = 2e-3, 3e-3


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


def _optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    inside = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in inside]
    muon = torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0)]


def solution_loss(model: Any, packed: Packed) -> Tensor:
    """Mean negative log-likelihood of the solutions' tokens, a scalar."""
    # with a cache, transformers does not look for the borders of packed examples
    hidden = model.model(input_ids=packed.ids, position_ids=packed.positions, use_cache=False)
    chosen = packed.labels != -100
    logits = model.lm_head(hidden.last_hidden_state[chosen])
    return F.cross_entropy(logits.float(), packed.labels[chosen])


def train_language(
    work: Path,
    *,
    steps: int,
    batch: int,
    seed: int,
    resume: bool,
    save_every: int = 250,
    check_per_task: int = 5,
) -> Qwen3ForCausalLM:
    """Train on the solutions, prompts masked, and return the model with averaged weights.

    Args:
        work: folder of the resumable state, `language.pt`.
        steps: optimizer steps.
        batch: records per step; record n of the corpus is the same in every run of a seed.
        seed: of weights and corpus.
        resume: go on from a saved state.
        save_every: steps between two saved states.
        check_per_task: held-out problems of each kind whose accuracy is printed then; 0 for none.

    Returns:
        The model in evaluation mode, float32.
    """
    torch.manual_seed(seed)
    tokenizer = new_tokenizer()
    model = new_language(tokenizer)
    pad: Any = tokenizer.pad_token_id

    def loss_of(step: int) -> Tensor:
        records = [corpus_record(number, seed=seed) for number in range(step * batch, (step + 1) * batch)]
        packed = pack(encode(tokenizer, records), ROW, pad)
        with torch.autocast("cpu", torch.bfloat16):
            return solution_loss(model, packed)

    def after(step: int, average: Average) -> None:
        held = new_language(tokenizer)
        held.load_state_dict(average.values)
        found = accuracy(held.eval(), tokenizer, heldout_tasks(check_per_task), samples=1, seed=step)
        print(f"  held-out at {step}: greedy {found.greedy:.2f}, sampled {found.sampled:.2f}", flush=True)

    stage = Stage(
        name="language",
        module=model,
        optimizers=_optimizers(model),
        steps=steps,
        state_file=work / "language.pt",
        decay=0.998,
        save_every=save_every,
        after=after if check_per_task else None,
    )
    average = stage.run(loss_of, resume)
    model.load_state_dict(average.values)
    return model.eval()


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
    """Measure a model on records.

    Args:
        model: a causal language model.
        tokenizer: its own, padding on the left.
        records: of `visalign.data.text_tasks.tasks`.
        samples: completions at temperature 1 per record.
        seed: of the sampling.
    """
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
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config.pop("_name_or_path", None)
    config["dtype"] = "float32"  # transformers follows this entry; float16 is slow and coarse on a CPU
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def language_card(
    folder: Path, seconds: float, *, steps: int, batch: int, per_task: int = 15, samples: int = 8
) -> str:
    """The card of a saved model, measured on the folder as transformers loads it."""
    from .cards import size_of
    from .plan import machine

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    records = heldout_tasks(per_task)
    found = accuracy(model.eval(), tokenizer, records, samples=samples)
    rows = {"all": (found.greedy, found.sampled, found.mixed)} | found.by_task
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    return "\n".join(
        [
            f"# {folder.name}",
            "",
            "A small causal language model for text policies, in transformers' format: "
            f"`AutoModelForCausalLM` and `AutoTokenizer` load the folder. Qwen3, 6 layers of width 128, "
            f"{millions:.1f} M parameters, {len(tokenizer)} tokens, float16, {size_of(folder):.1f} MB. It "
            "solves small arithmetic and list tasks with a short working and the answer in `\\boxed{…}`; a "
            "prompt ends in a line break, which the chat template adds.",
            "",
            "## Training",
            "",
            f"{steps} steps of {batch} fresh records of `visalign.data.text_tasks.tasks`, next-token loss on "
            f"the solutions. {MISREAD_SHARE:.0%} of the solutions answer a misread problem, with one number "
            "of it changed: sampling at temperature 1 errs about that often, which leaves reinforcement "
            f"learning room. {seconds / 60:.0f} minutes on {machine()}. Made by `visalign build-assets`.",
            "",
            "## Data",
            "",
            f"{len(TASKS)} kinds of task, three levels. {HELDOUT_SHARE:.0%} of the problems of each kind "
            "are held out by a hash of the problem, not of its wording. What a held-out problem is made of "
            "(a sum of two digits, say) occurs within the workings of others.",
            "",
            "## How good it is",
            "",
            f"{len(records)} held-out problems; greedy, and {samples} samples each at temperature 1. "
            "Mixed: share of problems with both right and wrong samples.",
            "",
            "| task | greedy | sampled | mixed |",
            "|---|---|---|---|",
            *(
                f"| {name} | " + " | ".join(f"{value:.3f}" for value in row) + " |"
                for name, row in rows.items()
            ),
            "",
        ]
    )
