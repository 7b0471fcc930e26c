# SPDX-License-Identifier: Apache-2.0
"""Reward model: a transformers sequence classifier that scores a prompt with its completion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification

from visalign.core.preference.uncertainty import soft_clamp
from visalign.errors import UserError
from visalign.interfaces import Metadata, Prompt, Scores
from visalign.rewards.base.contract import RewardError, check_counts
from visalign.text.chat import PromptEncoder

from .classifier import batches_by_length, load_classifier, load_tokenizer, longest_text, spelled_out
from .contract import TextVerdict, read_text_request, text_scores

MEAN_AND_STD = ("mean", "log_std")
"""Names of the outputs (`config.id2label`) of a model that gives a mean and a standard deviation."""
MEMBER = "member_"  # Beginning of the names of the outputs of an ensemble on one network


def read_logits(logits: Tensor, names: Sequence[str]) -> tuple[Tensor, Tensor | None]:
    """Read scores [M] and their standard deviations, None without, from the outputs [M, n] of the given names."""
    if tuple(names) == MEAN_AND_STD:
        return logits[:, 0], soft_clamp(logits[:, 1]).exp()
    return (logits[:, 0], None) if len(names) == 1 else (logits.mean(1), logits.std(1))


def answered_tokens(tokenizer: Any, encoder: PromptEncoder, prompt: Prompt, completion: str) -> list[int]:
    """Tokenize a prompt and its completion as the assistant's message, or without a chat template their text."""
    if tokenizer.chat_template:
        text = encoder.render_answered(prompt, completion)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not isinstance(prompt, str):
        raise UserError("a prompt is a conversation, and the tokenizer has no chat template; set one, or give texts.")
    return list(tokenizer(prompt + completion)["input_ids"])


class RewardModel:
    """Logit of a trained reward model for a completion of its prompt, float32.

    Prompt and completion (as the assistant's message) go through the tokenizer's chat template; without one they are
    concatenated. Texts longer than the model's limit are invalid, not cut: the lost part could be what matters. So are
    completions that spell out a special token, with which a policy could forge turns of the conversation. Models of
    the job text_reward with a mean and a deviation, or with several heads, give a standard deviation too.

    Args:
        model: folder or hub name of a sequence classification model with one label, or the module.
        tokenizer: folder, hub name or object; that of the model when None.
        precision: of the weights: "fp32", "bf16", "fp16", or "auto": "bf16" on a GPU, else "fp32".
        max_length: tokens of the longest text; the smaller one of the model's and tokenizer's limits when None.
    """

    range = (-math.inf, math.inf)
    higher_is_better = True
    unit = "logit"

    def __init__(
        self,
        model: str | Path | torch.nn.Module,
        *,
        tokenizer: Any = None,
        device: str | torch.device = "cpu",
        precision: str = "auto",
        batch_size: int = 16,
        max_length: int | None = None,
        name: str = "reward_model",
    ) -> None:
        check_counts(name, batch_size=batch_size, max_length=max_length)
        self.name, self.device, self.batch_size = name, torch.device(device), batch_size
        self.model = load_classifier(name, model, AutoModelForSequenceClassification, precision, self.device)
        self.tokenizer: Any = load_tokenizer(name, model, tokenizer)
        labels, pad = self.model.config.num_labels, self.tokenizer.pad_token_id
        self.outputs = [str(self.model.config.id2label[index]) for index in range(labels)]
        has_known_names = tuple(self.outputs) == MEAN_AND_STD or all(n.startswith(MEMBER) for n in self.outputs)
        if (labels != 1 and not has_known_names) or (pad is None and batch_size > 1):
            raise RewardError(
                f"{name}: the model has {labels} outputs, the pad token is {pad}; needed are num_labels=1, and one."
            )
        size = self.model.get_input_embeddings().num_embeddings
        if (largest := max(self.tokenizer.get_vocab().values())) >= size:
            raise RewardError(
                f"{name}: the tokenizer has tokens up to {largest}, the model {size} embeddings. Give its own."
            )
        if pad is not None:
            self.model.config.pad_token_id = pad  # the head reads the last token that is not this one
        self._prompts = PromptEncoder(self.tokenizer)
        self.max_length = longest_text(self.model, self.tokenizer, max_length)

    def score(self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None) -> Scores:
        request = read_text_request(self.name, completions, prompts, metadata)
        verdicts = [TextVerdict()] * len(request)
        deviation = [math.nan] * len(request)
        encoded: dict[int, list[int]] = {}
        for row, (prompt, completion) in enumerate(zip(request.prompts, request.completions, strict=True)):
            reason = spelled_out(self.tokenizer, completion)
            encoded[row] = self._encode(prompt, completion) if reason is None else []
            if reason is None and not 1 <= (length := len(encoded[row])) <= self.max_length:
                reason = f"prompt and completion have {length} tokens; the model reads 1 to {self.max_length}"
            if reason is not None:
                verdicts[row] = TextVerdict(reason=reason)
                del encoded[row]
        for rows in batches_by_length({row: len(ids) for row, ids in encoded.items()}, self.batch_size):
            for row, value, std in zip(rows, *self._forward([encoded[row] for row in rows]), strict=True):
                deviation[row] = std if math.isfinite(value) else math.nan
                reason = None if math.isfinite(value) else f"the reward model gave {value} for it"
                verdicts[row] = TextVerdict(value=value, reason=reason)
        scores = text_scores(verdicts, self.unit)
        return scores if len(self.outputs) == 1 else replace(scores, std=torch.tensor(deviation))

    def _encode(self, prompt: Prompt, completion: str) -> list[int]:
        try:
            return answered_tokens(self.tokenizer, self._prompts, prompt, completion)
        except UserError as error:
            raise RewardError(f"{self.name}: {error}") from error

    @torch.no_grad()
    def _forward(self, batch: list[list[int]]) -> tuple[list[float], list[float]]:
        """Compute scores and standard deviations (NaN without) of texts, padded on the right to the longest."""
        rows = [torch.tensor(tokens, device=self.device) for tokens in batch]
        ids = pad_sequence(rows, batch_first=True, padding_value=self.tokenizer.pad_token_id or 0)
        # a text may spell the pad token, so the mask is that of the lengths
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        logits = self.model(input_ids=ids, attention_mask=mask).logits.float()
        value, std = read_logits(logits, self.outputs)
        return value.tolist(), [math.nan] * len(batch) if std is None else std.tolist()
