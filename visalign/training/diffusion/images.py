# SPDX-License-Identifier: Apache-2.0
"""An iteration's images, whatever is learnt from them: prompts, rollout, decoding, judging."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from visalign.errors import UserError
from visalign.flow.noise import initial_noise
from visalign.flow.rollout import decode_images, encoder_inputs, rollout
from visalign.flow.trajectory import Trajectory, concatenate_trajectories, trajectory_of_latents
from visalign.interfaces import Condition, DiffusionPolicy, PointwiseReward, Scores, with_capabilities
from visalign.seeds import sample_seed
from visalign.training.loop.algorithm import Algorithm, Context
from visalign.training.loop.judging import (
    RewardScorer,
    as_higher_is_better,
    check_failures,
    concatenate_scores,
    reward_columns,
    score_metrics,
)
from visalign.training.loop.processes import Shares, get_accelerator, share_gradients
from visalign.training.loop.runtime import PhaseClock
from visalign.training.loop.sampler import Batch, PromptSampler, check_whole_groups
from visalign.training.loop.sharding import max_over_processes, shard, unsharded
from visalign.training.policy.balance import RewardBalance
from visalign.training.policy.constraints import RewardConstraints
from visalign.training.policy.reference import Reference

from .image_statistics import STATISTICS, group_diversity, image_statistics, middle_frame
from .rollout_settings import RolloutSettings
from .settings import DiffusionObjectiveSettings, check_sampling, check_sharding
from .stored_pairs import check_stored

Features = Callable[[Tensor], Tensor]
"""Images [b, 3, H, W] -> features [b, d] of any unit, by which their distances are measured."""
Stored = Callable[[Sequence[Mapping[str, Any]]], Tensor]
"""b records -> clean latents [b, ...] of their images, in the policy's storage dtype, on its device."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """b samples of this process, which are being judged."""

    condition: Condition
    trajectory: Trajectory
    batch: Batch
    records: Sequence[Mapping[str, Any]]
    verdicts: Sequence[Callable[[], Scores]]
    """Of one stretch of samples after the other."""
    looks: Tensor | None
    """[b, 4 + d]: `image_statistics`, and features; None of stored images."""


@dataclass(frozen=True, kw_only=True)
class Images:
    """b samples of this process, and what was said of all B."""

    condition: Condition
    trajectory: Trajectory
    batch: Batch
    records: Sequence[Mapping[str, Any]]
    """Of the b samples."""
    value: Tensor
    """[B] float64 of all processes in rank order, on the CPU."""
    valid: Tensor
    """bool [B]."""
    group: Tensor
    """[B] int64."""
    columns: Tensor
    """[B, M] float64, each term of the reward by itself."""
    parts: Mapping[str, Tensor]
    """name -> [B] float64, the parts of the reward."""
    first: int
    """Place of this process's first sample among the B."""
    metrics: Mapping[str, float]


def check_sizes(policy: DiffusionPolicy, rollout: RolloutSettings) -> None:
    """Refuse several sizes of a policy that has one.

    Raises:
        UserError: its `image_size` is no property that may be set.
    """
    if rollout.image_sizes and getattr(getattr(type(policy), "image_size", None), "fset", None) is None:
        raise UserError(
            f"rollout.image_sizes is {rollout.image_sizes}, and {type(policy).__name__} makes images of "
            "one size. Leave it out, or give the adapter the property image_size with a setter, as "
            "visalign.interfaces.DiffusionPolicy says."
        )


