# SPDX-License-Identifier: Apache-2.0
"""Job of direct preference optimisation: evaluate, learn pairs or votes, evaluate again, save the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from visalign.data.sets.completion_files import JudgedCompletions, check_votes, load_pairs, load_votes
from visalign.errors import UserError
from visalign.pipelines.shared.job import PolicyRun, run_job
from visalign.pipelines.shared.parts import Records, build_accelerator, name_key
from visalign.schema import STRICT
from visalign.seeds import sample_seed
from visalign.settings import Count, Finite
from visalign.training.loop.optimizer import OptimizerSettings
from visalign.training.text.dpo import DPOSettings

from .config import HeldoutPromptsConfig, SupervisedConfig, text_optimizer
from .job import supervised_plan, text_run
from .parts import build_text_policy, heldout_inputs, prompt_keys, text_records

__all__ = ["TextDPOConfig", "plan", "run"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CompletionsDataConfig(HeldoutPromptsConfig):
    """Completions with preferences, and prompts of the evaluation."""

    train: str = "tasks:train"
    """A .jsonl, .json, .csv, .tsv or .parquet file with the columns prompt, chosen, rejected; or prompt,
    completion, label (kto); or prompt, completion, reward, such as the dataset.jsonl of text_sample with
    selection.rule=all, of which the best and the worst completion to each prompt become a pair. Or
    tasks:train, which pairs the solution of each task with that of another."""
    threshold: Finite = 1.0
    """With kto, reward from which a scored completion is good."""
    unusable: Literal["refuse", "drop"] = "refuse"
    """Treatment of pairs of equal completions and of empty ones: an error (refuse), or left out (drop)."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """Treatment of records longer than the model's context: an error (refuse), or left out (drop); none is
    cut."""
    pairs_heldout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the prompts whose pairs (or votes) are held out, for each evaluation."""
    batch: Count = 32
    """Pairs or votes per update; each epoch reads every record once, in a new order."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextDPOConfig(SupervisedConfig):
    """Learn from pairs of completions of which one is better, or from votes for single ones."""

    pipeline: ClassVar[str] = "text_dpo"

    data: CompletionsDataConfig = field(default_factory=CompletionsDataConfig)
    """Completions."""
    loss: DPOSettings = field(default_factory=DPOSettings)
    """Loss."""
    optimizer: OptimizerSettings = field(default_factory=lambda: text_optimizer(1e-5))
    """Optimizer; micro_batch counts pairs or votes, ema_decay 0 leaves averaging out."""


class DPOInputs(NamedTuple):
    """Completions, held-out records and rewards of a job."""

    completions: JudgedCompletions
    heldout: Records
    rewards: Mapping[str, Any]
    """label -> reward of the evaluation."""
    seen: int
    """Held-out prompts that are trained on."""


def prepare_dpo(config: TextDPOConfig, device: str | None = None) -> DPOInputs:
    """Read and check the sources of the configuration, without the model."""
    data = config.data
    heldout, rewards = heldout_inputs(data, config.evaluation, config.seed, device)
    with name_key("data.train"):
        if data.train.startswith("tasks:"):
            completions = JudgedCompletions(records=_packaged(config))
        elif config.loss.votes:
            completions = load_votes(data.train, threshold=data.threshold, unusable=data.unusable)
        else:
            completions = load_pairs(data.train, unusable=data.unusable)
    seen = len(prompt_keys(completions.records) & prompt_keys(heldout))
    return DPOInputs(completions, heldout, rewards, seen)


def _packaged(config: TextDPOConfig) -> list[dict[str, Any]]:
    """Pair the solution of each task with that of the next task with another answer."""
    tasks = text_records("train", config.data, config.seed)
    records: list[dict[str, Any]] = []
    for index, task in enumerate(tasks):
        prompt, chosen = task["prompt"], task["solution"]
        following = (tasks[(index + step) % len(tasks)] for step in range(1, len(tasks)))
        rejected = next((other["solution"] for other in following if other["answer"] != task["answer"]), None)
        if rejected is None:
            raise UserError("all tasks have one answer, so no solution is wrong; raise data.size.")
        if config.loss.votes:
            votes = ((chosen, True), (rejected, False))
            records += [{"prompt": prompt, "completion": text, "label": good} for text, good in votes]
        else:
            records.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return records


def split_records(records: Records, share: float, seed: int) -> tuple[Records, Records]:
    """Split records by prompt into (trained, heldout); of two prompts or more at least one is held out."""
    keys = [json.dumps(record["prompt"], sort_keys=True) for record in records]
    prompts = list(dict.fromkeys(keys))
    count = min(max(1, round(share * len(prompts))), len(prompts) - 1) if share else 0
    order = np.random.default_rng(sample_seed(seed, "pairs", 0)).permutation(len(prompts))
    heldout = {prompts[i] for i in order[:count]}
    pairs = list(zip(records, keys, strict=True))
    return [r for r, key in pairs if key not in heldout], [r for r, key in pairs if key in heldout]


def run(config: TextDPOConfig, output: Path, resume: bool = False) -> dict[str, Any]:
    """Run the job; see `visalign.pipelines.shared.job.run_job`."""
    return run_job(config, output, resume, _build)


def _build(config: TextDPOConfig, output: Path) -> PolicyRun:
    """Build the objects of a run, without writing anything."""
    from visalign.adapters.causal_lm.demonstrations import fitting_demonstrations, with_mismatched
    from visalign.training import DPO

    accelerator = build_accelerator(config, output)
    inputs = prepare_dpo(config, str(accelerator.device))
    policy = build_text_policy(config.model, accelerator.device, config.seed, reference=False)
    votes, records = config.loss.votes, inputs.completions.records
    fitting: Records = records
    with name_key("data.train"):
        for name in ("completion",) if votes else config.loss.fields:
            fitting = fitting_demonstrations(policy, fitting, too_long=config.data.too_long, field=name)
        if votes:  # each gets a completion to another prompt, for kto's KL
            fitting = with_mismatched(policy, fitting)
    trained, heldout = split_records(fitting, config.data.pairs_heldout, config.seed)
    if votes:
        check_votes("data.train", trained)
    stream, good = _stream(config, policy, trained)
    heldout_stream, heldout_good = _stream(config, policy, heldout)
    algorithm = DPO(
        policy,
        stream,
        settings=config.loss,
        good=good,
        heldout=heldout_stream,
        heldout_good=heldout_good,
        accelerator=accelerator,
        sharding=config.run.sharding,
    )
    left_out = dict(inputs.completions.left_out)
    if len(fitting) < len(records):
        left_out["too_long"] = len(records) - len(fitting)
    return text_run(
        config,
        output,
        f"Direct preference optimisation ({config.loss.row})",
        policy,
        algorithm,
        inputs.rewards,
        {"data.train": records, "data.heldout": inputs.heldout},
        summary=lambda counters: {
            "completions": len(trained),
            "completions_heldout": len(heldout),
            "completions_left_out": left_out,
            "epochs": counters.samples / len(trained),
        },
        seen=inputs.seen,
        more_metrics=algorithm.measure,
    )


def _stream(config: TextDPOConfig, policy: Any, records: Records) -> tuple[Any, list[bool] | None]:
    """Build (batches of records, their votes), or (None, None) without records."""
    from visalign.adapters.causal_lm.demonstrations import DemonstrationBatches

    if not records:
        return None, None
    good = [record["label"] for record in records] if config.loss.votes else None
    size, fields = config.data.batch, config.loss.fields
    return DemonstrationBatches(policy, records, size=size, seed=config.seed, field=fields), good


def plan(config: TextDPOConfig) -> dict[str, Any]:
    """Plan the batches of a job, in groups of entries."""
    inputs, noun = prepare_dpo(config), "votes" if config.loss.votes else "pairs"
    trained, heldout = split_records(inputs.completions.records, config.data.pairs_heldout, config.seed)
    counts = {
        noun: len(trained),
        f"{noun}_heldout": len(heldout),
        **{f"left_out_{why}": count for why, count in inputs.completions.left_out.items()},
        "prompts": len(prompt_keys(trained)),
        "heldout_prompts_trained_on": inputs.seen,
    }
    return supervised_plan(config, counts, noun, len(trained), inputs.heldout)
