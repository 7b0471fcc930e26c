# SPDX-License-Identifier: Apache-2.0
"""`visalign build-assets`: trains the embedded models and writes them with their cards.

Stages: autoencoder, generator (with its text encoders), clip, language, judge (vision-language), heie (heads
on the judge). Each but the last saves its state as it goes; `--resume` goes on where the last run stopped.
Everything is drawn from fixed seeds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from visalign.errors import UserError

from .plan import Plan

STAGES = ("autoencoder", "generator", "clip", "language", "judge", "heie")


def main(output: Path, only: str | None = None, resume: bool = False, plan: Plan | None = None) -> None:
    """Train what is missing and write the model folders into `output`.

    Args:
        output: gets `shapes-sd3`, `shapes-clip`, `tasks-qwen3`, `shapes-vlm`, `shapes-heie`, and `.build`
            with the resumable state.
        only: one of STAGES; the others must have been trained before where it needs them.
        resume: go on from saved states; without it, existing ones are an error.
        plan: lengths of the stages.
    """
    plan = plan or Plan()
    if only is not None and only not in STAGES:
        raise UserError(f"There is no stage {only!r}. Stages: {', '.join(STAGES)}.")
    work = output / ".build"
    if work.exists() and any(work.iterdir()) and not resume:
        raise UserError(f"{work} holds the state of an earlier build. Add --resume to go on, or remove it.")
    work.mkdir(parents=True, exist_ok=True)
    for stage in STAGES:
        if only in (None, stage):
            _RUN[stage](output, work, plan, resume)


def _timed(work: Path, stage: str, train: Callable[[], Any]) -> Any:
    """Run a stage and add its seconds to those of earlier, interrupted runs."""
    file = work / f"{stage}.seconds.json"
    before = json.loads(file.read_text())["seconds"] if file.exists() else 0.0
    started = time.monotonic()
    try:
        return train()
    finally:
        file.write_text(json.dumps({"seconds": before + time.monotonic() - started}))


def _seconds(work: Path, stage: str) -> float:
    file = work / f"{stage}.seconds.json"
    return float(json.loads(file.read_text())["seconds"]) if file.exists() else float("nan")


def _autoencoder(output: Path, work: Path, plan: Plan, resume: bool) -> None:
    from .autoencoder import train_autoencoder

    steps, batch = plan.autoencoder_steps, plan.autoencoder_batch
    model = _timed(
        work,
        "autoencoder",
        lambda: train_autoencoder(work, steps=steps, batch=batch, seed=plan.seed, resume=resume),
    )
    model.save_pretrained(work / "vae")


def _generator(output: Path, work: Path, plan: Plan, resume: bool) -> None:
    from diffusers import AutoencoderKL

    from .generator import save_pipeline, train_generator

    if not (work / "vae").is_dir():
        raise UserError(f"{work / 'vae'} is missing: train the stage 'autoencoder' first.")
    autoencoder = AutoencoderKL.from_pretrained(work / "vae").eval()
    steps, batch = plan.generator_steps, plan.generator_batch
    generator = _timed(
        work,
        "generator",
        lambda: train_generator(
            autoencoder, work, steps=steps, batch=batch, seed=plan.seed + 1, resume=resume
        ),
    )
    save_pipeline(generator, autoencoder, output / "shapes-sd3")
    write_generator_card(output, work, plan)


def _clip(output: Path, work: Path, plan: Plan, resume: bool) -> None:
    from visalign.rewards.clip.open_clip_folder import save_open_clip

    from .captions import new_tokenizer
    from .clip import MEAN, STD, clip_config, train_clip

    steps, batch = plan.clip_steps, plan.clip_batch
    model = _timed(
        work, "clip", lambda: train_clip(work, steps=steps, batch=batch, seed=plan.seed + 2, resume=resume)
    )
    preprocess = {"mean": MEAN, "std": STD, "interpolation": "bicubic", "resize_mode": "shortest"}
    folder = output / "shapes-clip"
    save_open_clip(folder, model, clip_config(), new_tokenizer(), preprocess_cfg=preprocess)
    write_clip_card(output, work, plan)


def _language(output: Path, work: Path, plan: Plan, resume: bool) -> None:
    from .language import NAME, language_card, save_language, train_language

    steps, batch, per_task = plan.language_steps, plan.language_batch, plan.language_per_task
    model = _timed(
        work,
        "language",
        lambda: train_language(
            work, steps=steps, batch=batch, seed=plan.seed + 3, resume=resume, check_per_task=min(5, per_task)
        ),
    )
    save_language(model, output / NAME)
    seconds = _seconds(work, "language")
    card = language_card(output / NAME, seconds, steps=steps, batch=batch, per_task=per_task)
    (output / NAME / "README.md").write_text(card, encoding="utf-8")


def _judge(output: Path, work: Path, plan: Plan, resume: bool) -> None:
    from .judge import train_judge
    from .judge_card import NAME, judge_card, save_judge

    sizes: dict[str, Any] = {
        "vision_steps": plan.judge_vision_steps,
        "steps": plan.judge_steps,
        "batch": plan.judge_batch,
    }
    model = _timed(
        work, "judge", lambda: train_judge(work, **sizes, seed=plan.seed + 4, resume=resume, save_every=150)
    )
    save_judge(model, output / NAME)
    card = judge_card(output / NAME, _seconds(work, "judge"), **sizes, check=plan.judge_check)
    (output / NAME / "README.md").write_text(card, encoding="utf-8")


def _heie(output: Path, work: Path, plan: Plan, resume: bool) -> None:
    from visalign.data.assets import assets_folder

    from .heie_plan import HeiePlan
    from .judge_card import NAME as BASE
    from .train_heie import NAME, build_heie

    mine = output / BASE
    own = mine.is_dir() and mine.resolve() != (assets_folder() / BASE).resolve()
    sizes = {"pictures": plan.heie_pictures, "steps": plan.heie_steps, "test": plan.heie_check}
    build_heie(mine if own else BASE, output / NAME, HeiePlan(**sizes, seed=plan.seed + 5))


_RUN = {
    "autoencoder": _autoencoder,
    "generator": _generator,
    "clip": _clip,
    "language": _language,
    "judge": _judge,
    "heie": _heie,
}


def write_generator_card(output: Path, work: Path, plan: Plan) -> None:
    """Measure the saved pipeline as a user loads it, and write its card."""
    from .cards import generator_card

    seconds = {stage: _seconds(work, stage) for stage in ("autoencoder", "generator")}
    card = generator_card(output / "shapes-sd3", seconds, plan)
    (output / "shapes-sd3" / "README.md").write_text(card, encoding="utf-8")


def write_clip_card(output: Path, work: Path, plan: Plan) -> None:
    """Measure the saved model as a user loads it, and write its card."""
    from .cards import clip_card

    card = clip_card(output / "shapes-clip", _seconds(work, "clip"), plan)
    (output / "shapes-clip" / "README.md").write_text(card, encoding="utf-8")
