# SPDX-License-Identifier: Apache-2.0
"""What a value function of noisy latents would take off the advantage's variance, against the group's mean.

    python tests/benchmarks/value_baseline.py --iterations 8 --threads 1

On the settings of `shapes_grpo_guard`, the policy as it begins. Per stochastic step k, in shares of the
variance of R − R̄ with R̄ the mean of the *other* pictures of the group (DDPO's baseline, free):

* floor: mean variance of R given the latent before step k, from trees that part there: no V can do better.
* V: R − V(k, x̂0, R̄) of a small network that learns as a run would, from the iterations before; x̂0 is the
  clean latent that the network predicts there, which every adapter has and costs no pass.
* judge: the same with what the reward itself says of the decoded x̂0 beside R̄, linear: the best that a
  head on x̂0 could learn to read, at the price of a decoding and a judgement for each step.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from visalign.config import load_config, resolve_config
from visalign.core import group_advantages
from visalign.flow.rollout import predicted_clean
from visalign.pipelines.flow_grpo.config import FlowGRPOConfig
from visalign.pipelines.flow_grpo.inputs import prepare
from visalign.pipelines.flow_grpo.parts import build_policy
from visalign.training.diffusion.pictures import Pictures, PictureSource
from visalign.training.loop.runtime import PhaseClock

TREES = 3
"""Latents of a prompt at which the trees of the floor part, into the rest of its pictures."""


class Value(nn.Module):
    """V of a step, the clean latent predicted there and the other pictures' mean; begins at that mean."""

    def __init__(self, size: int, steps: int, width: int = 128) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(size + steps + 1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
        )
        self.out = nn.Linear(width, 1)
        nn.init.zeros_(self.out.weight)

    def forward(self, clean: Tensor, others: Tensor, step: Tensor) -> Tensor:
        """[N] of clean [N, d], others [N] and step [N, steps] (one hot)."""
        return others + self.out(self.net(torch.cat([clean, step, others[:, None]], 1)))[:, 0]


def source_of(changes: list[str]) -> tuple[PictureSource, list[int]]:
    """The pictures of a configuration, and its stochastic steps."""
    config = load_config(FlowGRPOConfig, resolve_config("shapes_grpo_guard"), changes)
    inputs, accelerator = prepare(config, 1), Accelerator(cpu=True)
    source = PictureSource(
        build_policy(config.model, accelerator.device, config.seed),
        inputs.reward,
        inputs.records,
        rollout=config.rollout,
        seed=config.seed,
        accelerator=accelerator,
        strata=inputs.strata,
    )
    return source, config.rollout.stochastic


def others_mean(made: Pictures) -> Tensor:
    """[B] R̄ without the picture itself."""
    centred = group_advantages(made.value, made.group, scale="none", baseline="leave_one_out")
    return made.value - centred


def floor(step: int, prompts: int, clock: PhaseClock) -> tuple[float, float]:
    """(mean variance of R given the latent before a step, that of R in its group), both unbiased."""
    tree = [
        f"rollout.prompts_per_iteration={prompts}",
        f"rollout.sde_steps={list(range(5))}",
        f"rollout.branch={{at: [{step}], children: {12 // TREES}}}",
        "objective.credit=branches",
    ]
    source, steps = source_of(tree)
    made = source.collect(0, clock, steps)
    value = made.value.view(prompts, TREES, -1)
    within = value.var(2).mean()
    # between latents: the variance of their means, less what is within them
    between = value.mean(2).var(1).mean() - within / value.shape[2]
    return float(within), float(within + between)


def fitted(value: Value, rows: tuple[Tensor, ...], target: Tensor, epochs: int, seed: int) -> None:
    """Squared error by AdamW, over all that has been seen."""
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(value.parameters(), lr=1e-3, weight_decay=1e-2)
    for _ in range(epochs):
        for at in torch.randperm(len(target), generator=draw).split(256):
            optimizer.zero_grad()
            (value(*(row[at] for row in rows)) - target[at]).square().mean().backward()
            optimizer.step()


def linear(columns: list[Tensor], target: Tensor, fresh: list[Tensor]) -> Tensor:
    """Least squares with a constant, said of fresh rows."""
    design, new = (torch.stack([*each, torch.ones_like(each[0])], 1) for each in (columns, fresh))
    return new @ torch.linalg.lstsq(design, target[:, None]).solution[:, 0]


def learnt(iterations: int, epochs: int, clock: PhaseClock) -> list[tuple[float, float]]:
    """Per step (V, judge): mean square of what is left, in shares of R − R̄, over the second half."""
    source, steps = source_of([])
    torch.manual_seed(0)
    clean, others, judged, reward = [], [], [], []
    left = torch.zeros(3, len(steps), dtype=torch.float64)
    value: Value | None = None
    for number in range(iterations):
        made = source.collect(number, clock, steps)
        found = [predicted_clean(made.trajectory, k) for k in range(len(steps))]
        says = [source.judge(x, made.records, clock).value.double() for x in found]
        now = torch.stack([x.flatten(1).float() for x in found], 1), others_mean(made), torch.stack(says, 1)
        if 2 * number >= iterations and value is not None:
            hot = torch.eye(len(steps))
            for k in range(len(steps)):
                with torch.no_grad():
                    v = value(now[0][:, k], now[1].float(), hot[k].expand(len(made.value), -1)).double()
                old = [torch.cat(judged)[:, k], torch.cat(others)]
                j = linear(old, torch.cat(reward), [now[2][:, k], now[1]])
                for row, baseline in enumerate((now[1], v, j)):
                    left[row, k] += (made.value - baseline).square().sum()
        for held, new in zip((clean, others, judged, reward), (*now, made.value), strict=True):
            held.append(new)
        value = value or Value(now[0].shape[2], len(steps))
        rows, count = torch.cat(clean), len(steps)
        hot = torch.eye(count).repeat(len(rows), 1)
        every = torch.cat(others).float().repeat_interleave(count)
        target = torch.cat(reward).float().repeat_interleave(count)
        fitted(value, (rows.flatten(0, 1), every, hot), target, epochs, number)
        print(f"iteration {number}: mean reward {made.value.mean():.3f}", flush=True)
    return [(float(left[1, k] / left[0, k]), float(left[2, k] / left[0, k])) for k in range(len(steps))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=48, help="of the floor, at each step")
    parser.add_argument("--epochs", type=int, default=3, help="of the value's fit, in each iteration")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    clock = PhaseClock()
    shares = learnt(given.iterations, given.epochs, clock)
    print("| step | floor | V | judge |\n|---|---|---|---|")
    for k, (v, judge) in enumerate(shares):
        within, whole = floor(k, given.prompts, clock)
        # R − R̄ of 12 has the variance of R and a share of it for the mean of the eleven others
        print(f"| {k} | {within / (whole * 12 / 11):.2f} | {v:.2f} | {judge:.2f} |", flush=True)
