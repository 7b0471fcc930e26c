# SPDX-License-Identifier: Apache-2.0
"""Network of a text reward: a sequence classifier of transformers that is trained on ranked completions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForSequenceClassification

from visalign.core.preference.uncertainty import soft_clamp
from visalign.data.assets import resolve_model
from visalign.errors import UserError
from visalign.pipelines.shared.parts import load_classifier, no_loading_bars
from visalign.rewards.text.classifier import longest_text
from visalign.rewards.text.reward_model import MEAN_AND_STD, MEMBER
from visalign.training.reward.batch import Outputs, RewardBatch

from .judges import TrainedJudge
from .text_records import RankedTexts


def output_names(config: Any) -> list[str]:
    """Return the names of the model's outputs, which its config.id2label holds."""
    if "uncertainty" in config.objective.task or "upstream" in config.objective.task:
        return [*MEAN_AND_STD]
    heads = config.model.heads
    return [f"{MEMBER}{head}" for head in range(heads)] if heads > 1 else ["LABEL_0"]


def load_network(config: Any, device: torch.device | str) -> tuple[Any, Any]:
    """Load the classifier with a new or its own head, partly frozen, and its tokenizer; "meta" loads no weights."""
    from visalign.adapters.causal_lm.loading import from_pretrained
    from visalign.adapters.causal_lm.lora import ALL_LINEAR, add_text_lora, text_lora

    settings, names = config.model, output_names(config)
    folder, device = str(resolve_model(settings.path)), torch.device(device)
    base: Any = from_pretrained(AutoConfig, folder)
    is_classifier = any(name.endswith("ForSequenceClassification") for name in base.architectures or ())
    outputs = [base.id2label[number] for number in range(base.num_labels)] if is_classifier else names
    if len(outputs) != len(names) or (len(names) > 1 and outputs != names):
        raise UserError(
            f"model.path is {settings.path!r}, a classifier with {len(outputs)} outputs ({', '.join(outputs)}), and "
            f"this objective trains {len(names)} ({', '.join(names)}). Give its base model, or one with these."
        )
    # steps of AdamW are below the resolution of bfloat16 weights
    dtype = "bfloat16" if device.type == "cuda" and settings.train != "full" else "float32"
    model, tokenizer = load_classifier(
        AutoModelForSequenceClassification,
        folder,
        seed=config.seed,
        hollow=device.type == "meta",
        dtype=getattr(torch, dtype if settings.dtype == "auto" else settings.dtype),
        num_labels=len(names),
        problem_type="regression" if len(names) == 1 else None,
    )
    if tokenizer.pad_token is None:  # as TRL does; the head reads the last token that is not this one
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    model.config.id2label = dict(enumerate(names))
    model.config.label2id = {name: index for index, name in enumerate(names)}
    if settings.train == "lora":
        lora, targets = settings.lora, tuple(settings.lora.target_modules or (ALL_LINEAR,))
        adapters = text_lora(rank=lora.rank, alpha=lora.alpha, target_modules=targets, seed=config.seed)
        add_text_lora(model, adapters, model.base_model)
    else:
        model.base_model.requires_grad_(settings.train == "full")
    for name, head in model.named_children():
        if name != model.base_model_prefix and next(head.parameters(), None) is not None:
            head.float().requires_grad_(True)  # its sums and differences of scores need float32
            head.forward = partial(_in_float32, head.forward)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.to(device), tokenizer


def _in_float32(forward: Callable[..., Tensor], states: Tensor, *others: Any) -> Tensor:
    with torch.autocast(states.device.type, enabled=False):
        return forward(states.float(), *others)


