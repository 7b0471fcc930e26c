# SPDX-License-Identifier: Apache-2.0
"""Held-out evaluation of a text policy: sampled answers, the likeliest answer, what they cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from visalign.core import pass_at_k
from visalign.errors import UserError
from visalign.interfaces import Scores, TextReward
from visalign.seeds import sample_seed
from visalign.text import Sampling, Stop, TextPolicy, TextRollout

from .correctness import PART, verdict
from .result import HeldoutResult

GREEDY, ANY, LENGTH, ENTROPY = "greedy", "any_of_samples", "length", "token_entropy"
"""What is measured besides the rewards: the verdict of the likeliest answer, pass@S over a prompt's S samples
(both the same for all samples of a prompt), tokens, and mean nats per token."""

_MEASURES = {
    GREEDY: ("1 = correct", True),
    ANY: ("1 = correct", True),
    LENGTH: ("tokens", False),
    ENTROPY: ("nats", True),
}


def evaluate_text(
    policy: TextPolicy,
    rewards: Mapping[str, TextReward],
    records: Sequence[Mapping[str, Any]],
    *,
    seeds: Sequence[int],
    sampling: Sampling,
    stop: Stop,
    correctness: str | None,
    measures: bool = True,
) -> HeldoutResult:
    """Answer every record once per seed, and once greedily, and judge the answers.

    Args:
        policy: with the weights to be judged.
        rewards: label -> reward.
        records: each with "prompt"; "tag" or "task" is its category.
        seeds: one answer each; a record's answer to a seed does not depend on the other records.
        sampling: how tokens are drawn.
        stop: what ends an answer.
        correctness: label of the reward that says right or wrong; None where none does.
        measures: add `GREEDY`, `ANY`, `LENGTH` and `ENTROPY` to the scores.

    Returns:
        The result, records in the given order, the seeds of a record side by side, without pictures.

    Raises:
        UserError: no records, no or repeated seeds, an unknown `correctness` or one that cannot say right or
            wrong, or a reward that returns another number of scores.
    """
    _check(rewards, records, seeds, correctness)
    prompts = [record["prompt"] for record in records]
    names = [prompt_text(prompt) for prompt in prompts]
    drawn = [sample_seed("heldout", name, int(s)) for name in names for s in seeds]
    with torch.no_grad():
        rollout = policy.generate(
            prompts, seeds=drawn, num_generations=len(seeds), sampling=sampling, stop=stop
        )
    metadata = [record for record in records for _ in seeds]
    scored = {name: _score(name, reward, rollout, metadata) for name, reward in rewards.items()}
    scored = {name: _answered(scores, rollout.generated) for name, scores in scored.items()}
    right, judged, reasons = _verdicts(rewards, scored, correctness, len(metadata))
    extra = _measured(rollout, right, judged, len(seeds)) if measures else {}
    if measures and correctness is not None:
        greedy = _greedy(policy, rewards[correctness], records, stop)
        extra[GREEDY] = np.repeat(greedy, len(seeds)).astype(np.float32)
    return HeldoutResult(
        prompts=tuple(name for name in names for _ in seeds),
        tags=tuple(str(r.get("tag", r.get("task", "untagged"))) for r in metadata),
        seeds=np.tile(np.array(seeds, dtype=np.int64), len(records)),
        correct=right,
        judged=judged,
        reasons=tuple(reasons),
        scores={name: _masked(scores) for name, scores in scored.items()} | extra,
        units={n: r.unit for n, r in rewards.items()} | {n: _MEASURES[n][0] for n in extra},
        higher_is_better={n: r.higher_is_better for n, r in rewards.items()} | _directions(extra),
        images=np.zeros((0, 1, 1, 3), dtype=np.uint8),
        image_index=np.zeros(0, dtype=np.int64),
        completions=tuple(rollout.text),
    )


def _directions(measured: Iterable[str]) -> dict[str, bool]:
    return {name: _MEASURES[name][1] for name in measured}


def prompt_text(prompt: Any) -> str:
    """A prompt as one text, which names its samples in a result: itself, or the contents of its messages."""
    return prompt if isinstance(prompt, str) else "\n".join(str(m.get("content")) for m in prompt)


def _score(
    name: str, reward: TextReward, rollout: TextRollout, metadata: Sequence[Mapping[str, Any]]
) -> Scores:
    scores = reward.score(list(rollout.text), list(rollout.prompt), metadata)
    if len(scores) != len(metadata):
        raise UserError(
            f"Reward '{name}' returned {len(scores)} scores for {len(metadata)} answers; it must return one "
            "each."
        )
    return scores


def _answered(scores: Scores, generated: Tensor) -> Scores:
    """The scores, invalid where a prompt was too long to be answered."""
    if bool(generated.all()):
        return scores
    reason = list(scores.reason or [None] * len(scores))
    reason = [r if g else "prompt too long" for r, g in zip(reason, generated.tolist(), strict=True)]
    return replace(scores, valid=scores.valid.cpu() & generated, reason=reason)


def _masked(scores: Scores) -> NDArray[np.float32]:
    value = scores.value.detach().cpu().float()
    return torch.where(_valid(scores), value, torch.tensor(torch.nan)).numpy()


def _valid(scores: Scores) -> Tensor:
    return scores.valid.cpu() & scores.value.detach().cpu().isfinite()


def _verdicts(
    rewards: Mapping[str, Any], scored: Mapping[str, Scores], correctness: str | None, size: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], list[str]]:
    """(right, judged, what the judge said), [N] each."""
    if correctness is None:
        return np.zeros(size, dtype=bool), np.zeros(size, dtype=bool), [""] * size
    scores = scored[correctness]
    valid = _valid(scores)
    right = verdict(correctness, rewards[correctness], scores) & valid
    said, failed = scores.text or [""] * size, scores.reason or [None] * size
    reasons = [(said[i] or "") if valid[i] else (failed[i] or "no finite value") for i in range(size)]
    return right.numpy(), valid.numpy(), reasons


def _measured(
    rollout: TextRollout, right: NDArray[np.bool_], judged: NDArray[np.bool_], samples: int
) -> dict[str, NDArray[np.float32]]:
    length = torch.where(rollout.generated, rollout.weight.sum(1), torch.nan)
    entropy = (rollout.entropy * rollout.weight).sum(1) / length.clamp(min=1)
    found = {LENGTH: length.float().numpy(), ENTROPY: entropy.float().numpy()}
    if judged.any():
        asked = torch.from_numpy(judged.reshape(-1, samples).sum(1))
        solved = torch.from_numpy(right.reshape(-1, samples).sum(1))
        whole = torch.where(asked == samples, pass_at_k(asked, solved, samples), torch.nan)
        found[ANY] = np.repeat(whole.float().numpy(), samples)
    return found


def _greedy(policy: TextPolicy, judge: Any, records: Sequence[Mapping[str, Any]], stop: Stop) -> NDArray:
    """[records] 1, 0 or NaN: the verdict of the likeliest answer."""
    with torch.no_grad():
        rollout = policy.generate(
            [record["prompt"] for record in records], seeds=0, sampling=Sampling(temperature=0.0), stop=stop
        )
    scores = _answered(_score(judge.name, judge, rollout, records), rollout.generated)
    right = verdict(judge.name, judge, scores).float()
    return torch.where(_valid(scores), right, torch.nan).numpy()


def _check(
    rewards: Mapping[str, TextReward],
    records: Sequence[Mapping[str, Any]],
    seeds: Sequence[int],
    correctness: str | None,
) -> None:
    if not records:
        raise UserError("There are no records to evaluate on; give at least one.")
    if not seeds or len(set(seeds)) != len(seeds):
        raise UserError(f"seeds is {list(seeds)}; give different numbers, e.g. [0, 1, 2, 3].")
    if correctness is not None and correctness not in rewards:
        raise UserError(
            f"correctness is {correctness!r}, which is none of the rewards: {', '.join(rewards) or 'none'}."
        )
    if taken := sorted(set(rewards) & set(_MEASURES)):
        raise UserError(f"The label {taken[0]!r} is a measure's; give the reward another one.")


def check_text_judge(name: str, reward: TextReward, record: Mapping[str, Any]) -> None:
    """Refuse a reward that cannot say right or wrong, before anything is sampled.

    The reward is shown one short answer to one record. It must be able to judge it, and say right or wrong:
    by a range of (0, 1) or the part `correct`.

    Args:
        name: of the reward.
        reward: the judge of correctness.
        record: a prompt record.

    Raises:
        UserError: it cannot.
    """
    scores = reward.score(["1"], [record["prompt"]], [record])
    if not bool(scores.valid.any()):
        why = (scores.reason or [None])[0] or "no reason given"
        raise UserError(
            f"Reward '{name}' cannot judge the first held-out record ({why}), so no accuracy can be "
            "measured. Set evaluation.correctness to a reward that reads these records, or to null."
        )
    if tuple(reward.range) != (0.0, 1.0) and PART not in scores.parts:
        verdict(name, reward, scores)  # raises
