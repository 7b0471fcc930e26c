# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimisation of a text policy: evaluate, learn pairs or votes, evaluate again, save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic.dataclasses import dataclass

from visalign.data.sets.completion_files import JudgedCompletions, check_votes, load_pairs, load_votes
from visalign.errors import UserError
from visalign.pipelines.shared.job import PolicyRun, run_job
from visalign.pipelines.shared.parts import Records, build_accelerator, ends_by
from visalign.pipelines.shared.sections import Count, Share
from visalign.schema import STRICT
from visalign.seeds import sample_seed
from visalign.training.loop.optimizer import OptimizerSettings
from visalign.training.loop.progress import SUPERVISED_COLUMNS
from visalign.training.text.dpo import DPOSettings

from .config import HeldoutPromptsConfig, SupervisedConfig
from .job import planned_evaluation, text_run
from .parts import build_text_policy, heldout_inputs, prompt_keys, text_records

__all__ = ["TextDPOConfig", "plan", "run"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CompletionsDataConfig(HeldoutPromptsConfig):
    """The completions with what was thought of them, and the prompts of the evaluation."""

    train: str = "tasks:train"
    """A .jsonl, .json, .csv, .tsv or .parquet file with the columns prompt, chosen, rejected; or prompt,
    completion, label (kto); or prompt, completion, reward, such as the dataset.jsonl of text_sample with
    selection.rule=all, of which the best and the worst completion to each prompt become a pair. Or
    tasks:train, where the solution of each task stands against that of another."""
    threshold: float = 1.0
    """With kto, reward from which a judged completion is good."""
    unusable: Literal["refuse", "drop"] = "refuse"
    """A pair of equal completions, or a record with an empty one, is an error (refuse) or left out (drop)."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """A record of which a completion is longer than the model's context is an error (refuse), or left out
    (drop); none is ever cut."""
    pairs_heldout: Share = 0.1
    """Share of the prompts whose pairs (or votes) are not learnt but measured at each evaluation."""
    batch: Count = 32
    """Pairs or votes per update; each epoch reads every record once, in a new order."""

    def __post_init__(self) -> None:
        if self.pairs_heldout >= 1:
            raise UserError("data.pairs_heldout is 1, which leaves nothing to learn; give less, such as 0.1.")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextDPOConfig(SupervisedConfig):
    """Learn from pairs of completions of which one is better, or from votes for single ones."""

    pipeline: ClassVar[str] = "text_dpo"

    data: CompletionsDataConfig = field(default_factory=CompletionsDataConfig)
    """The completions."""
    loss: DPOSettings = field(default_factory=DPOSettings)
    """The loss."""
    optimizer: OptimizerSettings = field(
        default_factory=lambda: OptimizerSettings(
            lr=1e-5, weight_decay=0.0, updates_per_iteration=1, micro_batch=32, ema_decay=0.0, ema_every=1
        )
    )
    """How the weights move; micro_batch counts pairs or votes, ema_decay 0 leaves averaging out."""


@plain_dataclass(frozen=True, kw_only=True)
class DPOInputs:
    """Completions, held-out records and rewards of a job."""

    completions: JudgedCompletions
    heldout: Records
    rewards: Mapping[str, Any]
    """label -> reward of the evaluation."""
    seen: int
    """Held-out prompts that are learnt as well."""


def prepare_dpo(config: TextDPOConfig, device: str | None = None) -> DPOInputs:
    """Read what the configuration names and check it: all that can be known without the model.

    Raises:
        UserError: something cannot be used, or does not fit the rest.
        RewardError: a reward that cannot be loaded.
    """
    data = config.data
    heldout, rewards = heldout_inputs(data, config.evaluation, config.seed, device)
    if data.train.startswith("tasks:"):
        completions = JudgedCompletions(records=_packaged(config))
    else:
        try:
            if config.loss.votes:
                completions = load_votes(data.train, threshold=data.threshold, unusable=data.unusable)
            else:
                completions = load_pairs(data.train, unusable=data.unusable)
        except UserError as error:
            raise UserError(f"data.train: {error}") from error
    seen = len(prompt_keys(completions.records) & prompt_keys(heldout))
    return DPOInputs(completions=completions, heldout=heldout, rewards=rewards, seen=seen)


def _packaged(config: TextDPOConfig) -> list[dict[str, Any]]:
    """The solution of each task, and that of the next with another answer."""
    tasks = text_records("train", config.data, config.seed)
    found: list[dict[str, Any]] = []
    for place, own in enumerate(tasks):
        others = (tasks[(place + step) % len(tasks)] for step in range(1, len(tasks)))
        other = next((record for record in others if record["answer"] != own["answer"]), None)
        if other is None:
            raise UserError(
                "data.train: all tasks have one answer, so no solution is wrong; raise data.size."
            )
        texts = {"chosen": own["solution"], "rejected": other["solution"]}
        if config.loss.votes:
            votes = (("chosen", True), ("rejected", False))
            found += [{"prompt": own["prompt"], "completion": texts[n], "label": good} for n, good in votes]
        else:
            found.append({"prompt": own["prompt"], **texts})
    return found


def split_records(records: Records, share: float, seed: int) -> tuple[Records, Records]:
    """(learnt, measured): all records of a prompt on one side, `share` of the prompts measured, of two
    prompts or more at least one."""
    keys = [prompt_keys([record]).pop() for record in records]
    different = list(dict.fromkeys(keys))
    count = min(max(1, round(share * len(different))), len(different) - 1) if share else 0
    order = np.random.default_rng(sample_seed(seed, "pairs", 0)).permutation(len(different))
    away = {different[place] for place in order[:count]}
    sides = [[r for r, key in zip(records, keys, strict=True) if (key in away) == s] for s in (False, True)]
    return sides[0], sides[1]


def run(config: TextDPOConfig, output: Path, resume: bool = False) -> dict[str, Any]:
    """Run the job; see `visalign.pipelines.shared.job.run_job`."""
    return run_job(config, output, resume, _build)


def _build(config: TextDPOConfig, output: Path) -> PolicyRun:
    """Everything a run needs; reads, writes nothing."""
    from visalign.training import DPO

    accelerator = build_accelerator(config, output)
    inputs = prepare_dpo(config, str(accelerator.device))
    policy = build_text_policy(config.model, accelerator.device, config.seed, reference=False)
    fitting = _fitting(config, policy, inputs.completions.records)
    sides = split_records(fitting, config.data.pairs_heldout, config.seed)
    if config.loss.votes:
        check_votes("data.train", sides[0])
    (learnt, good), (measured, measured_good) = (_stream(config, policy, side) for side in sides)
    algorithm = DPO(
        policy,
        learnt,
        settings=config.loss,
        good=good,
        heldout=measured,
        heldout_good=measured_good,
        accelerator=accelerator,
        sharding=config.run.sharding,
    )
    lost = dict(inputs.completions.left_out)
    if len(fitting) < len(inputs.completions.records):
        lost["too_long"] = len(inputs.completions.records) - len(fitting)
    return text_run(
        config,
        output,
        f"Direct preference optimisation ({config.loss.row})",
        policy,
        algorithm,
        inputs.rewards,
        inputs.heldout,
        config.generation,
        {"data.train": inputs.completions.records, "data.heldout": inputs.heldout},
        said=lambda counters: {
            "completions": len(sides[0]),
            "completions_heldout": len(sides[1]),
            "completions_left_out": lost,
            "epochs": counters.samples / len(sides[0]),
        },
        seen=inputs.seen,
        shown=SUPERVISED_COLUMNS,
        beside=algorithm.measure,
    )


def _fitting(config: TextDPOConfig, policy: Any, records: Records) -> Records:
    """The records whose completions the model can read whole; of votes with that to another prompt."""
    from visalign.adapters.causal_lm.demonstrations import fitting_demonstrations, with_mismatched

    votes = config.loss.votes
    try:
        for name in ("completion",) if votes else config.loss.fields:
            records = fitting_demonstrations(policy, records, too_long=config.data.too_long, field=name)
        return with_mismatched(policy, records) if votes else records
    except UserError as error:
        raise UserError(f"data.train: {error}") from error


def _stream(config: TextDPOConfig, policy: Any, records: Records) -> tuple[Any, list[bool] | None]:
    """Batches of records, and of votes which are good; no batches of no records."""
    from visalign.adapters.causal_lm.demonstrations import DemonstrationBatches

    if not records:
        return None, None
    good = [record["label"] for record in records] if config.loss.votes else None
    size, fields = config.data.batch, config.loss.fields
    return DemonstrationBatches(policy, records, size=size, seed=config.seed, field=fields), good


def plan(config: TextDPOConfig) -> dict[str, Any]:
    """Batch arithmetic of a job, in groups of entries."""
    inputs, length = prepare_dpo(config), config.run.iterations
    updates = length * config.optimizer.updates_per_iteration
    learnt, measured = split_records(inputs.completions.records, config.data.pairs_heldout, config.seed)
    kind = "votes" if config.loss.votes else "pairs"
    return {
        "batch": {
            kind: len(learnt),
            f"{kind}_heldout": len(measured),
            **{f"left_out_{why}": count for why, count in inputs.completions.left_out.items()},
            "prompts": len(prompt_keys(learnt)),
            "heldout_prompts_trained_on": inputs.seen,
            f"{kind}_per_update": config.data.batch,
            "updates": updates,
            "epochs": updates * config.data.batch / len(learnt),
            "iterations": length,
            "ends_by": ends_by(config.run),
        },
        "evaluation": planned_evaluation(config, inputs.heldout),
    }
