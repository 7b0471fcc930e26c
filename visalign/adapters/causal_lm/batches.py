# SPDX-License-Identifier: Apache-2.0
"""From encoded prompts to a `TextRollout`: length limits, batches of completions, putting them together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from visalign.errors import UserError
from visalign.text import (
    Prompt,
    Sampling,
    StoppingCriteria,
    StopReason,
    TextRollout,
    TokenSets,
    sample_uniforms,
)
from visalign.vision.images import PatchedImage

from .generation import Completions, Ending, generate_completions
from .network import CausalNetwork
from .prompts import EncodedPrompt, left_pad


@dataclass(frozen=True, kw_only=True)
class PromptBatch:
    """P prompts that are to be completed G times each."""

    prompts: Sequence[Prompt]
    ids: Sequence[Sequence[int]]
    """P lists of tokens."""
    group: Sequence[Hashable]
    """P labels."""
    generations: int
    """G."""
    seeds: Sequence[int]
    """P·G."""
    encoded_images: Sequence[Sequence[PatchedImage]] | None = None
    """P lists; None without images."""
    images: Sequence[Sequence[Any]] | None = None
    """The images as they were given."""
    after: Sequence[Sequence[int]] | None = None
    """P·G lists of tokens that the completions begin with."""

    def begun(self, sample: int) -> list[int]:
        """Return the tokens that a completion starts with."""
        return [] if self.after is None else list(self.after[sample])

    def encoded(self) -> list[EncodedPrompt]:
        """P prompts as the network reads them."""
        image_lists = [()] * len(self.ids) if self.encoded_images is None else self.encoded_images
        return [EncodedPrompt(tuple(ids), tuple(row)) for ids, row in zip(self.ids, image_lists, strict=True)]


def check_counts(
    prompts: Sequence[Prompt],
    generations: int,
    seeds: int | Sequence[int],
    group: Sequence[Hashable] | None,
    after: Sequence[Sequence[int]] | None = None,
) -> int:
    """B = P·G, after a look at what must fit together."""
    if isinstance(prompts, str) or not prompts:
        raise UserError(f"prompts is {prompts!r}; give a list of at least one prompt, [text, …].")
    if generations < 1:
        raise UserError(f"num_generations is {generations}; it must be at least 1.")
    count = len(prompts) * generations
    if not isinstance(seeds, int) and len(seeds) != count:
        raise UserError(
            f"seeds has {len(seeds)} entries for {len(prompts)} prompts × {generations} generations, "
            f"{count} samples. Give one per sample, or one integer for the call."
        )
    if group is not None and len(group) != len(prompts):
        raise UserError(f"group has {len(group)} labels for {len(prompts)} prompts; give one per prompt.")
    if after is not None and len(after) != count:
        raise UserError(f"after has {len(after)} lists of tokens for {count} samples; give one per sample.")
    return count


def check_lengths(
    ids: Sequence[Sequence[int]],
    longest: int | None,
    context: int | None,
    encoded_images: Sequence[Sequence[PatchedImage]] | None = None,
) -> None:
    """Refuse prompts of more than `longest` tokens, naming the first one; the model's context and the
    images are for the message.
    """
    long = [index for index, tokens in enumerate(ids) if longest is not None and len(tokens) > longest]
    if long:
        image_tokens = [] if encoded_images is None else [image.tokens for image in encoded_images[long[0]]]
        of_them = f" ({sum(image_tokens)} of them for its {len(image_tokens)} images)" if image_tokens else ""
        smaller = ", show smaller images" if image_tokens else ""
        raise UserError(
            f"Prompt {long[0]} has {len(ids[long[0]])} tokens{of_them}, and at most {longest} are allowed "
            f"(the model's context is {context}); {len(long)} of {len(ids)} prompts are too long. Shorten or "
            f'drop them{smaller}, or set long_prompts="mask" to mask their samples.'
        )


@dataclass
class _Collected:
    """Completions of all B samples; those that were not generated stay as they begin."""

    ids: list[list[int]]
    reason: list[StopReason]
    numbers: dict[str, list[Tensor]]
    """Name -> B tensors of the completions' lengths."""
    kept: list[list[Tensor]]


