# SPDX-License-Identifier: Apache-2.0
"""What a Flow-GRPO job needs besides its model: prompts and rewards, read and checked with the settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from visalign.errors import UserError
from visalign.evaluation.atomic import write_atomic
from visalign.evaluation.judge import check_judge
from visalign.interfaces import PointwiseReward
from visalign.training.checkpoint import check_same_config
from visalign.training.loss import step_weights
from visalign.training.sampler import PromptSampler, check_batch_algebra

from .build import Records, build_judges, build_records, build_reward, pointwise_only
from .comparison import build_win_rates, check_whole_groups
from .flow_grpo_config import FlowGRPOConfig

FINGERPRINTS = "inputs.json"
"""File of a run folder: what was read -> SHA-256 of its content."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Prompts and rewards of a job."""

    records: Records
    heldout: Records
    rewards: Mapping[str, PointwiseReward]
    """label -> reward to report on held-out pictures: all that can judge one picture by itself."""
    reward: PointwiseReward
    """The sum that is optimised."""
    strata: list[str] | None
    """Label per training record, with data.balance."""
    seen: int
    """Held-out prompts that are trained on as well."""
    fingerprints: Mapping[str, str]
    """What was read -> SHA-256 of its content."""


def prepare(config: FlowGRPOConfig, world: int) -> Inputs:
    """Read what the configuration names and check it: all that can be known without the model.

    Args:
        config: the configuration.
        world: number of processes.

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
    judges = build_judges({**config.evaluation.rewards, **config.rewards.terms})
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


def fingerprint(records: Records) -> str:
    """SHA-256 of prompt records.

    Args:
        records: JSON values.
    """
    return hashlib.sha256(json.dumps(list(records), sort_keys=True, default=str).encode()).hexdigest()


def check_unchanged(output: Path, fingerprints: Mapping[str, str]) -> None:
    """Refuse to continue a run whose prompts or rewards have another content than when it began.

    Args:
        output: the run's folder; one without the file is of an earlier version, and is not checked.
        fingerprints: of the present content.

    Raises:
        CheckpointError: listing what has changed.
    """
    path = output / FINGERPRINTS
    if path.is_file():
        saved = json.loads(path.read_text(encoding="utf-8"))
        check_same_config(saved, fingerprints, where=f"the run in '{output}' (SHA-256 of its inputs)")


def write_once(path: Path, text: str) -> None:
    """Write a file whole, and leave one that holds this text already as it is.

    Args:
        path: of the file.
        text: its content.
    """
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_atomic(path, text.encode("utf-8"))
