# SPDX-License-Identifier: Apache-2.0
"""Build a `TextRollout` from a server's completions, and rescore it with the policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from visalign.adapters.causal_lm.batches import PromptBatch
from visalign.adapters.causal_lm.generation import left_pad
from visalign.remote import ServerError
from visalign.text import (
    Sampling,
    StoppingCriteria,
    StopReason,
    TextPolicy,
    TextRollout,
    TokenOutput,
    TokenSets,
)

from .completions import Completion, CompletionRequest, find_end


def server_rollout(
    completed: Mapping[int, tuple[CompletionRequest, Completion]],
    batch: PromptBatch,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sampling: Sampling,
    stopping: StoppingCriteria,
    ends: Sequence[int],
    longest: int | None,
) -> TextRollout:
    """Assemble B samples from completions by sample index.

    A missing sample had a prompt of more than `longest` tokens, or no room for one. Unknown numbers are NaN.
    """
    prompt_index = [prompt for prompt in range(len(batch.ids)) for _ in range(batch.generations)]
    count = len(prompt_index)
    fits = [longest is None or len(ids) <= longest for ids in batch.ids]
    sampled, sampled_reasons = _cut(completed, count, tokenizer, stopping=stopping, ends=ends)
    reasons: list[StopReason] = [
        "length" if fits[prompt_index[n]] and n not in completed else reason
        for n, reason in enumerate(sampled_reasons)
    ]
    completions = [batch.begun(sample) + ids for sample, ids in enumerate(sampled)]
    pad: Any = tokenizer.pad_token_id
    filler = pad if pad is not None else ends[0] if ends else 0
    length = max(1, *map(len, completions))
    completion_ids = torch.full((count, length), filler, dtype=torch.int64)
    for row, ids in zip(completion_ids, completions, strict=True):
        row[: len(ids)] = torch.tensor(ids, dtype=torch.int64)
    spans = [slice(len(ids) - len(new), len(ids)) for ids, new in zip(completions, sampled, strict=True)]
    numbers, token_sets = _numbers(completed, spans, length, truncates=sampling.truncates)
    # only the first token of an overlong prompt is kept: nothing is computed from it
    prompt_ids, prompt_mask = left_pad(
        [ids if fit else ids[:1] for ids, fit in zip(batch.ids, fits, strict=True)], filler
    )
    return TextRollout(
        prompt_ids=prompt_ids[prompt_index],
        prompt_mask=prompt_mask[prompt_index].float(),
        completion_ids=completion_ids,
        loss_mask=numbers["loss_mask"],
        log_prob=numbers["log_prob"],
        full_log_prob=numbers["full_log_prob"],
        entropy=numbers["entropy"],
        text=[decode(tokenizer, ids, special=False) for ids in completions],
        stop_reason=reasons,
        group=[batch.group[prompt] for prompt in prompt_index],
        prompt=[batch.prompts[prompt] for prompt in prompt_index],
        seed=list(batch.seeds),
        sampling=sampling,
        kept=token_sets,
    )


def _cut(
    completed: Mapping[int, tuple[CompletionRequest, Completion]],
    count: int,
    tokenizer: PreTrainedTokenizerBase,
    *,
    stopping: StoppingCriteria,
    ends: Sequence[int],
) -> tuple[list[list[int]], list[StopReason]]:
    """Cut each of B completions at its end; return ids and stop reasons."""
    completions: list[list[int]] = [[] for _ in range(count)]
    reasons: list[StopReason] = ["prompt too long"] * count
    for sample, (request, completion) in completed.items():
        length, reasons[sample] = find_end(
            completion,
            request,
            ends=ends,
            strings=stopping.strings,
            decode=lambda ids: decode(tokenizer, ids, special=True),
        )
        completions[sample] = completion.ids[:length]
    return completions, reasons


def _numbers(
    completed: Mapping[int, tuple[CompletionRequest, Completion]],
    spans: Sequence[slice],
    length: int,
    *,
    truncates: bool,
) -> tuple[dict[str, Tensor], TokenSets | None]:
    """Return the rollout's number tensors [B, T], NaN where unknown, and its token sets."""
    names = ("loss_mask", "log_prob", "full_log_prob", "entropy")
    numbers = {name: torch.zeros(len(spans), length) for name in names}
    sets: list[list[Tensor]] = [[] for _ in spans]
    for sample, (_, completion) in completed.items():
        span = spans[sample]
        n = span.stop - span.start
        log_prob = torch.tensor(completion.log_prob[:n])
        numbers["loss_mask"][sample, span] = 1
        numbers["log_prob"][sample, span] = log_prob
        numbers["full_log_prob"][sample, span] = math.nan if truncates else log_prob
        numbers["entropy"][sample, span] = torch.tensor(completion.entropy()[:n]) if truncates else math.nan
        prefix = [torch.zeros(0, dtype=torch.int64)] * span.start
        sets[sample] = prefix + [torch.tensor(list(token_set)) for token_set in completion.sets[:n]]
    return numbers, TokenSets.from_lists(sets, length) if truncates else None


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int], *, special: bool) -> str:
    """Decode ids without cleaning up spaces; `special` keeps special tokens."""
    text: Any = tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
    return text


@dataclass(frozen=True, kw_only=True)
class Rescored:
    """Server rollout with the policy's own log-probs; all on the CPU."""

    rollout: TextRollout
    """`log_prob` is the server's (μ); `entropy` is the policy's."""
    output: TokenOutput
    """Policy's log-probs (π_old), entropies, and values if it has a value head; no gradient."""
    mean_gap: float
    """Mean |log π_old − log μ| per token, nats."""
    largest_gap: float
    """Largest |log π_old − log μ|, nats."""


@torch.no_grad()
def rescored(rollout: TextRollout, policy: TextPolicy, *, allowed_gap: float | None = 0.5) -> Rescored:
    """Compute the policy's log-probs of a server's rollout.

    Args:
        rollout: B samples from a server.
        policy: Policy with the weights that the update starts from.
        allowed_gap: Largest allowed mean |log π_old − log μ| per token. Kernels and precision cause a few
            hundredths of a nat; larger gaps have other causes. None allows any.

    Returns:
        Train on `r.rollout.trajectories(reward, old_log_prob=r.output.log_prob, value=r.output.value)`, which
        puts the server's log-probs into `rollout_log_prob`.

    Raises:
        ServerError: The gap is larger than allowed.
    """
    rescore = policy.log_probs(rollout)
    output = TokenOutput(
        log_prob=rescore.log_prob.cpu(),
        entropy=rescore.entropy.cpu(),
        value=None if rescore.value is None else rescore.value.cpu(),
    )
    mask = rollout.loss_mask != 0
    gaps = torch.where(mask, (output.log_prob - rollout.log_prob).abs().double(), 0.0)
    mean = float(gaps.sum() / mask.sum().clamp(min=1))
    largest = float(gaps.max())
    if allowed_gap is not None and not mean <= allowed_gap:
        sample, token = divmod(int(gaps.argmax()), gaps.shape[1])
        raise ServerError(
            f"The server's log-probs differ by {mean:.3g} nats from the policy's on average; {allowed_gap} "
            f"is allowed (most at sample {sample}, token {token}: "
            f"{float(rollout.log_prob[sample, token]):.4g} and {float(output.log_prob[sample, token]):.4g}). "
            "The server may have other weights (call sync after each update), serve another model, or give "
            "log-probs of other logits than it samples from (logprobs_mode)."
        )
    return Rescored(
        rollout=replace(rollout, entropy=output.entropy), output=output, mean_gap=mean, largest_gap=largest
    )
