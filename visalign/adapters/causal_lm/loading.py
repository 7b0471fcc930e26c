# SPDX-License-Identifier: Apache-2.0
"""A language model and its tokenizer from a folder or a hub name, and checks that the two can be a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from visalign.adapters.model_folder import local_folder
from visalign.errors import UserError
from visalign.text import StoppingCriteria

VISION_LANGUAGE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Model types whose images are read."""


def load_causal_lm(
    folder_or_id: str | Path, *, dtype: torch.dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | ProcessorMixin]:
    """(model on the CPU, its tokenizer, or its processor if it sees) of a folder as `save_pretrained` writes
    it, or of `owner/name` on the hub; all weights get the dtype.
    """
    name = str(folder_or_id)
    folder = local_folder(folder_or_id, "holds config.json and the weights, as save_pretrained writes it,")
    if folder is not None and not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder} holds no config.json, so it is no transformers model. Give the folder that "
            "model.save_pretrained wrote; for a LoRA alone give its base model here and load() it after."
        )
    config: Any = from_pretrained(AutoConfig, name)
    if config.model_type in VISION_LANGUAGE:
        processor = _load_processor(name, config.model_type)
        seeing: Any = from_pretrained(AutoModelForImageTextToText, name, dtype=dtype)
        return seeing, processor
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"{name} is a {config.model_type}, which is no causal language model. Choose a model that "
            f"AutoModelForCausalLM loads, or one that sees: {', '.join(VISION_LANGUAGE)}."
        )
    model: Any = from_pretrained(AutoModelForCausalLM, name, dtype=dtype)
    tokenizer: Any = from_pretrained(AutoTokenizer, name)
    return model, tokenizer


def from_pretrained(kind: Any, name: str, **options: Any) -> Any:
    """Load a class of transformers by name; the error says what to correct."""
    try:
        return kind.from_pretrained(name, **options)
    except (OSError, ValueError, SafetensorError) as error:
        message = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{kind.__name__} cannot load {name} ({message}). Correct the path, or the name and the access "
            "to the hub; where there is none, fetch it elsewhere (`hf download NAME --local-dir FOLDER`) and "
            "give that folder."
        ) from error


def _load_processor(name: str, kind: str) -> ProcessorMixin:
    """The processor of a model that sees."""
    reason = ""
    try:
        # without its files this falls back to the tokenizer
        processor: Any = AutoProcessor.from_pretrained(name)
    except (OSError, ValueError) as error:
        processor, reason = None, f" ({error})"
    if not isinstance(processor, ProcessorMixin):
        raise UserError(
            f"{name} is a {kind} without its processor: preprocessor_config.json or processor_config.json is "
            f"missing or not complete{reason}. Save it there from the model it came from: "
            "AutoProcessor.from_pretrained(original).save_pretrained(folder)."
        )
    return processor


def end_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stopping: StoppingCriteria
) -> tuple[int, ...]:
    """Tokens that end a completion: those of `stopping`, or of generation config and tokenizer together; none
    is an error unless `stopping` says that this is meant.
    """
    if stopping.eos_ids is not None:
        return stopping.eos_ids
    ids: set[int] = set()
    sources: tuple[Any, ...] = (
        getattr(model.generation_config, "eos_token_id", None),
        tokenizer.eos_token_id,
    )
    for source in sources:
        ids |= set(source) if isinstance(source, list | tuple) else {source} if source is not None else set()
    if not ids:
        raise UserError(
            "Neither the tokenizer nor the model's generation config has an end-of-sequence token, so no "
            "completion would end by itself. Set tokenizer.eos_token, or pass StoppingCriteria(eos_ids=(…)); "
            "StoppingCriteria(eos_ids=()) says that completions end by stop strings and length alone."
        )
    return tuple(sorted(ids))


def pad_id(tokenizer: PreTrainedTokenizerBase, ends: tuple[int, ...]) -> int:
    """Return the id that fills gaps; a tokenizer without a pad token works, since weights mark padding."""
    pad: Any = tokenizer.pad_token_id
    return pad if pad is not None else ends[0] if ends else 0


def check_options(
    generate_batch: int, score_batch: int, max_prompt_tokens: int | None, long_prompts: str
) -> None:
    """Refuse sizes below 1 and unknown ways with long prompts."""
    sizes = {"generate_batch": generate_batch, "score_batch": score_batch}
    if max_prompt_tokens is not None:
        sizes["max_prompt_tokens"] = max_prompt_tokens
    for name, size in sizes.items():
        if size < 1:
            raise UserError(f"{name} is {size}; it must be at least 1.")
    if long_prompts not in ("refuse", "mask"):
        raise UserError(f'long_prompts is {long_prompts!r}; it must be "refuse" or "mask".')


def context_length(model: PreTrainedModel) -> int | None:
    """Tokens that prompt and completion may have together, or None where the model names no limit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def longest_prompt(context: int | None, requested: int | None) -> int | None:
    """Tokens of a prompt at most: as many as are wanted, and leave room in the context for a completion; None
    without a limit.
    """
    limits = [*(() if requested is None else (requested,)), *(() if context is None else (context - 1,))]
    return min(limits) if limits else None


def check_causal_lm(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a model and a tokenizer that cannot work together: another kind of model, or a tokenizer with
    more tokens than the model.
    """
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise UserError(
            f"The text policy got a {type(model).__name__}; it needs a transformers model with a language "
            "head. Load it with AutoModelForCausalLM.from_pretrained."
        )
    embedding: Any = model.get_input_embeddings()
    size = embedding.weight.shape[0]
    if len(tokenizer) > size:
        raise UserError(
            f"The tokenizer has {len(tokenizer)} tokens and the model {size}: ids from {size} on have no "
            "embedding. Use the tokenizer that belongs to the model, or call "
            "model.resize_token_embeddings(len(tokenizer)) first."
        )
