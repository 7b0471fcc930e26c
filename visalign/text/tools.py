# SPDX-License-Identifier: Apache-2.0
"""Tools in the middle of a completion: a call ends a turn, the tool's answer is read, and the text goes on.

The tokens of an answer were not drawn: their loss mask is 0, and they count toward the length of the
completion alone. Turns are drawn by whoever draws completions without tools, so a server gives the same path.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from visalign.errors import UserError
from visalign.interfaces import Prompt
from visalign.seeds import sample_seed

from .distribution import Sampling
from .draws import check_seeds, draw_seeds
from .rollout import TextRollout, ToolTrace
from .stopping import StoppingCriteria, StopReason, StopStrings
from .token_sets import TokenSets
from .tool_calls import ToolFailure, ToolUse, ask_all

CHARACTERS = 32
"""Of an answer per token that it may have; the rest is not even read."""


@dataclass(frozen=True, kw_only=True)
class Branching:
    """ARPO (arXiv 2507.19849, section 3.1): after a tool's answer a completion goes on in a second way with
    the probability (α + β ΔH)·max(0, 1 − p l), ΔH = (H − H₀)/ln V, H the mean entropy of the first tokens
    after the answer and H₀ of the first tokens of the completion; l counts the turns in a row, up to this
    one, after which a completion of the same prompt branched (AEPO, arXiv 2510.14545).

    Deviations: the released code adds the entropies of 10 log-probs of each token up instead of averaging,
    and takes those before the answer; what is left of a group is drawn from the prompt at once. AEPO's
    asks whether (u + β ΔH)·max(0, 1 − p l) ≥ 1 − α, u drawn from [0, 1).
    """

    initial: int | None
    """Completions of a prompt that begin on their own. None: AEPO's number (arXiv 2510.14545), which a first
    completion decides: m = k σ(b (H₀ − H_tool)) of k, at least 1, H_tool the mean of its H after answers."""
    balance: float = 1.0
    """b, per nat; the value is ours."""
    probability: float = 0.5
    """α."""
    entropy_weight: float = 0.2
    """β."""
    penalty: float = 0.0
    """p, on branches in a row; AEPO's released code takes 0.05."""
    tokens: int = 20
    """That H is the mean of."""

    def __post_init__(self) -> None:
        if (self.initial is not None and self.initial < 1) or self.tokens < 1:
            raise UserError(
                f"branch.initial is {self.initial} and branch.tokens {self.tokens}; both are at least 1."
            )
        if not 0 <= self.balance < math.inf:
            raise UserError(f"branch.balance is {self.balance}; it must be at least 0 and finite.")
        if not 0 <= self.probability <= 1 or not math.isfinite(self.entropy_weight):
            raise UserError(
                f"branch.probability is {self.probability}, of 0 to 1, and branch.entropy_weight "
                f"{self.entropy_weight}, a finite number."
            )
        if not 0 <= self.penalty <= 1:
            raise UserError(f"branch.penalty is {self.penalty}; it must be 0 to 1 (AEPO: 0.05).")

    def chance(self, rise: float, in_a_row: int) -> float:
        """Of a branch, where entropy rose by ΔH after so many turns in a row with one; it may lie outside
        0 to 1."""
        return (self.probability + self.entropy_weight * rise) * max(0.0, 1 - self.penalty * in_a_row)


