# SPDX-License-Identifier: Apache-2.0
"""What a finished Flow-GRPO job writes: summary.json, report.html, and the code that loads the result."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visalign.pipelines.shared.parts import Records, evenly
from visalign.pipelines.shared.results import costs_of, write_results

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


def finish(
    config: FlowGRPOConfig,
    output: Path,
    before: HeldoutResult,
    after: HeldoutResult,
    *,
    result: TrainResult,
    evaluating: float,
    heldout: Records,
    seen: int,
) -> dict[str, Any]:
    """Write summary and report.

    Args:
        config: of the run.
        output: the run's folder.
        before: held-out evaluation before training.
        after: the same after it.
        result: of the training.
        evaluating: seconds of both evaluations.
        heldout: the held-out records.
        seen: how many of their prompts were trained on.

    Returns:
        The content of the summary.
    """
    state, way = result.state, config.evaluation
    counts = {
        "images": state.images,
        "forward_equivalents_per_image": state.forward_equivalents / max(1, state.images),
    }
    some = [str(record["prompt"]) for record in evenly(heldout, way.prompts_on_the_way)]
    return write_results(
        output,
        before,
        after,
        title=f"Flow-GRPO on {config.model.path}",
        config=asdict(config),
        costs=costs_of(output, result, evaluating, counts),
        load_code=load_code(config, output),
        on_the_way=(some, way.seeds[:1]) if way.every else None,
        seen=seen,
    )
