# SPDX-License-Identifier: Apache-2.0
"""Sample and score completions over a grid of temperatures, nuclei and seeds."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from visalign.errors import UserError
from visalign.interfaces import TextReward, score_named
from visalign.seeds import sample_seed
from visalign.text import Prompt, Sampling, StoppingCriteria
from visalign.text.tool_calls import score_generated

from .parts import CompletionGenerator, Records

UNREAD = "unread"  # Column of a dataset with the characters of a completion that no reward reads


@dataclass(frozen=True, kw_only=True)
class GridPoint:
    """A sampling distribution and a seed."""

    temperature: float
    top_p: float
    seed: int
    hinted: bool = False  # Whether the prompts end with a hint at their answers


@dataclass(frozen=True, kw_only=True)
class Completions:
    """B completions of one or several grid points, on the CPU."""

    prompt: Sequence[int]  # B indices of the prompts' records
    completed_prompt: Sequence[Prompt | None]  # B prompts into which an environment wrote; None where it wrote nothing
    number: Sequence[int]  # B numbers of the completions among those to the same prompt at the same point
    point: Sequence[GridPoint]  # B grid points
    text: Sequence[str]  # B completions, without special tokens
    reward: Tensor  # [B] float32, higher is better; NaN where the reward failed
    tokens: Sequence[int]  # B lengths, end token included
    truncated: Tensor  # bool [B], True where the completion met the length limit
    reason: Sequence[str | None]  # Why the reward failed; None where it did not
    answers: Sequence[Sequence[Sequence[int]]]  # B lists of (begin, end) characters of the text that a tool wrote
    unread: Sequence[Sequence[Sequence[int]]]  # The same with the marks of turns: characters that no reward reads

    def __len__(self) -> int:
        return len(self.text)

    @property
    def scored(self) -> Tensor:
        """bool [B], whether there is a reward."""
        return torch.isfinite(self.reward)

    def rows(self, index: Sequence[int]) -> Completions:
        columns: dict[str, Any] = {}
        for field in fields(self):
            column = getattr(self, field.name)
            columns[field.name] = column[list(index)] if isinstance(column, Tensor) else [column[i] for i in index]
        return Completions(**columns)


def grid_points(temperatures: Sequence[float], top_p: Sequence[float], seeds: Sequence[int]) -> list[GridPoint]:
    """Combine temperatures, nuclei and seeds, the seeds of one distribution side by side."""
    for name, values in (("temperatures", temperatures), ("top_p", top_p), ("seeds", seeds)):
        if not values or len(set(values)) != len(values):
            raise UserError(f"{name} is {list(values)}; give at least one number, and each number once.")
    return [GridPoint(temperature=t, top_p=p, seed=s) for t in temperatures for p in top_p for s in seeds]


def sample_point(
    policy: CompletionGenerator,
    reward: TextReward,
    records: Records,
    point: GridPoint,
    *,
    samples: int,
    stopping: StoppingCriteria,
    seed: int,
    prompts_per_call: int = 64,
    prompts: Sequence[Prompt] | None = None,
    after_call: Callable[[int], object] = lambda done: None,
) -> Completions:
    """Complete every record `samples` times at one grid point, prompt by prompt, and score the completions.

    A completion's tokens are a function of (seed, point, prompt, number): neither the other points nor the other
    records change them, and different points draw different numbers. `prompts` take the place of the records' own;
    `prompts_per_call` bounds memory, and after each call `after_call` gets the number of prompts done.
    """
    prompts = [record["prompt"] for record in records] if prompts is None else prompts
    draw = (seed, "grid", repr(float(point.temperature)), repr(float(point.top_p)), point.seed)
    parts = []
    for start in range(0, len(records), prompts_per_call):
        index = range(start, min(start + prompts_per_call, len(records)))
        batch = prompts[start : index.stop]
        # a text that is the same in every run; a message may be any mapping
        keys = [prompt if isinstance(prompt, str) else repr([*map(dict, prompt)]) for prompt in batch]
        with torch.no_grad():
            rollout = policy.generate(
                batch,
                seeds=[sample_seed(*draw, key, j) for key in keys for j in range(samples)],
                num_generations=samples,
                sampling=Sampling(temperature=point.temperature, top_p=point.top_p),
                stopping=stopping,
            )
        metadata = [records[i] for i in index for _ in range(samples)]
        if point.hinted:  # a judge does not see the hint
            rollout = replace(rollout, prompt=[record["prompt"] for record in metadata])
        pairs = zip(rollout.prompt, metadata, strict=True)
        scores = score_generated(rollout, metadata, partial(score_named, reward, name=reward.name))
        value = scores.value.detach().float().cpu()
        valid = scores.valid.cpu() & value.isfinite()
        failures = [reason or "value not finite" for reason in scores.reason or ()]
        parts.append(
            Completions(
                prompt=[i for i in index for _ in range(samples)],
                completed_prompt=[None if p == record["prompt"] else p for p, record in pairs],
                number=list(range(samples)) * len(index),
                point=[point] * len(metadata),
                text=list(rollout.text),
                reward=torch.where(valid, value, torch.nan),
                tokens=[int(length) for length in rollout.loss_mask.sum(1).tolist()],
                truncated=rollout.truncated,
                reason=[None if ok else why for ok, why in zip(valid.tolist(), failures, strict=True)],
                answers=[trace.answers for trace in rollout.tools or ()] or [()] * len(metadata),
                unread=[getattr(text, "answers", ()) for text in rollout.text],
            )
        )
        after_call(index.stop)
    return join_completions(parts)


def with_hint(record: Mapping[str, Any], hint: str) -> Prompt:
    """Append a hint, whose {field} are replaced by the record's fields, to the record's prompt."""
    if missing := sorted(set(re.findall(r"\{(\w+)\}", hint)) - record.keys()):
        raise UserError(
            f"The hint {hint!r} names the field {missing[0]!r}, which a record lacks: it has {', '.join(record)}."
        )
    text = "\n" + re.sub(r"\{(\w+)\}", lambda match: str(record[match[1]]), hint)
    prompt = record["prompt"]
    if isinstance(prompt, str):
        return prompt + text
    last, content = prompt[-1], prompt[-1].get("content") or ""
    content = content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return [*prompt[:-1], {**last, "content": content}]


def join_completions(parts: Sequence[Completions]) -> Completions:
    """Concatenate completions of several calls or points."""
    columns: dict[str, Any] = {}
    for field in fields(Completions):
        values = [getattr(part, field.name) for part in parts]
        columns[field.name] = torch.cat(values) if isinstance(values[0], Tensor) else list(chain.from_iterable(values))
    return Completions(**columns)
