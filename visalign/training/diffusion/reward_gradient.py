# SPDX-License-Identifier: Apache-2.0
"""A diffusion policy trained through the reward's own gradient: ReFL, DRaFT-K, DRaFT-LV, R0's normalisation.

The rows are `ASCENTS`. They need a reward that is differentiable in the pixels; no groups, no log-probs, no
noise on the way. What a reward likes for no good reason is found fast so: watch held-out rewards that are not
trained on.

Where this deviates from the published code, always on purpose:
* under guidance the unconditional half carries no gradient, as in every other training here;
* the pull takes v_ref as given: with `last` above 1 it does not follow how v_ref moves with x;
* an image leaves the autoencoder in [0, 1], and pixels that are cut there carry no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visalign.core.regression.ascents import Ascent
from visalign.core.surrogates.kl import velocity_kl
from visalign.errors import UserError
from visalign.flow.noise import initial_noise
from visalign.flow.parametrization import preserving_scale
from visalign.flow.rollout import encoder_inputs, velocity_of
from visalign.interfaces import Condition, DifferentiableReward, DifferentiableSum, Scores
from visalign.seeds import sample_seed
from visalign.training.loop.algorithm import Collected, Context
from visalign.training.loop.judging import check_failures, reward_metrics
from visalign.training.loop.processes import no_sync_unless_last
from visalign.training.loop.sampler import Batch
from visalign.training.policy.update import split_updates

from .images import ImageAlgorithm
from .regression import VelocityModule
from .rollout_settings import RolloutSettings
from .settings import DiffusionObjectiveSettings, check_sampling


@dataclass(kw_only=True)
class Asked:
    """The images to be made: b samples of this process."""

    condition: Condition
    prompts: list[str]
    batch: Batch
    group: Tensor
    """[B] int64 of all processes in rank order."""
    iteration: int
    value: Tensor
    """[B] float64, NaN where the reward is not known: what the updates found."""


@dataclass(frozen=True, kw_only=True)
class AscentStep:
    """One optimizer update."""

    sample: Tensor
    """Places among the B."""
    stop: int
    """Denoising steps without gradient."""
    number: int
    """Of the update in its iteration."""


class RewardGradient(ImageAlgorithm):
    """Trains a diffusion policy by a row of `ASCENTS`; an `Algorithm` for
    `visalign.training.loop.trainer.Trainer`.

    Args: as `FlowGRPO`; `objective.algorithm` names an ascent, and the reward has `score_with_gradient`.

    Raises:
        UserError: settings that do not fit each other, or a reward without a gradient.
    """

    usual = "draft"

    def begin(self) -> None:
        """The row, and the module that the processes share or divide."""
        self.row = ascent_for_run(self.settings, self.rollout)
        check_differentiable(self.reward)
        self.module = self.spread(VelocityModule(self.policy), asks_reference=self.row.kl > 0)

    def collect(self, run: Context) -> Collected:
        """Which images the iteration makes; each update makes its own, under the weights of that moment."""
        process, iteration = self.accelerator, run.counters.iteration
        self.source.resize(iteration)
        batch = self.source.sampler.batch(iteration, process.process_index, process.num_processes)
        records = [dict(self.source.records[i]) for i in batch.prompt_index.tolist()]
        with run.clock.phase("rollout"), torch.no_grad(), process.autocast():
            condition = self.policy.encode(encoder_inputs(self.policy, records))
        group = self.source.gather_all(batch.group_id)
        asked = Asked(
            condition=condition,
            prompts=[str(record["prompt"]) for record in records],
            batch=batch,
            group=group,
            iteration=iteration,
            value=torch.full((len(group),), torch.nan, dtype=torch.float64),
        )
        return Collected(experience=asked, samples=self.source.samples)

    def prepare(self, experience: Asked, run: Context) -> list[AscentStep]:
        """The samples of each update, and where their sampling stops."""
        updates, iteration = run.optimizer.updates_per_iteration, experience.iteration
        parts = split_updates(experience.group, self.settings.epochs, updates, self.seed, iteration, False)
        stops = self.row.stops(self.rollout.steps)
        return [
            AscentStep(
                sample=sample,
                stop=stops[sample_seed(self.seed, "stop", iteration, number) % len(stops)],
                number=number,
            )
            for number, sample in enumerate(parts)
        ]

    def backward(self, experience: Asked, step: AscentStep, run: Context) -> dict[str, float]:
        """Make the update's images and add the gradient of −mean reward, in micro-batches of images."""
        process, size = self.accelerator, len(experience.batch)
        first = self.source.first
        own = step.sample[(first <= step.sample) & (step.sample < first + size)] - first
        value = torch.full((len(experience.group),), torch.nan, dtype=torch.float64)
        sums = torch.zeros(2, dtype=torch.float64)  # Σ image gradient's norm, Σ k |v − v_ref|²
        # DDP averages over the processes, and the loss is a mean over all of them
        scale = run.counters.loss_scale * process.num_processes / len(step.sample)
        batches = list(own.split(max(1, run.micro_batch))) if len(own) else []
        idle, nothing = self.idle(len(batches)), torch.zeros(1, dtype=torch.int64)
        for number, sample in enumerate(batches):
            found, some = self._climb(experience, step, sample, scale, number == len(batches) - 1)
            value[first + sample] = found
            sums += some
        for _ in range(idle):
            x0, _ = self._end(experience, step, nothing)
            process.backward(x0.sum() * 0.0)
            for number in range(self.row.renoised if self.sharding else 0):
                again, _ = self._again(experience, step, nothing, x0.detach(), number)
                process.backward(again.sum() * 0.0)
        if process.num_processes > 1:
            known = torch.stack([value.nan_to_num(), (~value.isnan()).double()]).to(self.policy.device)
            total, seen = torch.as_tensor(process.reduce(known, "sum")).cpu()
            value = torch.where(seen > 0, total, torch.nan)
            sums = torch.as_tensor(process.reduce(sums.to(self.policy.device), "sum")).cpu()
        return self._said(experience, step, value, sums)

    def _said(self, experience: Asked, step: AscentStep, value: Tensor, sums: Tensor) -> dict[str, float]:
        """Sums of an update over all processes; stops where the reward fails too often."""
        asked = value[step.sample]
        valid = torch.isfinite(asked)
        own = Scores(value=asked.float(), valid=valid, unit=self.reward.unit)
        check_failures(own, valid, self.rollout.max_failure_rate, self.reward.name)
        experience.value[step.sample] = asked
        policy = -float(asked[valid].sum()) / len(asked)
        norm, kl = (sums / len(asked)).tolist()
        return {"loss/policy": policy, "loss/kl": kl, "reward_gradient": norm}

    def _climb(
        self, experience: Asked, step: AscentStep, sample: Tensor, scale: float, last: bool
    ) -> tuple[Tensor, Tensor]:
        """(rewards [n] float64, sums) of one micro-batch, whose gradients are added.

        Each prediction of the images goes back before the next is made: one graph at a time.
        """
        predictions = 1 + self.row.renoised
        process = self.accelerator
        with no_sync_unless_last(self.module, process, last=last and predictions == 1):
            x0, pull = self._end(experience, step, sample)
            value, norm = self._push(experience, sample, x0, pull, scale / predictions)
        sums, x0 = torch.stack([norm, pull.detach().sum().double().cpu()]), x0.detach()
        for number in range(self.row.renoised):
            with no_sync_unless_last(self.module, process, last=last and number == self.row.renoised - 1):
                again, pull = self._again(experience, step, sample, x0, number)
                _, norm = self._push(experience, sample, again, pull, scale / predictions)
            sums += torch.stack([norm, pull.detach().sum().double().cpu()])
        return value, sums / predictions

    def _push(
        self, experience: Asked, sample: Tensor, x0: Tensor, pull: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """(rewards [n], Σ norm of the image's gradient) of predictions x0; their gradient goes back."""
        with self.accelerator.autocast():
            images = self.policy.decode(x0.to(self.policy.storage_dtype))
        prompts = [experience.prompts[i] for i in sample.tolist()]
        value, slope = image_gradient(self.reward, images.detach(), prompts, self.row)
        norm = slope.flatten(1).norm(dim=1).sum().double().cpu()
        # ∂/∂θ of −Σ r(x0(θ)): the slope in the pixels goes on through the decoder and the last steps
        loss = (pull.sum() - (images * slope).sum()) * scale
        self.accelerator.backward(loss)
        return value, norm

    def _start(self, experience: Asked, step: AscentStep, sample: Tensor) -> Tensor:
        """[n, ...] latents where the gradient begins, made under the present weights."""
        policy, sigmas = self.policy, self.source.sigmas
        noise = initial_noise(
            self.source.sample_seeds(experience.batch.sample_id[sample]), policy.latent_shape
        )
        if policy.prediction != "velocity":
            noise = noise * preserving_scale(sigmas[0]).to(noise)
        x = noise.to(device=policy.device, dtype=policy.storage_dtype)
        with torch.no_grad(), self.accelerator.autocast():
            condition = experience.condition.select(sample)
            for k in range(step.stop):
                sigma, time = self._level(k, x)
                v = velocity_of(policy, x, sigma, condition, time)
                x = (x + (sigmas[k + 1] - sigmas[k]).to(v) * v).to(x.dtype)
        return x

    def _end(self, experience: Asked, step: AscentStep, sample: Tensor) -> tuple[Tensor, Tensor]:
        """(x0 [n, ...] with gradient, pull [n]) of samples: their last steps, or one prediction."""
        sigmas, x = self.source.sigmas, self._start(experience, step, sample)
        pull = torch.zeros(len(x), device=x.device)
        whole = self.row.stop_range is None
        for k in range(step.stop, self.rollout.steps if whole else step.stop + 1):
            v, own = self._ask(experience, sample, x, k)
            pull = pull + own
            # an Euler step of the ODE, or x0 = x − σ v
            length = sigmas[k + 1] - sigmas[k] if whole else -sigmas[k]
            x = x + length.to(v) * v
        return x, pull

    def _again(
        self, experience: Asked, step: AscentStep, sample: Tensor, x0: Tensor, number: int
    ) -> tuple[Tensor, Tensor]:
        """(x0 [n, ...], pull [n]) predicted from clean latents that are noised to the last level."""
        k = self.rollout.steps - 1
        sigma = self.source.sigmas[k].to(x0)
        ids = experience.batch.sample_id[sample].tolist()
        seeds = [sample_seed(self.seed, "again", one, step.number, number) for one in ids]
        noise = initial_noise(seeds, self.policy.latent_shape).to(x0)
        x = ((1 - sigma) * x0 + sigma * noise).to(self.policy.storage_dtype)
        v, pull = self._ask(experience, sample, x, k)
        return x - sigma.to(v) * v, pull

    def _ask(self, experience: Asked, sample: Tensor, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(v [n, ...] at step k with gradient, [n] k · mean |v − v_ref|²)."""
        condition, (sigma, time) = experience.condition.select(sample), self._level(k, x)
        reference = None
        if self.row.kl:  # before the own forward: weights may be swapped in place
            with torch.no_grad(), self.accelerator.autocast(), self.reference.applied():
                reference = velocity_of(self.policy, x.detach(), sigma, condition, time)
        v = self.module(condition, x, sigma, time)
        if reference is None:
            return v, v.new_zeros(len(v))
        return v, self.row.kl * velocity_kl(v, reference)

    def _level(self, k: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """(σ [n], time [n]) of step k."""
        levels = self.source.sigmas[k], self.source.times[k]
        return tuple(level.to(x.device).expand(len(x)) for level in levels)  # type: ignore[return-value]

    def record(self, experience: Asked, sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Metrics of the updates."""
        mean = {name: sum(each[name] for each in sums) / len(sums) for name in sums[0]}
        valid = torch.isfinite(experience.value)
        terms = {} if not self.row.kl else {key: mean[key] for key in ("loss/policy", "loss/kl")}
        self.divergence = mean["loss/kl"] / self.row.kl if self.row.kl else None
        return {
            **reward_metrics(experience.value, valid, experience.group),
            "loss": mean["loss/policy"] + mean["loss/kl"],
            **terms,
            "reward_gradient": mean["reward_gradient"],
        }


def ascent_for_run(objective: DiffusionObjectiveSettings, rollout: RolloutSettings) -> Ascent:
    """The row of a run, refused where the rollout does not fit it.

    Raises:
        UserError: with what to set instead.
    """
    row = objective.ascent
    if row is None:
        raise UserError(
            f"objective.algorithm={objective.algorithm} does not go through the reward's gradient."
        )
    check_sampling(objective, rollout)
    if row.last > rollout.steps:
        raise UserError(
            f"objective.changes.last is {row.last}, and rollout.steps is {rollout.steps}. Take at most "
            f"{rollout.steps}."
        )
    return row


def terms_of(reward: Any) -> Iterator[tuple[str, Any, float, float]]:
    """(label, reward r, weight w, mean m) of the w (r − m) that a reward adds up, or of itself."""
    if isinstance(reward, DifferentiableSum):
        yield from reward.gradient_terms()
    else:
        yield reward.name, reward, 1.0 if reward.higher_is_better else -1.0, 0.0


def check_differentiable(reward: Any) -> None:
    """Refuse a reward of which a term cannot be differentiated in the pixels.

    Raises:
        UserError: naming the term.
    """
    for label, term, *_ in terms_of(reward):
        if not isinstance(term, DifferentiableReward):
            raise UserError(
                f"The reward {label!r} ({type(term).__name__}) has no gradient in the pixels, through which "
                "objective.algorithm would train. Take one with score_with_gradient(images, prompts), as the "
                "CLIP judges, image_reward and laion_aesthetic have, or an algorithm that needs none, e.g. "
                "objective.algorithm=diffusion_nft."
            )


def image_gradient(reward: Any, images: Tensor, prompts: Sequence[str], row: Ascent) -> tuple[Tensor, Tensor]:
    """What a reward says of images, and where it grows.

    Args:
        reward: each term with `score_with_gradient`.
        images: [n, 3, H, W] in [0, 1].
        prompts: [n].
        row: its hinge and normalisation.

    Raises:
        UserError: a reward returned another shape.

    Returns:
        ([n] float64 rewards, higher is better, NaN where not finite; [n, 3, H, W] where they grow, 0 there).
    """
    images = images.detach().float()
    value = torch.zeros(len(images), dtype=torch.float64)
    slope = torch.zeros_like(images)
    for label, term, weight, mean in terms_of(reward):
        leaf = images.clone().requires_grad_()
        with torch.enable_grad():
            said = term.score_with_gradient(leaf, list(prompts))
            if said.shape != (len(images),):
                raise UserError(
                    f"score_with_gradient of the reward {label!r} returned {list(said.shape)} for "
                    f"{len(images)} images; it must return one number for each, [{len(images)}]."
                )
            (found,) = torch.autograd.grad(said.sum(), leaf)
        if row.normalise:
            size = found.flatten(1).norm(dim=1).reshape(-1, 1, 1, 1)
            found = torch.where(size == 0, 0.0, found / size)
        value += weight * (said.detach().double().cpu() - mean)
        slope += weight * found
    finite = torch.isfinite(value) & torch.isfinite(slope).flatten(1).all(1).cpu()
    live = finite if row.hinge is None else finite & (value < row.hinge)
    slope = torch.where(live.to(slope.device).reshape(-1, 1, 1, 1), slope, 0.0)
    return torch.where(finite, value, torch.nan), slope
