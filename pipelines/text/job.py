# SPDX-License-Identifier: Apache-2.0
"""The reinforcement learning of a text policy as a job, and what it shares with the other jobs of texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from visalign.errors import UserError
from visalign.evaluation import HeldoutResult
from visalign.evaluation.heldout.text import evaluate_text
from visalign.pipelines.shared.job import (
    PolicyRun,
    TrainingInterrupted,
    build_trainer,
    on_the_way,
    result_folder,
    run_job,
)
from visalign.pipelines.shared.parts import (
    Records,
    build_accelerator,
    ends_by,
    evenly_spaced,
    spread,
)
from visalign.pipelines.shared.run_folder import fingerprint
from visalign.training.loop.progress import POLICY_COLUMNS

from .config import TextConfig, TextGRPOConfig, TextPPOConfig
from .footprint import footprint
from .parts import (
    build_demonstrations,
    build_log_partition,
    build_process,
    build_server,
    build_text_policy,
    build_value_model,
    prepare,
    syncing,
    with_tool,
)

__all__ = ["TextGRPOConfig", "TextPPOConfig", "TrainingInterrupted", "estimate", "plan", "run"]


def run(config: TextConfig, output: Path, resume: bool = False) -> dict[str, Any]:
    """Run the job; see `visalign.pipelines.shared.job.run_job`."""
    return run_job(config, output, resume, _build)


def _build(config: TextConfig, output: Path) -> PolicyRun:
    """Everything a run needs; reads, writes nothing."""
    from visalign.training import TextRL
    from visalign.training.text.trajectories import needs_reference

    accelerator = build_accelerator(config, output)
    config.rewards.check_processes(accelerator.num_processes)
    inputs = prepare(config, str(accelerator.device))
    if inputs.reward.capabilities.needs_batch and accelerator.num_processes > 1:
        raise UserError(
            f"{inputs.reward.name} judges all completions of an iteration together, and "
            f"{accelerator.num_processes} processes would each have their own. Use one process."
        )
    objective = config.objective.build(length=config.rollout.max_new_tokens)
    leans = needs_reference(objective) or config.latent_flow is not None
    policy = build_text_policy(config.model, accelerator.device, config.seed, reference=leans)
    server = build_server(config, policy)
    generator = with_tool(config.rollout, server or policy, policy)
    algorithm = TextRL(
        policy,
        inputs.reward,
        inputs.records,
        rollout=config.rollout,
        objective=config.objective,
        seed=config.seed,
        accelerator=accelerator,
        dynamic=config.dynamic,
        self_imitation=config.self_imitation,
        latent_flow=config.latent_flow,
        generator=generator,
        after_update=syncing(config, policy, server, output, accelerator),
        value_model=build_value_model(config.model, accelerator.device),
        log_partition=build_log_partition(config, policy),
        process=build_process(config, policy),
        demonstrations=build_demonstrations(config, policy, inputs.demonstrations),
        sharding=config.run.sharding,
    )
    read = {"data.train": inputs.records, "data.heldout": inputs.heldout}
    if inputs.demonstrations is not None:
        read["data.demonstrations"] = inputs.demonstrations
    return text_run(
        config,
        output,
        config.method,
        policy,
        algorithm,
        inputs.rewards,
        inputs.heldout,
        config.rollout,
        read,
    )


def text_run(
    config: Any,
    output: Path,
    method: str,
    policy: Any,
    algorithm: Any,
    rewards: Mapping[str, Any],
    heldout: Records,
    generation: Any,
    read: Mapping[str, Records],
    *,
    said: Callable[[Any], Mapping[str, Any]] = lambda _: {},
    seen: int | None = None,
    beside: Callable[[], Mapping[str, float]] = dict,
    shown: Sequence[tuple[str, str, str]] = POLICY_COLUMNS,
) -> PolicyRun:
    """The run of a text policy; `said` has more entries of the summary, `beside` more of each evaluation on
    the way."""
    writer = with_tool(generation, policy, policy, branching=False)

    def measure(records: Records, seeds: Any) -> HeldoutResult:
        def stretch(rank: int, shares: int) -> HeldoutResult:
            first, end = (len(records) * (rank + more) // shares for more in (0, 1))
            return evaluate_text(
                writer,
                rewards,
                records[first:end],
                seeds=seeds,
                sampling=generation.sampling,
                stopping=generation.stopping(),
                correctness=config.evaluation.correctness,
            )

        return spread(algorithm.accelerator, len(records), stretch)

    way = on_the_way(config, measure, heldout, before=output / "before.npz")
    return PolicyRun(
        config=config,
        output=output,
        trainer=build_trainer(config, output, algorithm, lambda done: {**way(done), **beside()}, shown=shown),
        fingerprints={key: fingerprint(records) for key, records in read.items()},
        title=f"{method} on {config.model.path}",
        policy=policy,
        measure=measure,
        heldout=heldout,
        samples="completions",
        load_code=load_code(config, output, sees=policy.processor is not None),
        counts=lambda c: {**said(c), "samples": c.samples, "tokens": c.tokens},
        seen=seen,
        next_command=_next_command(config, output),
    )


def _next_command(config: Any, output: Path) -> list[str]:
    """Build the command that measures, or samples from, what was trained."""
    if config.model.lora is not None:
        return ["visalign", "diagnose", str(output)]
    model = result_folder(config, output)
    if "rating" in getattr(getattr(config, "rewards", None), "terms", {}):  # a judge that was trained to rate
        option = ["--option", f"model={model}"]
        return ["visalign", "evaluate", str(config.data.heldout), "-r", "visual_quality_r1", *option]
    return ["visalign", "train", "text_sample", f"model.path={model}"]


def load_code(config: Any, output: Path, *, sees: bool = False) -> str:
    """Python that loads the result into transformers, run from where the job was; a model that sees images
    has a processor."""
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


def planned_evaluation(config: Any, heldout: Records, *, greedy: bool = True) -> dict[str, int]:
    """How much is completed and judged before, on the way, and after; a greedy completion more per prompt."""
    way, some = config.evaluation, len(evenly_spaced(heldout, config.evaluation.prompts_on_the_way))
    visits = config.run.iterations // way.every if way.every else 0
    whole = 2 * len(heldout) * (len(way.seeds) + greedy)
    return {
        "heldout_prompts": len(heldout),
        "evaluations_on_the_way": visits,
        "completions": whole + visits * some * (1 + greedy),
    }


def plan(config: TextConfig) -> dict[str, Any]:
    """Batch arithmetic of a job, in groups of entries."""
    inputs, rollout, pace = prepare(config), config.rollout, config.optimizer
    completions = rollout.prompts_per_iteration * rollout.group_size
    updates = config.objective.epochs * pace.updates_per_iteration
    objective = config.objective.build(length=rollout.max_new_tokens)
    return {
        "batch": {
            "training_prompts": len(inputs.records),
            "completions_per_iteration": completions,
            "rounds_per_iteration_at_most": config.dynamic.max_rounds if config.dynamic.enabled else 1,
            "updates_per_iteration": updates,
            "completions_per_update": completions / pace.updates_per_iteration,
            "iterations": config.run.iterations,
            "completions": completions * config.run.iterations,
            "ends_by": ends_by(config.run),
        },
        "objective": {"algorithm": config.objective.algorithm, "source": objective.source},
        "evaluation": planned_evaluation(
            config, inputs.heldout, greedy=config.evaluation.correctness is not None
        ),
    }


def estimate(config: TextConfig) -> dict[str, Any]:
    """Memory, operations, hours and tokens a second by device beside the batch arithmetic; no model is
    loaded."""
    planned = plan(config)
    return {**planned, **footprint(config, prepare(config))}