class Continues(Protocol):
    """Who draws turns: a `TextPolicy`, or a server, that goes on from given tokens."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        seeds: Sequence[int],
        sampling: Sampling | None = None,
        stopping: StoppingCriteria | None = None,
        group: Sequence[Hashable] | None = None,
        images: Sequence[Sequence[Any]] | None = None,
        after: Sequence[Sequence[int]] | None = None,
    ) -> TextRollout:
        """Complete P prompts once each, after P lists of tokens, which are context with loss mask 0."""
        ...


@dataclass
class _Sample:
    """A completion that grows turn by turn."""

    place: int
    """Of its prompt."""
    seed: int
    ids: list[int] = field(default_factory=list)
    numbers: list[tuple[float, float, float, float]] = field(default_factory=list)
    """Loss mask, log_prob, full_log_prob and entropy of each token."""
    kept: list[Tensor] = field(default_factory=list)
    origin: list[tuple[int, int]] = field(default_factory=list)
    """Number of the sample that drew the token, and its place there."""
    begins: list[int] = field(default_factory=list)
    """Where its turns begin."""
    calls: list[int] = field(default_factory=list)
    """Answers that it had when each turn began."""
    cuts: list[int] = field(default_factory=list)
    """Of these, cut."""
    trace: ToolTrace = field(default_factory=ToolTrace)
    reason: StopReason = "length"

    def drawn(self) -> list[int]:
        """Its last tokens, back to an answer."""
        answered = max((place for place, row in enumerate(self.numbers) if not row[0]), default=-1)
        return self.ids[answered + 1 :]

    def entropy(self, turn: int, tokens: int) -> float:
        """Mean over the first tokens of a turn."""
        drawn = [row[3] for row in self.numbers[self.begins[turn] :] if row[0]][:tokens]
        return math.fsum(drawn) / len(drawn) if drawn else math.nan


class ToolPolicy:
    """Completions with a tool, and with the signature of `TextPolicy.generate`.

    Every turn reads prompt and text so far anew; a sample's tokens follow from its prompt, its seed and the
    tool's answers, and are those without the tool up to its first call.

    Args:
        engine: draws the turns.
        tokenizer: of the policy; special tokens in an answer are read as plain text.
        use: the tool.
        branching: where some completions of a group come from; None: all from the prompt.
    """

    def __init__(
        self, engine: Continues, tokenizer: Any, use: ToolUse, branching: Branching | None = None
    ) -> None:
        self.engine, self.tokenizer, self.use, self.branching = engine, tokenizer, use, branching

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
        """Complete P prompts G times each, B = P·G samples; the limit of tokens counts those of answers, and
        branches stay among the samples of a label of `group`.

        Returns:
            The rollout with a `ToolTrace` per sample, and where there are branches with `shared`. A sample
            whose tool raised or was too slow has the stop reason "tool failed".

        Raises:
            UserError: as the engine; or branching without the entropies of what was drawn.
        """
        count, stopping = len(prompts) * num_generations, stopping or StoppingCriteria()
        drawn = draw_seeds(seeds, count) if isinstance(seeds, int) else check_seeds(seeds)
        labels = list(range(len(prompts))) if group is None else list(group)
        places = [place for place in range(len(prompts)) for _ in range(num_generations)]
        samples = [_Sample(place, seed) for place, seed in zip(places, drawn, strict=True)]
        draw = _Draw(self, prompts, labels, images, sampling or Sampling(), stopping)
        groups: dict[Hashable, list[int]] = {}
        for number, place in enumerate(places):
            groups.setdefault(labels[place], []).append(number)
        initial = count if self.branching is None else self.branching.initial
        undecided = set(groups) if initial is None else set[Hashable]()
        in_a_row: Counter[Hashable] = Counter()
        waiting = {label: rows[initial or 1 :] for label, rows in groups.items()}
        growing = sorted(n for rows in groups.values() for n in rows[: initial or 1])
        while growing:
            draw.turn(samples, growing)
            branched = self._branches(samples, growing, waiting, labels, undecided, in_a_row)
            growing = self._answered(samples, growing, stopping) + branched
            left = {labels[samples[number].place] for number in growing}
            for label in [label for label in waiting if label not in left]:
                begun: list[int] = []
                if label in undecided:
                    undecided.remove(label)
                    begun = self._balanced(samples, groups[label], waiting[label])
                growing += begun or waiting.pop(label)  # nothing of the group grows that could branch
        return draw.rollout(samples, self.branching is not None)

    def _balanced(self, samples: list[_Sample], rows: Sequence[int], waiting: list[int]) -> list[int]:
        """What a group's first completion decides: those that begin at the prompt, and its own branches."""
        assert self.branching is not None
        first, rule = samples[rows[0]], self.branching
        turns = [turn for turn in range(1, len(first.begins)) if self._after_answer(first, turn)]
        share = 1.0  # without an answer there is nothing to branch from
        if turns:
            behind = [first.entropy(turn, rule.tokens) for turn in turns]
            rise = _known(math.fsum(behind) / len(behind) - first.entropy(0, rule.tokens))
            share = 1 / (1 + math.exp(min(rule.balance * rise, 500.0)))
        own = min(len(waiting), max(1, round(share * len(rows))) - 1)
        begun, waiting[:own] = waiting[:own], []
        in_a_row = 0
        for turn in turns:
            made = self._branch(samples, rows[0], turn, waiting, in_a_row)
            in_a_row = in_a_row + 1 if made else 0
            begun += made
        return begun

    def _branches(
        self,
        samples: list[_Sample],
        growing: Sequence[int],
        waiting: dict[Hashable, list[int]],
        labels: Sequence[Hashable],
        undecided: set[Hashable],
        in_a_row: Counter[Hashable],
    ) -> list[int]:
        """Samples that begin with what those before them had when their last turn began."""
        found: list[int] = []
        for number in growing:
            label = labels[samples[number].place]
            if self.branching is not None and label not in undecided:
                turn = len(samples[number].begins) - 1
                found += self._branch(samples, number, turn, waiting.get(label, []), in_a_row[label])
        branched = {labels[samples[number].place] for number in found}
        in_a_row.update(branched)
        for label in in_a_row.keys() - branched:
            del in_a_row[label]
        return found

    @staticmethod
    def _after_answer(sample: _Sample, turn: int) -> bool:
        """Whether a turn begins behind an answer, and the model's context had room for it."""
        if turn == 0 or sample.calls[turn] == sample.calls[turn - 1]:
            return False
        end = sample.begins[turn + 1] if turn + 1 < len(sample.begins) else len(sample.ids)
        return end > sample.begins[turn]

    def _branch(
        self, samples: list[_Sample], number: int, turn: int, waiting: list[int], in_a_row: int
    ) -> list[int]:
        """The first of those that wait, as a branch where a turn of a sample began; or nothing, by lot."""
        rule, sample = self.branching, samples[number]
        assert rule is not None
        is_second = bool(turn) and sample.trace.shared == sample.begins[turn]
        if not waiting or is_second or not self._after_answer(sample, turn):
            return []
        rise = _known(sample.entropy(turn, rule.tokens) - sample.entropy(0, rule.tokens))
        lot = sample_seed("branch", sample.seed, turn) / 2**63
        if not lot < rule.chance(rise / math.log(len(self.tokenizer)), in_a_row):
            return []
        begin, other = sample.begins[turn], waiting.pop(0)
        samples[other] = replace(
            samples[other],
            ids=sample.ids[:begin],
            numbers=sample.numbers[:begin],
            kept=sample.kept[:begin],
            origin=sample.origin[:begin],
            begins=sample.begins[:turn],
            calls=sample.calls[:turn],
            cuts=sample.cuts[:turn],
            trace=ToolTrace(calls=sample.calls[turn], cut=sample.cuts[turn], shared=begin),
        )
        return [other]

    def _answered(
        self, samples: Sequence[_Sample], growing: Sequence[int], stopping: StoppingCriteria
    ) -> list[int]:
        """Ask the tool for those that have called; those that go on."""
        called = [n for n in growing if self._called(samples[n], stopping)]
        asked = [self._call_text(samples[n]) for n in called]
        answers = ask_all(self.use, [text for text in asked if text is not None])
        on = []
        for number, text in zip(called, asked, strict=True):
            sample, answer = samples[number], None if text is None else answers[text]
            if isinstance(answer, ToolFailure):
                sample.trace, sample.reason = replace(sample.trace, failed=answer.why), "tool failed"
                continue
            if answer is not None:
                self._read(sample, answer)
            room = stopping.max_new_tokens - len(sample.ids)
            if room < 0:
                del sample.ids[room:], sample.numbers[room:], sample.origin[room:], sample.kept[room:]
            if room <= 0:
                sample.reason = "length"
            else:
                on.append(number)
        return on

    def _called(self, sample: _Sample, stopping: StoppingCriteria) -> bool:
        """Whether the turn ended with a call, and with nothing that ends the completion."""
        if sample.reason != "stop string" or sample.trace.calls >= self.use.max_calls:
            return False
        return not StopStrings(stopping.strings, self.text).found(sample.drawn())

    def _call_text(self, sample: _Sample) -> str | None:
        text = self.text(sample.ids)
        text = text[: text.rfind(self.use.close)]
        if self.use.open is None:
            return text
        begin = text.rfind(self.use.open)
        call = text[begin + len(self.use.open) :]
        return None if begin < 0 or self.use.close in call else call

    def _read(self, sample: _Sample, answer: str) -> None:
        """Put an answer behind the completion."""
        most = self.use.max_answer_tokens
        whole = self.use.answer.replace("{answer}", answer[: CHARACTERS * most])
        ids = self.tokenizer(whole, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        cut = len(ids) > most or len(answer) > CHARACTERS * most
        trace = sample.trace
        sample.trace = replace(trace, calls=trace.calls + 1, cut=trace.cut + cut)
        for token in ids[:most]:
            sample.origin.append((-1, 0))
            sample.ids.append(int(token))
            sample.numbers.append((0.0, 0.0, 0.0, 0.0))
            sample.kept.append(torch.zeros(0, dtype=torch.int32))

    def text(self, ids: list[int]) -> str:
        """Of tokens, special ones as they are spelled."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _known(rise: float) -> float:
    """A rise of the entropy; refuses one that the engine did not say."""
    if math.isnan(rise):
        raise UserError(
            "rollout.tool.branch looks at the entropy of what was drawn, and the server does not say "
            "it. Set rollout.top_k, or leave branch out."
        )
    return rise


@dataclass(frozen=True)
class _Draw:
    """One call of `ToolPolicy.generate`."""

    policy: ToolPolicy
    prompts: Sequence[Prompt]
    labels: Sequence[Hashable]
    images: Sequence[Sequence[Any]] | None
    sampling: Sampling
    stopping: StoppingCriteria
    read: list[TextRollout] = field(default_factory=list)
    """The first turns, for the tokens of the prompts."""

    def turn(self, samples: list[_Sample], growing: Sequence[int]) -> None:
        """Let samples draw on, up to a call, their end or the limit."""
        use, stopping = self.policy.use, self.stopping
        calling = replace(stopping, strings=(*stopping.strings, use.close))
        for may_call, ends in ((True, calling), (False, stopping)):
            rows = [n for n in growing if (samples[n].trace.calls < use.max_calls) == may_call]
            if not rows:
                continue
            places = [samples[n].place for n in rows]
            made = self.policy.engine.generate(
                [self.prompts[place] for place in places],
                seeds=[samples[n].seed for n in rows],
                sampling=self.sampling,
                stopping=ends,
                group=[self.labels[place] for place in places],
                images=None if self.images is None else [self.images[place] for place in places],
                after=[samples[n].ids for n in rows],
            )
            sets = None if made.kept is None else made.kept.lists()
            for row, number in enumerate(rows):
                self._take(samples[number], number, made, row, [] if sets is None else sets[row])
            self.read.append(made)

    def _take(
        self, sample: _Sample, number: int, made: TextRollout, row: int, sets: Sequence[Tensor]
    ) -> None:
        begin = len(sample.ids)
        new = made.completion_ids[row, begin : begin + int((made.loss_mask[row] != 0).sum())].tolist()
        sample.reason, ends = made.stop_reason[row], StopStrings(self.stopping.strings, self.policy.text)
        if before := sample.drawn():  # what was no call: a stop string may have begun there
            size = next((n for n in range(1, len(new) + 1) if ends.found(before + new[:n])), None)
            new, sample.reason = new[:size], sample.reason if size is None else "stop string"
        end = begin + len(new)
        sample.begins.append(begin)
        sample.calls.append(sample.trace.calls)
        sample.cuts.append(sample.trace.cut)
        sample.ids += new
        fields = (made.loss_mask, made.log_prob, made.full_log_prob, made.entropy)
        columns = [values[row, begin:end].tolist() for values in fields]
        sample.numbers += list(zip(*columns, strict=True))
        sample.origin += [(number, place) for place in range(begin, end)]
        sample.kept += [sets[place] if sets else torch.zeros(0) for place in range(begin, end)]

    def rollout(self, samples: Sequence[_Sample], branched: bool) -> TextRollout:
        """All samples in one."""
        length = max(1, *(len(sample.ids) for sample in samples))
        rows = [
            torch.tensor([*sample.numbers, *[(0.0,) * 4] * (length - len(sample.ids))]) for sample in samples
        ]
        loss_mask, log_prob, full_log_prob, entropy = torch.stack(rows).unbind(2)
        ids, mask = self._prompts(samples)
        filler = int(ids[0, 0])
        shared = None
        if branched:
            held = Counter(token for sample in samples for token in sample.origin)
            shared = torch.ones(len(samples), length)
            for row, sample in zip(shared, samples, strict=True):
                there = [held[token] if token[0] >= 0 else 1 for token in sample.origin]
                row[: len(there)] = torch.tensor(there)
        texts = [self._text(sample.ids) for sample in samples]
        return TextRollout(
            prompt_ids=ids,
            prompt_mask=mask,
            completion_ids=torch.tensor([s.ids + [filler] * (length - len(s.ids)) for s in samples]),
            loss_mask=loss_mask.contiguous(),
            log_prob=log_prob.contiguous(),
            full_log_prob=full_log_prob.contiguous(),
            entropy=entropy.contiguous(),
            text=texts,
            stop_reason=[sample.reason for sample in samples],
            group=[self.labels[sample.place] for sample in samples],
            prompt=[self.prompts[sample.place] for sample in samples],
            seed=[sample.seed for sample in samples],
            sampling=self.sampling,
            kept=TokenSets.from_lists([s.kept for s in samples], length) if self.sampling.truncates else None,
            images=None if self.images is None else [self.images[sample.place] for sample in samples],
            tools=[replace(sample.trace, answers=self._answers(sample)) for sample in samples],
            shared=shared,
        )

    def _text(self, ids: Sequence[int]) -> str:
        decode = self.policy.tokenizer.decode
        return str(decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _answers(self, sample: _Sample) -> tuple[tuple[int, int], ...]:
        """What characters of its text were answers."""
        edges, inside = list[int](), False
        for place, (number, _) in enumerate([*sample.origin, (0, 0)]):
            if (number < 0) != inside:
                edges, inside = [*edges, len(self._text(sample.ids[:place]))], not inside
        return tuple((begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end)

    def _prompts(self, samples: Sequence[_Sample]) -> tuple[Tensor, Tensor]:
        """Tokens [B, L] of the prompts and their mask, as the engine read them."""
        found: dict[tuple[Hashable, int], tuple[Tensor, Tensor]] = {}
        for made in self.read:
            for row, seed in enumerate(made.seed):
                found.setdefault((made.group[row], seed), (made.prompt_ids[row], made.prompt_mask[row]))
        mine = [found[self.labels[sample.place], sample.seed] for sample in samples]
        width = max(int(mask.sum()) for _, mask in mine)
        ids = torch.stack([_left(row, width) for row, _ in mine])
        return ids, torch.stack([_left(mask, width) for _, mask in mine])


def _left(row: Tensor, width: int) -> Tensor:
    """The last `width` entries of a row that is padded on the left."""
    return torch.nn.functional.pad(row, (max(0, width - len(row)), 0))[-width:]
