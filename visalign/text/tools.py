# SPDX-License-Identifier: Apache-2.0
"""Generate completions that call a tool: a call ends a turn, the answer is appended, and the text goes on.

The tokens of an answer were not drawn: their loss mask is 0, and they count toward the completion's length
only. The policy's own generator draws the turns, so a server gives the same completions.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from visalign.interfaces import Prompt, ToolCompletion

from .decoding import completion_text, decode
from .distribution import Sampling, draw_seeds
from .rollout import TextRollout, ToolTrace
from .stopping import StoppingCriteria, StopReason, StopStrings
from .token_sets import TokenSets
from .tool_calls import ToolFailure, ToolUse, ask_all
from .turns import ChatTurns, Conversation

CHARACTERS = 32  # Characters of an answer per token that it may have; what is beyond is not even tokenized
_NO_IDS = torch.zeros(0, dtype=torch.int32)


class _Token(NamedTuple):
    id: int
    loss_mask: float = 0.0
    log_prob: float = 0.0
    full_log_prob: float = 0.0
    entropy: float = 0.0
    kept: Tensor = _NO_IDS  # Ids that could be drawn


@dataclass
class _Sample:
    """A completion that grows turn by turn."""

    prompt: Prompt
    label: Hashable
    images: Sequence[Any]
    seed: int
    tokens: list[_Token] = field(default_factory=list)
    trace: ToolTrace = field(default_factory=ToolTrace)
    reason: StopReason = "length"
    outcome: float | None = None  # Reward of the environment
    conversation: Conversation | None = None  # Its tools and environment, with `ChatTurns`
    prompt_row: tuple[Tensor, Tensor] | None = None  # Ids and mask of the prompt, as the engine read it first

    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    def ids_since_answer(self) -> list[int]:
        answers = [position for position, token in enumerate(self.tokens) if not token.loss_mask]
        return self.ids()[answers[-1] + 1 if answers else 0 :]


class ToolPolicy:
    """Completions with a tool, drawn by an engine whose `generate` continues from lists of tokens (`after`).

    Every turn re-reads the prompt and the text so far. Tokens follow from prompt, seed and answers.
    """

    def __init__(self, engine: Any, tokenizer: Any, use: ToolUse | ChatTurns) -> None:
        self.engine, self.tokenizer, self.use = engine, tokenizer, use

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        seeds: int | Sequence[int],
        num_generations: int = 1,
        sampling: Sampling | None = None,
        stopping: StoppingCriteria | None = None,
        group: Sequence[Hashable] | None = None,
        images: Sequence[Sequence[Any]] | None = None,
    ) -> TextRollout:
        """Complete P prompts G times each, with a `ToolTrace` per sample; answers count in the token limit.

        A sample whose tool raised or was too slow has the stop reason "tool failed".
        """
        sample_seeds = draw_seeds(seeds, len(prompts) * num_generations)
        sampling, stopping = sampling or Sampling(), stopping or StoppingCriteria()
        labels = range(len(prompts)) if group is None else group
        image_lists = [()] * len(prompts) if images is None else images
        rows = [row for row in zip(prompts, labels, image_lists, strict=True) for _ in range(num_generations)]
        samples = [_Sample(*row, seed) for row, seed in zip(rows, sample_seeds, strict=True)]
        if isinstance(self.use, ChatTurns):
            self._begin(self.use, samples)
        growing = samples
        while growing:
            self._draw_turn(growing, sampling, stopping, has_images=images is not None)
            growing = self._answer_calls(growing, stopping)
        if isinstance(self.use, ChatTurns):
            self._finish(self.use, samples)
        return self._rollout(samples, sampling, has_images=images is not None)

    def _begin(self, turns: ChatTurns, samples: Sequence[_Sample]) -> None:
        """Reset the environments; one that fails takes its first turn and no other."""
        conversations, prompts = turns.begin([sample.prompt for sample in samples])
        for sample, conversation, prompt in zip(samples, conversations, prompts, strict=True):
            sample.conversation = conversation
            if isinstance(prompt, ToolFailure):
                sample.trace = replace(sample.trace, failed=prompt.why)
            else:
                sample.prompt = prompt

    def _finish(self, turns: ChatTurns, samples: Sequence[_Sample]) -> None:
        finished = [s for s in samples if s.trace.failed is None and s.reason != "prompt too long"]
        rewards = turns.finish([sample.conversation for sample in finished if sample.conversation is not None])
        for sample, reward in zip(finished, rewards, strict=True):
            if isinstance(reward, ToolFailure):
                self._fail(sample, reward.why)
            sample.outcome = None if isinstance(reward, ToolFailure) else reward
        turns.discard([s.conversation for s in samples if s.trace.failed and s.conversation is not None])

    def _fail(self, sample: _Sample, why: str) -> None:
        sample.trace, sample.reason = replace(sample.trace, failed=why), "tool failed"

    def _draw_turn(
        self, growing: Sequence[_Sample], sampling: Sampling, stopping: StoppingCriteria, *, has_images: bool
    ) -> None:
        """Let samples draw on, up to a call, their end or the limit."""
        use, calling = self.use, stopping
        if isinstance(use, ToolUse):
            calling = replace(stopping, strings=(*stopping.strings, use.close))
        for may_call in (True, False):
            samples = [s for s in growing if (isinstance(use, ChatTurns) or s.trace.calls < use.max_calls) == may_call]
            if not samples:
                continue
            rollout = self.engine.generate(
                [sample.prompt for sample in samples],
                seeds=[sample.seed for sample in samples],
                sampling=sampling,
                stopping=calling if may_call else stopping,
                group=[sample.label for sample in samples],
                images=[sample.images for sample in samples] if has_images else None,
                after=[sample.ids() for sample in samples],
            )
            kept = [None] * len(samples) if rollout.kept is None else rollout.kept.lists()
            for row, (sample, sets) in enumerate(zip(samples, kept, strict=True)):
                self._append_turn(sample, stopping, rollout, row, sets)

    def _append_turn(
        self,
        sample: _Sample,
        stopping: StoppingCriteria,
        rollout: TextRollout,
        row: int,
        kept: Sequence[Tensor] | None,
    ) -> None:
        start = len(sample.tokens)
        new = rollout.completion_ids[row, start : start + int((rollout.loss_mask[row] != 0).sum())].tolist()
        sample.reason = rollout.stop_reason[row]
        sample.prompt_row = sample.prompt_row or (rollout.prompt_ids[row], rollout.prompt_mask[row])
        if before := sample.ids_since_answer():  # a stop string may have begun in what was no call
            stop = StopStrings(stopping.strings, self._decode)
            size = next((n for n in range(1, len(new) + 1) if stop.found(before + new[:n])), None)
            if size is not None:
                new, sample.reason = new[:size], "stop string"
        end = start + len(new)
        sets = [_NO_IDS] * len(new) if kept is None else kept[start:end]
        columns = (rollout.loss_mask, rollout.log_prob, rollout.full_log_prob, rollout.entropy)
        numbers = (values[row, start:end].tolist() for values in columns)
        sample.tokens += [_Token(*token) for token in zip(new, *numbers, sets, strict=True)]

    def _answer_calls(self, growing: Sequence[_Sample], stopping: StoppingCriteria) -> list[_Sample]:
        """Ask the tool for the samples that have called; return the samples that go on."""
        for sample in growing:
            if sample.trace.failed:
                self._fail(sample, sample.trace.failed)
        use, continuing = self.use, []
        answers = self._answer_turns(use, growing) if isinstance(use, ChatTurns) else self._ask(use, growing, stopping)
        for sample, answer in answers:
            if isinstance(answer, ToolFailure):
                self._fail(sample, answer.why)
                continue
            if answer:
                self._append_answer(sample, answer)
            del sample.tokens[stopping.max_new_tokens :]  # an answer may reach beyond the limit
            if len(sample.tokens) == stopping.max_new_tokens:
                sample.reason = "length"
            else:
                continuing.append(sample)
        return continuing

    def _answer_turns(self, turns: ChatTurns, growing: Sequence[_Sample]) -> list[tuple[_Sample, Any]]:
        ended = [sample for sample in growing if sample.reason == "eos"]
        texts = [completion_text(self.tokenizer, sample.ids_since_answer(), ended=True) for sample in ended]
        answers = turns.answer([s.conversation for s in ended if s.conversation is not None], texts)
        return [pair for pair in zip(ended, answers, strict=True) if pair[1] is not None]

    def _ask(self, use: ToolUse, growing: Sequence[_Sample], stopping: StoppingCriteria) -> list[tuple[_Sample, Any]]:
        """Answer the samples that have called; None for one that asked nothing."""
        ends = StopStrings(stopping.strings, self._decode)  # a turn that ends with one of these as well calls nothing
        stopped = [s for s in growing if s.reason == "stop string" and s.trace.calls < use.max_calls]
        calling = [sample for sample in stopped if not ends.found(sample.ids_since_answer())]
        calls = [self._call_text(use, sample) for sample in calling]
        answers = ask_all(use, [call for call in calls if call is not None])
        return [
            (sample, [(use.answer.replace("{answer}", text), False)] if isinstance(text, str) else text)
            for sample, text in zip(calling, [None if call is None else answers[call] for call in calls], strict=True)
        ]

    def _call_text(self, use: ToolUse, sample: _Sample) -> str | None:
        text = self._decode(sample.ids())
        text = text[: text.rfind(use.close)]
        if use.open is None:
            return text
        start = text.rfind(use.open)
        call = text[start + len(use.open) :]
        return None if start < 0 or use.close in call else call

    def _append_answer(self, sample: _Sample, pieces: Sequence[tuple[str, bool]]) -> None:
        """Append what was not drawn: pieces of the template with its special tokens, and answers, cut if too long."""
        was_cut = False
        for text, from_template in pieces:
            limit = len(text) if from_template else self.use.max_answer_tokens
            text = text if from_template else text[: CHARACTERS * limit + 1]
            ids = self.tokenizer(text, add_special_tokens=False, split_special_tokens=not from_template)["input_ids"]
            if from_template and sample.tokens[-1].loss_mask and ids[:1] == [sample.tokens[-1].id]:
                ids = ids[1:]  # the end of a turn begins the next
            was_cut |= len(ids) > limit or (len(text) > CHARACTERS * limit and not from_template)
            sample.tokens += [_Token(int(token)) for token in ids[:limit]]
        sample.trace = replace(sample.trace, calls=sample.trace.calls + 1, cut=sample.trace.cut + was_cut)

    def _rollout(self, samples: Sequence[_Sample], sampling: Sampling, *, has_images: bool) -> TextRollout:
        length = max(1, *(len(sample.tokens) for sample in samples))
        numbers = torch.tensor(
            [[*(token[1:5] for token in s.tokens), *[(0.0,) * 4] * (length - len(s.tokens))] for s in samples]
        )
        loss_mask, log_prob, full_log_prob, entropy = (column.contiguous() for column in numbers.unbind(2))
        prompt_ids, prompt_mask = _prompt_tensors(samples)
        padding = int(prompt_ids[0, 0])
        kept = None
        if sampling.truncates:
            kept = TokenSets.from_lists([[token.kept for token in s.tokens] for s in samples], length)
        return TextRollout(
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            completion_ids=torch.tensor([s.ids() + [padding] * (length - len(s.tokens)) for s in samples]),
            loss_mask=loss_mask,
            log_prob=log_prob,
            full_log_prob=full_log_prob,
            entropy=entropy,
            text=[
                ToolCompletion(
                    self._text(s.ids(), ended=s.reason == "eos"),
                    self._answer_spans(s, for_rewards=True),
                    s.outcome,
                    s.trace.calls if s.conversation is None else s.conversation.calls,
                )
                for s in samples
            ],
            stop_reason=[sample.reason for sample in samples],
            group=[sample.label for sample in samples],
            prompt=[sample.prompt for sample in samples],
            seed=[sample.seed for sample in samples],
            sampling=sampling,
            kept=kept,
            images=[sample.images for sample in samples] if has_images else None,
            tools=[replace(sample.trace, answers=self._answer_spans(sample)) for sample in samples],
        )

    def _answer_spans(self, sample: _Sample, *, for_rewards: bool = False) -> tuple[tuple[int, int], ...]:
        """(begin, end) characters of the text that the tool wrote.

        `for_rewards`, which may refuse special tokens, a turn's end token belongs to the answer behind it. The blanks
        before the next turn do not, or else one blank of the answer, so that the words of two turns stay apart.
        """
        edges, inside, ids, spans = list[int](), False, sample.ids(), list[tuple[int, int]]()
        for position, drawn in enumerate([*(bool(token.loss_mask) for token in sample.tokens), True]):
            if drawn == inside:
                edges, inside = [*edges, position], not inside
        for first, last in zip(edges[::2], edges[1::2], strict=True):
            begin, text = len(self._text(ids[:first])), self._text(ids[:last])
            end = len(text)
            blanks = end - max(begin, len(text.rstrip()))
            if for_rewards and isinstance(self.use, ChatTurns):
                begin, end = len(self._text(ids[: first - 1])), end - blanks
                blank = None if blanks or last == len(ids) else re.search(r"\s", text[begin:end])
                if blank is not None:
                    spans, begin = [*spans, (begin, begin + blank.start())], begin + blank.end()
            spans += [(begin, end)] * (begin < end)
        return tuple(spans)

    def _text(self, ids: Sequence[int], *, ended: bool = False) -> str:
        """Decode a completion; in a conversation the end tokens of its earlier turns stay."""
        if isinstance(self.use, ChatTurns):
            return self._decode(ids[: len(ids) - ended])
        return completion_text(self.tokenizer, ids, ended=ended)

    def _decode(self, ids: Sequence[int]) -> str:
        return decode(self.tokenizer, ids)


def _prompt_tensors(samples: Sequence[_Sample]) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, L] of the prompts, padded on the left."""
    rows = [sample.prompt_row for sample in samples if sample.prompt_row is not None]
    width = max(int(mask.sum()) for _, mask in rows)
    ids, masks = (
        [pad(row, (max(0, width - len(row)), 0))[-width:] for row in column] for column in zip(*rows, strict=True)
    )
    return torch.stack(ids), torch.stack(masks)
