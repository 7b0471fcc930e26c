# SPDX-License-Identifier: Apache-2.0
"""What supervised fine-tuning needs besides its model: demonstrations, held-out prompts and rewards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from visalign.data.sets.prompt_files import load_demonstrations, with_completion
from visalign.errors import UserError
from visalign.pipelines.shared.parts import Records
from visalign.pipelines.shared.sections import RewardsConfig
from visalign.training.text.settings import TextRolloutSettings

from .config import TextConfig, TextDataConfig
from .parts import TextInputs, prepare
from .sft_config import TextSFTConfig

_ONE_PROMPT = TextRolloutSettings(prompts_per_iteration=1)
"""Of the parts that are shared with the RL jobs; nothing is rolled out here."""


@dataclass(frozen=True, kw_only=True)
class SFTInputs:
    """Demonstrations, held-out records and rewards of a job."""

    demonstrations: Records
    """Each with prompt and completion."""
    heldout: Records
    some: Records
    """The held-out records of the evaluations on the way."""
    rewards: Mapping[str, Any]
    """label -> reward of the evaluation."""
    seen: int
    """Held-out prompts that are learnt as well."""


def prepare_sft(config: TextSFTConfig, device: str | None = None) -> SFTInputs:
    """Read what the configuration names and check it: all that can be known without the model.

    Args:
        config: the configuration.
        device: the run's, where its judges compute too.

    Raises:
        UserError: something cannot be used, or does not fit the rest.
        RewardError: a reward that cannot be loaded.
    """
    data = config.data
    packaged = data.train.startswith("tasks:")
    found = _text_inputs(config, train=data.train if packaged else "tasks:train", device=device)
    if packaged:
        named = enumerate(found.records)
        demonstrations = [with_completion(r, f"data.train: record {i}", data.field) for i, r in named]
    else:
        try:
            demonstrations = load_demonstrations(data.train, data.field)
        except UserError as error:
            raise UserError(f"data.train: {error}") from error
    return SFTInputs(
        demonstrations=demonstrations,
        heldout=found.heldout,
        some=found.some,
        rewards=found.rewards,
        seen=len(prompt_keys(demonstrations) & prompt_keys(found.heldout)),
    )


def _text_inputs(config: TextSFTConfig, *, train: str, device: str | None) -> TextInputs:
    """What this job shares with the reinforcement learning of text policies."""
    data, judged = config.data, config.evaluation.rewards
    return prepare(
        TextConfig(
            seed=config.seed,
            data=TextDataConfig(
                train=train,
                heldout=data.heldout,
                tasks=data.tasks,
                levels=data.levels,
                size=data.size if train == data.train else 1,
                heldout_per_task=data.heldout_per_task,
            ),
            rewards=RewardsConfig(
                terms={label: replace(term, weight=1.0) for label, term in judged.items()},
                allow_mixed_units=True,  # the sum is not used
            ),
            rollout=_ONE_PROMPT,
            evaluation=config.evaluation,
        ),
        device,
    )


def prompt_keys(records: Records) -> set[str]:
    """The different prompts of some records, as text."""
    return {json.dumps(record["prompt"], sort_keys=True) for record in records}
