# SPDX-License-Identifier: Apache-2.0
"""Training a judge: measure, learn from labels, measure again, save what the reward reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from visalign.data.assets import resolve_model
from visalign.data.sets.trained_images import write_trained_images
from visalign.pipelines.shared.job import JUDGE, JudgeRun, build_trainer, run_job
from visalign.pipelines.shared.parts import build_accelerator, ends_by
from visalign.rewards.catalogue import CATALOGUE

from .config import JUDGE_KINDS, TrainRewardConfig
from .examples import ExampleBatches, Examples
from .inputs import prepare_reward

MEANING = {
    "accuracy": "pairs on the right side, where the truth is clear",
    "accuracy_low": "low end of the 95 % interval of the accuracy",
    "accuracy_high": "high end of the 95 % interval of the accuracy",
    "accuracy_shorter": "pairs on the right side, of those whose better text is the shorter one",
    "accuracy_all": "pairs on the right side, all whose truth is known",
    "nll": "negative log-likelihood of a vote, nats",
    "ece": "expected calibration error against the votes, 10 bins",
    "std_mean": "mean standard deviation of a difference",
    "std_auroc": "AUROC of that standard deviation for pairs on the wrong side (0.5: no use)",
    "std_auroc_votes": "AUROC of it for pairs against the majority of the votes",
    "std_auroc_lead": "the same among pairs of equal lead",
    "mass_low": "probability of all answers that are read, its 1 % quantile over the examples",
    "mae": "mean absolute error of the rating, of the plausibility, or of the probability of no artefact",
    "artefact_auroc": "AUROC of the probability of no artefact for images rated 3 and above",
    "srcc": "Spearman correlation with the mean opinion score, or with the plausibility",
    "heat_auroc": "AUROC of the map's cells for cells that a half of the voters boxed",
    "answer_accuracy": "answers on the side of most people",
    "answer_nll": "negative log-likelihood of a person's answer, nats",
    "critique_right": "answers that are right",
    "critique_accuracy": "answers of which it says rightly whether they are",
    "critique_auroc": "AUROC of its log-odds for right answers",
    "critique_nll": "negative log-likelihood of whether an answer is right, nats",
}


def _build(config: TrainRewardConfig, output: Path) -> JudgeRun:
    from visalign.training import RewardModeling
    from visalign.training.loop.progress import SUPERVISED_COLUMNS

    from .measure import Measure

    inputs = prepare_reward(config)
    accelerator = build_accelerator(config, output)
    judge, data, count = build_judge(config, accelerator.device), config.data, len(inputs.train)
    heldout = None if inputs.heldout is None else judge.remember(inputs.heldout)
    measure = Measure(config, judge, heldout, (accelerator.process_index, accelerator.num_processes))
    numbers = {"size": data.batch, "micro": data.micro_batch, "seed": config.seed}
    algorithm = RewardModeling(
        judge,
        ExampleBatches(examples=judge.remember(inputs.train), encode=judge.encode, **numbers),
        objective=config.objective,
        accelerator=accelerator,
        seed=config.seed,
        penalty=judge.penalty,
        compute_dtype=judge.compute_dtype,
        sharding=config.run.sharding,
        undivided=judge.divide() if config.run.sharding else (),
    )
    trainer = build_trainer(config, output, algorithm, lambda _: measure(), columns=SUPERVISED_COLUMNS)
    for note in inputs.notes:
        trainer.progress.note(note)
    reward, next_command = JUDGE_KINDS[config.model.kind].reward, ["visalign", "evaluate", "--help"]
    if reward is not None and data.heldout is not None:
        next_command[2:] = [data.heldout, "-r", reward, "--option", f"model={output / JUDGE}"]
    return JudgeRun(
        config=config,
        output=output,
        trainer=trainer,
        fingerprints=inputs.fingerprints,
        network=judge.module,
        measure=measure,
        heldout=0 if heldout is None else len(heldout),
        save=partial(_save, judge, inputs.train, config.model.path),
        counts=lambda result: example_counts(result, trainer, count),
        card=lambda summary, notes: reward_card(config, summary, count, notes),
        next_command=next_command,
    )


run = partial(run_job, build=_build)


def example_counts(result: Any, trainer: Any, examples: int) -> dict[str, Any]:
    """Count examples read, epochs over the set of `examples`, and trained parameters, for the summary of a run."""
    read, trained = result.counters.samples, sum(p.numel() for _, p in trainer.weights.named)
    return {"examples": read, "epochs": read / examples, "trainable_parameters": trained}


def _save(judge: Any, train: Examples, base: str, folder: Path) -> list[str]:
    """Write the judge with, for its evaluation, the prints of its training images; return lines for its card."""
    judge.save(folder)
    write_trained_images(folder, (image for row in train.rows for image in row.images), base=resolve_model(base))
    return judge.card_notes()


def build_judge(config: TrainRewardConfig, device: Any) -> Any:
    """Load the judge on its device, ready to train."""
    from .checklist_judge import ChecklistJudge
    from .clip_judges import HpJudge, IctJudge
    from .vlm_judges import AnswerJudge, HeieJudge, Hpsv3Judge

    kinds = {"hpsv3": Hpsv3Judge, "checklist": ChecklistJudge, "heie": HeieJudge, "ict": IctJudge}
    kinds |= dict.fromkeys(("hp", "artefact"), HpJudge)
    return kinds.get(config.model.kind, AnswerJudge)(config, device)


def reward_card(config: TrainRewardConfig, summary: Mapping[str, Any], examples: int, notes: list[str]) -> str:
    """Write the text of README.md: data, steps, time, held-out numbers as measured."""
    model, data = config.model, config.data
    labels = ""
    if model.kind == "ict":
        labels = f", labels: cosines of `{model.path}` truncated at {data.theta:g}"
    elif data.train == "shapes:pairs" and config.reads == "pairs":
        labels = f", labels: {data.labels}, pairs that differ in {', '.join(config.pair_kinds('train'))}"
    reward = JUDGE_KINDS[model.kind].reward
    reader = f"{CATALOGUE['deepseek_grm']}` as `meta" if reward is None else str(CATALOGUE[reward])
    return card_text(
        config,
        summary,
        title=f"A reward of kind {model.kind}",
        trained=model.train + "".join(f" but `{name}`" for name in model.frozen),
        reader=f"read by `{reader.replace(':', '.')}`",
        data=f"{examples:,} examples{labels}",
        heldout=str(data.heldout),
        notes=notes,
    )


def card_text(
    config: Any,
    summary: Mapping[str, Any],
    *,
    title: str,
    trained: str,
    reader: str,
    data: str,
    heldout: str,
    noun: str = "examples",
    notes: Sequence[str] = (),
) -> str:
    """Write the text of a trained reward's README.md; `noun` is that of the elements of a batch."""
    training = f"""# {title}

Trained from `{config.model.path}` ({trained}, {summary["trainable_parameters"]:,} parameters moved); {reader}.

## Training

- Data: `{config.data.train}`, {data}; {summary["examples"]:,} {noun} read ({summary["epochs"]:.2f} epochs).
- Loss: {config.objective.task}; {summary["updates"]} updates of {config.data.batch} {noun}.
- {summary["training_seconds"]:.0f} s of training, the evaluations on the way included.
- Made by `visalign train-reward`; the run's config.yaml holds every setting.
"""
    cells = [(MEANING.get(name, name), summary["before"].get(name), value) for name, value in summary["after"].items()]
    rows = [f"| {meaning} | {_number(before)} | {_number(value)} |" for meaning, before, value in cells]
    quality = f"""## How good it is

On held-out examples of `{heldout}` (no prompt in common with the training data):

| measure | before | after |
|---|---|---|
{chr(10).join(rows)}

The first column was measured on the first examples alone while the reward was untrained.
"""
    return "\n".join([training, *([quality] if cells else []), *notes])


def _number(value: Any) -> str:
    return "–" if value is None or value != value else f"{value:.4f}"


def plan(config: TrainRewardConfig) -> dict[str, Any]:
    """Count examples and updates of a job, in groups of entries."""
    inputs = prepare_reward(config)
    updates = config.run.iterations * config.optimizer.updates_per_iteration
    read = updates * config.data.batch
    heldout = 0 if inputs.heldout is None else len(inputs.heldout)
    length = {"iterations": config.run.iterations, "updates": updates, "examples_seen": read}
    return {
        "examples": {"train": len(inputs.train), "heldout": heldout, "per_update": config.data.batch},
        "length": {**length, "epochs": read / len(inputs.train), "ends_by": ends_by(config.run)},
    }
