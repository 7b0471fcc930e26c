# SPDX-License-Identifier: Apache-2.0
"""From a server's completions to a `TextRollout`, and from there to what the policy says of it."""

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

from .completions import Completion, CompletionRequest, first_end


def server_rollout(
    found: Mapping[int, tuple[CompletionRequest, Completion]],
    batch: PromptBatch,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sampling: Sampling,
    stopping: StoppingCriteria,
    ends: Sequence[int],
    longest: int | None,
) -> TextRollout:
    """Put B completions together: sample -> its request and completion; samples that are not there had a
    prompt of more than `longest` tokens, or no room left. Unknown numbers are NaN.
    """
    source = [place for place in range(len(batch.ids)) for _ in range(batch.generations)]
    count = len(source)
    fits = [longest is None or len(ids) <= longest for ids in batch.ids]
    drawn, drawn_reasons = _cut(found, count, tokenizer, stopping=stopping, ends=ends)
    reasons: list[StopReason] = [
        "length" if fits[source[n]] and n not in found else reason for n, reason in enumerate(drawn_reasons)
    ]
    completions = [batch.begun(sample) + ids for sample, ids in enumerate(drawn)]
    pad: Any = tokenizer.pad_token_id
    filler = pad if pad is not None else ends[0] if ends else 0
    length = max(1, *map(len, completions))
    completion_ids = torch.full((count, length), filler, dtype=torch.int64)
    for row, ids in zip(completion_ids, completions, strict=True):
        row[: len(ids)] = torch.tensor(ids, dtype=torch.int64)
    stretches = [slice(len(ids) - len(new), len(ids)) for ids, new in zip(completions, drawn, strict=True)]
    numbers, kept = _numbers(found, stretches, length, truncates=sampling.truncates)
    # a prompt that is too long keeps its first token alone: nothing is ever computed from it
    prompt_ids, prompt_mask = left_pad(
        [ids if fit else ids[:1] for ids, fit in zip(batch.ids, fits, strict=True)], filler
    )
    return TextRollout(
        prompt_ids=prompt_ids[source],
        prompt_mask=prompt_mask[source].float(),
        completion_ids=completion_ids,
        loss_mask=numbers["loss_mask"],
        log_prob=numbers["log_prob"],
        full_log_prob=numbers["full_log_prob"],
        entropy=numbers["entropy"],
        text=[decode(tokenizer, ids, special=False) for ids in completions],
        stop_reason=reasons,
        group=[batch.group[place] for place in source],
        prompt=[batch.prompts[place] for place in source],
        seed=list(batch.seeds),
        sampling=sampling,
        kept=kept,
    )


def _cut(
    found: Mapping[int, tuple[CompletionRequest, Completion]],
    count: int,
    tokenizer: PreTrainedTokenizerBase,
    *,
    stopping: StoppingCriteria,
    ends: Sequence[int],
) -> tuple[list[list[int]], list[StopReason]]:
    """Ids and stop reason of each of B completions."""
    completions: list[list[int]] = [[] for _ in range(count)]
    reasons: list[StopReason] = ["prompt too long"] * count
    for sample, (request, completion) in found.items():
        length, reasons[sample] = first_end(
            completion,
            request,
            ends=ends,
            strings=stopping.strings,
            decode=lambda ids: decode(tokenizer, ids, special=True),
        )
        completions[sample] = completion.ids[:length]
    return completions, reasons


def _numbers(
    found: Mapping[int, tuple[CompletionRequest, Completion]],
    stretches: Sequence[slice],
    length: int,
    *,
    truncates: bool,
) -> tuple[dict[str, Tensor], TokenSets | None]:
    """The rollout's tensors [B, T] of numbers, NaN where the server does not say, and its token sets."""
    names = ("loss_mask", "log_prob", "full_log_prob", "entropy")
    numbers = {name: torch.zeros(len(stretches), length) for name in names}
    sets: list[list[Tensor]] = [[] for _ in stretches]
    for sample, (_, completion) in found.items():
        at = stretches[sample]
        n = at.stop - at.start
        log_prob = torch.tensor(completion.log_prob[:n])
        numbers["loss_mask"][sample, at] = 1
        numbers["log_prob"][sample, at] = log_prob
        numbers["full_log_prob"][sample, at] = math.nan if truncates else log_prob
        numbers["entropy"][sample, at] = torch.tensor(completion.entropy()[:n]) if truncates else math.nan
        nothing = [torch.zeros(0, dtype=torch.int64)] * at.start
        sets[sample] = nothing + [torch.tensor(list(held)) for held in completion.sets[:n]]
    return numbers, TokenSets.from_lists(sets, length) if truncates else None


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int], *, special: bool) -> str:
    """Text of a completion, blanks as they are; `special` shows special tokens."""
    text: Any = tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
    return text


@dataclass(frozen=True, kw_only=True)
class Rescored:
    """A server's rollout with what the policy says of it; all on the CPU."""

    rollout: TextRollout
    """`log_prob` is the server's still (μ); `entropy` is the policy's."""
    output: TokenOutput
    """The policy's log-probs (π_old), entropies, and values where it has a value head; no gradient."""
    mean_gap: float
    """Mean over the tokens of |log π_old − log μ|, nats."""
    largest_gap: float
    """Its largest value."""


@torch.no_grad()
def rescored(rollout: TextRollout, policy: TextPolicy, *, allowed_gap: float | None = 0.5) -> Rescored:
    """What the policy says of a rollout that a server drew.

    Args:
        rollout: B samples of a server.
        policy: with the weights that the update starts from.
        allowed_gap: a mean |log π_old − log μ| per token above it is an error: what kernels and precision do
            is some hundredths of a nat, and what is far above has another cause. None allows all.

    Returns:
        To be trained on with
        `r.rollout.trajectories(reward, old_log_prob=r.output.log_prob, value=r.output.value)`, which puts the
        server's log-probs into `rollout_log_prob`.

    Raises:
        ServerError: the two lie further apart.
    """
    own = policy.log_probs(rollout)
    output = TokenOutput(
        log_prob=own.log_prob.cpu(),
        entropy=own.entropy.cpu(),
        value=None if own.value is None else own.value.cpu(),
    )
    there = rollout.loss_mask != 0
    gaps = torch.where(there, (output.log_prob - rollout.log_prob).abs().double(), 0.0)
    mean = float(gaps.sum() / there.sum().clamp(min=1))
    largest = float(gaps.max())
    if allowed_gap is not None and not mean <= allowed_gap:
        sample, token = divmod(int(gaps.argmax()), gaps.shape[1])
        raise ServerError(
            f"The server's log-probs lie {mean:.3g} nats from the policy's on average, and {allowed_gap} are "
            f"allowed (most at sample {sample}, token {token}: {float(rollout.log_prob[sample, token]):.4g} "
            f"against {float(output.log_prob[sample, token]):.4g}). The server may hold other weights (call "
            "sync after each update), serve another model, or give log-probs of other logits than it draws "
            "from (logprobs_mode)."
        )
    return Rescored(
        rollout=replace(rollout, entropy=output.entropy), output=output, mean_gap=mean, largest_gap=largest
    )
