# SPDX-License-Identifier: Apache-2.0
"""A job that trains a text policy: evaluate, train, evaluate again, save the model, write the summary."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visalign.config import config_to_yaml, flatten, load_config
from visalign.errors import UserError

from .build import Records, build_accelerator, heldout_metrics, no_loading_bars
from .flow_grpo_inputs import write_once
from .interrupted import TrainingInterrupted
from .job_config import FREE_KEYS
from .run_folder import check_run_folder
from .text_build import (
    TextInputs,
    build_log_partition,
    build_process,
    build_server,
    build_text_policy,
    build_value_model,
    build_written,
    prepare,
    result_folder,
    syncing,
)
from .text_config import TextConfig

if TYPE_CHECKING:
    from visalign.evaluation import HeldoutResult
    from visalign.training.text import TextTrainer


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The objects of a run."""

    policy: Any
    trainer: TextTrainer
    measure: Callable[..., HeldoutResult]
    inputs: TextInputs


def run(config: TextConfig, output: Path, resume: bool, *, pipeline: str) -> dict[str, Any]:
    """Run the job; nothing is written before everything that can be checked has been.

    Args:
        config: the configuration.
        output: run folder; new or empty, or with `resume` that of the run to continue.
        resume: continue from the newest whole checkpoint. The result is that of an uninterrupted run.
        pipeline: name of the job, for the folder's config.yaml.

    Returns:
        The content of summary.json.

    Raises:
        UserError: something in the configuration or the folder cannot be used.
        TrainingInterrupted: after Ctrl-C.
    """
    import torch

    output = Path(output)
    _check_folder(config, output, resume)
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    job = _build(config, output)
    write_once(output / "config.yaml", f"pipeline: {pipeline}\n" + config_to_yaml(config))
    accelerator = job.trainer.loop.accelerator
    if not config.run.trackers:
        return _work(config, job, output, resume)
    accelerator.init_trackers("visalign", config={k: str(v) for k, v in flatten(config).items()})
    try:
        return _work(config, job, output, resume)
    finally:
        accelerator.end_training()


def _work(config: TextConfig, job: _Job, output: Path, resume: bool) -> dict[str, Any]:
    """Evaluate, train, evaluate, write; returns the summary."""
    from visalign.evaluation import load_heldout, write_summary
    from visalign.training.runtime import peak_memory_bytes
    from visalign.versions import versions

    begin, path = time.perf_counter(), output / "before.npz"
    if resume and path.is_file():
        before = load_heldout(path)
    else:
        heldout, seeds = job.inputs.heldout, config.evaluation.seeds
        job.trainer.progress.note(
            f"Evaluating {len(heldout)} held-out prompts × {len(seeds)} answers before training."
        )
        before = job.measure(heldout, seeds)
        before.save(path)
    evaluating = time.perf_counter() - begin
    if resume:
        job.trainer.resume()
    with job.trainer.progress:
        result = job.trainer.train()
    if result.stopped == "interrupted":
        raise TrainingInterrupted
    begin = time.perf_counter()
    with job.trainer.ema.applied():
        with no_loading_bars():
            job.policy.save(result_folder(config, output))
        after = job.measure(job.inputs.heldout, config.evaluation.seeds)
    after.save(output / "after.npz")
    evaluating += time.perf_counter() - begin
    state, peak = result.state, peak_memory_bytes()
    costs = {
        "seconds": state.seconds + evaluating,
        "training_seconds": state.seconds,
        "samples": state.samples,
        "tokens": state.tokens,
        "iterations": state.iteration,
        "updates": state.updates,
        "updates_skipped": state.skipped,
        "stopped": result.stopped,
        "peak_memory_bytes": peak.get("cuda", peak.get("host")),
    }
    write_summary(
        output / "summary.json",
        before=before,
        after=after,
        costs=costs,
        config=asdict(config),
        versions=versions(),
    )
    return json.loads((output / "summary.json").read_text(encoding="utf-8"))


