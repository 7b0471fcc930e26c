# SPDX-License-Identifier: Apache-2.0
"""For the tests of the core: small tensors, numbers worked out by hand, a step of made-up trajectories."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from visalign.core.objective.algorithms import NAMED, named_objective
from visalign.core.objective.data import PolicyOutput, Trajectories
from visalign.core.objective.objective import Objective


def f64(*values: float) -> Tensor:
    """A vector in double precision."""
    return torch.tensor(values, dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in double precision, the same for the same seed."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_values(ours: Tensor, *expected: float, rtol: float = 1e-6, atol: float = 1e-12) -> None:
    """Fail unless a vector (or a number) holds these values in double precision; NaN equals NaN."""
    torch.testing.assert_close(ours, f64(*expected), rtol=rtol, atol=atol, equal_nan=True)


LABELS = ("a", "a", "b", "b", "a", "b", "c", "c")


def objectives() -> dict[str, Objective]:
    """Every named row, with a length where the aggregation needs one."""
    return {
        name: named_objective(name, length=11) if row.aggregation == "dr_grpo" else row for name, row in NAMED.items()
    }


def step(seed: int = 0, *, move: float = 0.3, rewards: int = 0) -> tuple[Trajectories, PolicyOutput]:
    """Eight samples of at most six decisions, one of them empty, one without a reward, with holes."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    b, t = len(LABELS), 6
    weight = (torch.rand(b, t, generator=g) > 0.25).double()
    weight[5] = 0.0
    log_prob = -draw(b, t).abs() - 0.1
    old = log_prob + move * draw(b, t)
    reward = draw(b, rewards) if rewards else draw(b)
    reward[4] = float("nan")
    trajectories = Trajectories(
        weight=weight, old_log_prob=old, group=LABELS, reward=reward, reward_weights=(1.0, 0.5)[:rewards],
        ref_log_prob=old + 0.2 * draw(b, t), rollout_log_prob=old + 0.1 * draw(b, t), value=draw(b, t),
        entropy=draw(b, t).abs(), expected_score=0.1 * draw(b, t), nucleus_entropy=draw(b, t).abs(),
        entropy_before=0.3, sum_p2=(1 + old.exp().square()) / 2, step=torch.arange(t).expand(b, t) // 2,
        bundle=torch.tensor([0, 1, 0, 1, 2, 2, 0, 1]), quantiles=(-0.5, 1.5), greedy_reward=draw(b),
        reference_reward=draw(b, 1), likelihood=-draw(b).abs(),
        rank=torch.linspace(1, 2, 3 * b, dtype=torch.float64).view(b, 3), rank_average=(1.5, 1.4, 1.6),
        metric=0.1 * torch.arange(b, dtype=torch.float64),
        uniform=torch.rand(b, t, generator=g, dtype=torch.float64),
        ptx_weight=torch.ones(2, 3, dtype=torch.float64),
    )  # fmt: skip
    policy = PolicyOutput(
        log_prob=log_prob, entropy=draw(b, t).abs(), nucleus_entropy=draw(b, t).abs(), value=draw(b, t),
        log_z=draw(b), divergence=draw(b, t).abs() * 1e-6, ptx_log_prob=-draw(2, 3).abs(),
        ptx_weight=torch.ones(2, 3, dtype=torch.float64),
    )  # fmt: skip
    return trajectories, policy


def step_for(name: str, **options: float) -> tuple[Trajectories, PolicyOutput]:
    """`step` in the form that the named row takes."""
    trajectories, policy = step(rewards=2 if name == "gdpo" else 0, **options)  # type: ignore[arg-type]
    policy = policy if name == "ppo_kl" else replace(policy, kl=None)
    row = NAMED[name]
    if row.decisions is not None:
        trajectories = replace(trajectories, decisions=row.decisions)
    if row.advantage in ("group_returns", "process", "prime"):
        trajectories = replace(trajectories, process_reward=0.1 * trajectories.old_log_prob)
    if row.step_weight != "uniform":
        trajectories = replace(trajectories, loss_weight=torch.linspace(1, 9, 6).double().expand(8, 6))
    if row.ratio == "guard":
        moved = policy.log_prob - trajectories.old_log_prob
        policy = replace(policy, log_prob=moved)
        trajectories = replace(trajectories, old_log_prob=torch.zeros_like(moved))
    return trajectories, policy
