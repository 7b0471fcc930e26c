# SPDX-License-Identifier: Apache-2.0
"""Train a diffusion policy through the reward's own gradient: ReFL, DRaFT-K, DRaFT-LV, R0's normalization.

The algorithms are `ASCENTS`. They need a reward that is differentiable in the pixels; no groups, no log-probs, no
noise on the way. They exploit flaws of a reward quickly: watch held-out rewards that are not trained on.

Deliberate differences from the published code:
* under guidance the unconditional half carries no gradient, as in every other training here;
* the KL term takes v_ref as given: with `last` above 1 it does not follow how v_ref moves with x;
* an image leaves the autoencoder in [0, 1], and pixels that are clamped there carry no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visalign.core.regression.ascents import ASCENTS, Ascent
from visalign.core.surrogates.kl import velocity_kl
from visalign.errors import UserError
from visalign.flow.noise import initial_noise
from visalign.flow.rollout import complete, first_latents, velocity_of
from visalign.interfaces import Condition, DifferentiableReward, DifferentiableSum, Scores
from visalign.seeds import sample_seed
from visalign.training.loop.algorithm import Collected, Context
from visalign.training.loop.judging import check_failures, reward_at, reward_metrics
from visalign.training.loop.processes import no_sync_unless_last
from visalign.training.loop.sampler import Batch
from visalign.training.policy.update import split_updates

from .images import ImageAlgorithm


@dataclass(kw_only=True)
class AscentBatch:
    """Images to generate in an iteration: b samples of this process."""

    condition: Condition
    prompts: list[str]
    batch: Batch
    group: Tensor  # [B] int64 of all processes in rank order
    value: Tensor  # [B] float64 rewards that the updates computed, NaN where unknown


@dataclass(frozen=True, kw_only=True)
class AscentStep:
    """Optimizer update."""

    sample: Tensor  # Indices among the B
    stop: int  # Denoising steps without gradient
    number: int  # Index of the update in its iteration


class RewardGradient(ImageAlgorithm):
    """Trains a diffusion policy by one of `ASCENTS` on a reward that has `score_with_gradient`."""

    algorithms = ASCENTS
    default = "draft"

    def setup(self) -> None:
        assert self.settings.ascent is not None
        self.row = self.settings.ascent
        check_differentiable(self.reward)
        self.module = self.distribute(velocity_of, needs_reference=self.row.kl > 0)

    def collect(self, run: Context) -> Collected:
        """Choose and encode the iteration's prompts; each update samples its own images."""
        iteration = self.scorer.iteration = run.counters.iteration
        with self.unsharded():
            self.draw_references(iteration, iteration, run.clock)
        batch, records = self.prompts(iteration)
        experience = AscentBatch(
            condition=self.encode(records, run.clock),
            prompts=[str(record["prompt"]) for record in records],
            batch=batch,
            group=self.shares.gather_all(batch.group_id),
            value=torch.full((self.samples,), torch.nan, dtype=torch.float64),
        )
        return Collected(experience=experience, samples=self.samples)

    def prepare(self, experience: AscentBatch, run: Context) -> list[AscentStep]:
        """Choose the samples of each update, and the step where sampling without gradient stops."""
        updates, iteration = run.optimizer.updates_per_iteration, run.counters.iteration
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

    def backward(self, experience: AscentBatch, step: AscentStep, run: Context) -> dict[str, float]:
        """Generate the update's images and add the gradient of −mean reward, in micro-batches of images."""
        process, local = self.accelerator, self.shares.local[step.sample]
        local = local[local >= 0]
        value = torch.full((len(experience.group),), torch.nan, dtype=torch.float64)
        sums = torch.zeros(2, dtype=torch.float64)  # Σ image gradient's norm, Σ k |v − v_ref|²
        # DDP averages over the processes, and the loss is a mean over all of them
        scale = run.counters.loss_scale * process.num_processes / len(step.sample)
        batches = list(local.split(max(1, run.micro_batch))) if len(local) else []
        idle, zero = self.idle(len(batches)), torch.zeros(1, dtype=torch.int64)  # all processes count before a batch
        for sample in batches:
            last = sample is batches[-1]
            value[self.shares.own[sample]], batch_sums = self._backward_batch(experience, step, sample, scale, last)
            sums += batch_sums
        for _ in range(idle):
            x0, _ = self._clean(experience, step, zero)
            process.backward(x0.sum() * 0.0)
            for number in range(self.row.renoised if self.sharding else 0):
                renoised, _ = self._renoised(experience, step, zero, x0.detach(), number)
                process.backward(renoised.sum() * 0.0)
        if process.num_processes > 1:
            columns = torch.stack([value.nan_to_num(), (~value.isnan()).double()]).to(self.policy.device)
            total, count = torch.as_tensor(process.reduce(columns, "sum")).cpu()
            value = torch.where(count > 0, total, torch.nan)
            sums = torch.as_tensor(process.reduce(sums.to(self.policy.device), "sum")).cpu()
        return self._update_sums(experience, step, value, sums)

    def _update_sums(self, experience: AscentBatch, step: AscentStep, value: Tensor, sums: Tensor) -> dict[str, float]:
        """Compute an update's sums over all processes; stop where the reward fails too often."""
        update = value[step.sample]
        valid = torch.isfinite(update)
        scores = Scores(value=update.float(), valid=valid, unit=self.reward.unit)
        check_failures(scores, valid, self.rollout.max_failure_rate, self.reward.name)
        experience.value[step.sample] = update
        norm, kl = (sums / len(update)).tolist()
        policy = -float(update[valid].sum()) / len(update)
        return {"loss/policy": policy, "loss/kl": kl, "reward_gradient": norm}

    def _backward_batch(
        self, experience: AscentBatch, step: AscentStep, sample: Tensor, scale: float, last: bool
    ) -> tuple[Tensor, Tensor]:
        """Add the gradient of one micro-batch; return (rewards [n] float64, sums).

        Each prediction of the images is backpropagated before the next is made: one graph at a time.
        """
        predictions, process = 1 + self.row.renoised, self.accelerator
        with no_sync_unless_last(self.module, process, last=last and predictions == 1):
            x0, kl = self._clean(experience, step, sample)
            value, norm = self._backward_images(experience, sample, x0, kl, scale / predictions)
        sums, x0 = torch.stack([norm, kl.detach().sum().double().cpu()]), x0.detach()
        for number in range(self.row.renoised):
            with no_sync_unless_last(self.module, process, last=last and number == self.row.renoised - 1):
                renoised, kl = self._renoised(experience, step, sample, x0, number)
                _, norm = self._backward_images(experience, sample, renoised, kl, scale / predictions)
            sums += torch.stack([norm, kl.detach().sum().double().cpu()])
        return value, sums / predictions

    def _backward_images(
        self, experience: AscentBatch, sample: Tensor, x0: Tensor, kl: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Backpropagate the rewards of predictions x0; return (rewards [n], Σ norm of the image gradient)."""
        with self.accelerator.autocast():
            images = self.policy.decode(x0.to(self.policy.storage_dtype))
        prompts = [experience.prompts[i] for i in sample.tolist()]
        value, gradient = image_gradient(
            reward_at(self.reward, self.scorer.iteration), images.detach(), prompts, self.row
        )
        # ∂/∂θ of −Σ r(x0(θ)): the gradient in the pixels goes on through the decoder and the last steps
        self.accelerator.backward((kl.sum() - (images * gradient).sum()) * scale)
        return value, gradient.flatten(1).norm(dim=1).sum().double().cpu()

    def _sampled(self, experience: AscentBatch, step: AscentStep, sample: Tensor) -> Tensor:
        """Sample latents [n, ...] under the current weights, up to where the gradient begins."""
        noise = initial_noise(self.sample_seeds(experience.batch.sample_id[sample]), self.policy.latent_shape)
        x, condition = first_latents(self.policy, noise, self.sigmas), experience.condition.select(sample)
        with self.accelerator.autocast():
            return complete(self.policy, condition, x, sigmas=self.sigmas, step=0, until=step.stop)

    def _clean(self, experience: AscentBatch, step: AscentStep, sample: Tensor) -> tuple[Tensor, Tensor]:
        """Compute (x0 [n, ...] with gradient, KL [n]) by the last steps, or by one prediction."""
        sigmas, x = self.sigmas, self._sampled(experience, step, sample)
        kl = torch.zeros(len(x), device=x.device)
        to_end = self.row.stop_range is None
        for k in range(step.stop, self.rollout.steps if to_end else step.stop + 1):
            v, step_kl = self._velocity(experience, sample, x, k)
            kl = kl + step_kl
            # an Euler step of the ODE, or x0 = x − σ v
            length = sigmas[k + 1] - sigmas[k] if to_end else -sigmas[k]
            x = x + length.to(v) * v
        return x, kl

    def _renoised(
        self, experience: AscentBatch, step: AscentStep, sample: Tensor, x0: Tensor, number: int
    ) -> tuple[Tensor, Tensor]:
        """Predict (x0 [n, ...], KL [n]) from clean latents that are noised to the last level."""
        k = self.rollout.steps - 1
        sigma = self.sigmas[k].to(x0)
        ids = experience.batch.sample_id[sample].tolist()
        seeds = [sample_seed(self.seed, "again", i, step.number, number) for i in ids]
        noise = initial_noise(seeds, self.policy.latent_shape).to(x0)
        x = ((1 - sigma) * x0 + sigma * noise).to(self.policy.storage_dtype)
        v, kl = self._velocity(experience, sample, x, k)
        return x - sigma.to(v) * v, kl

    def _velocity(self, experience: AscentBatch, sample: Tensor, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Compute (v [n, ...] at step k with gradient, [n] k · mean |v − v_ref|²)."""
        condition = experience.condition.select(sample)
        sigma, time = (levels[k].to(x.device).expand(len(x)) for levels in (self.sigmas, self.times))
        reference = None
        if self.row.kl:  # before the own forward: weights may be swapped in place
            with torch.no_grad(), self.accelerator.autocast(), self.reference.applied():
                reference = velocity_of(self.policy, x.detach(), sigma, condition, time)
        v = self.module(x, sigma, condition, time)
        if reference is None:
            return v, v.new_zeros(len(v))
        return v, self.row.kl * velocity_kl(v, reference)

    def record(self, experience: AscentBatch, sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
        mean = {name: sum(update[name] for update in sums) / len(sums) for name in sums[0]}
        valid = torch.isfinite(experience.value)
        terms = {key: mean[key] for key in ("loss/policy", "loss/kl")} if self.row.kl else {}
        self.divergence = mean["loss/kl"] / self.row.kl if self.row.kl else None
        return {
            **reward_metrics(experience.value, valid, experience.group),
            "loss": mean["loss/policy"] + mean["loss/kl"],
            **terms,
            "reward_gradient": mean["reward_gradient"],
        }


def gradient_terms(reward: Any) -> Iterator[tuple[str, Any, float, float]]:
    """Yield (label, reward r, weight w, mean m) of the terms w (r − m) of a sum, or of a single reward."""
    if isinstance(reward, DifferentiableSum):
        yield from reward.gradient_terms()
    else:
        yield reward.name, reward, 1.0 if reward.higher_is_better else -1.0, 0.0


def check_differentiable(reward: Any) -> None:
    """Refuse a reward of which a term cannot be differentiated in the pixels."""
    for label, term, *_ in gradient_terms(reward):
        if not isinstance(term, DifferentiableReward):
            raise UserError(
                f"The reward {label!r} ({type(term).__name__}) has no gradient in the pixels, through which "
                "objective.algorithm would train. Take one with score_with_gradient(images, prompts), as the "
                "CLIP rewards, image_reward, reward_dance and hpsv3 have, or an algorithm that needs none, e.g. "
                "objective.algorithm=diffusion_nft."
            )


def image_gradient(reward: Any, images: Tensor, prompts: Sequence[str], row: Ascent) -> tuple[Tensor, Tensor]:
    """Compute the rewards [n] of images [n, 3, H, W] in [0, 1] and their gradient in the pixels.

    Rewards are float64, higher is better, NaN where not finite; the gradient is 0 there and above the hinge.
    """
    images = images.detach().float()
    value = torch.zeros(len(images), dtype=torch.float64)
    gradient = torch.zeros_like(images)
    for label, term, weight, mean in gradient_terms(reward):
        leaf = images.clone().requires_grad_()
        with torch.enable_grad():
            scores = term.score_with_gradient(leaf, list(prompts))
            if scores.shape != (len(images),):
                raise UserError(
                    f"score_with_gradient of the reward {label!r} returned {list(scores.shape)} for "
                    f"{len(images)} images; it must return one number for each, [{len(images)}]."
                )
            if not scores.isfinite().any():  # a judge that answered about none of them has no graph either
                value += torch.nan
                continue
            (term_gradient,) = torch.autograd.grad(scores.sum(), leaf)
        if row.normalise:
            norm = term_gradient.flatten(1).norm(dim=1).reshape(-1, 1, 1, 1)
            term_gradient = torch.where(norm == 0, 0.0, term_gradient / norm)
        value += weight * (scores.detach().double().cpu() - mean)
        gradient += weight * term_gradient
    finite = torch.isfinite(value) & torch.isfinite(gradient).flatten(1).all(1).cpu()
    live = finite if row.hinge is None else finite & (value < row.hinge)
    gradient = torch.where(live.to(gradient.device).reshape(-1, 1, 1, 1), gradient, 0.0)
    return torch.where(finite, value, torch.nan), gradient
