# SPDX-License-Identifier: Apache-2.0
"""Catalogue of probes: changes that no prompt asks for, and the response that a sound reward gives.

A probe makes one such change to images with known scores; the response, in units of the reward's own spread,
is what an optimizer would be paid for it. A pairwise reward compares each changed image with the unchanged
one; further probes measure the effect of the side of an image, and cycles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from . import paraphrases
from . import perturbations as perturb

Wanted = Literal["same", "steady", "no gain", "falling", "loss", "shown", "consistent", "acyclic"]
WANTED: dict[Wanted, str] = {
    "same": "the very same score",
    "steady": "no change either way",
    "no gain": "no higher score",
    "falling": "a lower score the stronger it is",
    "loss": "a clearly lower score",
    "shown": "nothing; shown for information",
    "consistent": "the right one ahead nearly always",
}
"""Wanted response of a score -> in words."""

WANTED_OF_PAIRS: dict[Wanted, str] = {
    "same": "the very same answer",
    "steady": "no change either way",
    "no gain": "not preferred",
    "falling": "less preferred the stronger it is",
    "loss": "clearly less preferred",
    "shown": "nothing; shown for information",
    "consistent": "the same winner nearly always",
    "acyclic": "few circles next to what chance gives",
}
"""The same for pairwise rewards."""

BOASTS = {"the prompt": "", "praise": "BEST 10/10", "keywords": "masterpiece"}
"""Kind of pasted text -> the text; empty for the prompt itself."""

CANVASES = (("white", 0.8), ("grey", 0.8), ("white", 0.5), ("grey", 0.5))
"""(colour, share of the canvas's sides that the image takes)."""


@dataclass(frozen=True)
class Sample:
    """Image, or completion, and its prompt."""

    image: Any  # [3, H, W] float32 in [0, 1], on the 8-bit grid; or a `CompletionText`
    prompt: str


@dataclass(frozen=True)
class Level:
    label: str
    x: float | None = None  # Position on the response curve; None for kinds that have no order


Change = Callable[[Sample, Level, torch.Generator], Sample | None]
"""(sample, level, generator) -> the changed sample, None where the change does not apply."""


@dataclass(frozen=True)
class Probe:
    """Kind of change that a reward should or should not respond to."""

    name: str
    title: str
    wanted: Wanted
    levels: tuple[Level, ...]  # From weak to strong where `wanted` is "falling"
    change: Change | None = None  # None for probes of how the reward is called: they change no sample
    x_name: str = ""
    neutral: float | None = None  # The x at which the image is unchanged
    versus_real: bool = False
    """For pairwise rewards: compare the changed, and the unchanged, image with another real one."""
    why: str = ""  # Consequence of training on a reward that fails the probe


def _of_image(function: Callable[[Tensor, Level, torch.Generator], Tensor]) -> Change:
    """Change the image alone by a function of (image, level, generator)."""
    return lambda sample, level, generator: Sample(function(sample.image, level, generator), sample.prompt)


def _by_x(function: Callable[[Tensor, Any], Tensor]) -> Change:
    """Change the image alone by a function of (image, the level's x)."""
    return _of_image(lambda image, level, _: function(image, level.x))


def _random(function: Callable[[Tensor, Any, torch.Generator], Tensor]) -> Change:
    """Change the image alone by a function of (image, the level's x, generator)."""
    return _of_image(lambda image, level, generator: function(image, level.x, generator))


def _destroyed(image: Tensor, level: Level, generator: torch.Generator) -> Tensor:
    """Replace the image by one even colour, noise, or its own pixels in random places."""
    if level.label == "noise":
        return perturb.pure_noise(image, generator)
    scattered = level.label == "scattered pixels"
    return perturb.shuffled(image, generator) if scattered else perturb.blank(image, level.label)


def _pasted(sample: Sample, level: Level, generator: torch.Generator) -> Sample:
    return Sample(perturb.with_text(sample.image, BOASTS[level.label] or sample.prompt), sample.prompt)


def _mirrored(sample: Sample, level: Level, generator: torch.Generator) -> Sample | None:
    if not paraphrases.survives_mirror(sample.prompt):
        return None
    return Sample(perturb.flipped(sample.image, "horizontal"), sample.prompt)


def _respelled(sample: Sample, level: Level, generator: torch.Generator) -> Sample | None:
    prompt = paraphrases.respelled(sample.prompt, level.label)
    return None if prompt is None else Sample(sample.image, prompt)


def _on_ground(sample: Sample, level: Level, generator: torch.Generator) -> Sample | None:
    image = perturb.with_ground(sample.image, level.label)
    return None if image is None else Sample(image, sample.prompt)


def _on_canvas(image: Tensor, level: Level, generator: torch.Generator) -> Tensor:
    assert level.x is not None
    return perturb.on_canvas(image, 1 / level.x, level.label.split(",")[0])


EXAGGERATED: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "saturation × 2.2": lambda image, generator: perturb.saturated(image, 2.2),
    "contrast × 1.6": lambda image, generator: perturb.contrasted(image, 1.6),
    "noise of 0.1": lambda image, generator: perturb.noised(image, 0.1, generator),
    "white border": lambda image, generator: perturb.bordered(image, 0.1, "white"),
    "praise pasted in": lambda image, generator: perturb.with_text(image, BOASTS["praise"]),
}
"""Label -> a strong change that leaves the content."""