class ImageSource:
    """Makes and judges images.

    Args:
        policy: on the accelerator's device.
        reward: judges one image at a time; higher is better (or its sign is turned).
        records: prompt records, each with "prompt"; handed to the reward as metadata.
        rollout: how samples are made.
        seed: of the run.
        accelerator: without mixed precision: that is the policy's own matter.
        strata: label per record, see `PromptSampler`.
        cycle: see `PromptSampler`.
        features: see `Features`; None measures no distances.
        stored: what makes clean latents of stored images, which are learnt from in place of samples. Each
            prompt record then has under "candidates" a record for each of the G samples of its group, which
            it is joined with.

    Raises:
        UserError: sizes that do not fit each other.
    """

    def __init__(
        self,
        policy: DiffusionPolicy,
        reward: PointwiseReward,
        records: Sequence[Mapping[str, Any]],
        *,
        rollout: RolloutSettings,
        seed: int,
        accelerator: Accelerator,
        strata: Sequence[str] | None = None,
        cycle: Sequence[str] | None = None,
        features: Features | None = None,
        stored: Stored | None = None,
    ) -> None:
        self.features, self.stored = features, stored
        self.policy, self.reward, self.records, self.seed = policy, as_higher_is_better(reward), records, seed
        self.rollout, self.accelerator = rollout, accelerator
        self.judging = RewardScorer(self.reward, what="images", beside=rollout.scores_in_thread)
        size = rollout.prompts_per_iteration, rollout.group_size
        self.sampler = PromptSampler(len(records), *size, seed, strata=strata, cycle=cycle)
        if rollout.branch is not None:
            check_whole_groups(size[0], accelerator.num_processes)
        self.samples = size[0] * size[1]
        self.shares = Shares.even(self.samples, accelerator)
        self.gather_all = self.shares.gather_all
        policy.module.eval()  # dropout would make a second look another function than the rollout
        check_sizes(policy, rollout)
        self._own_size = getattr(policy, "image_size", None)
        try:
            for number, _ in enumerate(rollout.image_sizes or []):  # refused before an image is made
                self.resize(number)
        except UserError as error:
            raise UserError(f"rollout.image_sizes: {error}") from error
        finally:
            self.resize(None)

    def resize(self, iteration: int | None) -> None:
        """Let the policy make images of an iteration's size; None is its own, as between iterations."""
        policy, sizes = self.policy, self.rollout.image_sizes
        if sizes:
            size = self._own_size if iteration is None else sizes[iteration % len(sizes)]
            policy.image_size = size  # type: ignore[attr-defined]  # see check_sizes
        elif iteration is not None:
            return
        steps, schedule = self.rollout.steps, self.rollout.timestep_schedule
        self.sigmas = policy.sigmas(steps, timestep_schedule=schedule)
        self.times = policy.times(self.sigmas)

    def collect(self, iteration: int, clock: PhaseClock, sde_steps: Sequence[int] = ()) -> Images:
        """Sample, decode and judge one iteration's groups.

        Args:
            iteration: iterations finished.
            clock: of the run.
            sde_steps: the stochastic steps.

        Raises:
            RewardFailure: see `judge`.
            FloatingPointError: the rollout ended in latents that are not finite.
        """
        return self.judged(self.draw(iteration, clock, sde_steps), clock)

    def draw(self, iteration: int, clock: PhaseClock, sde_steps: Sequence[int] = ()) -> Drawn:
        """Sample, decode and hand to the judge, a stretch of samples after the other."""
        process = self.accelerator
        self.resize(iteration)
        batch = self.sampler.batch(iteration, process.process_index, process.num_processes)
        records = [dict(self.records[i]) for i in batch.prompt_index.tolist()]
        group = batch.group_id.tolist()
        if self.reward.capabilities.needs_group:  # win rates: a prompt may stand in two groups
            for record, label in zip(records, group, strict=True):
                record["group_id"] = label
        if self.stored is not None:
            return self._stored(batch, records, clock)
        joined = self.rollout.shared_noise or self.rollout.branch is not None
        parts = self.judging.chunks(group, self.rollout.overlap, whole_groups=joined)
        condition = self._encoded(records, clock)
        made, verdicts, looks = [], [], []
        for places in parts:
            one = condition if len(parts) == 1 else condition.select(places)
            made.append(self._sample(one, batch, places, sde_steps, clock))
            own = [records[i] for i in places.tolist()]
            shown = self._shown(made[-1].latents, clock)
            verdicts.append(self._ask(shown, own, clock))
            looks.append(self._looked_at(shown, clock))
        return Drawn(
            condition=condition,
            trajectory=concatenate_trajectories(made),
            batch=batch,
            records=records,
            verdicts=verdicts,
            looks=torch.cat(looks),
        )

    def _stored(self, batch: Batch, records: Sequence[Mapping[str, Any]], clock: PhaseClock) -> Drawn:
        """The stored images of a batch's groups; what was said of them stands in their records."""
        assert self.stored is not None
        places = (batch.sample_id % self.rollout.group_size).tolist()
        own = [{**one, **one["candidates"][place]} for one, place in zip(records, places, strict=True)]
        condition = self._encoded(records, clock)
        with clock.phase("decode"), torch.no_grad():
            latents = self.stored(own)
        return Drawn(
            condition=condition,
            trajectory=trajectory_of_latents(latents),
            batch=batch,
            records=own,
            verdicts=[self._ask(latents, own, clock)],
            looks=None,
        )

    def judged(self, drawn: Drawn, clock: PhaseClock) -> Images:
        """What the judge says of drawn samples, once it has.

        Raises:
            RewardFailure: see `judge`.
        """
        with clock.phase("reward"):
            scores = concatenate_scores([verdict() for verdict in drawn.verdicts])
        value, valid, parts = self._gather(scores)
        group = self.gather_all(drawn.batch.group_id)
        check_failures(scores, valid, self.rollout.max_failure_rate, self.reward.name)
        return Images(
            condition=drawn.condition,
            trajectory=drawn.trajectory,
            batch=drawn.batch,
            records=drawn.records,
            value=value,
            valid=valid,
            group=group,
            parts=parts,
            columns=self.gather_all(reward_columns(self.reward, scores)),
            first=self.first,
            metrics={
                **score_metrics(self.reward, value, valid, group, parts),
                **({} if drawn.looks is None else self._look_metrics(self.gather_all(drawn.looks), group)),
            },
        )

    def judge(self, latents: Tensor, records: Sequence[Mapping[str, Any]], clock: PhaseClock) -> Scores:
        """What the reward says of this process's clean latents.

        Args:
            latents: [b, ...].
            records: b prompt records.
            clock: of the run.
        """
        verdict = self._ask(self._shown(latents, clock), records, clock)
        with clock.phase("reward"):
            return verdict()

    def _shown(self, latents: Tensor, clock: PhaseClock) -> Tensor:
        """Images [b, 3, H, W], or clips [b, F, 3, H, W] for a judge of clips, on the CPU."""
        with clock.phase("decode"), torch.no_grad(), self.accelerator.autocast():
            chunks = latents.split(min(self.rollout.batch_size, len(latents)))
            clips = self.reward.capabilities.takes_clips
            return torch.cat(
                [decode_images(self.policy, chunk, clips=clips).float().cpu() for chunk in chunks]
            )

    def _ask(
        self, shown: Tensor, records: Sequence[Mapping[str, Any]], clock: PhaseClock
    ) -> Callable[[], Scores]:
        with clock.phase("reward"):
            return self.judging.ask(shown, records)

    def _looked_at(self, shown: Tensor, clock: PhaseClock) -> Tensor:
        """[b, 4 + d] float64."""
        with clock.phase("monitor"), torch.no_grad():
            found = [image_statistics(shown)]
            if self.features is not None:
                found.append(self.features(middle_frame(shown)).double().cpu())
            return torch.cat(found, 1)

    def _look_metrics(self, looks: Tensor, group: Tensor) -> dict[str, float]:
        """Of all B samples' looks."""
        count = len(STATISTICS)
        means = looks[:, :count].mean(0).tolist()
        found = {f"image/{name}": value for name, value in zip(STATISTICS, means, strict=True)}
        if self.features is not None:
            found["diversity"] = group_diversity(looks[:, count:], group)
        return found

    def sample_seeds(self, sample_id: Tensor) -> list[int]:
        """The seeds that samples' noise comes from."""
        return [sample_seed(self.seed, "sample", i) for i in sample_id.tolist()]

    def _encoded(self, records: Sequence[Mapping[str, Any]], clock: PhaseClock) -> Condition:
        with clock.phase("rollout"), torch.no_grad(), self.accelerator.autocast():
            return self.policy.encode(encoder_inputs(self.policy, records))

    def _sample(
        self,
        condition: Condition,
        batch: Batch,
        places: Tensor,
        sde_steps: Sequence[int],
        clock: PhaseClock,
    ) -> Trajectory:
        """The samples at `places` of the batch, whose condition it is."""
        settings, group = self.rollout, batch.group_id[places]
        with clock.phase("rollout"), torch.no_grad(), self.accelerator.autocast():
            return rollout(
                self.policy,
                condition,
                sigmas=self.sigmas,
                sde_steps=sde_steps,
                schedule=settings.schedule,
                noise_level=settings.noise_level,
                seeds=self.sample_seeds(batch.sample_id[places]),
                noise=self._shared_noise(group) if settings.shared_noise else None,
                log_prob_reduction=settings.log_prob_reduction,  # type: ignore[arg-type]  # checked by the settings
                batch_size=settings.batch_size,
                nodes=settings.nodes(group, sde_steps),
                solver=settings.solver,
                compression=settings.ode_compression,
            )

    def _shared_noise(self, group: Tensor) -> Tensor:
        """One start per group, [b, ...]."""
        seeds = [sample_seed(self.seed, "group", label) for label in group.tolist()]
        return initial_noise(seeds, self.policy.latent_shape)

    def _gather(self, scores: Scores) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(value [B] float64, valid [B], name -> part [B] float64) of all processes, on the CPU."""
        own = scores.value.float().cpu()
        said = {**({} if scores.std is None else {"std": scores.std}), **scores.parts}
        parts = self.shares.table({"": own, **{name: part.float() for name, part in said.items()}})
        valid = self.gather_all(scores.valid.cpu() & torch.isfinite(own))
        return parts.pop(""), valid, parts

    @property
    def first(self) -> int:
        """Place of this process's first sample among all B."""
        return int(self.shares.own[0])


