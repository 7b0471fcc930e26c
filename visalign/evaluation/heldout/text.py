# SPDX-License-Identifier: Apache-2.0
"""Held-out evaluation of a text policy: sampled completions, the likeliest completion, what they cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from visalign.core import pass_at_k
from visalign.errors import UserError
from visalign.interfaces import Scores, TextReward
from visalign.seeds import sample_seed
from visalign.text import Sampling, StoppingCriteria, TextPolicy, TextRollout
from visalign.text.tool_calls import without_failed

from .correctness import PART, Tally, check_asked, check_size, tags_of, valid_of, verdict
from .result import HeldoutResult

GREEDY, ANY, LENGTH, ENTROPY = "greedy", "any_of_samples", "length", "token_entropy"
"""What is measured besides the rewards: the verdict of the likeliest completion, pass@S over a prompt's S
samples (both the same for all samples of a prompt), tokens, and mean nats per token."""

_MEASURES = {
    GREEDY: ("1 = correct", True),
    ANY: ("1 = correct", True),
    LENGTH: ("tokens", False),
    ENTROPY: ("nats", True),
}


def check_labels(rewards: Iterable[str]) -> None:
    """Refuse a reward under the label of a measure.

    Raises:
        UserError: names it.
    """
    if taken := sorted(set(rewards) & set(_MEASURES)):
        raise UserError(
            f"The label {taken[0]!r} is a measure's, which evaluations have besides; give the reward another "
            f"one and its name: {{my_{taken[0]}: {{name: {taken[0]}}}}}."
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
    measures: bool = True,
) -> HeldoutResult:
    """Complete every record once per seed, and once greedily, and judge the completions.

    Args:
        policy: with the weights to be judged.
        rewards: label -> reward.
        records: each with "prompt"; "tag" or "task" is its category.
        seeds: one completion each; a record's completion to a seed does not depend on the other records.
        sampling: how tokens are drawn.
        stopping: what ends a completion.
        correctness: label of the reward that says right or wrong; None where none does.
        measures: add `GREEDY`, `ANY`, `LENGTH` and `ENTROPY` to the scores.

    Returns:
        The result, records in the given order, the seeds of a record side by side, without images.
    """
    check_asked(rewards, records, seeds, correctness)
    check_labels(rewards)
    prompts = [record["prompt"] for record in records]
    names = [prompt_text(prompt) for prompt in prompts]
    drawn = [sample_seed("heldout", name, int(s)) for name in names for s in seeds]
    with torch.no_grad():
        rollout = policy.generate(
            prompts, seeds=drawn, num_generations=len(seeds), sampling=sampling, stopping=stopping
        )
    metadata = [record for record in records for _ in seeds]
    tally = Tally(correctness=correctness, samples="completions")
    for name, reward in rewards.items():
        tally.add(name, reward, _score(name, reward, rollout, metadata), len(metadata))
    found = tally.fields(rewards, len(metadata))
    extra = _measured(rollout, found["correct"], found["judged"], len(seeds)) if measures else {}
    if measures and correctness is not None:
        greedy = _greedy(policy, rewards[correctness], records, stopping)
        extra[GREEDY] = np.repeat(greedy, len(seeds)).astype(np.float32)
    for name, values in extra.items():
        found["scores"][name] = values
        found["units"][name], found["higher_is_better"][name] = _MEASURES[name]
    return HeldoutResult(
        prompts=tuple(name for name in names for _ in seeds),
        tags=tags_of(metadata),
        seeds=np.tile(np.array(seeds, dtype=np.int64), len(records)),
        images=np.zeros((0, 1, 1, 3), dtype=np.uint8),
        image_index=np.zeros(0, dtype=np.int64),
        completions=tuple(rollout.text),
        **found,
    )


def prompt_text(prompt: Any) -> str:
    """A prompt as one text, which names its samples in a result: itself, or the contents of its messages, in
    which an image is what names it.

    >>> prompt_text([{"role": "user", "content": [{"image": "a.png"}, {"text": "How good is it?"}]}])
    '[a.png] How good is it?'
    """
    return prompt if isinstance(prompt, str) else "\n".join(map(_message_text, prompt))


def _message_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return str(content)
    parts = (f"[{part['image']}]" if "image" in part else str(part.get("text", part)) for part in content)
    return " ".join(parts)


def _score(
    name: str, reward: TextReward, rollout: TextRollout, metadata: Sequence[Mapping[str, Any]]
) -> Scores:
    """A reward's scores, invalid where a prompt was too long to be completed or a tool failed."""
    scores = reward.score(list(rollout.text), list(rollout.prompt), metadata)
    check_size(name, scores, len(metadata), "completions")
    if bool(rollout.generated.all()):
        return scores
    reason, written = scores.reason or [None] * len(scores), rollout.generated.tolist()
    reason = [r if ok else "prompt too long" for r, ok in zip(reason, written, strict=True)]
    return without_failed(
        replace(scores, valid=scores.valid.cpu() & rollout.generated, reason=reason), rollout
    )


def _measured(
    rollout: TextRollout, right: NDArray[np.bool_], judged: NDArray[np.bool_], samples: int
) -> dict[str, NDArray[np.float32]]:
    length = torch.where(rollout.generated, rollout.loss_mask.sum(1), torch.nan)
    entropy = (rollout.entropy * rollout.loss_mask).sum(1) / length.clamp(min=1)
    found = {LENGTH: length.float().numpy(), ENTROPY: entropy.float().numpy()}
    if judged.any():
        asked = torch.from_numpy(judged.reshape(-1, samples).sum(1))
        solved = torch.from_numpy(right.reshape(-1, samples).sum(1))
        whole = torch.where(asked == samples, pass_at_k(asked, solved, samples), torch.nan)
        found[ANY] = np.repeat(whole.float().numpy(), samples)
    return found


def _greedy(
    policy: TextPolicy, judge: Any, records: Sequence[Mapping[str, Any]], stopping: StoppingCriteria
) -> NDArray:
    """[records] 1, 0 or NaN: the verdict of the likeliest completion."""
    with torch.no_grad():
        rollout = policy.generate(
            [record["prompt"] for record in records],
            seeds=0,
            sampling=Sampling(temperature=0.0),
            stopping=stopping,
        )
    scores = _score(judge.name, judge, rollout, records)
    right = verdict(judge.name, judge, scores).float()
    return torch.where(valid_of(scores), right, torch.nan).numpy()


def check_text_judge(name: str, reward: TextReward, record: Mapping[str, Any]) -> None:
    """Refuse a reward that cannot say right or wrong, before anything is sampled.

    The reward is shown one short completion to one record. It must be able to judge it, and say right or
    wrong: by a range of (0, 1) or the part `correct`.

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
