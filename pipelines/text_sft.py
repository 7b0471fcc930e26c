# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning of a text policy: evaluate, learn given answers, evaluate again, save the model."""

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
from .flow_grpo_inputs import FINGERPRINTS, check_unchanged, write_once
from .interrupted import TrainingInterrupted
from .job_config import FREE_KEYS
from .run_folder import check_run_folder
from .text_build import build_text_policy
from .text_sft_config import TextSFTConfig
from .text_sft_inputs import SFTInputs, fingerprints, prepare_sft, prompt_keys

if TYPE_CHECKING:
    from visalign.evaluation import HeldoutResult
    from visalign.training.sft import SFTTrainer

__all__ = ["TextSFTConfig", "plan", "run"]


@dataclass(frozen=True, kw_only=True)
class _Job:
    policy: Any
    trainer: SFTTrainer
    measure: Callable[..., HeldoutResult]
    inputs: SFTInputs
    answers: int
    """Answers that fit the model."""


def run(config: TextSFTConfig, output: Path, resume: bool = False) -> dict[str, Any]:
    """Run the job; nothing is written before everything that can be checked has been.

    Args:
        config: the configuration.
        output: run folder; new or empty, or with `resume` that of the run to continue.
        resume: continue from the newest whole checkpoint. The result is that of an uninterrupted run.

    Returns:
        The content of summary.json.

    Raises:
        UserError: something in the configuration or the folder cannot be used.
        TrainingInterrupted: after Ctrl-C.
    """
    import torch

    output = Path(output)
    _check_folder(config, output, resume)
    inputs = prepare_sft(config)
    prints = fingerprints(inputs)
    if resume:
        check_unchanged(output, prints)
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    job = _build(config, inputs, output)
    write_once(output / "config.yaml", "pipeline: text_sft\n" + config_to_yaml(config))
    write_once(output / FINGERPRINTS, json.dumps(prints, indent=1, sort_keys=True) + "\n")
    accelerator = job.trainer.loop.accelerator
    if not config.run.trackers:
        return _work(config, job, output, resume)
    accelerator.init_trackers("visalign", config={k: str(v) for k, v in flatten(config).items()})
    try:
        return _work(config, job, output, resume)
    finally:
        accelerator.end_training()


def _work(config: TextSFTConfig, job: _Job, output: Path, resume: bool) -> dict[str, Any]:
    """Evaluate, train, evaluate, write; returns the summary."""
    from visalign.evaluation import load_heldout, write_summary
    from visalign.training.runtime import peak_memory_bytes
    from visalign.versions import versions

    seeds, path = config.evaluation.seeds, output / "before.npz"
    begin = time.perf_counter()
    if resume and path.is_file():
        before = load_heldout(path)
    else:
        job.trainer.progress.note(
            f"Evaluating {len(job.inputs.heldout)} held-out prompts × {len(seeds)} answers before training."
        )
        before = job.measure(job.inputs.heldout, seeds)
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
            job.policy.save(output / ("model" if config.model.lora is None else "lora"))
        after = job.measure(job.inputs.heldout, seeds)
    after.save(output / "after.npz")
    evaluating += time.perf_counter() - begin
    state, peak = result.state, peak_memory_bytes()
    costs = {
        "seconds": state.seconds + evaluating,
        "training_seconds": state.seconds,
        "answers": job.answers,
        "answers_left_out": len(job.inputs.answers) - job.answers,
        "heldout_prompts_trained_on": job.inputs.seen,
        "samples": state.samples,
        "tokens": state.tokens,
        "epochs": state.samples / job.answers,
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


def _check_folder(config: TextSFTConfig, output: Path, resume: bool) -> None:
    """Refuse a folder that would be overwritten, or that holds another run."""
    from visalign.training.checkpoint import check_same_config

    check_run_folder(output, resume=resume)
    if resume and any(output.iterdir()):
        if not (output / "config.yaml").is_file():
            raise UserError(
                f"There is no run in '{output}' to resume: it has no config.yaml. Give the folder of a run."
            )
        saved = load_config(TextSFTConfig, output / "config.yaml")
        check_same_config(asdict(saved), asdict(config), free=FREE_KEYS, where=f"the run in '{output}'")


def _build(config: TextSFTConfig, inputs: SFTInputs, output: Path) -> _Job:
    """Everything a run needs; reads, writes nothing."""
    from visalign.adapters.written_answers import WrittenBatches
    from visalign.adapters.written_lengths import fitting_answers
    from visalign.training.loop import Keeping
    from visalign.training.progress import TrainingProgress
    from visalign.training.sft import SFTTrainer

    accelerator = build_accelerator(config.run, output)
    policy = build_text_policy(config.model, accelerator.device, config.seed)
    try:
        fitting = fitting_answers(policy, inputs.answers, too_long=config.data.too_long)
    except UserError as error:
        raise UserError(f"data.train: {error}") from error
    measure = _evaluator(config, policy, inputs)
    trainer = SFTTrainer(
        policy,
        WrittenBatches(policy, fitting, size=config.data.batch, seed=config.seed),
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
        accelerator=accelerator,
        evaluate=lambda _: heldout_metrics(measure(inputs.some, config.evaluation.seeds[:1])),
        progress=TrainingProgress(config.run.iterations, max_seconds=config.run.max_seconds),
    )
    return _Job(policy=policy, trainer=trainer, measure=measure, inputs=inputs, answers=len(fitting))


def _evaluator(config: TextSFTConfig, policy: Any, inputs: SFTInputs) -> Callable[..., HeldoutResult]:
    """A function of (records, seeds) that evaluates the policy with the weights it has."""
    from visalign.evaluation.text_heldout import evaluate_text

    def measure(records: Records, seeds: Any) -> HeldoutResult:
        return evaluate_text(
            policy,
            inputs.rewards,
            records,
            seeds=seeds,
            sampling=config.generation.sampling,
            stop=config.generation.stopping(),
            correctness=config.evaluation.correctness,
        )

    return measure


def plan(config: TextSFTConfig) -> dict[str, Any]:
    """Batch arithmetic of a job.

    Args:
        config: the configuration.

    Returns:
        Groups of entries: batch, evaluation.

    Raises:
        UserError: something in the configuration cannot be used.
    """
    inputs, pace, length = prepare_sft(config), config.optimiser, config.run.iterations
    updates = length * pace.updates_per_iteration
    visits = length // config.evaluation.every if config.evaluation.every else 0
    first = len(config.evaluation.seeds) + 1  # one more is greedy
    return {
        "batch": {
            "answers": len(inputs.answers),
            "prompts": len(prompt_keys(inputs.answers)),
            "heldout_prompts_trained_on": inputs.seen,
            "answers_per_update": config.data.batch,
            "updates": updates,
            "epochs": updates * config.data.batch / len(inputs.answers),
            "iterations": length,
        },
        "evaluation": {
            "heldout_prompts": len(inputs.heldout),
            "evaluations_on_the_way": visits,
            "answers": 2 * len(inputs.heldout) * first + 2 * visits * len(inputs.some),
        },
    }
