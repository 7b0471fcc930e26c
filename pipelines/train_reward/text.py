# SPDX-License-Identifier: Apache-2.0
"""Training of a reward for texts: a sequence classifier on pairs, rankings or scores, read by `reward_model`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from visalign.pipelines.shared.job import JUDGE, JudgeRun, build_trainer, run_job
from visalign.pipelines.shared.parts import build_accelerator, ends_by, name_key
from visalign.pipelines.shared.plan import estimate_fit
from visalign.pipelines.shared.run_folder import fingerprint
from visalign.pipelines.shared.sections import LoraConfig, PolicyRunConfig
from visalign.rewards.text.classifier import longest_text
from visalign.schema import STRICT
from visalign.settings import Count, Natural, Positive, Records, refuse
from visalign.training.loop.optimizer import AdamWSettings
from visalign.training.loop.progress import SUPERVISED_COLUMNS
from visalign.training.reward.heldout import concatenate_pairs, pair_measures, score_batch
from visalign.training.reward.settings import (
    BradleyTerrySettings,
    MonteCarloSettings,
    RankingSettings,
    UncertaintySettings,
    ValueSettings,
)
from visalign.training.reward.tasks import TASKS

from .config import RewardEvaluationConfig
from .examples import ExampleBatches
from .job import card_text, example_counts
from .measure import accuracy_interval, rating_measures, read_batches
from .text_network import RewardNetwork, load_network
from .text_records import RankedTexts, length_balanced, longer_share, read_rankings, tokenize

__all__ = ["TextRewardConfig", "estimate", "plan", "run"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardModelConfig:
    """The causal or encoder model that gets a linear head."""

    path: str = "tasks-qwen3"
    """A packaged model, a transformers folder, or a hub id; a reward model continues with its head."""
    train: Literal["full", "lora", "head"] = "full"
    """Trained weights: everything, adapters and the head, or the head alone."""
    lora: LoraConfig = field(default_factory=lambda: LoraConfig(rank=16, alpha=32.0))
    """Adapters, with train=lora, which are merged into the saved weights; target_modules null: all linear layers."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the trunk's weights; the head is float32. auto: on a GPU bfloat16 or, with train=full, float32 under
    bfloat16 autocast; else float32."""
    heads: Count = 1
    """Heads on the same trunk. Several are an ensemble: each learns with other weights of the examples, and the reward
    is their mean with their standard deviation."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, for memory."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RankingDataConfig:
    """Completions with preferences or scores."""

    train: str = "tasks:train"
    """A table or dataset of the hub (owner/name:split). Columns: prompt, chosen, rejected (TRL's layouts; HH-RLHF,
    Skywork), with a margin if there is one; prompt, completion, reward or label, a row for each completion; prompt,
    completions, scores or ranks; or UltraFeedback's. Or tasks:train, solutions of packaged tasks and wrong ones."""
    map: dict[str, str] = field(default_factory=dict)
    """Our name of a column -> that of the file."""
    size: Records = 1900
    """Pairs of tasks:train."""
    tasks: list[str] | None = None
    """Kinds of the packaged tasks; null: all."""
    levels: list[Annotated[int, Field(ge=1, le=3)]] | None = None
    """Difficulties of the packaged tasks, 1 to 3; null: all."""
    heldout: Annotated[float, Field(ge=0, lt=1)] | str = 0.1
    """Share of the prompts that are held out, or a file in a form of data.train."""
    unusable: Literal["refuse", "drop"] = "refuse"
    """Treatment of pairs of equal completions, of empty ones, and of prompts of data.heldout in data.train: an error
    (refuse), or left out (drop)."""
    max_length: Count | None = None
    """Tokens of the longest prompt with its completion; null: limited by the model alone."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """Treatment of longer completions: an error (refuse), or left out (drop); none is cut."""
    length_balanced: bool = False
    """Leave out pairs until the better completion is the longer one in half of them, at any difference."""
    epochs: Positive = 1.0
    """Passes over the prompts, unless run.iterations ends first; reward models overfit in the second."""
    batch: Count = 32
    """Prompts per update; all pairs of a prompt are one element of the batch, of weight 1."""
    micro_batch: Count = 32
    """Prompts that go through the network together; memory only."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextRewardConfig:
    """Train a reward model for texts on pairs, rankings or scores of completions."""

    pipeline: ClassVar[str] = "text_reward"

    seed: Natural = 0
    """Seed of the run: the new head, the order and split of the prompts, dropout."""
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """Model."""
    data: RankingDataConfig = field(default_factory=RankingDataConfig)
    """Completions."""
    objective: Annotated[
        BradleyTerrySettings | UncertaintySettings | MonteCarloSettings | RankingSettings | ValueSettings,
        Field(discriminator="task"),
    ] = field(default_factory=BradleyTerrySettings)
    """Loss."""
    optimizer: AdamWSettings = field(
        default_factory=lambda: AdamWSettings(lr=1e-5, eps=1e-8, weight_decay=0.0, updates_per_iteration=10)
    )
    """Optimizer."""
    evaluation: RewardEvaluationConfig = field(default_factory=lambda: RewardEvaluationConfig(batch=32))
    """Held-out evaluation, in batches of prompts."""
    run: PolicyRunConfig = field(default_factory=lambda: PolicyRunConfig(iterations=100_000))
    """Length, checkpoints, machine; the run ends with run.iterations or data.epochs, whichever comes first."""

    def __post_init__(self) -> None:
        refuse(_broken_rules(self))

    @property
    def compares(self) -> bool:
        """True if the loss compares completions of a prompt; False if it reads single scores."""
        return TASKS[self.objective.task].labels == "pairs"


