# SPDX-License-Identifier: Apache-2.0
"""Self-imitation of a text policy (SPEAR): completions that beat their group are kept and learnt from again.

Where this deviates from the released code: it replays from the first completion that is kept on, and not once
the buffer is full; it draws an iteration's replay by lot; age and warm-up count iterations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from visalign.core import Objective, Prepared, Trajectories
from visalign.core.advantages.replay import replay_advantages, replay_weight
from visalign.core.groups.group_statistics import group_mean
from visalign.core.groups.labels import group_index
from visalign.core.objective.stages import sample_reward
from visalign.errors import UserError
from visalign.seeds import sample_seed
from visalign.text import Sampling, StopReason, TextRollout, TokenSets
from visalign.training.loop.algorithm import Context
from visalign.training.policy.update import PolicyStep

from .settings import SelfImitationSettings, TextRolloutSettings

KEY = "self_imitation"
"""Where a checkpoint keeps the buffer."""


@dataclass(frozen=True, kw_only=True)
class Winner:
    """A completion of L prompt tokens and T of its own."""

    prompt: Tensor
    """[L] int32."""
    completion: Tensor
    """[T] int32."""
    weight: Tensor
    """[T] float32."""
    log_prob: Tensor
    """[T] float32, log π_old."""
    kept: Tensor
    """[M] int32, ids of the tokens that could be drawn, decision after decision."""
    kept_count: Tensor
    """[T] int32 of these per decision; empty where all could."""
    reward: Tensor
    """[1] float32."""
    born: Tensor
    """[1] int32, iterations before the one that made it."""


_NAMES = tuple(f.name for f in fields(Winner))


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What an update learns from again, the same in all processes."""

    rollout: TextRollout
    """n completions."""
    prepared: Prepared
    """[n, T]."""


class SelfImitation:
    """The buffer of completions with A > 0 and that of the groups' mean rewards, and the loss on the first.

    c(s) · clipped surrogate of π/π_old under Ã = R − median of the means, of those with Ã > 0.

    Args:
        settings: sizes and pace.
        row: the run's objective, whose aggregation the loss takes.
        rollout: how completions are made.
        seed: of the run.

    Raises:
        UserError: the buffer could get larger than allowed.

    SPEAR, arXiv 2509.22601.
    """

    def __init__(
        self, settings: SelfImitationSettings, row: Objective, rollout: TextRolloutSettings, seed: int
    ) -> None:
        self._settings, self._rollout, self._seed = settings, rollout, seed
        self.row = settings.build(row)
        self._winners: deque[Winner] = deque(maxlen=settings.capacity)
        self._means: deque[float] = deque(maxlen=settings.history)
        self._said: dict[str, float] = {}
        self._check_size(0)

    def draw(self, t: Trajectories, run: Context, updates: int, epochs: int) -> list[Replayed | None]:
        """What each update of an iteration replays; None where it is nothing.

        Args:
            t: the iteration's own samples, all processes': their groups' mean rewards count already.
            run: says which iteration it is.
            updates: of an epoch.
            epochs: over the same.
        """
        now, settings = run.counters.iteration, self._settings
        self._means.extend(_group_means(t))
        while self._winners and now - int(self._winners[0].born) > settings.max_age:
            self._winners.popleft()
        weight = float(replay_weight(now, warmup=settings.warmup, ceiling=settings.weight))
        self._said = {"replay/size": float(len(self._winners)), "replay/weight": weight}
        nothing: list[Replayed | None] = [None] * (updates * epochs)
        if not (weight and self._winners and self._means):
            return nothing
        rewards = torch.cat([winner.reward for winner in self._winners])
        advantage, keep = replay_advantages(rewards, torch.tensor(list(self._means), dtype=torch.float64))
        places = keep.nonzero()[:, 0]
        generator = torch.Generator().manual_seed(sample_seed(self._seed, KEY, now))
        places = places[torch.randperm(len(places), generator=generator)[: settings.batch or len(t.weight)]]
        self._said |= {"replay/baseline": float(rewards[0] - advantage[0]), "replay/samples": len(places)}
        drawn = [
            self._replayed(part.sort().values, advantage, weight, generator)
            for part in places.tensor_split(updates)
        ]
        return drawn * epochs

    def _replayed(
        self, places: Tensor, advantage: Tensor, weight: float, generator: torch.Generator
    ) -> Replayed | None:
        if not len(places):
            return None
        winners = [self._winners[i] for i in places.tolist()]
        held = {
            name: pad_sequence([getattr(winner, name) for winner in winners], batch_first=True)
            for name in ("completion", "weight", "log_prob")
        }
        made = Trajectories(
            weight=held["weight"],
            old_log_prob=held["log_prob"],
            group=range(len(winners)),
            advantage=advantage[places],
            loss_weight=torch.full_like(held["weight"], weight),
            uniform=torch.rand(held["weight"].shape, generator=generator),
        )
        rollout = _rollout(winners, held, self._rollout.sampling)
        return Replayed(rollout=rollout, prepared=self.row.prepare(made))

    def keep(
        self, rollout: TextRollout, places: Tensor, t: Trajectories, steps: Sequence[PolicyStep], run: Context
    ) -> None:
        """Put the iteration's completions with A > 0 into the buffer, the oldest out.

        Args:
            rollout: of this process's b samples.
            places: [b] of these among the B.
            t: of all B.
            steps: the iteration's updates.
            run: says which iteration it is.

        Raises:
            UserError: images in the prompts, or the buffer could get larger than allowed.
        """
        if rollout.images is not None:
            raise UserError(
                "self_imitation keeps tokens, and these prompts have images. Set self_imitation=null."
            )
        won = torch.zeros(len(t.weight), dtype=torch.bool)
        for step in steps:
            own = step.prepared
            won[step.sample] |= torch.where(own.weight != 0, own.advantage, 0.0).sum(1) > 0
        won &= t.present() & (t.weight != 0).any(1)
        reward = sample_reward(t, 0.0).float()
        found = [
            (place, _winner(rollout, row, t, place, reward, run.counters.iteration))
            for row, place in enumerate(places.tolist())
            if won[place]
        ]
        for _, winner in sorted(gather_object(found), key=lambda pair: pair[0]):
            self._check_size(winner.prompt.nbytes + winner.kept.nbytes + winner.kept_count.nbytes)
            self._winners.append(winner)

    def _check_size(self, beside: int) -> None:
        """Refuse what could grow too large if completions were all as long as they may be; `beside` are bytes
        of a prompt, and of the tokens that could be drawn."""
        tokens, settings = self._rollout.max_new_tokens, self._settings
        needed = settings.capacity * (12 * tokens + beside) / 1e6
        if needed > settings.max_megabytes:
            raise UserError(
                f"self_imitation.capacity is {settings.capacity} completions of at most {tokens} tokens "
                f"(rollout.max_new_tokens), which with their prompts may take {needed:.3g} MB, and "
                f"self_imitation.max_megabytes allows {settings.max_megabytes:g}. Lower the capacity, or "
                "allow more: each process and each checkpoint holds them."
            )

    def metrics(self) -> dict[str, float]:
        """Of the iteration's replay."""
        return self._said

    def state(self) -> dict[str, Tensor]:
        """Both buffers, for a checkpoint."""
        found = {"means": torch.tensor(list(self._means), dtype=torch.float64)}
        for name in _NAMES:
            parts = [getattr(winner, name) for winner in self._winners]
            found[name] = torch.cat(parts) if parts else torch.zeros(0)
            found[f"{name}_length"] = torch.tensor([len(part) for part in parts], dtype=torch.int64)
        return found

    def load(self, state: Any) -> None:
        """Go on from a checkpoint's buffers."""
        self._means.extend(state["means"].tolist())
        parts = [state[name].split(state[f"{name}_length"].tolist()) for name in _NAMES]
        self._winners.extend(
            Winner(**dict(zip(_NAMES, row, strict=True))) for row in zip(*parts, strict=True)
        )


