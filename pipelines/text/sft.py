# SPDX-License-Identifier: Apache-2.0
"""Job of supervised fine-tuning: evaluate, learn demonstrations, evaluate again, save the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic.dataclasses import dataclass

from visalign.pipelines.shared.job import PolicyRun, run_job
from visalign.pipelines.shared.parts import Records, build_accelerator, name_key
from visalign.schema import STRICT
from visalign.settings import Count, refuse
from visalign.training.loop.optimizer import OptimizerSettings

from .config import HeldoutPromptsConfig, SupervisedConfig, text_optimizer
from .job import supervised_plan, text_run
from .parts import build_text_policy, heldout_inputs, prompt_keys, text_demonstrations

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
        refuse(self._broken_rules())

    def _broken_rules(self) -> Iterator[str]:
        words = self.decision
        if self.field == "":
            yield "data.field is empty; name the field of the completions, or null."
        if words is not None and not (
            len(words)
            == 2
            == len({word.strip().casefold() for word in words if isinstance(word, str)} - {""})
        ):
            yield (
                f"data.decision is {words}; give two different words, e.g. ['no', 'yes'] for the question "
                "whether the second image is better (without quotes YAML reads yes as true)."
            )
        if words is not None and self.question is None:
            yield "data.decision decides between images, and data.question, which asks about them, is null."


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextSFTConfig(SupervisedConfig):
    """Learn demonstrations: a cold start, or one round of rejection sampling."""

    pipeline: ClassVar[str] = "text_sft"

    data: DemonstrationsDataConfig = field(default_factory=DemonstrationsDataConfig)
    """Demonstrations."""
    optimizer: OptimizerSettings = field(default_factory=lambda: text_optimizer(1e-4))
    """Optimizer; micro_batch counts demonstrations, ema_decay 0 leaves averaging out."""


class SFTInputs(NamedTuple):
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
    return SFTInputs(demonstrations, heldout, rewards, seen)


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
        {"data.train": inputs.demonstrations, "data.heldout": inputs.heldout},
        summary=lambda counters: {
            "demonstrations": len(fitting),
            "demonstrations_left_out": len(inputs.demonstrations) - len(fitting),
            "epochs": counters.samples / len(fitting),
        },
        seen=inputs.seen,
    )


def plan(config: TextSFTConfig) -> dict[str, Any]:
    """Plan the batches of a job, in groups of entries."""
    inputs = prepare_sft(config)
    counts = {
        "demonstrations": len(inputs.demonstrations),
        "prompts": len(prompt_keys(inputs.demonstrations)),
        "heldout_prompts_trained_on": inputs.seen,
    }
    return supervised_plan(config, counts, "demonstrations", len(inputs.demonstrations), inputs.heldout)
