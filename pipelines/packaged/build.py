# SPDX-License-Identifier: Apache-2.0
"""`visalign build-assets`: trains the embedded models and writes them with their cards.

Stages: autoencoder, generator (with its text encoders), sd15 (a UNet on that autoencoder), clip, language,
judge (vision-language), heie (heads on the judge); clip_grounds and judge_grounds go on with a judge on other
grounds, specks and canvases. Each but the last saves its state as it goes; `--resume` goes on where the last
run stopped. Everything is drawn from fixed seeds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from visalign.errors import UserError
from visalign.pipelines.shared.run_folder import check_place

from .stage import Plan


def main(output: Path, only: str | None = None, resume: bool = False, plan: Plan | None = None) -> None:
    """Train what is missing and write the model folders into `output`.

    Args:
        output: gets `shapes-sd3`, `shapes-sd15`, `shapes-clip`, `tasks-qwen3`, `shapes-vlm`, `shapes-heie`,
            and `.build` with the resumable state.
        only: one of STAGES; the others must have been trained before where it needs them.
        resume: go on from saved states; without it, existing ones are an error.
        plan: lengths of the stages.
    """
    plan = plan or Plan()
    if only is not None and only not in STAGES:
        raise UserError(f"There is no stage {only!r}. Stages: {', '.join(STAGES)}.")
    check_place(output)
    work = output / ".build"
    if work.exists() and any(work.iterdir()) and not resume:
        raise UserError(f"{work} holds the state of an earlier build. Add --resume to go on, or remove it.")
    work.mkdir(parents=True, exist_ok=True)
    for stage in STAGES:
        if only in (None, stage):
            STAGES[stage](output, work, plan, resume)


def _timed(work: Path, stage: str, train: Callable[[], Any]) -> tuple[Any, float]:
    """What a stage trains, and its seconds with those of earlier, interrupted runs."""
    file = work / f"{stage}.seconds.json"
    before = json.loads(file.read_text())["seconds"] if file.exists() else 0.0
    started = time.monotonic()
    try:
        return train(), before + time.monotonic() - started
    finally:
        file.write_text(json.dumps({"seconds": before + time.monotonic() - started}))


def _card(folder: Path, text: str) -> None:
    (folder / "README.md").write_text(text, encoding="utf-8")


def _trained(folder: Path, stage: str) -> Path:
    """The folder, once its stage has written it."""
    if not folder.is_dir():
        raise UserError(f"{folder} is missing: train the stage '{stage}' first.")
    return folder


def _autoencoder(output: Path, work: Path, plan: Plan, resume: bool) -> None:
    from .autoencoder import train_autoencoder

    model, _ = _timed(work, "autoencoder", lambda: train_autoencoder(work, plan, resume))
    model.save_pretrained(work / "vae")


def _generator(output: Path, work: Path, plan: Plan, resume: bool) -> None:
    from diffusers import AutoencoderKL

    from .generator import generator_card, save_pipeline, train_generator

    if not (work / "vae").is_dir():
        raise UserError(f"{work / 'vae'} is missing: train the stage 'autoencoder' first.")
    autoencoder = AutoencoderKL.from_pretrained(work / "vae").eval()
    _, first = _timed(work, "autoencoder", lambda: None)
    generator, seconds = _timed(work, "generator", lambda: train_generator(autoencoder, work, plan, resume))
    folder = output / "shapes-sd3"
    save_pipeline(generator, autoencoder, folder)
    _card(folder, generator_card(folder, first + seconds, plan))


def _base(output: Path, name: str) -> Path | None:
    """The folder of a model that this build made, or None where the packaged one serves."""
    from visalign.data.assets import assets_folder

    folder = output / name
    return folder if folder.is_dir() and folder.resolve() != (assets_folder() / name).resolve() else None


def _sd15(output: Path, work: Path, plan: Plan, resume: bool) -> None:
    from visalign.data.assets import resolve_model

    from .unet import NAME, base_autoencoder, save_unet, train_unet, unet_card

    base = _base(output, "shapes-sd3") or Path(resolve_model("shapes-sd3"))
    model, seconds = _timed(work, "sd15", lambda: train_unet(base, work, plan, resume))
    save_unet(model, base_autoencoder(base), output / NAME)
    _card(output / NAME, unet_card(output / NAME, seconds, plan))


def _clip(output: Path, work: Path, plan: Plan, resume: bool) -> None:
    from .clip import clip_card, save_clip, train_clip

    model, seconds = _timed(work, "clip", lambda: train_clip(work, plan, resume))
    folder = output / "shapes-clip"
    save_clip(model, folder)
    _card(folder, clip_card(folder, seconds, plan))


def _language(output: Path, work: Path, plan: Plan, resume: bool) -> None:
    from .language import NAME, language_card, save_language, train_language

    model, seconds = _timed(work, "language", lambda: train_language(work, plan, resume))
    save_language(model, output / NAME)
    _card(output / NAME, language_card(output / NAME, seconds, plan))


def _judge(output: Path, work: Path, plan: Plan, resume: bool) -> None:
    from .judge import train_judge
    from .judge_card import NAME, judge_card, save_judge

    model, seconds = _timed(work, "judge", lambda: train_judge(work, plan, resume))
    save_judge(model, output / NAME)
    _card(output / NAME, judge_card(output / NAME, seconds, plan))


def _clip_grounds(output: Path, work: Path, plan: Plan, resume: bool) -> None:
    from .clip import clip_card, save_clip, widen_clip

    folder = _trained(output / "shapes-clip", "clip")
    model, seconds = _timed(work, "clip_grounds", lambda: widen_clip(folder, work, plan, resume))
    save_clip(model, folder)
    _card(folder, clip_card(folder, seconds + _timed(work, "clip", lambda: None)[1], plan))


def _judge_grounds(output: Path, work: Path, plan: Plan, resume: bool) -> None:
    from .judge import widen_judge
    from .judge_card import NAME, judge_card, save_judge

    folder = _trained(output / NAME, "judge")
    model, seconds = _timed(work, "judge_grounds", lambda: widen_judge(folder, work, plan, resume))
    save_judge(model, folder)
    _card(folder, judge_card(folder, seconds + _timed(work, "judge", lambda: None)[1], plan))


def _heie(output: Path, work: Path, plan: Plan, resume: bool) -> None:
    from .judge_card import NAME as BASE
    from .train_heie import NAME, HeiePlan, build_heie

    sizes = {"images": plan.heie_images, "steps": plan.heie_steps, "test": plan.heie_check}
    build_heie(_base(output, BASE) or BASE, output / NAME, HeiePlan(**sizes, seed=plan.seed + 5))


STAGES: dict[str, Callable[[Path, Path, Plan, bool], None]] = {
    "autoencoder": _autoencoder,
    "generator": _generator,
    "sd15": _sd15,
    "clip": _clip,
    "clip_grounds": _clip_grounds,
    "language": _language,
    "judge": _judge,
    "judge_grounds": _judge_grounds,
    "heie": _heie,
}
