# SPDX-License-Identifier: Apache-2.0
"""PPO of a text policy with a value function: PPO-clip, PPO-KL, PPO-ptx."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from visalign.errors import UserError
from visalign.training.text.settings import TextObjectiveSettings, TextRolloutSettings

from . import job as text_job
from .config import TextConfig, TextModelConfig

__all__ = ["TextPPOConfig", "plan", "run"]


@dataclass(frozen=True, kw_only=True)
class TextPPOConfig(TextConfig):
    """Completions are compared with what a value function expected."""

    model: TextModelConfig = field(default_factory=lambda: TextModelConfig(value="separate"))
    """The language model and its value function."""
    rollout: TextRolloutSettings = field(
        default_factory=lambda: TextRolloutSettings(prompts_per_iteration=64, group_size=2)
    )
    """How completions are made; groups serve dynamic sampling and statistics alone."""
    objective: TextObjectiveSettings = field(
        default_factory=lambda: TextObjectiveSettings(algorithm="ppo", epochs=2)
    )
    """The loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        built = self.objective.build(length=self.rollout.max_new_tokens)
        if built.advantage != "gae":
            raise UserError(
                f"objective.algorithm={self.objective.algorithm} has no value function (advantage "
                f"{built.advantage}), and this is the pipeline text_ppo. Use ppo, ppo_kl or ppo_ptx here, or "
                "write 'pipeline: text_grpo' in the file."
            )


def run(config: TextPPOConfig, output: Path, resume: bool = False) -> dict[str, Any]:
    """Run the job; see `visalign.pipelines.text.job.run`."""
    return text_job.run(config, output, resume, pipeline="text_ppo")


plan = text_job.plan
