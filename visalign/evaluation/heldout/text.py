# SPDX-License-Identifier: Apache-2.0
"""Held-out evaluation of a text policy: sampled completions, the greedy completion, their length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from visalign.core import pass_at_k
from visalign.errors import UserError
from visalign.interfaces import Scores, TextReward, score_named
from visalign.seeds import sample_seed
from visalign.text import Sampling, StoppingCriteria, TextPolicy, TextRollout
from visalign.text.messages import prompt_text
from visalign.text.tool_calls import score_generated

from .correctness import Tally, check_evaluation, record_tags, verdict
from .result import ENTROPY, LENGTH, HeldoutResult

GREEDY, ANY = "greedy", "any_of_samples"
"""Greedy verdict, pass@S over a prompt's S samples (both once a prompt), tokens, and mean nats per token."""

_MEASURES = {
    GREEDY: ("1 = correct", True),
    ANY: ("1 = correct", True),
    LENGTH: ("tokens", False),
    ENTROPY: ("nats", True),
}


def check_labels(rewards: Iterable[str]) -> None:
    """Refuse a reward under the label of a measure."""
    if taken := sorted(set(rewards) & set(_MEASURES)):
        raise UserError(
            f"The label {taken[0]!r} is the name of a measure of every evaluation; give the reward another, "
            f"such as {{my_{taken[0]}: {{name: {taken[0]}}}}}."
        )


def evaluate_text(
    policy: TextPolicy,
    rewards: Mapping[str, TextReward],
    records: Sequence[Mapping[str, Any]],
    *,
    seeds: Sequence[int],
    sampling: Sampling,
    stopping: StoppingCriteria,
    correctness: str | None,
) -> HeldoutResult:
    """Complete every record once per seed, and once greedily, and score the completions.

    The reward labelled `correctness` gives the verdicts; scores get `GREEDY`, `ANY`, `LENGTH`, `ENTROPY`.
    """
    check_evaluation(rewards, records, seeds, correctness)
    check_labels(rewards)
    prompts = [record["prompt"] for record in records]
    names = [prompt_text(prompt) for prompt in prompts]
    drawn = [sample_seed("heldout", name, int(s)) for name in names for s in seeds]
    with torch.no_grad():
        rollout = policy.generate(
            prompts, seeds=drawn, num_generations=len(seeds), sampling=sampling, stopping=stopping
        )
    metadata = [record for record in records for _ in seeds]
    tally = Tally(correctness=correctness)
    for name, reward in rewards.items():
        tally.add(name, reward, _score(name, reward, rollout, metadata), len(metadata))
    fields = tally.fields(rewards, len(metadata))
    extra = _measures(rollout, fields["correct"], fields["judged"], len(seeds))
    if correctness is not None:
        greedy = _greedy(policy, rewards[correctness], records, stopping)
        extra[GREEDY] = np.repeat(greedy, len(seeds)).astype(np.float32)
    for name, values in extra.items():
        fields["scores"][name] = values
        fields["units"][name], fields["higher_is_better"][name] = _MEASURES[name]
    return HeldoutResult(
        prompts=tuple(name for name in names for _ in seeds),
        tags=record_tags(metadata),
        seeds=np.tile(np.array(seeds, dtype=np.int64), len(records)),
        images=np.zeros((0, 1, 1, 3), dtype=np.uint8),
        image_index=np.zeros(0, dtype=np.int64),
        completions=tuple(rollout.text),
        **fields,
    )


def _score(name: str, reward: TextReward, rollout: TextRollout, metadata: Sequence[Mapping[str, Any]]) -> Scores:
    """Return a reward's scores, invalid where a prompt was too long to be completed or a tool failed."""
    return score_generated(rollout, metadata, partial(score_named, reward, name=name))


def _measures(
    rollout: TextRollout, right: NDArray[np.bool_], judged: NDArray[np.bool_], samples: int
) -> dict[str, NDArray[np.float32]]:
    length = torch.where(rollout.generated, rollout.loss_mask.sum(1), torch.nan)
    entropy = (rollout.entropy * rollout.loss_mask).sum(1) / length.clamp(min=1)
    measures = {LENGTH: length.float().numpy(), ENTROPY: entropy.float().numpy()}
    if judged.any():
        count = torch.from_numpy(judged.reshape(-1, samples).sum(1))
        solved = torch.from_numpy(right.reshape(-1, samples).sum(1))
        solved_any = torch.where(count == samples, pass_at_k(count, solved, samples), torch.nan)
        measures[ANY] = np.repeat(solved_any.float().numpy(), samples)
    return measures


def _greedy(
    policy: TextPolicy, judge: Any, records: Sequence[Mapping[str, Any]], stopping: StoppingCriteria
) -> NDArray:
    with torch.no_grad():
        rollout = policy.generate(
            [record["prompt"] for record in records], seeds=0, sampling=Sampling(temperature=0.0), stopping=stopping
        )
    scores = _score(judge.name, judge, rollout, records)
    right = verdict(judge.name, judge, scores).float()
    return torch.where(scores.valid.cpu(), right, torch.nan).numpy()


def check_text_judge(name: str, reward: TextReward, record: Mapping[str, Any]) -> None:
    """Refuse a reward that cannot say right or wrong of one short completion, before anything is sampled."""
    scores = reward.score(["1"], [record["prompt"]], [record])
    if not bool(scores.valid.any()):
        reason = (scores.reason or [None])[0] or "no reason given"
        raise UserError(
            f"Reward '{name}' cannot judge the first held-out record ({reason}), so no accuracy can be "
            "measured. Set evaluation.correctness to a reward that reads these records, or to null."
        )
    verdict(name, reward, scores)
