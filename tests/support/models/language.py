# SPDX-License-Identifier: Apache-2.0
"""A random language model of a few thousand numbers and a tokenizer of letters, built in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,:;?!+-*/=<>()\n"
SPECIAL = ("<pad>", "<end>", "<user>", "<assistant>", "<system>")
TEMPLATE = (
    "{% for message in messages %}{% if message.role not in ['user', 'assistant', 'system'] %}{{ "
    "raise_exception('role ' + message.role) }}{% endif %}<{{ message.role }}>{{ message.content }}<end>{% endfor "
    "%}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_tokenizer(*, pad: bool = True, eos: bool = True, template: Any = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per letter, and five special ones; what a library's tokenizer may lack can be left out."""
    vocab = {token: number for number, token in enumerate((*SPECIAL, *LETTERS, "<unk>"))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[attr-defined]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[attr-defined]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>" if pad else None,
        eos_token="<end>" if eos else None,
    )
    fast.chat_template = template
    return fast


def tiny_config(**changes: Any) -> Qwen3Config:
    """Two layers of width 32, sharp enough not to be uniform."""
    settings: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
        "initializer_range": 0.3, "tie_word_embeddings": True, "eos_token_id": 1, "pad_token_id": 0,
        "bos_token_id": None,
    }  # fmt: skip
    return Qwen3Config(**{**settings, **changes})


def tiny_model(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A Qwen3 with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(tiny_config(**changes)).eval()


def save_tiny_language_model(folder: Path, **changes: Any) -> Path:
    """Model and tokenizer in a folder, as any published one."""
    tiny_model(**changes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
