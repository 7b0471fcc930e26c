# SPDX-License-Identifier: Apache-2.0
"""Self-imitation of a text policy (SPEAR): completions that beat their group are stored and replayed.

Deviations from the released code: it replays from the first stored completion on, not once the buffer is
full; it draws an iteration's replay at random; age and warm-up count iterations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from visalign.core import Objective, Prepared, Trajectories
from visalign.core.objective.stages import sample_reward
from visalign.text import Sampling, TextRollout, TokenSets
from visalign.text.rollout import undrawn_rollout
from visalign.training.loop.algorithm import Context
from visalign.training.policy.update import PolicyStep
from visalign.training.policy.winners import StoredSample, WinnerBuffer, group_means

from .settings import SelfImitationSettings, TextRolloutSettings


@dataclass(frozen=True, kw_only=True)
class StoredCompletion(StoredSample):
    """A completion of T tokens to a prompt of L."""

    prompt: Tensor  # [L] int32
    completion: Tensor  # [T] int32
    weight: Tensor  # [T] float32
    log_prob: Tensor  # [T] float32, log π_old
    kept: Tensor  # [M] int32, ids of the tokens that could be drawn, decision after decision
    kept_count: Tensor  # [T] int32 of these per decision; empty where all could


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Stored completions of an update, the same in all processes."""

    rollout: TextRollout  # n completions
    prepared: Prepared  # [n, T]


class SelfImitation(WinnerBuffer[StoredCompletion]):
    """Buffers of completions with A > 0 and of the groups' mean rewards, and the replay's loss.

    L = c(s) · clipped surrogate of π/π_old under Ã = R − median of the means, over completions with Ã > 0.

    SPEAR, arXiv 2509.22601.
    """

    def __init__(
        self, settings: SelfImitationSettings, objective: Objective, rollout: TextRolloutSettings, seed: int
    ) -> None:
        super().__init__(StoredCompletion, settings, seed)
        self._sampling = rollout.sampling
        self.objective = settings.build(objective)

    def draw(self, t: Trajectories, run: Context, updates: int, epochs: int) -> list[Replay | None]:
        """Draw what each update of an iteration replays; None for nothing. All epochs replay the same.

        The mean rewards of the iteration's own samples `t`, of all processes, count already.
        """
        reward = sample_reward(t, 0.0).double()
        means = group_means(reward, torch.isfinite(reward) & t.present(), t.group)
        index, advantage, generator = self.draw_winners(means, run.counters.iteration, len(t.weight))
        parts = [part.sort().values for part in index.tensor_split(updates)]
        return [self._replay(part, advantage, generator) for part in parts] * epochs

    def _replay(self, index: Tensor, advantage: Tensor, generator: torch.Generator) -> Replay | None:
        if not len(index):
            return None
        stored = [self.samples[i] for i in index.tolist()]
        weights, log_prob = _padded(stored, "weight"), _padded(stored, "log_prob")
        t = Trajectories(
            weight=weights,
            old_log_prob=log_prob,
            group=range(len(stored)),
            advantage=advantage[index],
            loss_weight=torch.full_like(weights, self.weight),
            uniform=torch.rand(weights.shape, generator=generator),
        )
        return Replay(rollout=_rollout(stored, self._sampling), prepared=self.objective.prepare(t))

    def keep(
        self, rollout: TextRollout, index: Tensor, t: Trajectories, steps: Sequence[PolicyStep], run: Context
    ) -> None:
        """Store the iteration's completions with A > 0; the oldest leave a full buffer.

        `index` [b] are the positions of this process's samples among the B of `t`.
        """
        positive = torch.zeros(len(t.weight), dtype=torch.bool)
        for step in steps:
            prepared = step.prepared
            positive[step.sample] |= torch.where(prepared.weight != 0, prepared.advantage, 0.0).sum(1) > 0
        positive &= t.present() & (t.weight != 0).any(1)
        reward = sample_reward(t, 0.0).float()
        local = [
            (sample, _store(rollout, row, t, sample, reward, run.counters.iteration))
            for row, sample in enumerate(index.tolist())
            if positive[sample]
        ]
        self.samples.extend(stored for _, stored in sorted(gather_object(local), key=lambda pair: pair[0]))


def _store(
    rollout: TextRollout, row: int, t: Trajectories, sample: int, reward: Tensor, iteration: int
) -> StoredCompletion:
    """Copy row `row` of this process, sample `sample` of all, up to its last token that is trained on."""
    size = int((t.weight[sample] != 0).nonzero().max()) + 1  # what is behind it moves nothing
    kept = count = torch.zeros(0, dtype=torch.int32)
    if rollout.kept is not None:
        sets = rollout.kept.rows(torch.tensor([row]))
        count = sets.count[0, :size].int()
        kept = sets.ids[: int(count.sum())].clone()
    return StoredCompletion(
        prompt=rollout.prompt_ids[row][rollout.prompt_mask[row] != 0].int(),
        completion=rollout.completion_ids[row, :size].int(),
        weight=t.weight[sample, :size].float().clone(),
        log_prob=t.old_log_prob[sample, :size].float().clone(),
        kept=kept,
        kept_count=count,
        reward=reward[sample : sample + 1].clone(),
        born=torch.tensor([iteration], dtype=torch.int32),
    )


def _padded(stored: Sequence[StoredCompletion], name: str) -> Tensor:
    return pad_sequence([getattr(completion, name) for completion in stored], batch_first=True)


def _rollout(stored: Sequence[StoredCompletion], sampling: Sampling) -> TextRollout:
    prompts = [completion.prompt.flip(0).long() + 1 for completion in stored]
    padded = pad_sequence(prompts, batch_first=True).flip(1)  # on the left, with 0
    kept = None
    if sampling.truncates:
        kept = TokenSets(torch.cat([completion.kept for completion in stored]), _padded(stored, "kept_count").long())
    mask = (_padded(stored, "weight") != 0).float()
    rollout = undrawn_rollout(
        (padded - 1).clamp(min=0), (padded != 0).float(), _padded(stored, "completion").long(), mask
    )
    return replace(rollout, log_prob=_padded(stored, "log_prob"), sampling=sampling, kept=kept)
