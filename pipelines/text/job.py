# SPDX-License-Identifier: Apache-2.0
"""The reinforcement learning of a text policy as a job: what `text_grpo` and `text_ppo` share."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from visalign.pipelines.shared.job import Job, run_job, run_settings
from visalign.pipelines.shared.parts import build_accelerator, heldout_metrics

from .config import TextConfig
from .parts import (
    build_demonstrations,
    build_log_partition,
    build_process,
    build_server,
    build_text_policy,
    build_value_model,
    prepare,
    syncing,
)
from .run import evaluator, text_job

_NAMES = {"text_grpo": "GRPO", "text_ppo": "PPO"}


def run(config: TextConfig, output: Path, resume: bool, *, pipeline: str) -> dict[str, Any]:
    """Run the job; see `visalign.pipelines.shared.job.run_job`."""
    return run_job(config, output, resume, pipeline=pipeline, build=partial(_build, _NAMES[pipeline]))


def _build(name: str, config: TextConfig, output: Path) -> Job:
    """Everything a run needs; reads, writes nothing."""
    from visalign.training import TextRL, Trainer
    from visalign.training.loop.progress import TrainingProgress
    from visalign.training.text.trajectories import needs_reference

    accelerator = build_accelerator(config.run, output)
    inputs = prepare(config, str(accelerator.device))
    objective = config.objective.build(length=config.rollout.max_new_tokens)
    policy = build_text_policy(
        config.model, accelerator.device, config.seed, reference=needs_reference(objective)
    )
    rollout, judge = config.rollout, config.evaluation.correctness
    measure = evaluator(policy, inputs.rewards, rollout.sampling, rollout.stopping(), judge)
    generator = build_server(config, policy)
    algorithm = TextRL(
        policy,
        inputs.reward,
        inputs.records,
        rollout=config.rollout,
        objective=config.objective,
        seed=config.seed,
        accelerator=accelerator,
        dynamic=config.dynamic,
        generator=generator,
        after_update=syncing(config, policy, generator, output),
        value_model=build_value_model(config.model, accelerator.device),
        log_partition=build_log_partition(config, policy),
        process=build_process(config, policy),
        demonstrations=build_demonstrations(config, policy, inputs.demonstrations),
    )
    trainer = Trainer(
        algorithm,
        optimizer=config.optimizer,
        run=run_settings(config, output),
        evaluate=lambda _: heldout_metrics(measure(inputs.some, config.evaluation.seeds[:1])),
        progress=TrainingProgress(config.run.iterations, max_seconds=config.run.max_seconds),
    )
    read = {"data.train": inputs.records, "data.heldout": inputs.heldout}
    if inputs.demonstrations is not None:
        read["data.demonstrations"] = inputs.demonstrations
    return text_job(
        config,
        output,
        name=name,
        policy=policy,
        trainer=trainer,
        measure=measure,
        heldout=inputs.heldout,
        read=read,
    )


def plan(config: TextConfig) -> dict[str, Any]:
    """Batch arithmetic of a job.

    Args:
        config: the configuration.

    Returns:
        Groups of entries: batch, objective, evaluation.

    Raises:
        UserError: something in the configuration cannot be used.
    """
    inputs, rollout, pace = prepare(config), config.rollout, config.optimizer
    completions = rollout.prompts_per_iteration * rollout.group_size
    updates = config.objective.epochs * pace.updates_per_iteration
    objective = config.objective.build(length=rollout.max_new_tokens)
    visits = config.run.iterations // config.evaluation.every if config.evaluation.every else 0
    greedy = int(config.evaluation.correctness is not None)
    whole = 2 * len(inputs.heldout) * (len(config.evaluation.seeds) + greedy)
    return {
        "batch": {
            "training_prompts": len(inputs.records),
            "completions_per_iteration": completions,
            "rounds_per_iteration_at_most": config.dynamic.max_rounds if config.dynamic.enabled else 1,
            "updates_per_iteration": updates,
            "completions_per_update": completions / pace.updates_per_iteration,
            "iterations": config.run.iterations,
            "completions": completions * config.run.iterations,
        },
        "objective": {"algorithm": config.objective.algorithm, "source": objective.source},
        "evaluation": {
            "heldout_prompts": len(inputs.heldout),
            "evaluations_on_the_way": visits,
            "completions": whole + visits * len(inputs.some) * (1 + greedy),
        },
    }
