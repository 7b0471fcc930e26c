# SPDX-License-Identifier: Apache-2.0
"""Card of a trained judge: data, steps, time, held-out numbers as measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import JUDGE_KINDS, TrainRewardConfig

MEANING = {
    "accuracy": "pairs on the right side, where the truth is clear",
    "accuracy_all": "pairs on the right side, all whose truth is known",
    "nll": "negative log-likelihood of a vote, nats",
    "ece": "expected calibration error against the votes, 10 bins",
    "std_mean": "mean standard deviation of a difference",
    "std_auroc": "AUROC of that standard deviation for pairs on the wrong side (0.5: no use)",
    "std_auroc_votes": "AUROC of it for pairs against the majority of the votes",
    "std_auroc_lead": "the same among pairs of equal lead",
    "mass_low": "probability of all answers that are read, its 1 % quantile over the examples",
    "mae": "mean absolute error of the rating",
    "srcc": "Spearman correlation with the mean opinion score",
    "critique_right": "answers that are right",
    "critique_accuracy": "answers of which it says rightly whether they are",
    "critique_auroc": "AUROC of its log-odds for right answers",
    "critique_nll": "negative log-likelihood of whether an answer is right, nats",
}


def reward_card(config: TrainRewardConfig, summary: Mapping[str, Any], examples: int, notes: list[str]) -> str:
    """Write the text of README.md."""
    model, data = config.model, config.data
    before, after = summary["before"], summary["after"]
    labels = ""
    if config.reads == "triples":
        labels = f", labels: cosines of `{model.path}` truncated at {data.theta:g}"
    elif data.train == "shapes:pairs":
        labels = f", labels: {data.labels}, pairs that differ in {', '.join(data.kinds)}"
    trained_part = model.train + "".join(f" but `{name}`" for name in model.frozen)
    lines = [
        f"# A judge of kind {model.kind}",
        "",
        f"Trained from `{model.path}` ({trained_part}, {summary['trainable_parameters']:,} parameters "
        f"moved); read by `{JUDGE_KINDS[model.kind].reader}`.",
        "",
        "## Training",
        "",
        f"- Data: `{data.train}`, {examples:,} examples{labels}; {summary['examples']:,} read "
        f"({summary['epochs']:.2f} epochs).",
        f"- Loss: {config.objective.task}; {summary['updates']} updates of {data.batch} examples.",
        f"- {summary['training_seconds']:.0f} s of training, the evaluations on the way included.",
        "- Made by `visalign train-reward`; the run's config.yaml holds every setting.",
        "",
    ]
    if after:
        lines += [
            "## How good it is",
            "",
            f"On held-out examples of `{data.heldout}` (no prompt in common with the training data):",
            "",
            "| measure | before | after |",
            "|---|---|---|",
            *(
                f"| {MEANING.get(name, name)} | {_number(before.get(name))} | {_number(value)} |"
                for name, value in after.items()
            ),
            "",
            "The first column was measured on the first examples alone while the judge was untrained.",
            "",
        ]
    return "\n".join([*lines, *notes])


def _number(value: Any) -> str:
    return "–" if value is None or value != value else f"{value:.4f}"
