# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning of a text policy: evaluate, learn demonstrations, evaluate again, save the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from visalign.errors import UserError
from visalign.pipelines.shared.job import Job, run_job, run_settings
from visalign.pipelines.shared.parts import build_accelerator, heldout_metrics

from .parts import build_text_policy
from .run import evaluator, text_job
from .sft_config import TextSFTConfig
from .sft_inputs import prepare_sft, prompt_keys

__all__ = ["TextSFTConfig", "plan", "run"]


def run(config: TextSFTConfig, output: Path, resume: bool = False) -> dict[str, Any]:
    """Run the job; see `visalign.pipelines.shared.job.run_job`."""
    return run_job(config, output, resume, pipeline="text_sft", build=_build)


def _build(config: TextSFTConfig, output: Path) -> Job:
    """Everything a run needs; reads, writes nothing."""
    from visalign.adapters.causal_lm.demonstrations import DemonstrationBatches, fitting_demonstrations
    from visalign.training import SFT, Trainer
    from visalign.training.loop.progress import TrainingProgress

    accelerator = build_accelerator(config.run, output)
    inputs = prepare_sft(config, str(accelerator.device))
    policy = build_text_policy(config.model, accelerator.device, config.seed, reference=False)
    try:
        fitting = fitting_demonstrations(policy, inputs.demonstrations, too_long=config.data.too_long)
    except UserError as error:
        raise UserError(f"data.train: {error}") from error
    generation, judge = config.generation, config.evaluation.correctness
    measure = evaluator(policy, inputs.rewards, generation.sampling, generation.stopping(), judge)
    batches = DemonstrationBatches(policy, fitting, size=config.data.batch, seed=config.seed)
    trainer = Trainer(
        SFT(policy, batches, accelerator=accelerator),
        optimizer=config.optimizer,
        run=run_settings(config, output),
        evaluate=lambda _: heldout_metrics(measure(inputs.some, config.evaluation.seeds[:1])),
        progress=TrainingProgress(config.run.iterations, max_seconds=config.run.max_seconds),
    )
    return text_job(
        config,
        output,
        name="Supervised fine-tuning",
        policy=policy,
        trainer=trainer,
        measure=measure,
        heldout=inputs.heldout,
        read={"data.train": inputs.demonstrations, "data.heldout": inputs.heldout},
        said=lambda counters: {
            "demonstrations": len(fitting),
            "demonstrations_left_out": len(inputs.demonstrations) - len(fitting),
            "epochs": counters.samples / len(fitting),
        },
        seen=inputs.seen,
    )


def plan(config: TextSFTConfig) -> dict[str, Any]:
    """Batch arithmetic of a job.

    Args:
        config: the configuration.

    Returns:
        Groups of entries: batch, evaluation.

    Raises:
        UserError: something in the configuration cannot be used.
    """
    inputs, pace, length = prepare_sft(config), config.optimizer, config.run.iterations
    updates = length * pace.updates_per_iteration
    visits = length // config.evaluation.every if config.evaluation.every else 0
    first = len(config.evaluation.seeds) + 1  # one more is greedy
    return {
        "batch": {
            "demonstrations": len(inputs.demonstrations),
            "prompts": len(prompt_keys(inputs.demonstrations)),
            "heldout_prompts_trained_on": inputs.seen,
            "demonstrations_per_update": config.data.batch,
            "updates": updates,
            "epochs": updates * config.data.batch / len(inputs.demonstrations),
            "iterations": length,
        },
        "evaluation": {
            "heldout_prompts": len(inputs.heldout),
            "evaluations_on_the_way": visits,
            "completions": 2 * len(inputs.heldout) * first + 2 * visits * len(inputs.some),
        },
    }
