# SPDX-License-Identifier: Apache-2.0
"""Completions of a policy over a grid of temperatures, nuclei and seeds, judged."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visalign.errors import UserError
from visalign.interfaces import TextReward
from visalign.seeds import sample_seed
from visalign.text import Prompt, Sampling, StoppingCriteria
from visalign.text.tool_calls import without_failed
from visalign.training.loop.judging import score_samples

from .parts import Generates

Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class GridPoint:
    """One way of sampling, with a seed of its own."""

    temperature: float
    top_p: float
    seed: int
    hinted: bool = False
    """Whether the prompts were completed with a hint at their answers."""


@dataclass(frozen=True, kw_only=True)
class Completions:
    """B completions of one or several grid points, on the CPU."""

    prompt: Sequence[int]
    """B numbers of the records that were completed."""
    number: Sequence[int]
    """B numbers of the completions among those to the same prompt at the same point."""
    point: Sequence[GridPoint]
    """B grid points."""
    text: Sequence[str]
    """B completions, without special tokens."""
    reward: Tensor
    """[B] float32, higher is better; NaN where the judgement failed."""
    tokens: Sequence[int]
    """B lengths, end token included."""
    truncated: Tensor
    """bool [B], True where the completion met the length limit."""
    reason: Sequence[str | None]
    """Why the judgement failed; None where it did not."""
    answers: Sequence[Sequence[Sequence[int]]]
    """B lists of what characters of the text a tool wrote: beginnings and ends."""

    def __len__(self) -> int:
        return len(self.text)

    @property
    def judged(self) -> Tensor:
        """bool [B], whether there is a reward."""
        return torch.isfinite(self.reward)

    def rows(self, places: Sequence[int]) -> Completions:
        """Some of the completions."""
        return Completions(
            prompt=[self.prompt[i] for i in places],
            number=[self.number[i] for i in places],
            point=[self.point[i] for i in places],
            text=[self.text[i] for i in places],
            reward=self.reward[list(places)],
            tokens=[self.tokens[i] for i in places],
            truncated=self.truncated[list(places)],
            reason=[self.reason[i] for i in places],
            answers=[self.answers[i] for i in places],
        )


def grid_points(
    temperatures: Sequence[float], top_p: Sequence[float], seeds: Sequence[int]
) -> list[GridPoint]:
    """Every combination, the seeds of one distribution next to each other.

    Args:
        temperatures: τ, above 0.
        top_p: nuclei, in (0, 1].
        seeds: integers from 0 up.

    Raises:
        UserError: an empty or repeating list, or a number out of range.
    """
    for name, given in (("temperatures", temperatures), ("top_p", top_p), ("seeds", seeds)):
        if not given or len(set(given)) != len(given):
            raise UserError(f"{name} is {list(given)}; give at least one number, and each number once.")
    if min(seeds) < 0:
        raise UserError(f"seeds is {list(seeds)}; seeds are whole numbers from 0 up.")
    for temperature in temperatures:
        if Sampling(temperature=temperature).greedy:
            raise UserError(
                "temperatures holds 0, which draws nothing: all completions to a prompt would be the same. "
                "Give temperatures above 0."
            )
    for nucleus in top_p:
        Sampling(top_p=nucleus)
    return [GridPoint(temperature=t, top_p=p, seed=s) for t in temperatures for p in top_p for s in seeds]


def sample_point(
    policy: Generates,
    reward: TextReward,
    records: Records,
    point: GridPoint,
    *,
    samples: int,
    stopping: StoppingCriteria,
    seed: int,
    prompts_per_call: int = 64,
    prompts: Sequence[Prompt] | None = None,
    after_call: Callable[[int], object] | None = None,
) -> Completions:
    """Complete every record `samples` times at one grid point, and judge the completions.

    A completion's tokens are a function of (seed, point, prompt, number): neither the other points nor the
    other records change them, and different points draw different numbers.

    Args:
        policy: who writes the completions.
        reward: higher is better.
        records: each has "prompt"; they are handed to the reward as metadata.
        point: how tokens are drawn.
        samples: n, completions per prompt.
        stopping: what ends a completion.
        seed: of the run.
        prompts_per_call: prompts that are completed and judged together; memory only.
        prompts: what is completed in place of the records' prompts, one for each; judged are the records.
        after_call: called with the prompts done so far.

    Returns:
        P·n completions, those of a prompt next to each other.

    Raises:
        RewardFailure: the reward returned something other than one score per completion.
    """
    parts, prompts = [], [record["prompt"] for record in records] if prompts is None else prompts
    for start in range(0, len(records), prompts_per_call):
        chosen = range(start, min(start + prompts_per_call, len(records)))
        parts.append(_call(policy, reward, records, prompts, chosen, point, samples, stopping, seed))
        if after_call is not None:
            after_call(chosen.stop)
    return join_completions(parts)


def _call(
    policy: Generates,
    reward: TextReward,
    records: Records,
    prompts: Sequence[Prompt],
    chosen: range,
    point: GridPoint,
    samples: int,
    stopping: StoppingCriteria,
    seed: int,
) -> Completions:
    drawn_with = (seed, "grid", repr(float(point.temperature)), repr(float(point.top_p)), point.seed)
    keys = [prompt_key(prompts[i]) for i in chosen]
    with torch.no_grad():
        rollout = policy.generate(
            [prompts[i] for i in chosen],
            seeds=[sample_seed(*drawn_with, key, j) for key in keys for j in range(samples)],
            num_generations=samples,
            sampling=Sampling(temperature=point.temperature, top_p=point.top_p),
            stopping=stopping,
        )
    metadata = [records[i] for i in chosen for _ in range(samples)]
    scores = without_failed(score_samples(reward, list(rollout.text), metadata, what="completions"), rollout)
    value = scores.value.detach().float().cpu()
    valid = scores.valid.cpu() & value.isfinite() & rollout.generated
    said = scores.reason or [None] * len(metadata)
    reasons: list[str | None] = []
    for i, ok in enumerate(valid.tolist()):
        unread = "prompt too long" if rollout.stop_reason[i] == "prompt too long" else None
        reasons.append(None if ok else unread or said[i] or "value not finite")
    return Completions(
        prompt=[i for i in chosen for _ in range(samples)],
        number=list(range(samples)) * len(chosen),
        point=[point] * len(metadata),
        text=list(rollout.text),
        reward=torch.where(valid, value, torch.nan),
        tokens=[int(length) for length in rollout.loss_mask.sum(1).tolist()],
        truncated=rollout.truncated,
        reason=reasons,
        answers=[() for _ in metadata] if rollout.tools is None else [t.answers for t in rollout.tools],
    )


def prompt_key(prompt: Prompt) -> str:
    """A text that stands for the prompt, the same in every run."""
    return prompt if isinstance(prompt, str) else repr([dict(message) for message in prompt])


def with_hint(record: Mapping[str, Any], hint: str) -> Prompt:
    """The record's prompt with a hint behind it, whose {field} stand for the record's fields.

    Raises:
        UserError: the record lacks a field.
    """
    wanted = set(re.findall(r"\{(\w+)\}", hint))
    if lacking := sorted(wanted - record.keys()):
        raise UserError(
            f"The hint {hint!r} names the field {lacking[0]!r}, which a record lacks: it has "
            f"{', '.join(record)}."
        )
    text = "\n" + re.sub(r"\{(\w+)\}", lambda found: str(record[found[1]]), hint)
    prompt = record["prompt"]
    if isinstance(prompt, str):
        return prompt + text
    last, content = prompt[-1], prompt[-1]["content"]
    added = content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return [*prompt[:-1], {**last, "content": added}]


def join_completions(parts: Sequence[Completions]) -> Completions:
    """Completions of several calls or points as one, in the order given."""
    return Completions(
        prompt=[i for part in parts for i in part.prompt],
        number=[i for part in parts for i in part.number],
        point=[p for part in parts for p in part.point],
        text=[t for part in parts for t in part.text],
        reward=torch.cat([part.reward for part in parts]),
        tokens=[n for part in parts for n in part.tokens],
        truncated=torch.cat([part.truncated for part in parts]),
        reason=[r for part in parts for r in part.reason],
        answers=[a for part in parts for a in part.answers],
    )
