# SPDX-License-Identifier: Apache-2.0
"""Training a judge: measure, learn from labels, measure again, save what `from_pretrained` reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visalign.atomic import write_atomic
from visalign.pipelines.shared.job import JUDGE, JudgeRun, build_trainer, run_job
from visalign.pipelines.shared.parts import build_accelerator, ends_by
from visalign.pipelines.shared.run_folder import RunSummary, check_unchanged

from .card import NAMES, reward_card
from .config import ChecklistModel, HpModel, Hpsv3Model, IctModel, TrainRewardConfig
from .inputs import prepare_reward
from .measure import Measure

if TYPE_CHECKING:
    import torch

    from visalign.training import TrainResult

    from .judges import TrainedJudge

__all__ = ["JUDGE", "TrainRewardConfig", "plan", "run"]


def run(config: TrainRewardConfig, output: Path, resume: bool = False) -> RunSummary:
    """Run the job; see `visalign.pipelines.shared.job.run_job`."""

    def build(config: TrainRewardConfig, output: Path) -> RewardRun:
        return _build(config, output, resume)

    return run_job(config, output, resume, build)


def _build(config: TrainRewardConfig, output: Path, resume: bool) -> RewardRun:
    """Everything a run needs; reads, writes nothing."""
    from visalign.training import RewardModeling
    from visalign.training.loop.progress import SUPERVISED_COLUMNS

    from .examples import ExampleBatches
    from .judges import compute_dtype

    inputs = prepare_reward(config)
    if resume:
        check_unchanged(output, inputs.fingerprints)  # before the judge is loaded
    accelerator = build_accelerator(config, output)
    judge, data = build_judge(config, accelerator.device), config.data
    train = judge.remember(inputs.train)
    heldout = None if inputs.heldout is None else judge.remember(inputs.heldout)
    measure = Measure(config, judge, heldout, (accelerator.process_index, accelerator.num_processes))
    algorithm = RewardModeling(
        judge,
        ExampleBatches(train, judge.encode, size=data.batch, micro=data.micro_batch, seed=config.seed),
        objective=config.objective,
        accelerator=accelerator,
        seed=config.seed,
        penalty=judge.penalty,
        compute_dtype=compute_dtype(config.model, accelerator.device),
        sharding=config.run.sharding,
        undivided=judge.divide() if config.run.sharding else (),
    )
    trainer = build_trainer(config, output, algorithm, lambda _: measure(), columns=SUPERVISED_COLUMNS)
    for note in (*inputs.notes, *judge.first_notes()):
        trainer.progress.note(note)
    return RewardRun(
        config=config,
        output=output,
        trainer=trainer,
        fingerprints=inputs.fingerprints,
        judge=judge,
        network=judge.module,
        measure=measure,
        heldout=measure.size,
        examples=len(inputs.train),
        next_command=evaluate_command(config, output),
    )


def build_judge(config: TrainRewardConfig, device: torch.device) -> TrainedJudge:
    """The judge on its device, ready to train."""
    model, seed = config.model, config.seed
    if isinstance(model, IctModel | HpModel):
        from .clip_judges import HpJudge, IctJudge

        is_ict = isinstance(model, IctModel)
        return IctJudge(model, config.data.theta, device) if is_ict else HpJudge(model, seed, device)
    if isinstance(model, ChecklistModel):
        from .checklist_judge import ChecklistJudge

        return ChecklistJudge(model, seed, device)
    from .vlm_judges import AnswerJudge, Hpsv3Judge

    judge = Hpsv3Judge if isinstance(model, Hpsv3Model) else AnswerJudge
    return judge(model, seed, device)  # type: ignore[arg-type]  # of its own kind


def evaluate_command(config: TrainRewardConfig, output: Path) -> list[str]:
    """Build the command that measures the trained reward on the held-out set."""
    reward, source = NAMES[config.model.kind], config.data.heldout
    if reward is None or source is None:
        return ["visalign", "evaluate", "--help"]
    return ["visalign", "evaluate", source, "-r", reward, "--option", f"model={output / JUDGE}"]


@dataclass(frozen=True, kw_only=True)
class RewardRun(JudgeRun):
    """A judge of images."""

    judge: TrainedJudge
    examples: int
    """To learn from."""

    def save(self, folder: Path) -> None:
        """With the words that it is asked with."""
        self.judge.save(folder)

    def counts(self, result: TrainResult) -> dict[str, Any]:
        """Examples seen, and what was trained."""
        samples = result.counters.samples
        return {
            "examples": samples,
            "epochs": samples / self.examples,
            "trainable_parameters": sum(p.numel() for _, p in self.trainer.weights.named),
        }

    def notes(self) -> Any:
        """Return lines about the weights for the card."""
        return self.judge.card_notes()

    def write_card(self, summary: Mapping[str, Any], notes: Any, folder: Path) -> None:
        """Beside the judge."""
        card = reward_card(self.config, summary, self.examples, notes)
        write_atomic(folder / "README.md", card.encode())


def plan(config: TrainRewardConfig) -> Mapping[str, Any]:
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
