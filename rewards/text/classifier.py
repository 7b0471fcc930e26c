# SPDX-License-Identifier: Apache-2.0
"""Shared code of rewards on transformers text classifiers: loading, limits, special tokens in texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from visalign.hub import go_offline_if_unreachable
from visalign.model_files import LOADING_ERRORS
from visalign.rewards.base.contract import RewardError
from visalign.rewards.weights.checkpoint_files import dtype_of, precision_on, quiet_loading

UNBOUNDED = 10**9  # Tokenizers without a limit give a huge number as model_max_length


def load_classifier(name: str, model: str | Path | torch.nn.Module, loader: Any, precision: str, device: Any) -> Any:
    """Load the classifier (folder, hub name or module) in evaluation mode, by a class AutoModelFor…Classification."""
    dtype = dtype_of(precision_on(device, precision), f"{name}: ")
    if isinstance(model, torch.nn.Module):
        return model.to(device, dtype).eval()
    if not Path(model).exists():
        go_offline_if_unreachable()
    try:
        with quiet_loading():
            options = {"dtype": dtype, "output_loading_info": True, "trust_remote_code": False}
            loaded, report = loader.from_pretrained(str(model), **options)
    except LOADING_ERRORS as error:
        kind = loader.__name__.removeprefix("AutoModelFor").removesuffix("Classification").lower()
        raise RewardError(
            f"{name}: {model} cannot be loaded as a {kind} classifier ({error}). Give a folder or hub id."
        ) from error
    if absent := sorted(report["missing_keys"]):
        raise RewardError(
            f"{name}: {model} has no weights for {', '.join(absent[:3])}. Give a reward model with its head."
        )
    return loaded.to(device, dtype).eval()


def load_tokenizer(name: str, model: str | Path | torch.nn.Module, tokenizer: Any) -> Any:
    """Load the tokenizer (folder, hub name or object); that of the model's folder when None."""
    source = model if tokenizer is None else tokenizer
    if isinstance(source, torch.nn.Module):
        raise ValueError(f"{name}: a module has no tokenizer; give tokenizer=.")
    if not isinstance(source, str | Path):
        return source
    try:
        return AutoTokenizer.from_pretrained(str(source), trust_remote_code=False)
    except LOADING_ERRORS as error:
        raise RewardError(f"{name}: no tokenizer can be loaded from {source} ({error}). Give tokenizer=.") from error


def longest_text(model: Any, tokenizer: Any, max_length: int | None) -> int:
    """Smallest of the limits in tokens: the model's, the tokenizer's and `max_length`."""
    limits = (max_length, getattr(model.config, "max_position_embeddings", None), tokenizer.model_max_length)
    return int(min(limit for limit in (*limits, UNBOUNDED) if limit is not None and limit > 0))


def spelled_out(tokenizer: Any, completion: str) -> str | None:
    """Reason to refuse a completion that spells out a special token, with which it could forge turns; else None."""
    if any("\ud800" <= sign <= "\udfff" for sign in completion):
        return "the completion holds half of a surrogate pair"
    forged = next((token for token in tokenizer.all_special_tokens if token and token in completion), None)
    return None if forged is None else f"the completion spells out the special token {forged!r}"


def batches_by_length(length_of: Mapping[int, int], batch_size: int) -> Iterator[list[int]]:
    """Yield batches of rows, shortest first, so that little is padded."""
    order = sorted(length_of, key=length_of.__getitem__)
    yield from (order[start : start + batch_size] for start in range(0, len(order), batch_size))
