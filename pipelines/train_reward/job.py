# SPDX-License-Identifier: Apache-2.0
"""Training a judge: measure, learn from labels, measure again, save what `from_pretrained` reads."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visalign.pipelines.shared.job import JUDGE, JudgeRun, build_trainer, run_job
from visalign.pipelines.shared.parts import build_accelerator, ends_by

from .config import JUDGE_KINDS, TrainRewardConfig
from .inputs import prepare_reward

if TYPE_CHECKING:
    import torch

    from .judges import TrainedJudge

__all__ = ["JUDGE", "TrainRewardConfig", "plan", "run"]


def _build(config: TrainRewardConfig, output: Path) -> JudgeRun:
    """Build the objects of a run, without writing anything."""
    from visalign.training import RewardModeling
    from visalign.training.loop.progress import SUPERVISED_COLUMNS

    from .card import reward_card
    from .examples import ExampleBatches
    from .measure import Measure

    inputs = prepare_reward(config)
    accelerator = build_accelerator(config, output)
    judge, data, count = build_judge(config, accelerator.device), config.data, len(inputs.train)
    heldout = None if inputs.heldout is None else judge.remember(inputs.heldout)
    measure = Measure(config, judge, heldout, (accelerator.process_index, accelerator.num_processes))
    examples = judge.remember(inputs.train)
    algorithm = RewardModeling(
        judge,
        ExampleBatches(examples, judge.encode, size=data.batch, micro=data.micro_batch, seed=config.seed),
        objective=config.objective,
        accelerator=accelerator,
        seed=config.seed,
        penalty=judge.penalty,
        compute_dtype=judge.compute_dtype,
        sharding=config.run.sharding,
        undivided=judge.divide() if config.run.sharding else (),
    )
    trainer = build_trainer(config, output, algorithm, lambda _: measure(), columns=SUPERVISED_COLUMNS)
    for note in (*inputs.notes, *judge.first_notes()):
        trainer.progress.note(note)
    return JudgeRun(
        config=config,
        output=output,
        trainer=trainer,
        fingerprints=inputs.fingerprints,
        network=judge.module,
        measure=measure,
        heldout=measure.size,
        save=judge.save,
        counts=lambda result: {
            "examples": result.counters.samples,
            "epochs": result.counters.samples / count,
            "trainable_parameters": sum(p.numel() for _, p in trainer.weights.named),
        },
        notes=judge.card_notes,
        card=lambda summary, notes: reward_card(config, summary, count, notes),
        next_command=evaluate_command(config, output),
    )


run = partial(run_job, build=_build)


def build_judge(config: TrainRewardConfig, device: torch.device) -> TrainedJudge:
    """Load the judge on its device, ready to train."""
    from .checklist_judge import ChecklistJudge
    from .clip_judges import HpJudge, IctJudge
    from .vlm_judges import AnswerJudge, Hpsv3Judge

    kinds = {"hpsv3": Hpsv3Judge, "checklist": ChecklistJudge, "ict": IctJudge, "hp": HpJudge}
    return kinds.get(config.model.kind, AnswerJudge)(config, device)


def evaluate_command(config: TrainRewardConfig, output: Path) -> list[str]:
    """Build the command that measures the trained reward on the held-out set."""
    reward, source = JUDGE_KINDS[config.model.kind].reward, config.data.heldout
    if reward is None or source is None:
        return ["visalign", "evaluate", "--help"]
    return ["visalign", "evaluate", source, "-r", reward, "--option", f"model={output / JUDGE}"]


def plan(config: TrainRewardConfig) -> dict[str, Any]:
    """Count examples and updates of a job, in groups of entries."""
    inputs = prepare_reward(config)
    updates = config.run.iterations * config.optimizer.updates_per_iteration
    read = updates * config.data.batch
    return {
        "examples": {
            "train": len(inputs.train),
            "heldout": 0 if inputs.heldout is None else len(inputs.heldout),
            "per_update": config.data.batch,
        },
        "length": {
            "iterations": config.run.iterations,
            "updates": updates,
            "examples_seen": read,
            "epochs": read / len(inputs.train),
            "ends_by": ends_by(config.run),
        },
    }
