# SPDX-License-Identifier: Apache-2.0
"""Job of supervised fine-tuning: evaluate, learn demonstrations, evaluate again, save the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic.dataclasses import dataclass

from visalign.pipelines.shared.job import PolicyRun, run_job
from visalign.pipelines.shared.parts import Records, build_accelerator, ends_by
from visalign.schema import STRICT
from visalign.settings import Count, check_rules
from visalign.training.loop.optimizer import OptimizerSettings
from visalign.training.loop.progress import SUPERVISED_COLUMNS

from .config import HeldoutPromptsConfig, SupervisedConfig
from .job import planned_evaluation, text_run
from .parts import build_text_policy, heldout_inputs, name_key, prompt_keys, text_demonstrations

__all__ = ["TextSFTConfig", "plan", "run"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DemonstrationsDataConfig(HeldoutPromptsConfig):
    """Demonstrations, and prompts of the evaluation."""

    train: str = "tasks:train"
    """tasks:train, or a .jsonl file of records with "prompt" and a completion, such as the dataset.jsonl of
    the job text_sample; a prompt may have several."""
    field: str | None = None
    """Field of the completion in a record; null: completion, or solution where there is none."""
    decision: list[Any] | None = None
    """For pairs of images, with a question: the words for "the first is better" and "the second is better".
    The completion is the word that the votes prefer, then ", " and the column `field`, a teacher's reason
    (RewardDance, arXiv 2509.08826). null: data.train holds completions."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """Treatment of records longer than the model's context: an error (refuse), or left out (drop)."""
    batch: Count = 32
    """Demonstrations per update; each epoch reads every record once, in a new order."""

    def __post_init__(self) -> None:
        check_rules(self, DATA_RULES)


def _distinct_words(words: list[Any]) -> int:
    return len({word.strip().casefold() for word in words if isinstance(word, str)} - {""})


DATA_RULES = (
    (lambda s: s.field == "", "data.field is empty; name the field of the completions, or null."),
    (
        lambda s: s.decision is not None and (len(s.decision) != 2 or _distinct_words(s.decision) != 2),
        "data.decision is {s.decision}; give two different words, e.g. ['no', 'yes'] for the question "
        "whether the second image is better (without quotes YAML reads yes as true).",
    ),
    (
        lambda s: s.decision is not None and s.question is None,
        "data.decision says how pairs of images are decided, and data.question, which asks about them, is "
        "null. Set data.question, or take data.decision out.",
    ),
)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextSFTConfig(SupervisedConfig):
    """Learn demonstrations: a cold start, or one round of rejection sampling."""

    pipeline: ClassVar[str] = "text_sft"

    data: DemonstrationsDataConfig = field(default_factory=DemonstrationsDataConfig)
    """Demonstrations."""
    optimizer: OptimizerSettings = field(
        default_factory=lambda: OptimizerSettings(
            lr=1e-4, weight_decay=0.0, updates_per_iteration=1, micro_batch=32, ema_decay=0.0, ema_every=1
        )
    )
    """Optimizer; micro_batch counts demonstrations, ema_decay 0 leaves averaging out."""


@plain_dataclass(frozen=True, kw_only=True)
class SFTInputs:
    """Demonstrations, held-out records and rewards of a job."""

    demonstrations: Records
    """Each with prompt and completion."""
    heldout: Records
    rewards: Mapping[str, Any]
    """label -> reward of the evaluation."""
    seen: int
    """Held-out prompts that are trained on."""


def prepare_sft(config: TextSFTConfig, device: str | None = None) -> SFTInputs:
    """Read and check the sources of the configuration, without the model."""
    data = config.data
    heldout, rewards = heldout_inputs(data, config.evaluation, config.seed, device)
    demonstrations = text_demonstrations("train", data, config.seed, data.field, data.field)
    seen = len(prompt_keys(demonstrations) & prompt_keys(heldout))
    return SFTInputs(demonstrations=demonstrations, heldout=heldout, rewards=rewards, seen=seen)


def run(config: TextSFTConfig, output: Path, resume: bool = False) -> dict[str, Any]:
    """Run the job; see `visalign.pipelines.shared.job.run_job`."""
    return run_job(config, output, resume, _build)


def _build(config: TextSFTConfig, output: Path) -> PolicyRun:
    """Build the objects of a run, without writing anything."""
    from visalign.adapters.causal_lm.demonstrations import DemonstrationBatches, fitting_demonstrations
    from visalign.training import SFT

    accelerator = build_accelerator(config, output)
    inputs = prepare_sft(config, str(accelerator.device))
    policy = build_text_policy(config.model, accelerator.device, config.seed, reference=False)
    with name_key("data.train"):
        fitting = fitting_demonstrations(policy, inputs.demonstrations, too_long=config.data.too_long)
    batches = DemonstrationBatches(policy, fitting, size=config.data.batch, seed=config.seed)
    return text_run(
        config,
        output,
        "Supervised fine-tuning",
        policy,
        SFT(policy, batches, accelerator=accelerator, sharding=config.run.sharding),
        inputs.rewards,
        inputs.heldout,
        config.generation,
        {"data.train": inputs.demonstrations, "data.heldout": inputs.heldout},
        summary=lambda counters: {
            "demonstrations": len(fitting),
            "demonstrations_left_out": len(inputs.demonstrations) - len(fitting),
            "epochs": counters.samples / len(fitting),
        },
        seen=inputs.seen,
        columns=SUPERVISED_COLUMNS,
    )


def plan(config: TextSFTConfig) -> dict[str, Any]:
    """Plan the batches of a job, in groups of entries."""
    inputs, length = prepare_sft(config), config.run.iterations
    updates = length * config.optimizer.updates_per_iteration
    return {
        "batch": {
            "demonstrations": len(inputs.demonstrations),
            "prompts": len(prompt_keys(inputs.demonstrations)),
            "heldout_prompts_trained_on": inputs.seen,
            "demonstrations_per_update": config.data.batch,
            "updates": updates,
            "epochs": updates * config.data.batch / len(inputs.demonstrations),
            "iterations": length,
            "ends_by": ends_by(config.run),
        },
        "evaluation": planned_evaluation(config, inputs.heldout),
    }
