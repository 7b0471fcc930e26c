# SPDX-License-Identifier: Apache-2.0
"""Generate completions that call a tool: a call ends a turn, the answer is appended, and the text goes on.

The tokens of an answer were not drawn: their loss mask is 0, and they count toward the completion's length
only. The policy's own generator draws the turns, so a server gives the same completions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

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
"""Characters of an answer per token that it may have; what is beyond is not even tokenized."""
_NO_IDS = torch.zeros(0, dtype=torch.int32)


@dataclass(frozen=True, kw_only=True)
class Branching:
    """Branching after a tool's answer (ARPO, arXiv 2507.19849, section 3.1).

    A completion goes on in a second way with probability (α + β ΔH)·max(0, 1 − p l). ΔH = (H − H₀)/ln V, H is
    the mean entropy of the first tokens after the answer and H₀ of the first tokens of the completion. l
    counts the turns in a row, up to this one, after which a completion of the same prompt branched (AEPO,
    arXiv 2510.14545).

    Deviations: the released code sums the entropies of 10 log-probs of each token instead of averaging, and
    takes those before the answer; what is left of a group is drawn from the prompt at once. AEPO's asks
    whether (u + β ΔH)·max(0, 1 − p l) ≥ 1 − α, u drawn from [0, 1).
    """

    initial: int | None
    """Completions of a prompt that start from the prompt. None: AEPO's number (arXiv 2510.14545), which a
    first completion decides: m = k σ(b (H₀ − H_tool)) of k, at least 1, H_tool the mean of its H after
    answers."""
    balance: float = 1.0
    """b, per nat; the value is ours."""
    probability: float = 0.5
    """α."""
    entropy_weight: float = 0.2
    """β."""
    penalty: float = 0.0
    """p, penalty on consecutive branches; AEPO's released code takes 0.05."""
    tokens: int = 20
    """Tokens that H is averaged over."""

    def __post_init__(self) -> None:
        ranges = (
            ("initial", self.initial is None or self.initial >= 1, "null, or at least 1"),
            ("tokens", self.tokens >= 1, "at least 1"),
            ("balance", 0 <= self.balance < math.inf, "at least 0 and finite"),
            ("probability", 0 <= self.probability <= 1, "0 to 1"),
            ("entropy_weight", math.isfinite(self.entropy_weight), "finite"),
            ("penalty", 0 <= self.penalty <= 1, "0 to 1 (AEPO: 0.05)"),
        )
        for name, holds, allowed in ranges:
            if not holds:
                raise UserError(f"branch.{name} is {getattr(self, name)}; it must be {allowed}.")

    def chance(self, entropy_rise: float, consecutive: int) -> float:
        """Compute (α + β ΔH)·max(0, 1 − p l); the value may lie outside [0, 1]."""
        return (self.probability + self.entropy_weight * entropy_rise) * max(
            0.0, 1 - self.penalty * consecutive
        )


class TurnGenerator(Protocol):
    """A `TextPolicy`, or a server, that continues from given tokens."""

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


