# SPDX-License-Identifier: Apache-2.0
"""Reference images of a reward, drawn and ranked while a policy trains, and rewards of what the reference draws."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from visalign.flow.rollout import decode_images, rollout
from visalign.interfaces import ReferencedReward, Scores
from visalign.seeds import sample_seed
from visalign.settings import MOST
from visalign.training.loop.algorithm import Context
from visalign.training.loop.judging import check_failures
from visalign.training.loop.processes import Shares
from visalign.training.loop.runtime import PhaseClock
from visalign.training.loop.sampler import Batch
from visalign.vision.pixels import to_levels

from .samples import Records, ScoredImages

KEY = "references"  # File stem of the references in a checkpoint


class ReferenceImages:
    """Draw `count` images of a prompt, rank them by the reward's judge, and keep the best `keep` as its references.

    A prompt's references are drawn when it first comes up: with `every` None by the model before training, once, as
    in the paper; else by the present policy, and again once they are `every` iterations old.

    RewardDance, arXiv 2509.08826: P(yes) against the best 2 of 16 (table 8, Bo16 top-2).
    """

    def __init__(self, reward: ReferencedReward, *, count: int, keep: int, every: int | None = None) -> None:
        self.reward, self.count, self.keep, self.every = reward, count, keep, every
        self.own = frozenset(reward.references)  # Prompts whose references are the user's
        self.drawn: dict[str, int] = {}  # Prompt -> iteration

    def due(self, prompts: Iterable[str], iteration: int, drawn: Mapping[str, int]) -> list[str]:
        """List the prompts whose references have not been `drawn`, or are too old."""
        oldest = 0 if self.every is None else iteration - self.every + 1
        return [p for p in dict.fromkeys(prompts) if p not in self.own and drawn.get(p, -MOST) < oldest]

    def planned(self, rounds: Iterable[tuple[int, Sequence[str]]]) -> int:
        """Count the images drawn in a run of these (iteration, prompts)."""
        drawn, count = dict[str, int](), 0
        for iteration, prompts in rounds:
            due = self.due(prompts, iteration, drawn)
            drawn |= dict.fromkeys(due, iteration)
            count += self.count * len(due)
        return count

    def draw(self, algorithm: Any, number: int, iteration: int, clock: PhaseClock) -> None:
        """Draw the references due for the prompts of a round of an `ImageAlgorithm`; all processes call it."""
        indices = algorithm.sampler.batch(number).prompt_index.tolist()
        records = {str(algorithm.records[i]["prompt"]): algorithm.records[i] for i in indices}
        due, process = self.due(records, iteration, self.drawn), algorithm.accelerator
        if not due:
            return
        algorithm.wait_for_rewards()  # the judge ranks next, and its references change
        own, chosen = due[process.process_index :: process.num_processes], dict[str, Tensor]()
        size = max(1, algorithm.batch_size // self.count)
        with algorithm.policy.reference() if self.every is None else nullcontext():
            for start in range(0, len(own), size):
                prompts = own[start : start + size]
                images = self._sample(algorithm, [records[prompt] for prompt in prompts], iteration, clock)
                for prompt, candidates in zip(prompts, images.split(self.count), strict=True):
                    with clock.phase("reward"):
                        best = self.reward.rank(candidates, prompt, records[prompt])[: self.keep]
                    chosen[prompt] = candidates[best]
        for share in gather_object([chosen]):
            self.reward.references.update(share)
            self.drawn |= dict.fromkeys(share, iteration)
        self._drop(self.due(self.drawn, iteration, self.drawn))

    def _sample(self, algorithm: Any, records: Records, iteration: int, clock: PhaseClock) -> Tensor:
        """Sample `count` images of each record along the ODE: uint8 [n · count, 3, H, W] on the CPU."""
        moment = 0 if self.every is None else iteration
        seeds = [
            sample_seed(algorithm.seed, "reference image", str(record["prompt"]), moment, number)
            for record in records
            for number in range(self.count)
        ]
        condition = algorithm.encode([record for record in records for _ in range(self.count)], clock)
        options = {"batch_size": algorithm.batch_size, "solver": algorithm.rollout.solver}
        with clock.phase("rollout"), torch.no_grad(), algorithm.accelerator.autocast():
            latents = rollout(algorithm.policy, condition, sigmas=algorithm.sigmas, seeds=seeds, **options).latents
        with clock.phase("decode"), torch.no_grad(), algorithm.accelerator.autocast():
            chunks = latents.split(algorithm.batch_size)
            return torch.cat([to_levels(decode_images(algorithm.policy, c, clips=False).float()) for c in chunks])

    def _drop(self, prompts: Iterable[str]) -> None:
        for prompt in prompts:
            del self.drawn[prompt], self.reward.references[prompt]

    def state(self) -> dict[str, Tensor]:
        """Return "ITERATION PROMPT" -> images of what was drawn, for a checkpoint."""
        return {f"{iteration} {prompt}": self.reward.references[prompt] for prompt, iteration in self.drawn.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore from a checkpoint."""
        self._drop([*self.drawn])
        for name, images in state.items():
            iteration, _, prompt = name.partition(" ")
            self.drawn[prompt], self.reward.references[prompt] = int(iteration), images