class RewardNetwork(TrainedJudge):
    """Trained classifier with its tokenizer.

    The rows of a batch are the completions of its examples. With several heads the rows of each follow one another
    in training, and each example has a random weight for each head (the Bayesian bootstrap: Exponential(1), a
    function of seed and example), so that heads differ where the data leave room.
    """

    def __init__(self, config: Any, device: torch.device) -> None:
        self.module, self.tokenizer = load_network(config, device)
        self.task, self.seed, self.device = config.objective.task, config.seed, device
        self.names, self.heads = output_names(config), config.model.heads
        self.limit = longest_text(self.module, self.tokenizer, config.data.max_length)
        self.compute_dtype: torch.dtype = self.module.base_model.dtype
        if config.model.dtype == "auto" and device.type == "cuda":
            self.compute_dtype = torch.bfloat16

    def encode(self, examples: Sequence[RankedTexts], *, heldout: bool = False) -> RewardBatch:
        """Encode examples with their labels; each weighs 1, shared by its pairs (InstructGPT, arXiv 2203.02155)."""
        rows = [torch.tensor(ids) for example in examples for ids in example.ids]
        starts = np.cumsum([0, *(len(example.ids) for example in examples)]).tolist()
        pairs = [(start + i, start + j, n) for n, start in enumerate(starts[:-1]) for i, j in examples[n].pairs]
        heads = 1 if heldout else self.heads
        draws = torch.ones(heads, len(examples))
        if heads > 1:
            rngs = [np.random.default_rng([self.seed, 61, example.number]) for example in examples]
            draws = torch.tensor(np.stack([rng.exponential(size=heads) for rng in rngs], 1), dtype=torch.float32)
        left, right, owner = torch.tensor(pairs, dtype=torch.int64).view(-1, 3).T
        offsets = torch.arange(heads)[:, None] * len(rows)
        share = torch.tensor([1 / max(len(example.pairs), 1) for example in examples])
        row = pad_sequence([torch.arange(a, b) for a, b in pairwise(starts)], batch_first=True)
        ranks = [torch.tensor([float(sum(s > score for s in e.scores)) for score in e.scores]) for e in examples]
        rank = pad_sequence(ranks, batch_first=True, padding_value=math.nan)
        is_ranking = self.task == "plackett_luce" and not heldout
        margins = torch.tensor([example.margin for example in examples])
        return RewardBatch(
            inputs={
                "input_ids": pad_sequence(rows, batch_first=True, padding_value=self.tokenizer.pad_token_id or 0),
                # a text may spell the pad token, so the mask is that of the lengths
                "attention_mask": pad_sequence([torch.ones_like(ids) for ids in rows], batch_first=True),
            },
            size=len(examples),
            left=(left + offsets).flatten(),
            right=(right + offsets).flatten(),
            label=torch.ones(heads * len(pairs)),
            weight=draws.flatten() if is_ranking else (draws * share)[:, owner].flatten(),
            margin=margins[owner].repeat(heads),
            example=torch.tensor([example.number for example in examples])[owner],
            rank=rank.repeat(heads, 1),
            row=(row + offsets[:, None]).flatten(0, 1),
            target=torch.tensor([score for example in examples for score in example.scores]),
        )

    def __call__(self, inputs: Any) -> Outputs:
        """Return value [M], and log_std where outputs or heads give one; in training value [heads · M]."""
        on_device = {name: value.to(self.device) for name, value in inputs.items()}
        is_mixed = self.compute_dtype != self.module.base_model.dtype
        with torch.autocast(self.device.type, self.compute_dtype, enabled=is_mixed):
            logits: Tensor = self.module(**on_device).logits.float()
        if tuple(self.names) == MEAN_AND_STD:
            return {"value": logits[:, 0], "log_std": soft_clamp(logits[:, 1])}
        if self.heads == 1:
            return {"value": logits[:, 0]}
        if self.module.training:
            return {"value": logits.T.flatten()}
        return {"value": logits.mean(1), "log_std": logits.std(1).log()}

    def save(self, folder: Path) -> None:
        """Write what AutoModelForSequenceClassification reads, adapters merged into the weights."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        layers = [module for module in self.module.modules() if isinstance(module, BaseTunerLayer)]
        for layer in layers:
            layer.merge()
        if layers:
            self.module._hf_peft_config_loaded = False  # else save_pretrained writes the adapters alone
        state = {
            name.replace(".base_layer.", "."): value
            for name, value in self.module.state_dict().items()
            if ".lora_" not in name
        }
        with no_loading_bars():
            self.module.save_pretrained(folder, state_dict=state)
        self.tokenizer.save_pretrained(folder)