_OF_VOTES = {"smoothing": 0.5, "pair_weight": "pair", "ties": "half"}
"""Settings of the losses for votes and ties, which texts do not have -> default."""


def _broken_rules(s: TextRewardConfig) -> Iterator[str]:
    task, heads = s.objective.task, s.model.heads
    for name, default in _OF_VOTES.items():
        if (value := getattr(s.objective, name, default)) != default:
            yield f"objective.{name} is {value!r}, and pairs of texts have no votes and no ties. Leave it out."
    if heads > 1 and task not in ("bradley_terry", "plackett_luce"):
        yield (
            f"model.heads is {heads}; an ensemble learns by bradley_terry or plackett_luce, and objective.task is "
            f"{task!r}. Set one of them, or model.heads=1."
        )
    if s.data.length_balanced and task in ("plackett_luce", "mse", "bce"):
        yield f"data.length_balanced chooses pairs, and objective.task {task} reads none. Set it to bradley_terry."


def _length(config: TextRewardConfig, prompts: int) -> tuple[int, int]:
    """Return (updates, iterations) of a run on so many training prompts."""
    per_iteration = config.optimizer.updates_per_iteration
    updates = max(1, round(config.data.epochs * prompts / config.data.batch))
    updates = min(updates, config.run.iterations * per_iteration)
    return updates, math.ceil(updates / per_iteration)


def _read(config: TextRewardConfig, tokenizer: Any, limit: int) -> tuple[list[RankedTexts], list[RankedTexts], Any]:
    """Read and tokenize the trained and held-out records; return them with reason -> count of what is left out."""
    trained, measured, left_out = read_rankings(config)
    drop = config.data.too_long == "drop"
    options: dict[str, Any] = {"limit": limit, "drop": drop, "compares": config.compares, "left_out": left_out}
    with name_key("data.train"):
        texts = tokenize(trained, tokenizer, **options)
    if config.data.length_balanced:
        texts = length_balanced(texts, config.seed)
    with name_key("data.heldout"):
        return texts, tokenize(measured, tokenizer, **options) if measured else [], left_out


def _build(config: TextRewardConfig, output: Path) -> JudgeRun:
    from visalign.training import RewardModeling

    accelerator, data = build_accelerator(config, output), config.data
    network = RewardNetwork(config, accelerator.device)
    examples, heldout, left_out = _read(config, network.tokenizer, network.limit)
    updates, iterations = _length(config, len(examples))
    reading: Any = {"examples": examples, "encode": network.encode}
    algorithm = RewardModeling(
        network,
        ExampleBatches(**reading, size=data.batch, micro=data.micro_batch, seed=config.seed),
        objective=config.objective,
        accelerator=accelerator,
        seed=config.seed,
        compute_dtype=network.compute_dtype,
        sharding=config.run.sharding,
    )
    algorithm.updates = updates
    measure = partial(_measure, config, network, heldout, (accelerator.process_index, accelerator.num_processes))
    ending = replace(config, run=replace(config.run, iterations=iterations))
    trainer = build_trainer(ending, output, algorithm, lambda _: measure(), columns=SUPERVISED_COLUMNS)
    if config.compares:
        pairs, share = sum(len(text.pairs) for text in examples), longer_share(examples)
        trainer.progress.note(f"data.train: {pairs} pairs; the better completion is the longer one in {share:.1%}.")
    terms = f"{{reward_model: {{options: {{model: {output / JUDGE}}}}}}}"
    return JudgeRun(
        config=config,
        output=output,
        trainer=trainer,
        fingerprints={"data.train": fingerprint([vars(text) for text in (*examples, *heldout)])},
        network=network.module,
        measure=measure,
        heldout=len(heldout),
        save=network.save,
        counts=lambda result: {
            **example_counts(result, trainer, len(examples)),
            "pairs": sum(len(text.pairs) for text in examples),
            "left_out": left_out,
        },
        card=lambda summary, _: _card(config, summary, network.names),
        next_command=["visalign", "train", "text_grpo", f"rewards.terms={terms}"],
    )


