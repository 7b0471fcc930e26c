# SPDX-License-Identifier: Apache-2.0
"""The Flow-GRPO job: evaluate, train, evaluate again, save the LoRA, write summary and report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visalign.config import config_to_yaml, load_config
from visalign.errors import UserError
from visalign.interfaces import DiffusionPolicy

from .build import (
    Records,
    build_accelerator,
    build_evaluator,
    build_policy,
    build_records,
    build_reward,
    build_terms,
    evenly,
    heldout_metrics,
)
from .flow_grpo_config import FREE_KEYS, FlowGRPOConfig
from .flow_grpo_plan import plan
from .run_folder import check_run_folder

if TYPE_CHECKING:
    from visalign.evaluation import HeldoutResult
    from visalign.training.flow_grpo import FlowGRPOTrainer, TrainResult

__all__ = ["FlowGRPOConfig", "TrainingInterrupted", "plan", "run"]


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C: the iteration was finished and saved; the command line says how to go on and exits with 130."""


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The objects of a run."""

    policy: DiffusionPolicy
    trainer: FlowGRPOTrainer
    measure: Callable[..., HeldoutResult]
    heldout: Records


def run(config: FlowGRPOConfig, output: Path, resume: bool = False) -> dict[str, Any]:
    """Run the job; nothing is written before everything that can be checked has been.

    Args:
        config: the configuration.
        output: run folder; new or empty, or with `resume` that of the run to continue.
        resume: continue from the newest whole checkpoint. The result is that of an uninterrupted run.

    Returns:
        The content of summary.json; empty in all processes but the first.

    Raises:
        UserError: something in the configuration or the folder cannot be used.
        TrainingInterrupted: after Ctrl-C.
    """
    import torch

    from visalign.config import flatten
    from visalign.versions import versions

    output = Path(output)
    _check_folder(config, output, resume)
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    job = _build(config, output)
    accelerator = job.trainer.accelerator
    if accelerator.is_main_process:
        output.mkdir(parents=True, exist_ok=True)
        text = "pipeline: flow_grpo\n" + config_to_yaml(config)
        (output / "config.yaml").write_text(text, encoding="utf-8")
    accelerator.wait_for_everyone()
    if config.run.trackers:
        accelerator.init_trackers("visalign", config={k: str(v) for k, v in flatten(config).items()})
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
            job.policy.save(output / ("model" if config.model.lora is None else "lora"))
            after = job.measure(job.heldout, config.evaluation.seeds)
        after.save(output / "after.npz")
        evaluating += time.perf_counter() - begin
        costs = _costs(output, result, evaluating)
        summary = _write(config, output, before, after, costs, versions())
    if config.run.trackers:
        accelerator.end_training()
    accelerator.wait_for_everyone()
    return summary


def _check_folder(config: FlowGRPOConfig, output: Path, resume: bool) -> None:
    """Refuse a folder that would be overwritten, or that holds another run.

    Raises:
        UserError: it is not empty (without resume), or holds no run or one of another configuration (with
            it).
    """
    from visalign.training.checkpoint import check_same_config

    check_run_folder(output, resume=resume)
    if resume and any(output.iterdir()):
        if not (output / "config.yaml").is_file():
            raise UserError(
                f"There is no run in '{output}' to resume: it has no config.yaml. Give the folder of a run."
            )
        saved = load_config(FlowGRPOConfig, output / "config.yaml")
        check_same_config(asdict(saved), asdict(config), free=FREE_KEYS, where=f"the run in '{output}'")


def _build(config: FlowGRPOConfig, output: Path) -> _Job:
    """Everything a run needs; reads, writes nothing."""
    from visalign.training.flow_grpo import FlowGRPOTrainer, Keeping
    from visalign.training.progress import TrainingProgress
    from visalign.training.sampler import check_batch_algebra

    records = build_records(config.data.train, "data.train")
    heldout = build_records(config.data.heldout, "data.heldout")
    rewards = build_terms({**config.evaluation.rewards, **config.rewards.terms})
    reward = build_reward(config.rewards, rewards)
    accelerator = build_accelerator(config.run, output)
    check_batch_algebra(
        config.rollout.prompts_per_iteration, config.rollout.group_size, accelerator.num_processes
    )
    policy = build_policy(config.model, accelerator.device, config.seed)
    measure = build_evaluator(
        config.evaluation, policy, rewards, steps=config.rollout.steps, grid=config.rollout.grid
    )
    some = evenly(heldout, config.evaluation.prompts_on_the_way)
    trainer = FlowGRPOTrainer(
        policy,
        reward,
        records,
        rollout=config.rollout,
        objective=config.objective,
        optimiser=config.optimiser,
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
        strata=[str(r.get("tag", "")) for r in records] if config.data.balance else None,
        cycle=config.data.cycle,
        evaluate=lambda _: heldout_metrics(measure(some, config.evaluation.seeds[:1])),
        progress=TrainingProgress(
            config.run.iterations,
            max_seconds=config.run.max_seconds,
            enabled=accelerator.is_main_process,
        ),
    )
    return _Job(policy=policy, trainer=trainer, measure=measure, heldout=heldout)


def _before(config: FlowGRPOConfig, job: _Job, output: Path, resume: bool) -> HeldoutResult | None:
    """The evaluation before training, kept in the run folder; None in all processes but the first."""
    from visalign.evaluation import load_heldout

    if not job.trainer.accelerator.is_main_process:
        return None
    path = output / "before.npz"
    if resume and path.is_file():
        return load_heldout(path)
    job.trainer.progress.note(
        f"Evaluating {len(job.heldout)} held-out prompts × {len(config.evaluation.seeds)} seeds before "
        f"training."
    )
    result = job.measure(job.heldout, config.evaluation.seeds)
    result.save(path)
    return result


def _costs(output: Path, result: TrainResult, evaluating: float) -> dict[str, Any]:
    """What the run spent, for `write_report` and `write_summary`; memory is the GPU's if there is one."""
    from visalign.training.metrics import read_metrics
    from visalign.training.runtime import peak_memory_bytes

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


def _write(
    config: FlowGRPOConfig,
    output: Path,
    before: HeldoutResult,
    after: HeldoutResult,
    costs: Mapping[str, Any],
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """summary.json and report.html; returns the summary."""
    from visalign.evaluation import write_report, write_summary
    from visalign.training.metrics import read_metrics

    plain = asdict(config)
    path = write_summary(
        output / "summary.json", before=before, after=after, costs=costs, config=plain, versions=versions
    )
    write_report(
        output,
        before=before,
        after=after,
        metrics=read_metrics(output / "metrics.jsonl"),
        config=plain,
        versions=versions,
        costs=costs,
        title=f"Flow-GRPO on {config.model.path}",
        resume_command=f"visalign train {output}/config.yaml --output {output} --resume",
    )
    return json.loads(path.read_text(encoding="utf-8"))
