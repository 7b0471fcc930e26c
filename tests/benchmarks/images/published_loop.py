# SPDX-License-Identifier: Apache-2.0
"""An iteration of Flow-GRPO beside one that spends its passes as the published training loop does.

    python tests/benchmarks/images/published_loop.py                          without guidance, and at 4.5
    python tests/benchmarks/images/published_loop.py --guidance 4.5 --kl 0    one row

The other side restates the passes of arXiv 2505.05470 and its repository on the same model and settings:
* every copy of a prompt is encoded, batch by batch; both halves of guidance go through the network in one;
* a step of training is one time of one batch: both halves with gradient, then the reference's two without,
  where the KL counts; the optimizer moves twice an iteration;
* the KL is the squared distance of the means over twice the squared noise rate; averages every 8th update.
Sides take turns in one process, one thread, CPU seconds; the first iterations warm up; medians are printed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from visalign.adapters import LoraSettings, load_policy
from visalign.adapters.sd3.joint_attention import collapse_null_tokens
from visalign.core import ppo_clip
from visalign.data.assets import resolve_model
from visalign.flow.transitions import Kernel
from visalign.rewards import FunctionReward
from visalign.training import (
    DiffusionObjectiveSettings,
    FlowGRPO,
    OptimizerSettings,
    RolloutSettings,
    RunSettings,
    Trainer,
)
from visalign.training.loop.runtime import PhaseClock

PROMPTS = [f"a {colour} {shape}" for colour in ("red", "blue", "green", "yellow") for shape in ("circle", "square")]
CLIP, UPDATES, LR, EMA, EMA_EVERY = 1e-4, 2, 3e-4, 0.9, 8


def redness(images: Tensor, prompts: Sequence[str], metadata: Any) -> Tensor:
    """The reward of both sides."""
    return images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))


class Published:
    """An iteration that spends what the published loop spends."""

    def __init__(self, policy: Any, options: argparse.Namespace) -> None:
        self.policy, self.options = policy, options
        self.weights = [weight for _, weight in policy.trainable_parameters()]
        self.average = [weight.detach().clone() for weight in self.weights]
        self.optimizer = torch.optim.AdamW(self.weights, lr=LR, weight_decay=1e-4)
        self.sigmas = policy.sigmas(options.steps).to(policy.device)
        self.clock = PhaseClock()
        self.kernel = Kernel(schedule="flow", noise_level=0.7, sigma_max=float(self.sigmas[1]))
        self.updates = 0

    def iterate(self) -> None:
        """Sample, score, and train on all times but the last."""
        group = self.options.group
        prompts = [prompt for prompt in PROMPTS[: self.options.prompts] for _ in range(group)]
        batches = [
            self._sample(prompts[i : i + self.options.batch]) for i in range(0, len(prompts), self.options.batch)
        ]
        reward = torch.cat([batch["reward"] for batch in batches]).double().view(-1, group)
        centred = reward - reward.mean(1, keepdim=True)
        advantage = (centred / (reward.std(correction=0) + 1e-4)).flatten().float().clamp(-5, 5)
        for batch, own in zip(batches, advantage.split(self.options.batch), strict=True):
            batch["advantage"] = own
        share = len(batches) // UPDATES
        for i in range(0, len(batches), share):
            for batch in batches[i : i + share]:
                for step in range(self.options.steps - 1):
                    with self.clock.phase("update"):
                        (self._loss(batch, step) / (share * (self.options.steps - 1))).backward()
            with self.clock.phase("update"):
                self._update()

    def _velocity(self, x: Tensor, step: int, context: tuple[Any, ...]) -> Tensor:
        """Both halves in one batch, with gradient where there is one."""
        embeds, pooled, null, null_pooled, weights = context
        time = self.policy.times(self.sigmas[step].expand(len(x)))
        if self.policy.guidance == 1:
            return self.policy._forward(x, time, embeds, pooled, weights)
        halves = self.policy._forward(
            torch.cat([x, x]), torch.cat([time, time]), torch.cat([null, embeds]),
            torch.cat([null_pooled, pooled]), weights,
        )  # fmt: skip
        without, prompted = halves.chunk(2)
        return without + self.policy.guidance * (prompted - without)

    @torch.no_grad()
    def _sample(self, prompts: list[str]) -> dict[str, Any]:
        uncollapsed, pooled = self.policy._text._encode(prompts)
        embeds, weights = collapse_null_tokens(uncollapsed)
        weights = weights if weights.any() else None
        context = (embeds, pooled, *self.policy._text.null(len(prompts)), weights)
        x = torch.randn(len(prompts), *self.policy.latent_shape, device=self.policy.device)
        states, log_probs = [x], []
        with self.clock.phase("rollout"):
            for step in range(self.options.steps):
                v = self._velocity(x, step, context)
                transition = self.kernel.step(x, v, self.sigmas[step], self.sigmas[step + 1])
                x = transition.sample(torch.randn_like(x))
                states.append(x)
                log_probs.append(transition.log_prob(x))
        with self.clock.phase("decode"):
            images = self.policy.decode(x)
        reward = redness(images, prompts, None)
        return {"context": context, "states": states, "old": log_probs, "reward": reward}

    def _loss(self, batch: dict[str, Any], step: int) -> Tensor:
        x, x_next = batch["states"][step : step + 2]
        sigma, sigma_next = self.sigmas[step], self.sigmas[step + 1]
        transition = self.kernel.step(x, self._velocity(x, step, batch["context"]), sigma, sigma_next)
        log_ratio = transition.log_prob(x_next) - batch["old"][step]
        loss = ppo_clip(log_ratio, batch["advantage"], eps_low=CLIP, eps_high=CLIP).mean()
        if self.options.kl:
            with torch.no_grad(), self.policy.reference():
                other = self.kernel.step(x, self._velocity(x, step, batch["context"]), sigma, sigma_next)
            rate = transition.std / (sigma - sigma_next).sqrt()
            distance = (transition.mean - other.mean).square().mean((1, 2, 3))
            loss = loss + self.options.kl * (distance / (2 * rate**2)).mean()
        return loss

    def _update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1
        if self.updates % EMA_EVERY == 0:
            for average, weight in zip(self.average, self.weights, strict=True):
                average.lerp_(weight.detach(), 1 - EMA)


def ours(policy: Any, options: argparse.Namespace, folder: Path) -> Trainer[FlowGRPO]:
    """The same work by the package's own loop."""
    rollout = RolloutSettings(
        prompts_per_iteration=options.prompts, group_size=options.group, steps=options.steps,
        batch_size=options.batch, noise_level=0.7,
    )  # fmt: skip
    objective = DiffusionObjectiveSettings(algorithm="flow_grpo", changes={"kl": options.kl}, ratio_bound=1e-3)
    algorithm = FlowGRPO(
        policy,
        FunctionReward(redness),
        [{"prompt": prompt} for prompt in PROMPTS],
        rollout=rollout,
        objective=objective,
    )
    optimizer = OptimizerSettings(
        lr=LR, updates_per_iteration=UPDATES, micro_batch=options.batch, ema_decay=EMA, ema_every=EMA_EVERY
    )
    return Trainer(algorithm, run=RunSettings(folder=folder, iterations=10**6), optimizer=optimizer)