class ToolPolicy:
    """Completions with a tool; has the signature of `TextPolicy.generate`.

    Every turn re-reads the prompt and the text so far. A sample's tokens follow from its prompt, its seed and
    the tool's answers; up to its first call they are those of a completion without a tool.

    Args:
        engine: draws the turns.
        tokenizer: the policy's; special tokens in an answer are read as plain text.
        use: the tool.
        branching: where some completions of a group come from; None: all from the prompt.
    """

    def __init__(
        self, engine: TurnGenerator, tokenizer: Any, use: ToolUse, branching: Branching | None = None
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
        """Complete P prompts G times each, B = P·G samples.

        The token limit counts tokens of answers too. Branches stay among the samples of a label of `group`.

        Returns:
            The rollout with a `ToolTrace` per sample, and with `shared` where there are branches. A sample
            whose tool raised or was too slow has the stop reason "tool failed".

        Raises:
            UserError: as the engine; or branching without the entropies of the drawn tokens.
        """
        count = len(prompts) * num_generations
        sample_seeds = draw_seeds(seeds, count) if isinstance(seeds, int) else check_seeds(seeds)
        prompt_index = [index for index in range(len(prompts)) for _ in range(num_generations)]
        generation = _Generation(
            policy=self,
            prompts=prompts,
            labels=list(range(len(prompts))) if group is None else list(group),
            images=images,
            sampling=sampling or Sampling(),
            stopping=stopping or StoppingCriteria(),
            samples=[_Sample(*pair) for pair in zip(prompt_index, sample_seeds, strict=True)],
        )
        return generation.run()

    def decode(self, ids: Sequence[int], *, special: bool) -> str:
        """Decode tokens, special ones included or left out, without tidying of blanks."""
        text = self.tokenizer.decode(
            list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return str(text)

    def decode_all(self, ids: list[int]) -> str:
        """Decode tokens with special ones as they are spelled."""
        return self.decode(ids, special=True)


class _Token(NamedTuple):
    id: int
    loss_mask: float = 0.0
    log_prob: float = 0.0
    full_log_prob: float = 0.0
    entropy: float = 0.0
    kept: Tensor = _NO_IDS
    """Ids that could be drawn."""
    source: tuple[int, int] | None = None
    """(sample that drew it, position there); None: written by the tool."""


class _Turn(NamedTuple):
    """State of a sample when one of its turns began."""

    start: int
    """Position of its first token."""
    calls: int
    cut: int


@dataclass
class _Sample:
    """A completion that grows turn by turn."""

    prompt_index: int
    seed: int
    tokens: list[_Token] = field(default_factory=list)
    turns: list[_Turn] = field(default_factory=list)
    trace: ToolTrace = field(default_factory=ToolTrace)
    reason: StopReason = "length"
    prompt_row: tuple[Tensor, Tensor] | None = None
    """Ids and mask of the prompt, as the engine read it first."""

    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    def ids_since_answer(self) -> list[int]:
        answers = [position for position, token in enumerate(self.tokens) if not token.loss_mask]
        return self.ids()[answers[-1] + 1 if answers else 0 :]

    def mean_entropy(self, turn: int, count: int) -> float:
        """Mean over the first `count` drawn tokens of a turn."""
        drawn = [t.entropy for t in self.tokens[self.turns[turn].start :] if t.loss_mask][:count]
        return math.fsum(drawn) / len(drawn) if drawn else math.nan

    def follows_answer(self, turn: int) -> bool:
        """Check if a turn begins behind an answer, and the model's context had room for it."""
        if turn == 0 or self.turns[turn].calls == self.turns[turn - 1].calls:
            return False
        end = self.turns[turn + 1].start if turn + 1 < len(self.turns) else len(self.tokens)
        return end > self.turns[turn].start


@dataclass
class _Generation:
    """State of one call of `ToolPolicy.generate`."""

    policy: ToolPolicy
    prompts: Sequence[Prompt]
    labels: Sequence[Hashable]
    images: Sequence[Sequence[Any]] | None
    sampling: Sampling
    stopping: StoppingCriteria
    samples: list[_Sample]
    waiting: dict[Hashable, list[int]] = field(default_factory=dict)
    """label -> samples of the group that have not begun."""
    undecided: set[Hashable] = field(default_factory=set)
    """Groups whose first completion has yet to decide how many start from the prompt."""
    consecutive: Counter[Hashable] = field(default_factory=Counter)
    """label -> turns in a row with a branch."""

    def run(self) -> TextRollout:
        groups: dict[Hashable, list[int]] = {}
        for number in range(len(self.samples)):
            groups.setdefault(self._label(number), []).append(number)
        rule = self.policy.branching
        initial = len(self.samples) if rule is None else rule.initial
        self.undecided = set(groups) if initial is None else set()
        self.waiting = {label: members[initial or 1 :] for label, members in groups.items()}
        growing = sorted(number for members in groups.values() for number in members[: initial or 1])
        while growing:
            self._draw_turn(growing)
            branches = self._branch_all(growing)
            growing = self._answer_calls(growing) + branches
            active = {self._label(number) for number in growing}
            for label in [label for label in self.waiting if label not in active]:
                started: list[int] = []
                if label in self.undecided:
                    self.undecided.remove(label)
                    started = self._start_balanced(groups[label], self.waiting[label])
                growing += started or self.waiting.pop(label)  # no sample of the group could branch
        return self._rollout()

    def _label(self, number: int) -> Hashable:
        return self.labels[self.samples[number].prompt_index]

    def _draw_turn(self, growing: Sequence[int]) -> None:
        """Let samples draw on, up to a call, their end or the limit."""
        use = self.policy.use
        calling = replace(self.stopping, strings=(*self.stopping.strings, use.close))
        for may_call, stopping in ((True, calling), (False, self.stopping)):
            numbers = [n for n in growing if (self.samples[n].trace.calls < use.max_calls) == may_call]
            if not numbers:
                continue
            samples = [self.samples[n] for n in numbers]
            rollout = self.policy.engine.generate(
                [self.prompts[sample.prompt_index] for sample in samples],
                seeds=[sample.seed for sample in samples],
                sampling=self.sampling,
                stopping=stopping,
                group=[self._label(n) for n in numbers],
                images=self._images(samples),
                after=[sample.ids() for sample in samples],
            )
            kept = None if rollout.kept is None else rollout.kept.lists()
            for row, number in enumerate(numbers):
                self._append_turn(number, rollout, row, None if kept is None else kept[row])

    def _append_turn(
        self, number: int, rollout: TextRollout, row: int, kept: Sequence[Tensor] | None
    ) -> None:
        sample = self.samples[number]
        start = len(sample.tokens)
        new = rollout.completion_ids[row, start : start + int((rollout.loss_mask[row] != 0).sum())].tolist()
        sample.reason = rollout.stop_reason[row]
        sample.prompt_row = sample.prompt_row or (rollout.prompt_ids[row], rollout.prompt_mask[row])
        if before := sample.ids_since_answer():  # a stop string may have begun in what was no call
            stop = StopStrings(self.stopping.strings, self.policy.decode_all)
            size = next((n for n in range(1, len(new) + 1) if stop.found(before + new[:n])), None)
            if size is not None:
                new, sample.reason = new[:size], "stop string"
        end = start + len(new)
        sample.turns.append(_Turn(start, sample.trace.calls, sample.trace.cut))
        columns = (rollout.loss_mask, rollout.log_prob, rollout.full_log_prob, rollout.entropy)
        numbers = zip(new, *(values[row, start:end].tolist() for values in columns), strict=True)
        for position, values in enumerate(numbers, start):
            ids = _NO_IDS if kept is None else kept[position]
            sample.tokens.append(_Token(*values, kept=ids, source=(number, position)))

    def _answer_calls(self, growing: Sequence[int]) -> list[int]:
        """Ask the tool for the samples that have called; return the samples that go on."""
        use, limit = self.policy.use, self.stopping.max_new_tokens
        calling = [n for n in growing if self._has_called(self.samples[n])]
        calls = [self._call_text(self.samples[n]) for n in calling]
        answers = ask_all(use, [call for call in calls if call is not None])
        continuing = []
        for number, call in zip(calling, calls, strict=True):
            sample, answer = self.samples[number], None if call is None else answers[call]
            if isinstance(answer, ToolFailure):
                sample.trace, sample.reason = replace(sample.trace, failed=answer.why), "tool failed"
                continue
            if answer is not None:
                self._append_answer(sample, answer)
            del sample.tokens[limit:]
            if len(sample.tokens) == limit:
                sample.reason = "length"
            else:
                continuing.append(number)
        return continuing

    def _has_called(self, sample: _Sample) -> bool:
        """Check if the turn ended with a call, and with nothing that ends the completion."""
        if sample.reason != "stop string" or sample.trace.calls >= self.policy.use.max_calls:
            return False
        stop = StopStrings(self.stopping.strings, self.policy.decode_all)
        return not stop.found(sample.ids_since_answer())

    def _call_text(self, sample: _Sample) -> str | None:
        use, text = self.policy.use, self.policy.decode_all(sample.ids())
        text = text[: text.rfind(use.close)]
        if use.open is None:
            return text
        start = text.rfind(use.open)
        call = text[start + len(use.open) :]
        return None if start < 0 or use.close in call else call

    def _append_answer(self, sample: _Sample, answer: str) -> None:
        use, tokenizer = self.policy.use, self.policy.tokenizer
        longest = CHARACTERS * use.max_answer_tokens
        text = use.answer.replace("{answer}", answer[:longest])
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        cut = len(ids) > use.max_answer_tokens or len(answer) > longest
        sample.trace = replace(sample.trace, calls=sample.trace.calls + 1, cut=sample.trace.cut + cut)
        sample.tokens += [_Token(int(token)) for token in ids[: use.max_answer_tokens]]

    def _branch_all(self, growing: Sequence[int]) -> list[int]:
        """Start samples that share the prefix which growing samples had when their last turn began."""
        branches: list[int] = []
        for number in growing if self.policy.branching is not None else ():
            label = self._label(number)
            if label not in self.undecided:
                turn, waiting = len(self.samples[number].turns) - 1, self.waiting.get(label, [])
                branches += self._branch(number, turn, waiting, self.consecutive[label])
        branched = {self._label(number) for number in branches}
        self.consecutive = Counter({label: self.consecutive[label] + 1 for label in branched})
        return branches

    def _branch(self, number: int, turn: int, waiting: list[int], consecutive: int) -> list[int]:
        """Start the first waiting sample as a branch where a turn of a sample began, or none, by lot."""
        rule, sample = self.policy.branching, self.samples[number]
        assert rule is not None
        start, calls, cut = sample.turns[turn]
        is_branch_point = bool(turn) and sample.trace.shared == start  # a third way is not taken
        if not waiting or is_branch_point or not sample.follows_answer(turn):
            return []
        rise = _require_entropy(
            sample.mean_entropy(turn, rule.tokens) - sample.mean_entropy(0, rule.tokens)
        ) / math.log(len(self.policy.tokenizer))
        if not sample_seed("branch", sample.seed, turn) / 2**63 < rule.chance(rise, consecutive):
            return []
        other = waiting.pop(0)
        self.samples[other] = replace(
            self.samples[other],
            tokens=sample.tokens[:start],
            turns=sample.turns[:turn],
            trace=ToolTrace(calls=calls, cut=cut, shared=start),
        )
        return [other]

    def _start_balanced(self, members: Sequence[int], waiting: list[int]) -> list[int]:
        """Start what a group's first completion decides: samples from the prompt, and its own branches."""
        rule, first = self.policy.branching, self.samples[members[0]]
        assert rule is not None
        turns = [turn for turn in range(1, len(first.turns)) if first.follows_answer(turn)]
        share = 1.0  # without an answer there is nothing to branch from
        if turns:
            after_answers = [first.mean_entropy(turn, rule.tokens) for turn in turns]
            rise = math.fsum(after_answers) / len(turns) - first.mean_entropy(0, rule.tokens)
            # m/k = σ(b (H₀ − H_tool))
            share = 1 / (1 + math.exp(min(rule.balance * _require_entropy(rise), 500.0)))
        from_prompt = min(len(waiting), max(1, round(share * len(members))) - 1)
        started, waiting[:from_prompt] = waiting[:from_prompt], []
        consecutive = 0
        for turn in turns:
            branch = self._branch(members[0], turn, waiting, consecutive)
            consecutive = consecutive + 1 if branch else 0
            started += branch
        return started

    def _rollout(self) -> TextRollout:
        samples, length = self.samples, max(1, *(len(sample.tokens) for sample in self.samples))
        numbers = torch.tensor(
            [[*(token[1:5] for token in s.tokens), *[(0.0,) * 4] * (length - len(s.tokens))] for s in samples]
        )
        loss_mask, log_prob, full_log_prob, entropy = (column.contiguous() for column in numbers.unbind(2))
        prompt_ids, prompt_mask = self._prompt_tensors()
        padding = int(prompt_ids[0, 0])
        kept = None
        if self.sampling.truncates:
            kept = TokenSets.from_lists([[token.kept for token in s.tokens] for s in samples], length)
        return TextRollout(
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            completion_ids=torch.tensor([s.ids() + [padding] * (length - len(s.tokens)) for s in samples]),
            loss_mask=loss_mask,
            log_prob=log_prob,
            full_log_prob=full_log_prob,
            entropy=entropy,
            text=[self.policy.decode(sample.ids(), special=False) for sample in samples],
            stop_reason=[sample.reason for sample in samples],
            group=[self._label(number) for number in range(len(samples))],
            prompt=[self.prompts[sample.prompt_index] for sample in samples],
            seed=[sample.seed for sample in samples],
            sampling=self.sampling,
            kept=kept,
            images=self._images(samples),
            tools=[replace(sample.trace, answers=self._answer_spans(sample)) for sample in samples],
            shared=None if self.policy.branching is None else self._shared(length),
        )

    def _images(self, samples: Sequence[_Sample]) -> list[Sequence[Any]] | None:
        return None if self.images is None else [self.images[sample.prompt_index] for sample in samples]

    def _shared(self, length: int) -> Tensor:
        """[B, T] number of samples that have each drawn token in common."""
        counts = Counter(token.source for sample in self.samples for token in sample.tokens)
        shared = torch.ones(len(self.samples), length)
        for row, sample in zip(shared, self.samples, strict=True):
            row[: len(sample.tokens)] = torch.tensor(
                [counts[t.source] if t.source else 1 for t in sample.tokens]
            )
        return shared

    def _answer_spans(self, sample: _Sample) -> tuple[tuple[int, int], ...]:
        """(begin, end) characters of the text that the tool wrote."""
        edges, inside, ids = list[int](), False, sample.ids()
        for position, drawn in enumerate([*(token.source is not None for token in sample.tokens), True]):
            if drawn == inside:
                edges, inside = [*edges, len(self.policy.decode(ids[:position], special=False))], not inside
        return tuple((begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end)

    def _prompt_tensors(self) -> tuple[Tensor, Tensor]:
        """Ids and mask [B, L] of the prompts, padded on the left."""
        rows = [sample.prompt_row for sample in self.samples if sample.prompt_row is not None]
        width = max(int(mask.sum()) for _, mask in rows)
        ids, masks = (
            [pad(row, (max(0, width - len(row)), 0))[-width:] for row in column]
            for column in zip(*rows, strict=True)
        )
        return torch.stack(ids), torch.stack(masks)


def _require_entropy(rise: float) -> float:
    """Refuse an entropy that the engine did not report."""
    if math.isnan(rise):
        raise UserError(
            "rollout.tool.branch needs the entropy of the drawn tokens, and the server does not report "
            "it. Set rollout.top_k, or leave branch out."
        )
    return rise