def generate_rollout(
    network: CausalNetwork,
    tokenizer: PreTrainedTokenizerBase,
    batch: PromptBatch,
    *,
    sampling: Sampling,
    stopping: StoppingCriteria,
    ends: Sequence[int],
    pad: int,
    context: int | None,
    longest_prompt: int | None,
    chunk: int,
) -> TextRollout:
    """Complete the prompts, `chunk` samples at a time. `context` bounds the tokens of prompt and completion
    together; a prompt above `longest_prompt` is not completed; `pad` is an id that fills gaps.
    """
    source = [prompt for prompt in range(len(batch.ids)) for _ in range(batch.generations)]
    fits = [longest_prompt is None or len(ids) <= longest_prompt for ids in batch.ids]
    encoded = batch.encoded()
    count, max_new_tokens = len(source), stopping.max_new_tokens
    begun = [batch.begun(sample) for sample in range(count)]
    rooms = [
        min(max_new_tokens, max_new_tokens if context is None else context - len(encoded[prompt].ids))
        - len(begun[sample])
        for sample, prompt in enumerate(source)
    ]
    todo = [sample for sample, prompt in enumerate(source) if fits[prompt] and rooms[sample] > 0]
    collected = _Collected(
        ids=[[] for _ in range(count)],
        reason=["length" if fits[prompt] else "prompt too long" for prompt in source],
        numbers={name: [torch.zeros(0)] * count for name in ("log_prob", "full_log_prob", "entropy")},
        kept=[[] for _ in range(count)],
    )
    for start in range(0, len(todo), chunk):
        samples = todo[start : start + chunk]
        prompts = [encoded[source[sample]].and_then(begun[sample]) for sample in samples]
        limit = [rooms[sample] for sample in samples]
        completions = generate_completions(
            network,
            prompts,
            _uniforms([(batch.seeds[sample], len(begun[sample])) for sample in samples], max(limit)),
            sampling=sampling,
            ending=Ending(
                eos_ids=frozenset(ends),
                limit=limit,
                strings=stopping.strings,
                decode=lambda ids: _decode(tokenizer, ids, special=True),
            ),
            pad_id=pad,
        )
        _collect(collected, completions, samples)
    return _rollout(collected, batch, source, tokenizer, sampling, pad, fits)


def _uniforms(rows: Sequence[tuple[int, int]], length: int) -> Tensor:
    """[b, length] numbers that decide the tokens behind the first ones: b pairs (seed, how many)."""
    longest = max(begun for _, begun in rows)
    drawn = sample_uniforms([seed for seed, _ in rows], longest + length)
    return drawn.gather(1, torch.tensor([begun for _, begun in rows])[:, None] + torch.arange(length))


def _collect(collected: _Collected, completions: Completions, samples: Sequence[int]) -> None:
    """Put the completions of one batch in their places, cut to their lengths."""
    numbers = {name: getattr(completions, name).cpu() for name in collected.numbers}
    for row, sample in enumerate(samples):
        length = len(completions.ids[row])
        collected.ids[sample], collected.reason[sample] = completions.ids[row], completions.reason[row]
        collected.kept[sample] = completions.kept[row][:length]
        for name, values in numbers.items():
            collected.numbers[name][sample] = values[row, :length]


def _rollout(
    collected: _Collected,
    batch: PromptBatch,
    source: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    pad: int,
    fits: Sequence[bool],
) -> TextRollout:
    # A prompt that is too long keeps its first token alone: nothing is ever computed from it.
    prompt_ids, prompt_mask = left_pad(
        [ids if fit else ids[:1] for ids, fit in zip(batch.ids, fits, strict=True)], pad
    )
    begun = [batch.begun(sample) for sample in range(len(source))]
    completions_ids = [first + ids for first, ids in zip(begun, collected.ids, strict=True)]
    length = max(1, *map(len, completions_ids))
    completion = torch.full((len(source), length), pad, dtype=torch.int64)
    loss_mask = torch.zeros(len(source), length)
    numbers = {name: torch.zeros(len(source), length) for name in collected.numbers}
    for sample, ids in enumerate(completions_ids):
        drawn = slice(len(begun[sample]), len(ids))
        completion[sample, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        loss_mask[sample, drawn] = 1
        for name, values in numbers.items():
            values[sample, drawn] = collected.numbers[name][sample]
    nothing = torch.zeros(0, dtype=torch.int32)
    token_sets = [[nothing] * len(first) + sets for first, sets in zip(begun, collected.kept, strict=True)]
    return TextRollout(
        prompt_ids=prompt_ids[source],
        prompt_mask=prompt_mask[source].float(),
        completion_ids=completion,
        loss_mask=loss_mask,
        log_prob=numbers["log_prob"],
        full_log_prob=numbers["full_log_prob"],
        entropy=numbers["entropy"],
        text=[_decode(tokenizer, ids, special=False) for ids in completions_ids],
        stop_reason=collected.reason,
        group=[batch.group[prompt] for prompt in source],
        prompt=[batch.prompts[prompt] for prompt in source],
        seed=list(batch.seeds),
        sampling=sampling,
        kept=TokenSets.from_lists(token_sets, length) if sampling.truncates else None,
        images=None if batch.images is None else [batch.images[prompt] for prompt in source],
    )


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int], *, special: bool) -> str:
    """Text of a completion, blanks as they are."""
    text: Any = tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
    return text
