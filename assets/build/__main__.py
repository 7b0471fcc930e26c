# SPDX-License-Identifier: Apache-2.0
"""Train the packaged models and print the numbers of their cards.

    python -m assets.build [STAGE ...] --output FOLDER

Run it in the root of a checkout. Without a stage all run in order, hours on a CPU; a stage reads what the
earlier ones wrote into FOLDER. Seeds are fixed. The card of each model (`README.md`) is written by hand.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from visalign.data.assets import resolve_model

from .stage import Plan, machine, size_of


def _autoencoder(output: Path, plan: Plan) -> dict[str, float]:
    from .autoencoder import train_autoencoder

    train_autoencoder(plan).save_pretrained(output / "vae")
    return {}


def _generator(output: Path, plan: Plan) -> dict[str, float]:
    from diffusers import AutoencoderKL

    from .generator import pipeline_measures, save_pipeline, train_generator

    autoencoder = AutoencoderKL.from_pretrained(output / "vae").eval()
    pipeline = train_generator(autoencoder, plan).pipeline(autoencoder)
    save_pipeline(pipeline, output / "shapes-sd3")
    return pipeline_measures(output / "shapes-sd3")


def _base(output: Path, name: str) -> Path:
    """Return the folder of a model of this build, or else the packaged one."""
    return output / name if (output / name).is_dir() else Path(resolve_model(name))


def _sd15(output: Path, plan: Plan) -> dict[str, float]:
    from .generator import pipeline_measures, save_pipeline
    from .unet import base_autoencoder, train_unet

    base = _base(output, "shapes-sd3")
    pipeline = train_unet(base, plan).pipeline(base_autoencoder(base))
    save_pipeline(pipeline, output / "shapes-sd15")
    return pipeline_measures(output / "shapes-sd15")


def _composed(output: Path, plan: Plan) -> dict[str, float]:
    from .composed import train_composed
    from .generator import pipeline_measures, save_pipeline

    folder = output / "shapes-sd3-composed"
    save_pipeline(train_composed(_base(output, "shapes-sd3"), plan), folder)
    return pipeline_measures(folder)


def _clip(output: Path, plan: Plan, grounds: bool = False) -> dict[str, float]:
    from .clip import retrieval, save_clip, train_clip, widen_clip

    folder = output / "shapes-clip"
    model = widen_clip(folder, plan) if grounds else train_clip(plan)
    save_clip(model, folder)
    return retrieval(model, draws=50)


def _language(output: Path, plan: Plan) -> dict[str, float]:
    from .language import language_measures, save_language, train_language

    save_language(train_language(plan), output / "tasks-qwen3")
    return language_measures(output / "tasks-qwen3", plan.language_per_task)


def _judge(output: Path, plan: Plan, grounds: bool = False) -> dict[str, float]:
    from .judge import train_judge, widen_judge
    from .judge_measures import save_judge, saved_accuracy

    folder = output / "shapes-vlm"
    save_judge(widen_judge(folder, plan) if grounds else train_judge(plan), folder)
    return saved_accuracy(folder, plan.judge_check)


def _heie(output: Path, plan: Plan) -> dict[str, float]:
    from .heie import build_heie

    base = output / "shapes-vlm"
    return build_heie(base if base.is_dir() else "shapes-vlm", output / "shapes-heie", plan)


STAGES: dict[str, Callable[[Path, Plan], Mapping[str, float]]] = {
    "autoencoder": _autoencoder,
    "generator": _generator,
    "sd15": _sd15,
    "composed": _composed,
    "clip": _clip,
    "clip_grounds": partial(_clip, grounds=True),
    "language": _language,
    "judge": _judge,
    "judge_grounds": partial(_judge, grounds=True),
    "heie": _heie,
}
"""Stages in order; `*_grounds` continue a model on other backgrounds, with specks and on canvases."""


def build(output: Path, stages: list[str], plan: Plan | None = None) -> None:
    """Run stages and print their measurements."""
    output.mkdir(parents=True, exist_ok=True)
    for stage in stages or STAGES:
        started = time.monotonic()
        measures = STAGES[stage](output, plan or Plan())
        print(f"{stage}: {(time.monotonic() - started) / 60:.0f} minutes on {machine()}")
        for name, value in measures.items():
            print(f"  {name:28} {value:.3f}")
    for folder in sorted(path for path in output.iterdir() if path.is_dir()):
        print(f"{folder.name}: {size_of(folder):.1f} MB")


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and build."""
    parser: Any = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stages", nargs="*", choices=[[], *STAGES], default=[], metavar="STAGE")
    parser.add_argument("--output", "-o", type=Path, required=True)
    options = parser.parse_args(arguments)
    build(options.output, options.stages)


if __name__ == "__main__":
    main()
