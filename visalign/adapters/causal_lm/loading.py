# SPDX-License-Identifier: Apache-2.0
"""A language model and its tokenizer from a folder or a hub name, and checks that the two can be a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
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
from visalign.data.sets.tables import listed
from visalign.errors import UserError
from visalign.hub import go_offline_if_unreachable, hub_message
from visalign.model_files import LOADING_ERRORS
from visalign.text import StoppingCriteria
from visalign.text.chat import PromptEncoder

CONTENT = "holds config.json and the weights, as save_pretrained writes it,"
VISION_LANGUAGE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # model types whose images are read


def load_causal_lm(
    folder_or_id: str | Path, *, dtype: torch.dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | ProcessorMixin]:
    """Load a model on the CPU, and its tokenizer, or its processor if it reads images, from a folder or the hub."""
    name, folder = str(folder_or_id), local_folder(folder_or_id, CONTENT)
    if folder is not None and not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder} holds no config.json. Give the folder that model.save_pretrained wrote; of a LoRA its base "
            "model, and the LoRA as model.lora_path."
        )
    config: Any = from_pretrained(AutoConfig, name)
    if config.model_type in VISION_LANGUAGE:
        processor = from_pretrained(AutoProcessor, name)
        if not isinstance(processor, ProcessorMixin):  # without its files transformers gives the tokenizer
            raise UserError(
                f"{name} is a {config.model_type} without its processor (preprocessor_config.json). Save it there: "
                "AutoProcessor.from_pretrained(original).save_pretrained(folder)."
            )
        return load_whole(AutoModelForImageTextToText, name, dtype), processor
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"{name} is a {config.model_type}, and no causal language model. Choose a model that AutoModelForCausalLM "
            f"loads, or one that reads images: {', '.join(VISION_LANGUAGE)}."
        )
    return load_whole(AutoModelForCausalLM, name, dtype), from_pretrained(AutoTokenizer, name)


def load_whole(kind: Any, name: str, dtype: torch.dtype) -> Any:
    """Load a model all of whose weights are in its files; transformers would draw others at random."""
    model, info = from_pretrained(kind, name, dtype=dtype, output_loading_info=True)
    if absent := sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}):
        raise UserError(
            f"The files of {name} lack weights of its config.json, or have them in another shape: {listed(absent)}. "
            "Copy all files of one model."
        )
    return model


def from_pretrained(kind: Any, name: str, **options: Any) -> Any:
    """Load a class of transformers by name, never with code of its folder; the error says what to correct."""
    is_remote = local_folder(name, CONTENT) is None
    if is_remote:
        go_offline_if_unreachable()
    try:
        return kind.from_pretrained(name, trust_remote_code=False, **options)
    except LOADING_ERRORS as error:
        if is_remote and isinstance(error, OSError):
            raise UserError(f"There is no model folder {name}. {hub_message(name, 'model', error)}") from error
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{kind.__name__} cannot load {name} ({message}). Copy its folder again.") from error


def end_tokens(model: PreTrainedModel, prompts: PromptEncoder, stopping: StoppingCriteria) -> tuple[int, ...]:
    """Return the tokens that end a completion: of `stopping`, or of generation config, tokenizer and chat template."""
    if stopping.eos_ids is not None:
        return stopping.eos_ids
    configured: Any = getattr(model.generation_config, "eos_token_id", None)  # one id, or a list
    configured = configured if isinstance(configured, list | tuple) else [configured]
    end_of_text: Any = prompts.tokenizer.eos_token_id
    ids = {*configured, end_of_text, prompts.turn_end(configured)} - {None}
    if not ids:
        raise UserError(
            "Neither the tokenizer nor the generation config has an end-of-sequence token. Set it, or pass "
            "StoppingCriteria(eos_ids=(…)); with () completions end by stop strings and length alone."
        )
    return tuple(sorted(ids))


def pad_id(tokenizer: PreTrainedTokenizerBase, ends: tuple[int, ...]) -> int:
    """Return the id that fills gaps; a tokenizer without a pad token works, since weights mark padding."""
    pad: Any = tokenizer.pad_token_id
    return pad if pad is not None else ends[0] if ends else 0


def context_length(model: PreTrainedModel) -> int | None:
    """Return the largest number of tokens of prompt and completion together; None: the model names no limit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def check_causal_lm(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a model without a language head, and a tokenizer with more tokens than the model."""
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise UserError(
            f"The text policy got a {type(model).__name__}; it needs a transformers model with a language head. Load "
            "it with AutoModelForCausalLM.from_pretrained."
        )
    embedding: Any = model.get_input_embeddings()
    if len(tokenizer) > (size := embedding.weight.shape[0]):
        raise UserError(
            f"The tokenizer has {len(tokenizer)} tokens and the model {size}. Use the tokenizer that belongs to the "
            "model, or call model.resize_token_embeddings(len(tokenizer)) first."
        )
