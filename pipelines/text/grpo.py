# SPDX-License-Identifier: Apache-2.0
"""Group-relative training of a text policy: GRPO, Dr.GRPO, RLOO, GSPO, DAPO, CISPO, FlowRL and the rest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import job as text_job
from .config import TextConfig

__all__ = ["TextGRPOConfig", "plan", "run"]


@dataclass(frozen=True, kw_only=True)
class TextGRPOConfig(TextConfig):
    """Completions are compared within the group of their prompt."""


def run(config: TextGRPOConfig, output: Path, resume: bool = False) -> dict[str, Any]:
    """Run the job; see `visalign.pipelines.text.job.run`."""
    return text_job.run(config, output, resume, pipeline="text_grpo")


plan = text_job.plan