def seconds(work: Callable[[], object]) -> float:
    """Of processor time."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def compare(guidance: float, options: argparse.Namespace, folder: Path) -> str:
    """The line of one guidance scale."""
    policies = [
        load_policy(resolve_model("shapes-sd3"), guidance=guidance, lora=LoraSettings(rank=32, alpha=64, seed=0))
        for _ in range(2)
    ]
    trainer, published = ours(policies[0], options, folder), Published(policies[1], options)
    sides = (trainer.iterate, published.iterate)
    spent: tuple[list[float], list[float]] = ([], [])
    for number in range(options.rounds + 1):
        before = [policy.forward_count.equivalents for policy in policies]
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            spent[side].append(seconds(sides[side]))
        passes = [policy.forward_count.equivalents - b for policy, b in zip(policies, before, strict=True)]
    images = options.prompts * options.group
    one, other = (times[1:] for times in spent)
    ratios = [b / a for a, b in zip(one, other, strict=True)]
    return (
        f"guidance {guidance:g}, KL {options.kl:g}: ours {median(one):.1f} s and {passes[0] / images:.0f} "
        f"forward-equivalents an image, published {median(other):.1f} s and {passes[1] / images:.0f}; "
        f"published / ours: passes {passes[1] / passes[0]:.2f}, seconds {median(ratios):.2f} "
        f"(rounds: {', '.join(f'{ratio:.2f}' for ratio in ratios)})"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each guidance scale."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.0, 4.5])
    parser.add_argument("--kl", type=float, default=0.04, help="its coefficient; 0.04 as published")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=24)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=48, help="samples in a pass, in both phases")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    if options.prompts > len(PROMPTS) or options.prompts * options.group % (UPDATES * options.batch):
        parser.error(f"--prompts is at most {len(PROMPTS)}, and --batch divides half of all images.")
    torch.set_num_threads(1)
    for guidance in options.guidance:
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            print(compare(guidance, options, Path(folder)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