class ReferenceRewards:
    """Rewards of `count` images per prompt, sampled by the reference when the prompt first comes, and stored.

    The images are sampled as the policy's are, with noise that depends on the run's seed and the prompt. PAR (arXiv
    2502.18770, eq. 4) compares the policy's rewards with them.
    """

    def __init__(self, algorithm: Any, count: int) -> None:
        self._algorithm, self._count = algorithm, count
        self._rewards: dict[int, Tensor] = {}  # Index of a prompt -> [count] float64

    def of(self, images: ScoredImages, run: Context) -> Tensor:
        """Return [B, count] float64 of the samples' prompts; NaN where the reward failed, which is tried again."""
        prompt = images.shares.gather_all(images.batch.prompt_index[: len(images.shares.own)]).tolist()
        new = torch.tensor([i for i in dict.fromkeys(prompt) if i not in self._rewards], dtype=torch.int64)
        rewards = dict(self._rewards)
        if len(new):
            rewards |= dict(zip(new.tolist(), self._sample(new, images.trajectory.sde_steps, run), strict=True))
            self._rewards |= {i: reward for i, reward in rewards.items() if bool(reward.isfinite().all())}
        result = torch.stack([rewards[i] for i in prompt])
        value, valid = result.mean(1).float(), result.isfinite().all(1)
        reason = ["the reference's image of the prompt has no reward"] * len(value)
        judge, limit = self._algorithm.scorer.reward, self._algorithm.rollout.max_failure_rate
        check_failures(Scores(value=value, valid=valid, unit=judge.unit, reason=reason), valid, limit, judge.name)
        return result

    def _sample(self, prompts: Tensor, sde_steps: tuple[int, ...], run: Context) -> Tensor:
        """Sample and score `count` images of each of n prompts, [n, count]; the processes share the work."""
        algorithm = self._algorithm
        number = (prompts[:, None] * self._count + torch.arange(self._count)).flatten()
        world = algorithm.accelerator.num_processes
        shares = Shares.of_owners(torch.arange(len(number)) % world, algorithm.accelerator)
        own, value = number[shares.own], torch.zeros(0, dtype=torch.float64)
        if len(own):
            records = [algorithm.records[i] for i in (own // self._count).tolist()]
            # ids below 0: no sample of the run has the same noise
            batch = Batch(prompt_index=own // self._count, group_id=-1 - own, sample_id=-1 - own)
            condition, rows = algorithm.encode(records, run.clock), torch.arange(len(own))
            with algorithm.reference.applied():
                latents = algorithm.roll_out(condition, batch, rows, sde_steps, run.clock).latents
            scores = algorithm.score(latents, records, run.clock)
            value = torch.where(scores.valid, scores.value, torch.nan).double().cpu()
        return shares.gather_all(value).view(len(prompts), self._count)

    def state(self) -> dict[str, Tensor]:
        """Return the rewards, for a checkpoint."""
        rewards = torch.stack([*self._rewards.values()]) if self._rewards else torch.zeros(0, self._count)
        return {"prompt": torch.tensor(list(self._rewards), dtype=torch.int64), "reward": rewards}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore from a checkpoint; an empty state forgets all, for another reference."""
        pairs = zip(state["prompt"].tolist(), state["reward"], strict=True) if state else ()
        self._rewards = {i: reward.clone() for i, reward in pairs}
