# SPDX-License-Identifier: Apache-2.0
"""What a finished text job writes: summary.json, report.html, and the code that loads the result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visalign.pipelines.shared.parts import Records, evenly
from visalign.pipelines.shared.results import costs_of, write_results

if TYPE_CHECKING:
    from visalign.evaluation import HeldoutResult
    from visalign.training.loop.loop import TrainResult

_NAMES = {"text_grpo": "GRPO", "text_ppo": "PPO", "text_sft": "Supervised fine-tuning"}


def result_folder(config: Any, output: Path) -> Path:
    """Where a run leaves what it trained: the adapters, or the whole model."""
    return output / ("model" if config.model.lora is None else "lora")


def load_code(config: Any, output: Path, *, sees: bool = False) -> str:
    """Python that loads the result into transformers, run from where the job was.

    Args:
        config: of the run.
        output: the run's folder.
        sees: whether the model reads pictures, and so has a processor.
    """
    folder, base = (json.dumps(str(name)) for name in (result_folder(config, output), config.model.path))
    kind, reader = "AutoModelForCausalLM", "AutoTokenizer"
    if sees:
        kind, reader = "AutoModelForImageTextToText", "AutoProcessor"
    lines = [f"from transformers import {kind}, {reader}", ""]
    if config.model.lora is None:
        lines.append(f"model = {kind}.from_pretrained({folder})")
    else:
        lines = ["from peft import PeftModel", lines[0], "from visalign.data.assets import resolve_model", ""]
        lines.append(f"base = {kind}.from_pretrained(resolve_model({base}))")
        lines.append(f"model = PeftModel.from_pretrained(base, {folder})")
    return "\n".join([*lines, f"{reader.removeprefix('Auto').lower()} = {reader}.from_pretrained({folder})"])


def finish(
    config: Any,
    output: Path,
    before: HeldoutResult,
    after: HeldoutResult,
    *,
    pipeline: str,
    result: TrainResult,
    evaluating: float,
    heldout: Records,
    sees: bool,
    more: Mapping[str, Any],
) -> dict[str, Any]:
    """Write summary and report.

    Args:
        config: of the run.
        output: the run's folder.
        before: held-out evaluation before training.
        after: the same after it.
        pipeline: name of the job, for the title.
        result: of the training.
        evaluating: seconds of both evaluations.
        heldout: the held-out records.
        sees: whether the model reads pictures.
        more: entries of the summary that only this job has.

    Returns:
        The content of the summary.
    """
    from visalign.evaluation.heldout.text import prompt_text

    state, way = result.state, config.evaluation
    some = [prompt_text(record["prompt"]) for record in evenly(heldout, way.prompts_on_the_way)]
    counts = {**more, "samples": state.samples, "tokens": state.tokens}
    return write_results(
        output,
        before,
        after,
        title=f"{_NAMES.get(pipeline, pipeline)} on {config.model.path}",
        config=asdict(config),
        costs=costs_of(output, result, evaluating, counts),
        load_code=load_code(config, output, sees=sees),
        on_the_way=(some, way.seeds[:1]) if way.every else None,
        seen=more.get("heldout_prompts_trained_on"),
    )
