# SPDX-License-Identifier: Apache-2.0
"""What a finished job leaves, of pictures or of text: summary.json and report.html."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visalign.training.loop.metrics import read_metrics
from visalign.training.loop.runtime import peak_memory_bytes

from .resume import resume_command

if TYPE_CHECKING:
    from visalign.evaluation import HeldoutResult
    from visalign.training import TrainResult


def costs_of(
    output: Path, result: TrainResult, evaluating: float, counts: Mapping[str, Any]
) -> dict[str, Any]:
    """What the run spent, for `write_results`; memory is the GPU's if there is one.

    Args:
        output: the run's folder, with its metrics.
        result: of the training.
        evaluating: seconds of the evaluations before and after.
        counts: what was made and what one of it cost, by the names of the summary.
    """
    state, peak = result.counters, peak_memory_bytes()
    phases: dict[str, float] = {}
    for record in read_metrics(output / "metrics.jsonl"):
        for key, value in record.items():
            if key.startswith("seconds/") and value is not None:
                name = key.removeprefix("seconds/")
                phases[name] = phases.get(name, 0.0) + value
    return {
        "seconds": state.seconds + evaluating,
        "training_seconds": state.seconds,
        "phases": {**phases, "evaluation": phases.get("evaluation", 0.0) + evaluating},
        **counts,
        "iterations": state.iteration,
        "updates": state.updates,
        "updates_skipped": state.skipped,
        "stopped": result.stopped,
        "peak_memory_bytes": peak.get("cuda", peak.get("host")),
    }


def write_results(
    output: Path,
    before: HeldoutResult,
    after: HeldoutResult,
    *,
    title: str,
    config: Mapping[str, Any],
    costs: Mapping[str, Any],
    load_code: str,
    on_the_way: tuple[Sequence[str], Sequence[int]] | None = None,
    seen: int | None = None,
) -> dict[str, Any]:
    """Write summary.json and report.html; the curves are those of the folder's metrics.jsonl.

    Args:
        output: the run's folder.
        before: held-out evaluation before training, of pictures or of completions.
        after: the same after it.
        title: of the page.
        config: of the run, nested mappings.
        costs: what `costs_of` returned.
        load_code: Python that loads the result.
        on_the_way: prompts and seeds of the evaluations during training, whose curve then starts with the
            accuracy on these before training; None where there are none.
        seen: how many of the held-out prompts were trained on; None where that is not known.

    Returns:
        The content of the summary.
    """
    from visalign.evaluation import write_report, write_summary
    from visalign.versions import versions

    found = versions()
    spent = {**costs} if seen is None else {**costs, "heldout_prompts_trained_on": seen}
    path = write_summary(
        output / "summary.json", before=before, after=after, costs=spent, config=config, versions=found
    )
    accuracy = math.nan if on_the_way is None else before.accuracy_of(*on_the_way)
    write_report(
        output,
        before=before,
        after=after,
        metrics=read_metrics(output / "metrics.jsonl"),
        config=config,
        versions=found,
        costs=costs,
        title=title,
        load_code=load_code,
        resume_command=resume_command(str(output / "config.yaml"), [], output),
        start={"heldout/accuracy": accuracy} if math.isfinite(accuracy) else None,
        seen=seen,
    )
    return json.loads(path.read_text(encoding="utf-8"))
