# SPDX-License-Identifier: Apache-2.0
"""From encoded prompts to a `TextRollout`: length limits, batches of completions, putting them together."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from visalign.errors import UserError
from visalign.text import Prompt, Sampling, StopReason, TextRollout, TokenSets, draw_seeds
from visalign.text.decoding import completion_text

from .generation import Completion
from .prompts import EncodedPrompt, EncodedPrompts, left_pad


@dataclass(frozen=True, kw_only=True)
class PromptBatch:
    """P prompts that are to be completed G times each; B = P·G samples, those of a prompt side by side."""

    prompts: Sequence[Prompt]
    encoded: EncodedPrompts
    group: Sequence[Hashable]  # P labels
    generations: int  # G
    seeds: Sequence[int]  # B
    after: Sequence[Sequence[int]] | None  # B lists of tokens that the completions begin with
    context: int | None  # Largest number of tokens of prompt and completion together
    longest: int | None  # Largest number of tokens of a prompt that is completed

    @classmethod
    def build(
        cls,
        policy: Any,
        prompts: Sequence[Prompt],
        encoded: EncodedPrompts,
        *,
        seeds: int | Sequence[int],
        num_generations: int = 1,
        group: Sequence[Hashable] | None = None,
        after: Sequence[Sequence[int]] | None = None,
        context: int | None,
    ) -> PromptBatch:
        """Check that the arguments of `generate` fit together, and the prompts' lengths by the policy's rules."""
        if isinstance(prompts, str) or not prompts:
            raise UserError(f"prompts is {prompts!r}; give a list of at least one prompt, [text, …].")
        count = len(prompts) * num_generations
        sized = {"seeds": (seeds, count), "group": (group, len(prompts)), "after": (after, count)}
        for name, (values, expected) in sized.items():
            if isinstance(values, Sequence) and len(values) != expected:
                raise UserError(f"{name} has {len(values)} entries for {len(prompts)} prompts; give {expected}.")
        limits = (policy.max_prompt_tokens, None if context is None else context - 1)
        longest = min((limit for limit in limits if limit is not None), default=None)
        long = [index for index, ids in enumerate(encoded.ids) if longest is not None and len(ids) > longest]
        if long and policy.long_prompts == "refuse":
            raise UserError(
                f"Prompt {long[0]} has {len(encoded.ids[long[0]])} tokens, and at most {longest} are allowed with its "
                f"images (the model's context is {context}); {len(long)} of {len(prompts)} have more. Shorten or drop "
                'them, or set long_prompts="mask".'
            )
        return cls(
            prompts=prompts,
            encoded=encoded,
            group=list(range(len(prompts))) if group is None else list(group),
            generations=num_generations,
            seeds=draw_seeds(seeds, count),
            after=after,
            context=context,
            longest=longest,
        )

    @property
    def prompt_index(self) -> list[int]:
        """Prompt of each of the B samples."""
        return [prompt for prompt in range(len(self.prompts)) for _ in range(self.generations)]

    def begun(self, sample: int) -> list[int]:
        return [] if self.after is None else list(self.after[sample])

    def prompt_of(self, sample: int) -> EncodedPrompt:
        """Return a sample's prompt with the tokens that its completion starts with."""
        return self.encoded.prompt(sample // self.generations, self.begun(sample))

    def fits(self, prompt: int) -> bool:
        """Return False for a prompt that is too long to be completed."""
        return self.longest is None or len(self.encoded.ids[prompt]) <= self.longest

    def rooms(self, max_new_tokens: int) -> dict[int, int]:
        """Return sample -> tokens that may be drawn, of the samples to be completed."""
        rooms = {}
        for sample, prompt in enumerate(self.prompt_index):
            left = max_new_tokens if self.context is None else self.context - len(self.encoded.ids[prompt])
            room = min(max_new_tokens, left) - len(self.begun(sample))
            if room > 0 and self.fits(prompt):
                rooms[sample] = room
        return rooms


def assemble_rollout(
    batch: PromptBatch,
    completions: Mapping[int, Completion],
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    pad: int,
) -> TextRollout:
    """Put completions, by sample, together; samples without one stay as they begin."""
    source = batch.prompt_index
    fits = [batch.fits(prompt) for prompt in range(len(batch.prompts))]
    # only the first token of an overlong prompt is kept: nothing is computed from it
    ids = [tokens if fit else tokens[:1] for tokens, fit in zip(batch.encoded.ids, fits, strict=True)]
    prompt_ids, prompt_mask = left_pad(ids, pad)
    begun = [batch.begun(sample) for sample in range(len(source))]
    completion_ids = [first + (completions[n].ids if n in completions else []) for n, first in enumerate(begun)]
    length = max(1, *map(len, completion_ids))
    padded = torch.full((len(source), length), pad, dtype=torch.int64)
    numbers = {name: torch.zeros(len(source), length) for name in ("log_prob", "full_log_prob", "entropy")}
    loss_mask = torch.zeros(len(source), length)
    reasons: list[StopReason] = ["length" if fits[prompt] else "prompt too long" for prompt in source]
    token_sets: list[list[Tensor]] = [[] for _ in source]
    for sample, tokens in enumerate(completion_ids):
        padded[sample, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        if (completion := completions.get(sample)) is not None:
            drawn = slice(len(begun[sample]), len(tokens))
            loss_mask[sample, drawn], reasons[sample] = 1, completion.reason
            for name, values in numbers.items():
                values[sample, drawn] = getattr(completion, name)
            token_sets[sample] = [torch.zeros(0, dtype=torch.int32)] * drawn.start + completion.kept
    images = batch.encoded.images
    return TextRollout(
        prompt_ids=prompt_ids[source],
        prompt_mask=prompt_mask[source].float(),
        completion_ids=padded,
        loss_mask=loss_mask,
        log_prob=numbers["log_prob"],
        full_log_prob=numbers["full_log_prob"],
        entropy=numbers["entropy"],
        text=[
            completion_text(tokenizer, tokens, ended=reason == "eos")
            for tokens, reason in zip(completion_ids, reasons, strict=True)
        ],
        stop_reason=reasons,
        group=[batch.group[prompt] for prompt in source],
        prompt=[batch.prompts[prompt] for prompt in source],
        seed=list(batch.seeds),
        sampling=sampling,
        kept=TokenSets.from_lists(token_sets, length) if sampling.truncates else None,
        images=None if images is None else [images[prompt] for prompt in source],
    )
