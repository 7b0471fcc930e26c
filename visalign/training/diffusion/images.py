# SPDX-License-Identifier: Apache-2.0
"""Sample, decode and score an iteration's images: what every image algorithm shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from visalign.core.objective.algorithms import NAMED
from visalign.errors import UserError
from visalign.flow.noise import initial_noise
from visalign.flow.rollout import decode_images, encoder_inputs, middle_frames, rollout
from visalign.flow.trajectory import Trajectory, concatenate_trajectories, trajectory_of_latents
from visalign.interfaces import Condition, DiffusionPolicy, PointwiseReward, Scores, with_capabilities
from visalign.seeds import sample_seed
from visalign.training.loop.algorithm import Algorithm, Collected, Context
from visalign.training.loop.dynamic_groups import DynamicGroups, DynamicSettings
from visalign.training.loop.judging import (
    RewardScorer,
    as_higher_is_better,
    check_failures,
    concatenate_scores,
    rank_agreement,
    reward_columns,
    score_metrics,
)
from visalign.training.loop.processes import Shares, get_accelerator, share_gradients
from visalign.training.loop.runtime import PhaseClock
from visalign.training.loop.sampler import Batch, BucketSampler, PromptSampler
from visalign.training.loop.sharding import max_over_processes, shard, unsharded
from visalign.training.policy.balance import RewardBalance
from visalign.training.policy.constraints import RewardConstraints
from visalign.training.policy.reference import Reference
from visalign.training.policy.winners import ReplaySettings

from .discriminator import OnlineDiscriminator
from .image_statistics import STATISTICS, group_diversity, image_statistics
from .references import KEY as REFERENCES
from .references import ReferenceImages
from .rollout_settings import RolloutSettings, check_more_samples, check_processes, check_sampling, check_sharding
from .samples import Features, PendingImages, Records, ScoredImages, Stored, scout_pool, select_images
from .settings import DiffusionObjectiveSettings


class PolicyModule(nn.Module):
    """A function of a policy as a module, so that DDP wraps it and synchronizes the policy's gradients."""

    def __init__(self, policy: DiffusionPolicy, function: Callable[..., Any], head: nn.Module | None) -> None:
        super().__init__()
        self.network, self.head = policy.module, head  # registered with DDP; the policy itself is no module
        self._function = partial(function, policy)

    def forward(self, *arguments: Any) -> Any:
        """Call the function under the current weights."""
        return self._function(*arguments)


def check_inputs(reward: Any, records: Records) -> None:
    """Refuse what is no reward, and records without a prompt."""
    if not hasattr(reward, "score"):
        raise UserError(f"The reward is a {type(reward).__name__} without score. Give e.g. FunctionReward(function).")
    for record in records:
        if not isinstance(record, Mapping) or "prompt" not in record:
            raise UserError(f'Record {record!r:.80} has no prompt. Give records as [{{"prompt": "a cat"}}, ...].')


def check_sizes(policy: DiffusionPolicy, sizes: Sequence[int | tuple[int, int]] | None) -> None:
    """Refuse several image sizes for a policy whose `image_size` is no property with a setter."""
    if sizes and getattr(getattr(type(policy), "image_size", None), "fset", None) is None:
        raise UserError(
            f"rollout.image_sizes is {sizes}, and {type(policy).__name__} generates images of one size. "
            "Leave it out, or give the adapter the property image_size with a setter, as "
            "visalign.interfaces.DiffusionPolicy describes."
        )