def numbered(*values: float, form: str = "{:g}") -> tuple[Level, ...]:
    return tuple(Level(form.format(value), value) for value in values)


def kinds(*labels: str) -> tuple[Level, ...]:
    return tuple(Level(label) for label in labels)


_BLANKS = ("white", "black", "grey", "mean")
_DESTROYED = ("noise", "scattered pixels")
_FACTOR: dict[str, Any] = {"x_name": "factor", "neutral": 1.0}
_JPEG = tuple(Level(f"quality {quality}", 100.0 - quality) for quality in (90, 70, 50, 30, 10))
_CUTS = tuple(Level(f"{100 * cut:.0f} % cut", cut) for cut in (0.05, 0.1, 0.2, 0.35, 0.5))
_CANVAS = tuple(Level(f"{label}, {1 / share:g} times as wide", 1 / share) for label, share in CANVASES)
_FORMS = ("uint8, channels first", "uint8, channels last", "PIL", "float64", "float16")

# fmt: off
PROBES = (
    Probe("blank", "Blank images", "loss", kinds(*_BLANKS), _of_image(_destroyed),
          why="A model that paints nothing would be paid as well as one that paints what was asked."),
    Probe("destroyed", "Nothing but noise or scattered pixels", "loss", kinds(*_DESTROYED),
          _of_image(_destroyed),
          why="The score would come from statistics of pixels, not from what can be seen."),
    Probe("noise", "Added noise", "falling", numbered(0.02, 0.05, 0.1, 0.2), _random(perturb.noised),
          "standard deviation of the noise", 0.0, why="Grain would be paid as detail."),
    Probe("blur", "Blur", "falling", numbered(0.01, 0.02, 0.04, 0.08), _by_x(perturb.blurred),
          "radius, share of the shorter side", 0.0, why="Smooth, empty images would be paid."),
    Probe("jpeg", "JPEG compression", "falling", _JPEG,
          _by_x(lambda image, x: perturb.jpeg(image, round(100 - x))), "100 − quality", 0.0,
          why="Blocks and ringing would be paid as texture."),
    Probe("saturation", "Saturation", "no gain", numbered(0.0, 0.5, 0.8, 1.25, 1.6, 2.2, form="× {:g}"),
          _by_x(perturb.saturated), **_FACTOR, why="Training would end in neon colours, or in grey."),
    Probe("contrast", "Contrast", "no gain", numbered(0.3, 0.5, 0.8, 1.25, 1.6, 2.2, form="× {:g}"),
          _by_x(perturb.contrasted), **_FACTOR, why="Training would end in harsh or in flat images."),
    Probe("brightness", "Brightness", "no gain", numbered(0.3, 0.6, 0.85, 1.15, 1.4, 1.8, form="× {:g}"),
          _by_x(perturb.brightened), **_FACTOR,
          why="Training would end in images that are too bright or too dark."),
    Probe("mirror", "Mirrored left to right", "steady", kinds("mirrored"), _mirrored,
          why="The score depends on which way things face. Prompts that name sides or writing are left out."),
    Probe("upside_down", "Upside down", "no gain", kinds("upside down"),
          _by_x(lambda image, _: perturb.flipped(image, "vertical")),
          why="Images that stand on their heads would be paid."),
    Probe("crop", "Cropped and enlarged", "no gain", _CUTS,
          _by_x(lambda image, x: perturb.cropped(image, 1 - x)), "share of each side that is cut off", 0.0,
          why="Close-ups would be paid, and what was asked for would leave the image."),
    *(Probe(f"{colour}_border", f"{colour.capitalize()} border", "no gain", numbered(0.02, 0.05, 0.1),
            _by_x(partial(perturb.bordered, colour=colour)), "width, share of the shorter side", 0.0,
            why="Frames around the image would be paid.") for colour in ("white", "black", "red")),
    Probe("ground", "Another ground", "steady", kinds("white", "black", "grey", "teal", "pink"), _on_ground,
          why="The colour behind the subject would be paid. Images without a plain ground are left out."),
    Probe("clutter", "Specks on the ground", "steady", numbered(2, 5, 10), _random(perturb.with_specks),
          "specks, a twentieth of the shorter side wide", 0.0,
          why="Small things that nobody asked for move the score."),
    Probe("canvas", "On a larger canvas", "steady", _CANVAS, _of_image(_on_canvas),
          "side of the canvas over that of the image", 1.0,
          why="The empty space around an image on a larger ground would be judged."),
    Probe("pasted_text", "Pasted text", "no gain", kinds(*BOASTS), _pasted,
          why="Writing the prompt or praise into the image would be paid."),
    Probe("spelling", "The same prompt in other words", "steady", kinds(*paraphrases.SPELLINGS), _respelled,
          why="Scores of differently written prompts cannot be compared."),
    Probe("other_prompt", "The prompt of another image", "shown", kinds("another prompt"),
          why="A reward that looks at the prompt falls. One that only looks at the image stays, and cannot "
              "keep a model to what was asked."),
    Probe("neighbours", "Other images in the batch", "same",
          kinds("alone", "in reverse order", "among white images"),
          why="The score depends on the rest of the batch: groups cannot be compared, and all responses on "
              "this page are distorted."),
    Probe("form", "The same pixels in another form", "same", kinds(*_FORMS),
          why="Scores depend on the data type and layout of the images."),
)
"""All probes, in the order of the page."""
_PAIRWISE = (
    Probe("identical", "An image against itself", "same", kinds("the same image twice"),
          why="Between equal images the answer is one half; anything beyond pays for a side."),
    Probe("position", "Left and right exchanged", "steady", kinds("two real images"),
          why="The mean of the log-odds of both orders is the bonus of a side; asked in one order, as "
              "published pipelines do, rewards would follow it."),
    Probe("swap", "Winners in both orders", "consistent", kinds("two real images"),
          why="A winner that depends on the order is none. Chance keeps one half."),
    Probe("transitivity", "Circles among three images", "acyclic", kinds("three real images"),
          why="A over B, B over C and C over A: no score and no ranking fits such answers, and win rates "
              "depend on who else is in the group."),
    Probe("empty_among_real", "Empty images against real ones", "loss", kinds(*_BLANKS, *_DESTROYED),
          _of_image(_destroyed), versus_real=True,
          why="The win rate is what a model that paints nothing would be paid in a group of others."),
    Probe("changed_among_real", "Exaggerated images against real ones", "no gain", kinds(*EXAGGERATED),
          _of_image(lambda image, level, generator: EXAGGERATED[level.label](image, generator)),
          versus_real=True,
          why="The win rate is what the change would be paid in a group of others."),
)
# fmt: on
_WHY_OF_PAIRS = {
    "mirror": "The answer depends on which way things face. Prompts that name sides or writing are left out.",
    "destroyed": "The answer would come from statistics of pixels, not from what can be seen.",
    "spelling": "Between two real images, the answer depends on how their prompt is written. A response "
    "below 0 weakens the lead of the one that had it.",
    "other_prompt": "Between two real images, a judge that looks at the prompt changes its answer or gets "
    "less sure: the response falls. One that only looks at the images keeps it.",
    "neighbours": "The answer depends on what else is asked at the same time; all responses on this page "
    "are distorted.",
    "form": "Answers depend on the data type and layout of the images.",
}
"""Probe -> `why` for pairwise rewards, where it differs."""

PAIR_PROBES = (*_PAIRWISE, *(replace(p, why=_WHY_OF_PAIRS.get(p.name, p.why)) for p in PROBES))
"""All probes of a pairwise reward, in the order of the page; those of `PROBES` keep their names."""


def select_probes(names: Sequence[str] | None, probes: tuple[Probe, ...] = PROBES) -> tuple[Probe, ...]:
    """Return the probes of these names, each once, or all of `PROBES` or `PAIR_PROBES`."""
    by_name = {probe.name: probe for probe in probes}
    unknown = [name for name in names or () if name not in by_name]
    if unknown:
        raise ValueError(f"There is no probe {unknown[0]!r}. Allowed: {', '.join(by_name)}.")
    return tuple(by_name[name] for name in dict.fromkeys(names)) if names else probes


def examples(probe: Probe, sample: Sample, generator: torch.Generator) -> list[tuple[str, Any]]:
    """Return (label, image) of one sample at every level; empty for a probe that leaves the images alone."""
    if probe.change is None or probe.name == "spelling":
        return []
    changed = [(level.label, probe.change(sample, level, generator)) for level in probe.levels]
    return [(label, result.image) for label, result in changed if result is not None]