def _group_means(t: Trajectories) -> list[float]:
    """Mean rewards of the groups that have one."""
    reward = sample_reward(t, 0.0).double()
    known = torch.isfinite(reward) & t.present()
    index, groups = group_index(t.group, len(reward))
    return group_mean(reward, known, index, groups)[index[known].unique()].tolist()


def _winner(
    rollout: TextRollout, row: int, t: Trajectories, place: int, reward: Tensor, iteration: int
) -> Winner:
    """Sample `row` of a process, which is the `place`-th of all; up to its last token that is trained on."""
    size = int((t.weight[place] != 0).nonzero().max()) + 1
    kept = None if rollout.kept is None else rollout.kept.rows(torch.tensor([row]))
    none = torch.zeros(0, dtype=torch.int32)
    count = none if kept is None else kept.count[0, :size].int()
    return Winner(
        prompt=rollout.prompt_ids[row][rollout.prompt_mask[row] != 0].int(),
        completion=rollout.completion_ids[row, :size].int(),
        weight=t.weight[place, :size].float().clone(),
        log_prob=t.old_log_prob[place, :size].float().clone(),
        kept=none if kept is None else kept.ids[: int(count.sum())].clone(),
        kept_count=count,
        reward=reward[place : place + 1].clone(),
        born=torch.tensor([iteration], dtype=torch.int32),
    )


def _rollout(winners: Sequence[Winner], held: dict[str, Tensor], sampling: Sampling) -> TextRollout:
    """Stored completions as a rollout whose log-probs can be asked for."""
    count, blank = len(winners), torch.zeros_like(held["weight"])
    ended: list[StopReason] = ["eos"] * count
    prompts = [winner.prompt.flip(0).long() + 1 for winner in winners]
    padded = pad_sequence(prompts, batch_first=True).flip(1)  # on the left, 0 where there is none
    kept = None
    if sampling.truncates:
        counts = pad_sequence([winner.kept_count for winner in winners], batch_first=True)
        kept = TokenSets(torch.cat([winner.kept for winner in winners]), counts.long())
    return TextRollout(
        prompt_ids=(padded - 1).clamp(min=0),
        prompt_mask=(padded != 0).float(),
        completion_ids=held["completion"].long(),
        loss_mask=(held["weight"] != 0).float(),
        log_prob=held["log_prob"],
        full_log_prob=blank,
        entropy=blank,
        text=[""] * count,
        stop_reason=ended,
        group=range(count),
        prompt=[""] * count,
        seed=[0] * count,
        sampling=sampling,
        kept=kept,
    )