class ImageAlgorithm(Algorithm):
    """What every training of a diffusion policy on judged images has; its arguments are `FlowGRPO`'s.

    A training defines `begin`, which finds policy, settings, rollout, accelerator and source in place.
    """

    usual = "flow_grpo"
    """`objective.algorithm` where no objective is given."""

    def __init__(
        self,
        policy: DiffusionPolicy,
        reward: PointwiseReward,
        records: Sequence[Mapping[str, Any]],
        *,
        rollout: RolloutSettings | None = None,
        objective: DiffusionObjectiveSettings | None = None,
        seed: int = 0,
        accelerator: Accelerator | None = None,
        strata: Sequence[str] | None = None,
        cycle: Sequence[str] | None = None,
        sharding: bool = False,
        features: Features | None = None,
        stored: Stored | None = None,
    ) -> None:
        self.sharding = sharding
        reward = with_capabilities(reward)
        self.policy, self.seed, self.reward = policy, seed, reward
        self.settings = objective or DiffusionObjectiveSettings(algorithm=self.usual)
        self.rollout = rollout or RolloutSettings()
        check_sampling(self.settings, self.rollout)
        check_stored(self.settings, self.rollout, stored=stored is not None)
        self.accelerator = get_accelerator(accelerator, policy)
        self.source = ImageSource(
            policy,
            reward,
            records,
            rollout=self.rollout,
            seed=seed,
            accelerator=self.accelerator,
            strata=strata,
            cycle=cycle,
            features=features,
            stored=stored,
        )
        self.reference, self.divergence = Reference(policy, self.settings), None
        every = self.settings.balance_every
        self.settings.check_constrained(reward)
        self.constraints = RewardConstraints(reward, self.settings.multiplier_rate)
        self.balance = None if every is None else RewardBalance(reward, every)
        self.begin()

    def begin(self) -> None:
        """Check the row against the rollout and make what it needs."""
        ...

    def spread(self, module: nn.Module, *, asks_reference: bool, joins: str | None = None) -> nn.Module:
        """The module that the processes share, or whose network they divide.

        Args:
            module: through which the training looks at the policy with gradient.
            asks_reference: whether it looks at the policy before training as well.
            joins: what a row joins, so that processes differ in their forwards; None: nothing.

        Raises:
            UserError: sharding with what looks at all weights at once, or see `shard`.
        """
        if not self.sharding:
            return share_gradients(module, self.accelerator)
        from peft.tuners.lora import LoraLayer

        settings, network = self.settings, self.policy.module
        adapters = any(isinstance(each, LoraLayer) for each in network.modules())
        refused = {
            "a reference (objective.changes.kl) without LoRA": asks_reference and not adapters,
            f"the row {settings.algorithm!r}, which joins {joins}": joins is not None,
        }
        check_sharding(settings, self.rollout, refused)
        shard(network, self.accelerator)
        return module

    def idle(self, batches: int) -> int:
        """How many micro-batches without gradient this process makes beside its own: DDP must meet a backward
        of every process, and each forward through a divided network gathers weights from all. All processes
        call it before the first of an update."""
        if not self.sharding:
            return int(not batches)
        return max_over_processes(max(1, batches), self.accelerator) - batches

    def constrained(self, made: Images, run: Context) -> Images:
        """The images with what is optimised for their value, where a reward has a bound."""
        if not self.constraints.bounds:
            return made
        value, multipliers = self.constraints.apply(made.valid, made.parts, run)
        judged = score_metrics(self.source.reward, value, made.valid, made.group, made.parts)
        metrics = {**made.metrics, **judged, **multipliers}
        return replace(made, value=value, metrics=metrics)

    divergence: float | None
    """From the reference, of the iteration's updates; None where none was measured."""

    def wait_for_rewards(self) -> None:
        """Wait until nothing is being judged."""
        self.source.judging.wait_for_rewards()

    def release(self) -> None:
        """Give the policy its own size back."""
        if self.rollout.image_sizes:
            self.source.resize(None)

    def finish(self, run: Context) -> None:
        """Reset the reference where it is due."""
        self.reference.finish(run, self.divergence)

    def restore(self, run: Context) -> None:
        """Take up the reference of a checkpoint."""
        self.reference.restore(run)

    def unsharded(self) -> AbstractContextManager[Any]:
        """Inside, each process has all of the network."""
        return unsharded(self.policy.module)

    def parameters(self) -> Sequence[tuple[str, nn.Parameter]]:
        """What of the policy is trained."""
        return self.policy.trainable_parameters()

    def compute_dtype(self) -> torch.dtype:
        """Of the policy's network."""
        return self.policy.compute_dtype

    def forward_equivalents(self) -> int:
        """One for a forward on one latent, two more for a backward."""
        return self.policy.forward_count.equivalents
