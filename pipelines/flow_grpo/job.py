# SPDX-License-Identifier: Apache-2.0
"""The Flow-GRPO job: evaluate, train, evaluate again, save the LoRA, write summary and report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visalign.config import config_to_yaml, flatten
from visalign.interfaces import DiffusionPolicy
from visalign.pipelines.shared.interrupted import TrainingInterrupted
from visalign.pipelines.shared.parts import build_accelerator, evenly, heldout_metrics
from visalign.pipelines.shared.run_folder import check_same_run
from visalign.pipelines.shared.run_inputs import FINGERPRINTS, check_unchanged, write_once
from visalign.pipelines.shared.sections import FREE_KEYS

from .config import FlowGRPOConfig
from .inputs import Inputs, prepare
from .parts import build_evaluator, build_policy
from .plan import plan
from .results import finish, result_folder

if TYPE_CHECKING:
    from visalign.evaluation import HeldoutResult
    from visalign.training.diffusion.trainer import FlowGRPOTrainer

__all__ = ["FlowGRPOConfig", "TrainingInterrupted", "plan", "run"]


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The objects of a run."""

    policy: DiffusionPolicy
    trainer: FlowGRPOTrainer
    measure: Callable[..., HeldoutResult]
    inputs: Inputs


def run(
    config: FlowGRPOConfig, output: Path, resume: bool = False, *, pipeline: str = "flow_grpo"
) -> dict[str, Any]:
    """Run the job; nothing is written before everything that can be checked has been.

    Args:
        config: the configuration.
        output: run folder; new or empty, or with `resume` that of the run to continue.
        resume: continue from the newest whole checkpoint. The result is that of an uninterrupted run.
        pipeline: name under which the run's own copy of the configuration can be run again.

    Returns:
        The content of summary.json; empty in all processes but the first.

    Raises:
        UserError: something in the configuration or the folder cannot be used.
        TrainingInterrupted: after Ctrl-C.
    """
    import torch

    output = Path(output)
    check_same_run(config, output, resume=resume, free=FREE_KEYS)
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    job = _build(config, output)
    if resume:
        check_unchanged(output, job.inputs.fingerprints)
    accelerator = job.trainer.accelerator
    if accelerator.is_main_process:
        write_once(output / "config.yaml", f"pipeline: {pipeline}\n" + config_to_yaml(config))
        write_once(output / FINGERPRINTS, json.dumps(job.inputs.fingerprints, indent=1) + "\n")
    accelerator.wait_for_everyone()
    if not config.run.trackers:
        return _work(config, job, output, resume)
    accelerator.init_trackers("visalign", config={k: str(v) for k, v in flatten(config).items()})
    try:
        return _work(config, job, output, resume)
    finally:
        accelerator.end_training()


def _work(config: FlowGRPOConfig, job: _Job, output: Path, resume: bool) -> dict[str, Any]:
    """Evaluate, train, evaluate, write; returns the summary.

    Raises:
        TrainingInterrupted: after Ctrl-C.
    """
    begin = time.perf_counter()
    before = _before(config, job, output, resume)
    evaluating = time.perf_counter() - begin
    if resume:
        job.trainer.resume()
    with job.trainer.progress:
        result = job.trainer.train()
    if result.stopped == "interrupted":
        raise TrainingInterrupted
    summary: dict[str, Any] = {}
    if before is not None:
        begin = time.perf_counter()
        with job.trainer.ema.applied():
            job.policy.save(result_folder(config, output))
            after = job.measure(job.inputs.heldout, config.evaluation.seeds)
        after.save(output / "after.npz")
        evaluating += time.perf_counter() - begin
        summary = finish(
            config,
            output,
            before,
            after,
            result=result,
            evaluating=evaluating,
            heldout=job.inputs.heldout,
            seen=job.inputs.seen,
        )
    job.trainer.accelerator.wait_for_everyone()
    return summary


def _build(config: FlowGRPOConfig, output: Path) -> _Job:
    """Everything a run needs; reads, writes nothing."""
    from visalign.training.diffusion.trainer import FlowGRPOTrainer
    from visalign.training.loop.loop import Keeping
    from visalign.training.loop.progress import TrainingProgress

    accelerator = build_accelerator(config.run, output)
    inputs = prepare(config, accelerator.num_processes)
    policy = build_policy(config.model, accelerator.device, config.seed)
    measure = build_evaluator(
        config.evaluation,
        policy,
        inputs.rewards,
        steps=config.rollout.steps,
        timestep_schedule=config.rollout.timestep_schedule,
    )
    some = evenly(inputs.heldout, config.evaluation.prompts_on_the_way)
    trainer = FlowGRPOTrainer(
        policy,
        inputs.reward,
        inputs.records,
        rollout=config.rollout,
        objective=config.objective,
        optimizer=config.optimizer,
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
        strata=inputs.strata,
        cycle=config.data.cycle,
        evaluate=lambda _: heldout_metrics(measure(some, config.evaluation.seeds[:1])),
        progress=TrainingProgress(
            config.run.iterations,
            max_seconds=config.run.max_seconds,
            enabled=accelerator.is_main_process,
        ),
    )
    return _Job(policy=policy, trainer=trainer, measure=measure, inputs=inputs)


def _before(config: FlowGRPOConfig, job: _Job, output: Path, resume: bool) -> HeldoutResult | None:
    """The evaluation before training, kept in the run folder; None in all processes but the first."""
    from visalign.evaluation import load_heldout

    if not job.trainer.accelerator.is_main_process:
        return None
    if job.inputs.seen:
        job.trainer.progress.note(
            f"Warning: {job.inputs.seen} of {len(job.inputs.heldout)} held-out prompts are trained on as "
            "well, so the accuracy is partly one of memory. Take them out of data.train or data.heldout."
        )
    path = output / "before.npz"
    if resume and path.is_file():
        return load_heldout(path)
    job.trainer.progress.note(
        f"Evaluating {len(job.inputs.heldout)} held-out prompts × {len(config.evaluation.seeds)} seeds "
        "before training."
    )
    result = job.measure(job.inputs.heldout, config.evaluation.seeds)
    result.save(path)
    return result
