# SPDX-License-Identifier: Apache-2.0
"""What a Flow-GRPO job needs besides its model: prompts and rewards, read and checked with the settings."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from visalign.errors import UserError
from visalign.evaluation.heldout.correctness import check_judge
from visalign.interfaces import PointwiseReward
from visalign.pipelines.shared.parts import Records, build_judges, build_records, build_reward, pointwise_only
from visalign.pipelines.shared.run_inputs import fingerprint
from visalign.training.diffusion.flow_grpo import step_weights
from visalign.training.loop.sampler import PromptSampler, check_batch_algebra

from .config import FlowGRPOConfig
from .win_rates import build_win_rates, check_whole_groups


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Prompts and rewards of a job."""

    records: Records
    heldout: Records
    rewards: Mapping[str, PointwiseReward]
    """label -> reward to report on held-out pictures: all that can judge one picture by itself."""
    reward: PointwiseReward
    """The sum that is optimized."""
    strata: list[str] | None
    """Label per training record, with data.balance."""
    seen: int
    """Held-out prompts that are trained on as well."""
    fingerprints: Mapping[str, str]
    """What was read -> SHA-256 of its content."""


def prepare(config: FlowGRPOConfig, world: int, device: str | None = None) -> Inputs:
    """Read what the configuration names and check it: all that can be known without the model.

    Args:
        config: the configuration.
        world: number of processes.
        device: the run's, where its judges compute too.

    Returns:
        Prompts and rewards; nothing is written.

    Raises:
        UserError, ValueError: something cannot be used, or does not fit the rest.
        RewardError: a reward that cannot be loaded.
    """
    rollout, data = config.rollout, config.data
    check_batch_algebra(rollout.prompts_per_iteration, rollout.group_size, world)
    if config.rewards.normalise == "batch" and world > 1:
        raise UserError(
            f"rewards.normalise is batch and there are {world} processes, each of which would have its own "
            "scale. Set rewards.normalise to fixed (each term's mean and std) or none, or use one process."
        )
    records = build_records(data.train, "data.train")
    heldout = build_records(data.heldout, "data.heldout")
    judges = build_judges({**config.evaluation.rewards, **config.rewards.terms}, device)
    rewards = pointwise_only(judges, needed=config.evaluation.rewards)
    if config.comparison is None:
        reward = build_reward(config.rewards, pointwise_only(judges, needed=config.rewards.terms))
    else:
        check_whole_groups(rollout.prompts_per_iteration, world)
        reward = build_reward(config.rewards, build_win_rates(config.comparison, config.rewards, judges))
    strata = [str(record.get("tag", "")) for record in records] if data.balance else None
    PromptSampler(
        len(records),
        rollout.prompts_per_iteration,
        rollout.group_size,
        config.seed,
        strata=strata,
        cycle=data.cycle,
    )
    grid = torch.linspace(1, 0, rollout.steps + 1)  # the model's own has as many steps
    step_weights(config.objective, rollout, grid)
    judge = config.evaluation.correctness
    if judge is not None:
        check_judge(judge, rewards[judge], heldout[0])
    return Inputs(
        records=records,
        heldout=heldout,
        rewards=rewards,
        reward=reward,
        strata=strata,
        seen=len(_prompts(records) & _prompts(heldout)),
        fingerprints=_fingerprints(config, records, heldout),
    )


def _prompts(records: Records) -> set[str]:
    """The prompts, alike where only blanks or capitals differ."""
    return {" ".join(str(record["prompt"]).split()).casefold() for record in records}


def _fingerprints(config: FlowGRPOConfig, records: Records, heldout: Records) -> dict[str, str]:
    """SHA-256 of the prompt records, and of the files of the user's own rewards."""
    found = {name: fingerprint(given) for name, given in (("data.train", records), ("data.heldout", heldout))}
    for label, term in {**config.evaluation.rewards, **config.rewards.terms}.items():
        file = Path((term.name or label).rpartition(":")[0])
        if file.suffix == ".py":
            found[f"reward {label}"] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found
