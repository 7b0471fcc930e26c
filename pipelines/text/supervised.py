# SPDX-License-Identifier: Apache-2.0
"""Jobs of learning from records: supervised fine-tuning and direct preference optimisation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from visalign.data.sets.completion_files import JudgedCompletions, check_votes, load_pairs, load_votes
from visalign.data.text_tasks.tasks import wrong_solutions
from visalign.errors import UserError
from visalign.pipelines.shared.job import PolicyRun, run_job
from visalign.pipelines.shared.parts import Records, build_accelerator, ends_by, name_key, own_heldout, split_records
from visalign.schema import STRICT
from visalign.settings import Count, Finite
from visalign.training.text.dpo import DPOSettings

from .config import HeldoutPromptsConfig, SupervisedConfig, TextOptimizerSettings, text_optimizer
from .job import planned_evaluation, text_run
from .parts import TextInputs, build_text_policy, heldout_inputs, text_demonstrations, text_records

__all__ = ["TextDPOConfig", "TextSFTConfig", "plan", "run"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RecordsDataConfig(HeldoutPromptsConfig):
    """Records to learn from, and prompts of the evaluation."""

    too_long: Literal["refuse", "drop"] = "refuse"
    """Treatment of records longer than the model's context: an error (refuse), or left out (drop); none is cut."""
    batch: Count = 32
    """Records per update; each epoch reads every record once, in a new order."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DemonstrationsDataConfig(RecordsDataConfig):
    """Demonstrations, and prompts of the evaluation."""

    train: str = "tasks:train"
    """tasks:train, or a table or dataset of the hub of records with "prompt" and a completion, or with "messages",
    such as the dataset.jsonl of the job text_sample; a prompt may have several."""
    field: Annotated[str, Field(min_length=1)] | None = None
    """Field of the completion in a record; null: the first it has of completion, solution, response, answer."""
    decision: list[Any] | None = None
    """For pairs of images, with a question: the words for "the first is better" and "the second is better".
    The completion is the word that the votes prefer, then ", " and the column `field`, a teacher's
    or a voter's reason (RewardDance, arXiv 2509.08826); pairs without one are left out. null: data.train holds
    completions."""

    def __post_init__(self) -> None:
        words = self.decision
        if words is None:
            return
        if not len(words) == 2 == len({w.strip().casefold() for w in words if isinstance(w, str)} - {""}):
            raise UserError(
                f"data.decision is {words}; give two words in quotes, e.g. ['no', 'yes'] (YAML reads yes as true)."
            )
        if self.question is None:
            raise UserError("data.decision decides between images, and data.question, which asks about them, is null.")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CompletionsDataConfig(RecordsDataConfig):
    """Completions with preferences, and prompts of the evaluation."""

    train: str = "tasks:train"
    """A table or dataset of the hub with the columns prompt, chosen, rejected; or prompt,
    completion, label (kto); or prompt, completion, reward, such as the dataset.jsonl of text_sample with
    selection.rule=all, of which the best and the worst completion to each prompt become a pair. Or
    tasks:train, which pairs the solution of each task with that of another."""
    threshold: Finite = 1.0
    """With kto, reward from which a scored completion is good."""
    unusable: Literal["refuse", "drop"] = "refuse"
    """Treatment of pairs of equal completions and of empty ones: an error (refuse), or left out (drop)."""
    pairs_heldout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the prompts whose pairs (or votes) are held out, for each evaluation."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextSFTConfig(SupervisedConfig):
    """Learn demonstrations: a cold start, or one round of rejection sampling."""

    pipeline: ClassVar[str] = "text_sft"

    data: DemonstrationsDataConfig = field(default_factory=DemonstrationsDataConfig)
    """Demonstrations."""
    optimizer: TextOptimizerSettings = field(default_factory=lambda: text_optimizer(lr=1e-4))
    """Optimizer; micro_batch counts demonstrations, ema_decay 0 leaves averaging out."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextDPOConfig(SupervisedConfig):
    """Learn from pairs of completions of which one is better, or from votes for single ones."""

    pipeline: ClassVar[str] = "text_dpo"

    data: CompletionsDataConfig = field(default_factory=CompletionsDataConfig)
    """Completions."""
    loss: DPOSettings = field(default_factory=DPOSettings)
    """Loss."""
    optimizer: TextOptimizerSettings = field(default_factory=lambda: text_optimizer(lr=1e-5))
    """Optimizer; micro_batch counts pairs or votes, ema_decay 0 leaves averaging out."""


def prepare_supervised(config: TextSFTConfig | TextDPOConfig, device: str | None = None) -> TextInputs:
    """Read and check the sources of the configuration, without the model."""
    left_out: Mapping[str, int] = {}
    if isinstance(config, TextSFTConfig):
        records = text_demonstrations("train", config.data, config.seed, config.data.field)
    else:
        with name_key("data.train"):
            completions = _completions(config)
        records, left_out = completions.records, completions.left_out
    heldout = None
    if config.data.heldout is None:
        records, heldout = own_heldout(records, config.seed)
    heldout, rewards = heldout_inputs(config, device, heldout)
    repeated = len({*_prompt_keys(records)} & {*_prompt_keys(heldout)})
    return TextInputs(records, heldout, rewards, left_out=left_out, heldout_trained_on=repeated)


