# SPDX-License-Identifier: Apache-2.0
"""What a finished Flow-GRPO job writes: summary.json, report.html, and the code that loads the result."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visalign.pipelines.shared.parts import Records, evenly
from visalign.pipelines.shared.resume import resume_command
from visalign.training.loop.metrics import read_metrics
from visalign.training.loop.runtime import peak_memory_bytes

from .config import FlowGRPOConfig

if TYPE_CHECKING:
    from visalign.evaluation import HeldoutResult
    from visalign.training.loop.loop import TrainResult


def result_folder(config: FlowGRPOConfig, output: Path) -> Path:
    """Where a run leaves what it trained: the adapters, or a whole pipeline.

    Args:
        config: of the run.
        output: the run's folder.
    """
    return output / ("model" if config.model.lora is None else "lora")


def load_code(config: FlowGRPOConfig, output: Path) -> str:
    """Python that loads the result into diffusers, run from where the job was.

    Args:
        config: of the run.
        output: the run's folder.
    """
    folder = json.dumps(str(result_folder(config, output)))
    if config.model.lora is None:
        return f"from diffusers import StableDiffusion3Pipeline\n\npipe = {_PIPE}({folder})"
    return (
        "from diffusers import StableDiffusion3Pipeline\n"
        "from visalign.data.assets import resolve_model\n\n"
        f"pipe = {_PIPE}(resolve_model({json.dumps(config.model.path)}))\n"
        f"pipe.load_lora_weights({folder})"
    )


_PIPE = "StableDiffusion3Pipeline.from_pretrained"


def costs_of(output: Path, result: TrainResult, evaluating: float) -> dict[str, Any]:
    """What the run spent, for `write_report` and `write_summary`; memory is the GPU's if there is one.

    Args:
        output: the run's folder.
        result: of the training.
        evaluating: seconds of the evaluations before and after.
    """
    state, peak = result.state, peak_memory_bytes()
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
        "images": state.images,
        "iterations": state.iteration,
        "updates": state.updates,
        "updates_skipped": state.skipped,
        "stopped": result.stopped,
        "forward_equivalents_per_image": state.forward_equivalents / max(1, state.images),
        "peak_memory_bytes": peak.get("cuda", peak.get("host")),
    }


def write_results(
    config: FlowGRPOConfig,
    output: Path,
    before: HeldoutResult,
    after: HeldoutResult,
    costs: Mapping[str, Any],
    *,
    heldout: Records,
    seen: int,
) -> dict[str, Any]:
    """Write summary.json and report.html.

    Args:
        config: of the run.
        output: the run's folder.
        before: held-out evaluation before training.
        after: the same after it.
        costs: what `costs_of` returned.
        heldout: the held-out records.
        seen: how many of their prompts were trained on.

    Returns:
        The content of the summary.
    """
    from visalign.evaluation import write_report, write_summary
    from visalign.versions import versions

    plain, found = asdict(config), versions()
    spent = {**costs, "heldout_prompts_trained_on": seen}
    path = write_summary(
        output / "summary.json", before=before, after=after, costs=spent, config=plain, versions=found
    )
    write_report(
        output,
        before=before,
        after=after,
        metrics=read_metrics(output / "metrics.jsonl"),
        config=plain,
        versions=found,
        costs=costs,
        title=f"Flow-GRPO on {config.model.path}",
        load_code=load_code(config, output),
        resume_command=resume_command(str(output / "config.yaml"), [], output),
        start=start_of_curves(config, before, heldout),
        seen=seen,
    )
    return json.loads(path.read_text(encoding="utf-8"))


def start_of_curves(config: FlowGRPOConfig, before: HeldoutResult, heldout: Records) -> dict[str, float]:
    """The accuracy before training on the samples of the evaluations on the way; empty where there are none.

    Args:
        config: of the run.
        before: held-out evaluation before training, of all prompts and seeds.
        heldout: the held-out records.
    """
    if not config.evaluation.every:
        return {}
    some = {str(record["prompt"]) for record in evenly(heldout, config.evaluation.prompts_on_the_way)}
    accuracy = before.accuracy_of(some, config.evaluation.seeds[:1])
    return {"heldout/accuracy": accuracy} if math.isfinite(accuracy) else {}