def _check_folder(config: TextConfig, output: Path, resume: bool) -> None:
    """Refuse a folder that would be overwritten, or that holds another run."""
    from visalign.training.checkpoint import check_same_config

    check_run_folder(output, resume=resume)
    if resume and any(output.iterdir()):
        if not (output / "config.yaml").is_file():
            raise UserError(
                f"There is no run in '{output}' to resume: it has no config.yaml. Give the folder of a run."
            )
        saved = load_config(type(config), output / "config.yaml")
        check_same_config(asdict(saved), asdict(config), free=FREE_KEYS, where=f"the run in '{output}'")


def _build(config: TextConfig, output: Path) -> _Job:
    """Everything a run needs; reads, writes nothing."""
    from visalign.training.loop import Keeping
    from visalign.training.progress import TrainingProgress
    from visalign.training.text import TextTrainer
    from visalign.training.text_trajectories import needs_reference

    accelerator = build_accelerator(config.run, output)
    inputs = prepare(config)
    objective = config.objective.build(max_new_tokens=config.rollout.max_new_tokens)
    policy = build_text_policy(
        config.model, accelerator.device, config.seed, reference=needs_reference(objective)
    )
    measure = _evaluator(config, policy, inputs)
    generator = build_server(config, policy)
    trainer = TextTrainer(
        policy,
        inputs.reward,
        inputs.records,
        rollout=config.rollout,
        objective=config.objective,
        optimiser=config.optimiser,
        dynamic=config.dynamic,
        keeping=Keeping(
            folder=output,
            iterations=config.run.iterations,
            checkpoint_every=config.run.checkpoint_every,
            keep_checkpoints=config.run.keep_checkpoints,
            evaluate_every=config.evaluation.every,
            max_seconds=config.run.max_seconds,
            config=asdict(config),
            free_keys=FREE_KEYS,
        ),
        seed=config.seed,
        accelerator=accelerator,
        generator=generator,
        after_update=syncing(config, policy, generator, output),
        value_model=build_value_model(config.model, accelerator.device),
        log_partition=build_log_partition(config, policy),
        process=build_process(config, policy),
        written=build_written(config, policy, inputs.written),
        evaluate=lambda _: heldout_metrics(measure(inputs.some, config.evaluation.seeds[:1])),
        progress=TrainingProgress(config.run.iterations, max_seconds=config.run.max_seconds),
    )
    return _Job(policy=policy, trainer=trainer, measure=measure, inputs=inputs)


def _evaluator(config: TextConfig, policy: Any, inputs: TextInputs) -> Callable[..., HeldoutResult]:
    """A function of (records, seeds) that evaluates the policy with the weights it has."""
    from visalign.evaluation.text_heldout import evaluate_text

    def measure(records: Records, seeds: Any) -> HeldoutResult:
        return evaluate_text(
            policy,
            inputs.rewards,
            records,
            seeds=seeds,
            sampling=config.rollout.sampling,
            stop=config.rollout.stopping(),
            correctness=config.evaluation.correctness,
        )

    return measure


def plan(config: TextConfig) -> dict[str, Any]:
    """Batch arithmetic of a job.

    Args:
        config: the configuration.

    Returns:
        Groups of entries: batch, objective, evaluation.

    Raises:
        UserError: something in the configuration cannot be used.
    """
    inputs, rollout, pace = prepare(config), config.rollout, config.optimiser
    answers = rollout.prompts_per_iteration * rollout.group_size
    updates = config.objective.epochs * pace.updates_per_iteration
    objective = config.objective.build(max_new_tokens=rollout.max_new_tokens)
    visits = config.run.iterations // config.evaluation.every if config.evaluation.every else 0
    asked = 2 * len(inputs.heldout) + visits * len(inputs.some) // max(1, len(config.evaluation.seeds))
    return {
        "batch": {
            "training_prompts": len(inputs.records),
            "answers_per_iteration": answers,
            "rounds_per_iteration_at_most": config.dynamic.max_rounds if config.dynamic.enabled else 1,
            "updates_per_iteration": updates,
            "answers_per_update": answers / pace.updates_per_iteration,
            "iterations": config.run.iterations,
            "answers": answers * config.run.iterations,
        },
        "objective": {"algorithm": config.objective.algorithm, "source": objective.source},
        "evaluation": {
            "heldout_prompts": len(inputs.heldout),
            "evaluations_on_the_way": visits,
            "answers": asked * (len(config.evaluation.seeds) + 1),
        },
    }