def _prompt_keys(records: Records) -> list[str]:
    return [json.dumps(record["prompt"], sort_keys=True) for record in records]


def _completions(config: TextDPOConfig) -> JudgedCompletions:
    """Read pairs or votes; of packaged tasks a solution is paired with the next one of another answer."""
    data = config.data
    if not data.train.startswith("tasks:"):
        if config.loss.votes:
            return load_votes(data.train, threshold=data.threshold, unusable=data.unusable, names=data.map)
        return load_pairs(data.train, unusable=data.unusable, names=data.map)
    records: list[dict[str, Any]] = []
    for task, rejected in wrong_solutions(text_records("train", data, config.seed)):
        prompt, votes = task["prompt"], ((task["chosen"], True), (rejected, False))
        if config.loss.votes:
            records += [{"prompt": prompt, "completion": text, "label": label} for text, label in votes]
        else:
            records.append({"prompt": prompt, "chosen": task["chosen"], "rejected": rejected})
    return JudgedCompletions(records=records)


def _build(config: TextSFTConfig | TextDPOConfig, output: Path) -> PolicyRun:
    from visalign.adapters.causal_lm import demonstrations
    from visalign.training import DPO, SFT

    accelerator = build_accelerator(config, output)
    inputs, data = prepare_supervised(config, str(accelerator.device)), config.data
    policy = build_text_policy(config.model, accelerator.device, config.seed, reference=False)
    loss = config.loss if isinstance(config, TextDPOConfig) else None
    votes, fields = loss is not None and loss.votes, ("completion",) if loss is None else loss.fields
    fitting: Records = inputs.records
    with name_key("data.train"):
        for name in ("completion",) if votes else fields:
            fitting = demonstrations.fitting_demonstrations(policy, fitting, too_long=data.too_long, field=name)
        if votes:  # kto's KL is measured on completions of other prompts
            fitting = demonstrations.with_mismatched(policy, fitting)
    left_out = len(inputs.records) - len(fitting)

    def batches(records: Records) -> Any:
        return demonstrations.DemonstrationBatches(policy, records, size=data.batch, seed=config.seed, field=fields)

    options: dict[str, Any] = {"accelerator": accelerator, "sharding": config.run.sharding}
    if isinstance(config, TextSFTConfig):
        title, trained, algorithm = "Supervised fine-tuning", fitting, SFT(policy, batches(fitting), **options)
        entries: dict[str, Any] = {"demonstrations": len(fitting), "demonstrations_left_out": left_out}
    else:
        title = f"Direct preference optimisation ({config.loss.row})"
        trained, heldout = split_records(fitting, config.data.pairs_heldout, config.seed)
        if votes:
            check_votes("data.train", trained)
        good, heldout_good = ([r["label"] for r in side] if votes and side else None for side in (trained, heldout))
        options |= {"good": good, "heldout_good": heldout_good, "settings": config.loss}
        algorithm = DPO(policy, batches(trained), heldout=batches(heldout) if heldout else None, **options)
        reasons = dict(inputs.left_out) | ({"too_long": left_out} if left_out else {})
        entries = {"completions": len(trained), "completions_heldout": len(heldout), "completions_left_out": reasons}
    return text_run(
        config,
        output,
        title,
        policy,
        algorithm,
        inputs,
        summary=lambda counters: {**entries, "epochs": counters.samples / len(trained)},
        more_metrics=getattr(algorithm, "measure", dict),
    )


run = partial(run_job, build=_build)


def plan(config: TextSFTConfig | TextDPOConfig) -> dict[str, Any]:
    """Plan the batches of a job, in groups of entries."""
    inputs, length = prepare_supervised(config), config.run.iterations
    noun, trained = "demonstrations", inputs.records
    counts: dict[str, int] = {}
    if isinstance(config, TextDPOConfig):
        noun = "votes" if config.loss.votes else "pairs"
        trained, heldout = split_records(inputs.records, config.data.pairs_heldout, config.seed)
        counts = {f"{noun}_heldout": len(heldout)}
        counts |= {f"left_out_{why}": count for why, count in inputs.left_out.items()}
    updates = length * config.optimizer.updates_per_iteration
    return {
        "batch": {
            noun: len(trained),
            **counts,
            "prompts": len({*_prompt_keys(trained)}),
            "heldout_prompts_trained_on": inputs.heldout_trained_on,
            f"{noun}_per_update": config.data.batch,
            "updates": updates,
            "epochs": updates * config.data.batch / len(trained),
            "iterations": length,
            "ends_by": ends_by(config.run),
        },
        "evaluation": planned_evaluation(config, inputs.heldout),
    }