class ImageAlgorithm(Algorithm):
    """Base of the algorithms that train a diffusion policy on scored images.

    A subclass defines `setup`, which runs at the end of `__init__` and sets `module`, the trained function.

    The reward scores one image at a time, and gets the prompt records, each with "prompt", as metadata. `strata` and
    `cycle` are those of `PromptSampler`; `sharding` divides the network, its gradients and AdamW's moments among the
    processes (FSDP2); `features` measure the diversity of a group. `stored` encodes stored images that replace
    samples. Each prompt record then has under "candidates" a record for each of the G samples of its group, merged
    into it, and perhaps "bucket", the number of its `rollout.image_sizes`; a share `caption_dropout` of them is learnt
    without a prompt. `dynamic` replaces groups without signal by new ones, and `references` are reference images that
    the reward compares with. `self_imitation` replays images that beat their group. `keep_images` gets a name, the
    images and the records of what is sampled. `teacher` are weights of a few-step student's teacher.
    """

    algorithms: ClassVar[Mapping[str, Any]] = NAMED  # Values of `objective.algorithm` that this class trains
    default: ClassVar[str] = "flow_grpo"  # `objective.algorithm` where no objective is given
    divergence: float | None = None
    """Divergence from the reference in the iteration's updates; None where it was not measured."""

    def __init__(
        self,
        policy: DiffusionPolicy,
        reward: PointwiseReward,
        records: Records,
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
        caption_dropout: float = 0.0,
        dynamic: DynamicSettings | None = None,
        references: ReferenceImages | None = None,
        self_imitation: ReplaySettings | None = None,
        keep_images: Callable[[str, Tensor, Records], None] | None = None,
        teacher: Mapping[str, Tensor] | None = None,
    ) -> None:
        check_inputs(reward, records)
        reward = with_capabilities(reward)
        self.policy, self.seed, self.reward, self.sharding = policy, seed, reward, sharding
        self.settings = settings = objective or DiffusionObjectiveSettings(algorithm=self.default)
        self.rollout = rollout = rollout or RolloutSettings()
        self.accelerator = get_accelerator(accelerator, policy)
        if settings.algorithm not in self.algorithms:
            raise UserError(
                f"objective.algorithm is {settings.algorithm}, which {type(self).__name__} does not "
                f"train; it trains {', '.join(self.algorithms)}. Take FlowGRPO for algorithms on log-probs, "
                "VelocityRegression for regressions, RewardGradient for draft, draft_lv and refl, "
                "FewStepDistillation for dmd2, tdm and tdm_r1."
            )
        check_sampling(settings, rollout, stored=stored is not None)
        added = dynamic or DynamicSettings(), self_imitation
        renewed = references is not None and references.every is not None
        check_more_samples(settings, rollout, *added, stored=stored is not None, reward=reward, renewed=renewed)
        self.replay_settings, self.keep_images = self_imitation, keep_images
        self.groups = DynamicGroups(rollout.prompts_per_iteration, added[0]) if added[0].enabled else None
        check_processes(settings, rollout, reward, self.accelerator.num_processes)
        settings.check_reward(reward, renewed=renewed)
        settings.check_features(features is not None)
        self.records, self.features, self.stored, self.references = records, features, stored, references
        self.caption_dropout, self.teacher, self.batch_size = caption_dropout, teacher, rollout.measured_batch_size
        self.scorer = RewardScorer(as_higher_is_better(reward), in_thread=rollout.overlap > 1 or rollout.staleness > 0)
        terms = with_capabilities(reward).capabilities.discriminators.items()
        self.discriminators = [OnlineDiscriminator(*term, seed=seed, accelerator=self.accelerator) for term in terms]
        self.sampler = self._build_sampler(strata, cycle)
        self.samples = rollout.prompts_per_iteration * rollout.group_size
        self.shares = Shares.even(self.samples, self.accelerator)
        policy.module.eval()  # with dropout the replay would evaluate another function than the rollout
        check_sizes(policy, rollout.image_sizes)
        self._default_size = getattr(policy, "image_size", None)
        self._check_image_sizes()
        self.reference = Reference(policy, settings)
        self.constraints = RewardConstraints(reward, settings.multiplier_rate)
        self.balance = None if settings.balance_every is None else RewardBalance(reward, settings.balance_every)
        self.setup()

    def setup(self) -> None:
        """Build the objective and the trained module."""

    def _build_sampler(
        self, strata: Sequence[str] | None, cycle: Sequence[str] | None
    ) -> PromptSampler | BucketSampler:
        """Build the order of the prompts; stored images of several sizes come bucket by bucket."""
        rollout = self.rollout
        pool = rollout.group_size if rollout.scout is None else rollout.scout.pool
        size, sized = (rollout.prompts_per_iteration, pool), self.stored is not None and rollout.image_sizes
        if buckets := [record["bucket"] for record in self.records if sized and "bucket" in record]:
            return BucketSampler(buckets, *size, self.seed)
        order: dict[str, Any] = {"strata": strata, "cycle": cycle, "compared": self.settings.compares}
        return PromptSampler(len(self.records), *size, self.seed, **order)

    def _check_image_sizes(self) -> None:
        """Refuse sizes that the policy has no use for, before an image is sampled."""
        try:
            for number in range(len(self.rollout.image_sizes or ())):
                self._set_size(number)
        except UserError as error:
            raise UserError(f"rollout.image_sizes: {error}") from error
        finally:
            self.resize(None)

    def resize(self, iteration: int | None) -> None:
        """Set the policy to an iteration's image size; None restores its own, as between iterations."""
        if iteration is None:
            self._set_size(None)
        elif sizes := self.rollout.image_sizes:
            sampler = self.sampler
            number = sampler.bucket(iteration) if isinstance(sampler, BucketSampler) else iteration % len(sizes)
            self._set_size(number)

    def _set_size(self, number: int | None) -> None:
        """Set the policy to one of `rollout.image_sizes`; None restores its own."""
        policy, sizes = self.policy, self.rollout.image_sizes
        if sizes:
            size = self._default_size if number is None else sizes[number]
            policy.image_size = size  # type: ignore[attr-defined]  # see check_sizes
        steps, schedule = self.rollout.steps, self.rollout.timestep_schedule
        self.sigmas = policy.sigmas(steps, timestep_schedule=schedule)
        self.times = policy.times(self.sigmas)

    def prompts(self, number: int, iteration: int | None = None) -> tuple[Batch, list[dict[str, Any]]]:
        """Return this process's batch of a round and its prompt records; None: the rounds are the iterations."""
        self.resize(number if iteration is None else iteration)
        batch = self.sampler.batch(number, self.accelerator.process_index, self.accelerator.num_processes)
        records = [dict(self.records[i]) for i in batch.prompt_index.tolist()]
        if self.scorer.reward.capabilities.needs_group:  # win rates: a prompt may be in two groups
            for record, label in zip(records, batch.group_id.tolist(), strict=True):
                record["group_id"] = label
        return batch, records

    def draw_references(self, number: int, iteration: int, clock: PhaseClock) -> None:
        """Draw the reference images that prompts of a round lack; where adapters are not merged."""
        if self.references is not None:
            self.resize(iteration)
            self.references.draw(self, number, iteration, clock)

    def collect_images(
        self, run: Context, sample_round: Callable[[int], PendingImages]
    ) -> tuple[ScoredImages | None, Collected]:
        """Sample and score groups, with dynamic sampling round after round until enough of them carry signal; return
        (the images, None where no group carries signal; counts and metrics of all samples).
        """
        self.scorer.iteration = run.counters.iteration
        if self.groups is None:
            images = self.constrained(self.scored(sample_round(run.counters.iteration), run.clock), run)
            metrics = {**images.metrics, **self._teach_discriminators(run)}
            return images, Collected(experience=None, samples=self.samples, metrics=metrics)
        rounds: list[Mapping[str, float]] = []
        while self.groups.wants_more:
            images = self.scored(sample_round(self.groups.round), run.clock)
            self.groups.feed(images.group, images.value, images.valid, payload=images)
            rounds.append(images.metrics)
        taken = self.groups.take()
        names = dict.fromkeys(name for metrics in rounds for name in metrics)  # parts of rewards may be missing
        means = {name: fmean(metrics[name] for metrics in rounds if name in metrics) for name in names}
        metrics = {**means, **self.groups.metrics(), **self._teach_discriminators(run)}
        images = select_images(taken, partial(self.encode, clock=run.clock)) if taken else None
        return images, Collected(experience=None, samples=self.samples * len(rounds), metrics=metrics)

    def _teach_discriminators(self, run: Context) -> dict[str, float]:
        """Let adversarial rewards learn from the iteration's images; return their metrics."""
        metrics = dict[str, float]()
        for discriminator in self.discriminators:
            with run.clock.phase("reward"):
                discriminator.learn(run.counters.iteration)
            metrics |= discriminator.metrics()
        return metrics

    def sample(
        self, number: int, clock: PhaseClock, sde_steps: Sequence[int] = (), iteration: int | None = None
    ) -> PendingImages:
        """Sample a round, decode and submit to the reward, one chunk after the other; see `prompts`."""
        batch, records = self.prompts(number, iteration)
        if self.stored is not None:
            return self._load_stored(batch, records, clock)
        scouted = None
        if (scout := self.rollout.scout) is not None:
            rows, scouted = scout_pool(self, scout, batch, records, clock)
            batch, records = batch.rows(rows), [records[i] for i in rows.tolist()]
        shares_steps = self.rollout.shared_noise or self.rollout.branch is not None
        chunks = self.scorer.chunks(batch.group_id.tolist(), self.rollout.overlap, whole_groups=shares_steps)
        condition = self.encode(records, clock)
        trajectories, scores, statistics = [], [], []
        for rows in chunks:
            conditions = condition if len(chunks) == 1 else condition.select(rows)
            trajectories.append(self.roll_out(conditions, batch, rows, sde_steps, clock))
            images, measured = self.decode(trajectories[-1].latents, clock)
            chunk = [records[i] for i in rows.tolist()]
            if self.keep_images is not None:
                self.keep_images(f"{number:05d}_{int(rows[0]):04d}", images, chunk)
            for discriminator in self.discriminators:
                discriminator.keep(images)
            scores.append(self.submit(images, chunk, clock))
            statistics.append(measured)
        return PendingImages(
            condition=condition,
            trajectory=concatenate_trajectories(trajectories),
            batch=batch,
            records=records,
            scores=scores,
            statistics=torch.cat(statistics),
            scouted=scouted,
        )

    def _load_stored(self, batch: Batch, records: Records, clock: PhaseClock) -> PendingImages:
        """Load the stored images of a batch's groups; their records hold their preferences."""
        assert self.stored is not None
        candidate = (batch.sample_id % self.rollout.group_size).tolist()
        merged = [{**record, **record["candidates"][i]} for record, i in zip(records, candidate, strict=True)]
        for record, label in zip(merged, batch.sample_id.tolist(), strict=True):
            if sample_seed(self.seed, "caption", label) / 2**63 < self.caption_dropout:
                record["prompt"] = ""
        condition = self.encode(merged, clock)
        with clock.phase("decode"), torch.no_grad():
            latents = self.stored(merged)
        return PendingImages(
            condition=condition,
            trajectory=trajectory_of_latents(latents),
            batch=batch,
            records=merged,
            scores=[self.submit(latents, merged, clock)],
            statistics=None,
        )

    def scored(self, pending: PendingImages, clock: PhaseClock) -> ScoredImages:
        """Wait for the scores of sampled images and gather those of all processes."""
        with clock.phase("reward"):
            scores = concatenate_scores([wait() for wait in pending.scores])
        value, valid, parts = self._gather(scores)
        group = self.shares.gather_all(pending.batch.group_id)
        check_failures(scores, valid, self.rollout.max_failure_rate, self.scorer.reward.name)
        metrics = score_metrics(self.scorer.reward, value, valid, group, parts)
        if pending.statistics is not None:
            statistics = self.shares.gather_all(pending.statistics)
            metrics |= {f"image/{n}": mean for n, mean in zip(STATISTICS, statistics.mean(0).tolist(), strict=False)}
            if self.features is not None:
                metrics["diversity"] = group_diversity(statistics[:, len(STATISTICS) :], group)
        if pending.scouted is not None:
            metrics["scout_agreement"] = rank_agreement(value, self.shares.gather_all(pending.scouted), group)
        return ScoredImages(
            condition=pending.condition,
            trajectory=pending.trajectory,
            batch=pending.batch,
            records=pending.records,
            value=value,
            valid=valid,
            group=group,
            parts=parts,
            columns=self.shares.gather_all(reward_columns(self.scorer.reward, scores)),
            metrics=metrics,
            shares=self.shares,
        )

    def score(self, latents: Tensor, records: Records, clock: PhaseClock) -> Scores:
        """Score clean latents [b, ...] of this process with the reward."""
        wait = self.submit(self.decode(latents, clock, measured=False)[0], records, clock)
        with clock.phase("reward"):
            return wait()

    def decode(self, latents: Tensor, clock: PhaseClock, *, measured: bool = True) -> tuple[Tensor, Tensor]:
        """Decode to images [b, 3, H, W], or clips [b, F, 3, H, W] for a reward of clips; with their statistics.

        They stay on the GPU for a reward that takes them there.
        """
        reward = self.scorer.reward.capabilities
        images, statistics = [], []
        for chunk in latents.split(min(self.batch_size, len(latents))):
            with clock.phase("decode"), torch.no_grad(), self.accelerator.autocast():
                decoded = decode_images(self.policy, chunk, clips=reward.takes_clips).float()
            statistics.append(self._statistics(decoded, clock) if measured else torch.zeros(len(chunk), 0))
            images.append(decoded if reward.takes_gpu_images else decoded.cpu())
        return torch.cat(images), torch.cat(statistics)

    def submit(self, images: Tensor, records: Records, clock: PhaseClock) -> Callable[[], Scores]:
        with clock.phase("reward"):
            return self.scorer.submit(images, records)

    def _statistics(self, images: Tensor, clock: PhaseClock) -> Tensor:
        """Compute [b, 4 + d] float64 statistics and features of images, on the CPU."""
        with clock.phase("monitor"), torch.no_grad():
            columns = [image_statistics(images).cpu()]
            if self.features is not None:
                columns.append(self.features(middle_frames(images)).double().cpu())
            return torch.cat(columns, 1)

    def sample_seeds(self, sample_id: Tensor) -> list[int]:
        """Derive the noise seeds of samples."""
        return [sample_seed(self.seed, "sample", i) for i in sample_id.tolist()]

    def encode(self, records: Records, clock: PhaseClock) -> Condition:
        """Encode the records' prompts."""
        with clock.phase("rollout"), torch.no_grad(), self.accelerator.autocast():
            return self.policy.encode(encoder_inputs(self.policy, records))

    def roll_out(
        self, condition: Condition, batch: Batch, rows: Tensor, sde_steps: Sequence[int], clock: PhaseClock
    ) -> Trajectory:
        """Sample the given rows of the batch, whose condition it is."""
        group, noise = batch.group_id[rows], None
        if self.rollout.shared_noise:
            seeds = [sample_seed(self.seed, "group", label) for label in group.tolist()]
            noise = initial_noise(seeds, self.policy.latent_shape)
        with clock.phase("rollout"), torch.no_grad(), self.accelerator.autocast():
            return rollout(
                self.policy,
                condition,
                sigmas=self.sigmas,
                seeds=self.sample_seeds(batch.sample_id[rows]),
                noise=noise,
                **self.rollout.arguments(group, sde_steps),
            )

    def _gather(self, scores: Scores) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Gather (value [B] float64, valid [B], name -> part [B] float64) of all processes on the CPU."""
        value = scores.value.float().cpu()
        columns = {**({} if scores.std is None else {"std": scores.std}), **scores.parts}
        parts = self.shares.table({"": value, **{name: part.float() for name, part in columns.items()}})
        return parts.pop(""), self.shares.gather_all(scores.valid.cpu() & torch.isfinite(value)), parts

    def distribute(
        self,
        function: Callable[..., Any],
        *,
        needs_reference: bool,
        joins: str | None = None,
        head: nn.Module | None = None,
    ) -> nn.Module:
        """Share a function of the policy among the processes as a module, or divide its network (FSDP2).

        `needs_reference`: the policy before training is evaluated as well. `joins`: what an objective joins,
        so that processes differ in their forwards. `head`: trained beside the network.
        """
        module = PolicyModule(self.policy, function, head)
        several = len(getattr(self.policy, "networks", ())) > 1  # each for a part of the noise levels
        if not self.sharding:
            return share_gradients(module, self.accelerator, may_skip=several)
        from peft.tuners.lora import LoraLayer

        settings, network = self.settings, self.policy.module
        has_adapters = any(isinstance(part, LoraLayer) for part in network.modules())
        unsupported = {
            "a reference (objective.changes.kl, rewards.terms.LABEL.references) without LoRA": (
                (needs_reference or self.references is not None) and not has_adapters
            ),
            f"the algorithm {settings.algorithm!r}, which joins {joins}": joins is not None,
            "a model of several networks, as Wan 2.2": several,
        }
        check_sharding(settings, self.rollout, unsupported)
        shard(network, self.accelerator)
        return module

    def idle(self, batches: int) -> int:
        """Count the micro-batches without gradient that this process adds to its own in an update.

        DDP needs a backward of every process, and each forward through a divided network gathers weights from
        all. All processes call it before the first micro-batch of an update.
        """
        if not self.sharding:
            return int(not batches)
        return max_over_processes(max(1, batches), self.accelerator) - batches

    def constrained(self, images: ScoredImages, run: Context) -> ScoredImages:
        """Replace the value by what is optimized where a reward has a bound."""
        if not self.constraints.bounds:
            return images
        value, multipliers = self.constraints.apply(images.valid, images.parts, run)
        metrics = score_metrics(self.scorer.reward, value, images.valid, images.group, images.parts)
        return replace(images, value=value, metrics={**images.metrics, **metrics, **multipliers})

    def wait_for_rewards(self) -> None:
        self.scorer.wait()

    def release(self) -> None:
        """Restore the policy's own image size."""
        if self.rollout.image_sizes:
            self.resize(None)

    def finish(self, run: Context) -> None:
        """Reset the reference where it is due, and store the rounds of dynamic sampling."""
        self.reference.finish(run, self.divergence)
        if self.references is not None:
            run.tensors[REFERENCES] = self.references.state()
        run.tensors |= {discriminator.key: discriminator.state() for discriminator in self.discriminators}
        if self.groups is not None:
            run.counters.own["rounds"] = self.groups.round

    def restore(self, run: Context) -> None:
        self.reference.restore(run)
        if self.references is not None:
            self.references.load(run.tensors.get(REFERENCES, {}))
        for discriminator in self.discriminators:
            if discriminator.key in run.tensors:  # else the run began without it
                discriminator.load(run.tensors[discriminator.key])
        if self.groups is not None:
            self.groups.round = run.counters.own.get("rounds", 0)

    def unsharded(self) -> AbstractContextManager[Any]:
        return unsharded(self.policy.module)

    def parameters(self) -> Sequence[tuple[str, nn.Parameter]]:
        return self.policy.trainable_parameters()

    def compute_dtype(self) -> torch.dtype:
        return self.policy.compute_dtype

    def forward_equivalents(self) -> int:
        """Count one for a forward on one latent, two more for a backward."""
        return self.policy.forward_count.equivalents
