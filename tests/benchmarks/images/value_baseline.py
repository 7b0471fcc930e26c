# SPDX-License-Identifier: Apache-2.0
"""What a value function of noisy latents would take off the advantage's variance, against the group's mean.

    python tests/benchmarks/images/value_baseline.py --iterations 8 --prompts 32 --threads 1

On the settings of `shapes_grpo_guard`, the policy as it begins. Per stochastic step k, in shares of the
variance of R − R̄ with R̄ the mean of the *other* images of the group (DDPO's baseline, free):

* floor: mean variance of R given the latent before step k, from trees that part there: no V can do better.
* V: R − V_k(x̂0, R̄), a ridge regression of 64 projections of x̂0 and of R̄ on the iterations before, as a run
  would have it; x̂0 is the clean latent that the network predicts there, which every adapter has and costs no pass.
* judge: the same with what the reward itself says of the decoded x̂0 in place of the projections: what a head
  on x̂0 could learn to read, at the price of a decoding and a judgement for each step.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import Tensor

from visalign.config import load_config, resolve_config
from visalign.core import group_advantages
from visalign.flow.rollout import predict_clean
from visalign.pipelines.flow_grpo.config import FlowGRPOConfig
from visalign.pipelines.flow_grpo.inputs import prepare
from visalign.pipelines.flow_grpo.parts import build_policy
from visalign.training import FlowGRPO
from visalign.training.diffusion.samples import ScoredImages
from visalign.training.loop.runtime import PhaseClock

TREES = 3
"""Latents of a prompt at which the trees of the floor part, into the rest of its images."""


def source_of(changes: list[str]) -> tuple[FlowGRPO, list[int]]:
    """The images of a configuration, and its stochastic steps."""
    config = load_config(FlowGRPOConfig, resolve_config("shapes_grpo_guard"), changes)
    inputs, accelerator = prepare(config, 1), Accelerator(cpu=True)
    source = FlowGRPO(
        build_policy(config.model, accelerator.device, config.seed), inputs.reward, inputs.records,
        rollout=config.rollout, objective=config.objective, seed=config.seed, accelerator=accelerator,
        strata=inputs.strata,
    )  # fmt: skip
    return source, config.rollout.stochastic


def others_mean(images: ScoredImages) -> Tensor:
    """[B] R̄ without the image itself."""
    centred = group_advantages(images.value, images.group, scale="none", baseline="leave_one_out")
    return images.value - centred


def floor(step: int, prompts: int, clock: PhaseClock) -> tuple[float, float]:
    """(mean variance of R given the latent before a step, that of R in its group), both unbiased."""
    tree = [
        f"rollout.prompts_per_iteration={prompts}",
        f"rollout.sde_steps={list(range(5))}",
        f"rollout.branch={{at: [{step}], children: {12 // TREES}}}",
        "objective.credit=branches",
    ]
    source, steps = source_of(tree)
    images = source.scored(source.sample(0, clock, steps), clock)
    value = images.value.view(prompts, TREES, -1)
    within = value.var(2).mean()
    # between latents: the variance of their means, less what is within them
    between = value.mean(2).var(1).mean() - within / value.shape[2]
    return float(within), float(within + between)


def ridge(columns: Tensor, target: Tensor, fresh: Tensor, strength: float = 0.1) -> Tensor:
    """What a ridge regression of target [N] on columns [N, d], of unit variance, says of fresh [M, d]."""
    mean, std = columns.mean(0), columns.std(0)
    x, y = (columns - mean) / std, target - target.mean()
    penalty = strength * len(x) * torch.eye(x.shape[1], dtype=x.dtype)
    return (fresh - mean) / std @ torch.linalg.solve(x.T @ x + penalty, x.T @ y) + target.mean()


def learnt(iterations: int, clock: PhaseClock) -> Tensor:
    """[2, S] of V and judge: mean square of what is left, in shares of R − R̄, over the second half."""
    source, steps = source_of([])
    draw, size = torch.Generator().manual_seed(0), source.policy.latent_shape
    project = torch.randn(torch.Size(size).numel(), 64, generator=draw, dtype=torch.float64)
    columns: list[list[Tensor]] = []
    targets: list[Tensor] = []
    left = torch.zeros(3, len(steps), dtype=torch.float64)
    for number in range(iterations):
        images = source.scored(source.sample(number, clock, steps), clock)
        clean = [predict_clean(images.trajectory, k) for k in range(len(steps))]
        baseline, rest = others_mean(images), images.value - others_mean(images)
        now = []  # per baseline and step [B, d]
        for inputs in (
            [x.flatten(1).double() @ project for x in clean],
            [source.score(x, images.records, clock).value.double()[:, None] for x in clean],
        ):
            now += [torch.cat([values, baseline[:, None]], 1) for values in inputs]
        if 2 * number >= iterations:
            left[0] += rest.square().sum()
            for index, fresh in enumerate(now):
                earlier = torch.cat([rows[index] for rows in columns])
                error = rest - ridge(earlier, torch.cat(targets), fresh)
                left[1 + index // len(steps), index % len(steps)] += error.square().sum()
        columns.append(now)
        targets.append(rest)
        print(f"iteration {number}: mean reward {images.value.mean():.3f}", flush=True)
    return left[1:] / left[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=48, help="of the floor, at each step")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = PhaseClock()
    shares = learnt(options.iterations, clock).T.tolist()
    print("| step | floor | V | judge |\n|---|---|---|---|")
    for k, (v, judge) in enumerate(shares):
        within, total = floor(k, options.prompts, clock)
        # R − R̄ of 12 has the variance of R and a share of it for the mean of the eleven others
        print(f"| {k} | {within / (total * 12 / 11):.2f} | {v:.2f} | {judge:.2f} |", flush=True)
