# SPDX-License-Identifier: Apache-2.0
"""The frame of a job that trains a text policy: evaluate, train, evaluate again, save, summarise."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visalign.config import config_to_yaml, flatten
from visalign.pipelines.shared.interrupted import TrainingInterrupted
from visalign.pipelines.shared.parts import Records, no_loading_bars
from visalign.pipelines.shared.run_folder import check_same_run
from visalign.pipelines.shared.run_inputs import FINGERPRINTS, check_unchanged, fingerprint, write_once
from visalign.pipelines.shared.sections import FREE_KEYS

from .results import finish, result_folder

if TYPE_CHECKING:
    from visalign.evaluation import HeldoutResult
    from visalign.text import Sampling, Stop
    from visalign.training.loop.loop import Keeping


@dataclass(frozen=True, kw_only=True)
class TextJob:
    """The objects of a run."""

    policy: Any
    trainer: Any
    """With `train`, `resume`, `ema`, `progress` and `loop`."""
    measure: Callable[..., HeldoutResult]
    """(records, seeds) -> the evaluation of the weights that the policy has."""
    heldout: Records
    read: Mapping[str, Records]
    """What was read, by its key in the configuration: a resume on other content is refused."""
    said: Callable[[Any], Mapping[str, Any]] = lambda state: {}
    """More entries of the summary, from the trainer's counters."""


def run_text(
    config: Any, output: Path, resume: bool, *, pipeline: str, build: Callable[[Any, Path], TextJob]
) -> dict[str, Any]:
    """Run a job; nothing is written before everything that can be checked has been.

    Args:
        config: the configuration, with model, evaluation and run.
        output: run folder; new or empty, or with `resume` that of the run to continue.
        resume: continue from the newest whole checkpoint. The result is that of an uninterrupted run.
        pipeline: name of the job, for the folder's config.yaml.
        build: makes the objects; reads, writes nothing.

    Returns:
        The content of summary.json.

    Raises:
        UserError: something in the configuration or the folder cannot be used.
        TrainingInterrupted: after Ctrl-C.
    """
    import torch

    output = Path(output)
    check_same_run(config, output, resume=resume, free=FREE_KEYS)
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    job = build(config, output)
    prints = {name: fingerprint(records) for name, records in job.read.items()}
    if resume:
        check_unchanged(output, prints)
    write_once(output / "config.yaml", f"pipeline: {pipeline}\n" + config_to_yaml(config))
    write_once(output / FINGERPRINTS, json.dumps(prints, indent=1, sort_keys=True) + "\n")
    accelerator = job.trainer.loop.accelerator
    if not config.run.trackers:
        return _work(config, job, output, resume, pipeline)
    accelerator.init_trackers("visalign", config={k: str(v) for k, v in flatten(config).items()})
    try:
        return _work(config, job, output, resume, pipeline)
    finally:
        accelerator.end_training()


def _work(config: Any, job: TextJob, output: Path, resume: bool, pipeline: str) -> dict[str, Any]:
    """Evaluate, train, evaluate, write; returns the summary."""
    from visalign.evaluation import load_heldout

    seeds, path = config.evaluation.seeds, output / "before.npz"
    begin = time.perf_counter()
    if resume and path.is_file():
        before = load_heldout(path)
    else:
        job.trainer.progress.note(
            f"Evaluating {len(job.heldout)} held-out prompts × {len(seeds)} answers before training."
        )
        before = job.measure(job.heldout, seeds)
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
        after = job.measure(job.heldout, seeds)
    after.save(output / "after.npz")
    evaluating += time.perf_counter() - begin
    return finish(
        config,
        output,
        before,
        after,
        pipeline=pipeline,
        result=result,
        evaluating=evaluating,
        heldout=job.heldout,
        sees=job.policy.processor is not None,
        more=job.said(result.state),
    )


def keeping_of(config: Any, output: Path) -> Keeping:
    """Length, checkpoints and evaluations of a run."""
    from visalign.training.loop.loop import Keeping

    return Keeping(
        folder=output,
        iterations=config.run.iterations,
        checkpoint_every=config.run.checkpoint_every,
        keep_checkpoints=config.run.keep_checkpoints,
        evaluate_every=config.evaluation.every,
        max_seconds=config.run.max_seconds,
        config=asdict(config),
        free_keys=FREE_KEYS,
    )


def evaluator(
    policy: Any, rewards: Mapping[str, Any], sampling: Sampling, stop: Stop, correctness: str | None
) -> Callable[..., HeldoutResult]:
    """A function of (records, seeds) that evaluates the policy with the weights it has."""
    from visalign.evaluation.heldout.text import evaluate_text

    def measure(records: Records, seeds: Any) -> HeldoutResult:
        return evaluate_text(
            policy, rewards, records, seeds=seeds, sampling=sampling, stop=stop, correctness=correctness
        )

    return measure