run = partial(run_job, build=_build)


@torch.no_grad()
def _measure(
    config: TextRewardConfig,
    network: RewardNetwork,
    heldout: Sequence[RankedTexts],
    processes: tuple[int, int],
    *,
    final: bool = False,
) -> dict[str, float]:
    """Measure the network on held-out texts, all (final) or the first ones."""
    if not heldout:
        return {}
    task = TASKS[config.objective.task]
    network.train(False)

    def read(batch: Any) -> tuple[Any, ...]:
        outputs, length = network(batch.inputs), batch.inputs["attention_mask"].sum(1)
        shorter = length[batch.left] < length[batch.right]
        return score_batch(outputs, batch, task), shorter, outputs["value"].cpu().double(), batch.target

    parts = read_batches(network, heldout, config.evaluation.batch, processes, final=final, read=read)
    scored, *columns = zip(*parts, strict=True)
    pairs, (shorter, value, target) = concatenate_pairs(scored), map(torch.cat, columns)
    wins = (pairs.difference[shorter].sign() + 1) / 2
    measures = {**pair_measures(pairs), **accuracy_interval(pairs)}
    measures["accuracy_shorter"] = float(wins.mean()) if len(wins) else math.nan
    value = value.sigmoid() if config.objective.task == "bce" else value
    return measures if config.compares else {**measures, **rating_measures(value, target.double())}


def _card(config: TextRewardConfig, summary: Mapping[str, Any], names: Sequence[str]) -> str:
    """Write the text of README.md: data, loss, held-out numbers as measured."""
    data, output = config.data, "The output is the score" if len(names) == 1 else f"The outputs are {', '.join(names)}"
    return card_text(
        config,
        summary,
        title="A reward for texts",
        trained=config.model.train,
        reader=f"loaded by `AutoModelForSequenceClassification`, and read by the reward `reward_model`. {output}",
        data=f"{summary['pairs']:,} pairs",
        heldout=data.heldout if isinstance(data.heldout, str) else data.train,
        noun="prompts",
    )


def plan(config: TextRewardConfig) -> dict[str, Any]:
    """Plan the records and length of a job, in groups of entries."""
    train, heldout, left_out = read_rankings(config)
    updates, iterations = _length(config, len(train))
    return {
        "records": {
            "prompts": len(train),
            "completions": sum(len(record["completions"]) for record in train),
            "heldout_prompts": len(heldout),
            "prompts_per_update": config.data.batch,
            **{f"left_out_{why}": count for why, count in left_out.items()},
        },
        "length": {
            "updates": updates,
            "iterations": iterations,
            "epochs": updates * config.data.batch / len(train),
            "ends_by": ends_by(replace(config.run, iterations=iterations)),
        },
    }


def estimate(config: TextRewardConfig) -> dict[str, Any]:
    """Extend the plan by memory and hours by device, each text as long as the longest."""
    model, tokenizer = load_network(config, "meta")
    texts, _, _ = _read(config, tokenizer, longest_text(model, tokenizer, config.data.max_length))
    rows = max(len(text.ids) for text in texts) * min(config.data.micro_batch, len(texts))
    total = config.data.epochs * sum(len(text.ids) for text in texts)
    longest = max(len(ids) for text in texts for ids in text.ids)
    fit = estimate_fit(model, config, rows=rows, longest=longest, texts=total, frozen=config.model.train == "head")
    return {**plan(config), **fit}
