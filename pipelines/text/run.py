# SPDX-License-Identifier: Apache-2.0
"""What the jobs of text policies share: the evaluator, the ends of a run, the code that loads its result."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visalign.pipelines.shared.job import Job, PolicyRun, result_folder
from visalign.pipelines.shared.parts import Records
from visalign.pipelines.shared.run_inputs import fingerprint

if TYPE_CHECKING:
    from visalign.evaluation import HeldoutResult
    from visalign.text import Sampling, StoppingCriteria


def text_job(
    config: Any,
    output: Path,
    *,
    name: str,
    policy: Any,
    trainer: Any,
    measure: Callable[..., HeldoutResult],
    heldout: Records,
    read: Mapping[str, Records],
    said: Callable[[Any], Mapping[str, Any]] = lambda _: {},
    seen: int | None = None,
) -> Job:
    """The job of a text policy.

    Args:
        config: with model, evaluation and run.
        output: the run's folder.
        name: of the method, for the title.
        policy: that is trained.
        trainer: of it.
        measure: (records, seeds) -> the evaluation of the weights that the policy has.
        heldout: held-out records.
        read: what was read, by its key in the configuration.
        said: more entries of the summary, from the counters.
        seen: held-out prompts that are trained on as well, where that is known.
    """
    from visalign.evaluation.heldout.text import prompt_text

    ends = PolicyRun(
        config=config,
        output=output,
        title=f"{name} on {config.model.path}",
        policy=policy,
        trainer=trainer,
        measure=measure,
        heldout=heldout,
        samples="completions",
        load_code=load_code(config, output, sees=policy.processor is not None),
        counts=lambda c: {**said(c), "samples": c.samples, "tokens": c.tokens},
        prompt_text=prompt_text,
        seen=seen,
    )
    prints = {key: fingerprint(records) for key, records in read.items()}
    return Job(trainer=trainer, fingerprints=prints, before=ends.before, after=ends.after)


def load_code(config: Any, output: Path, *, sees: bool = False) -> str:
    """Python that loads the result into transformers, run from where the job was.

    Args:
        config: of the run.
        output: the run's folder.
        sees: whether the model reads pictures, and so has a processor.
    """
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


def evaluator(
    policy: Any,
    rewards: Mapping[str, Any],
    sampling: Sampling,
    stopping: StoppingCriteria,
    correctness: str | None,
) -> Callable[..., HeldoutResult]:
    """A function of (records, seeds) that evaluates the policy with the weights it has."""
    from visalign.evaluation.heldout.text import evaluate_text

    def measure(records: Records, seeds: Any) -> HeldoutResult:
        return evaluate_text(
            policy,
            rewards,
            records,
            seeds=seeds,
            sampling=sampling,
            stopping=stopping,
            correctness=correctness,
        )

    return measure
