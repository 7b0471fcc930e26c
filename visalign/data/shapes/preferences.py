# SPDX-License-Identifier: Apache-2.0
"""Pairs, votes and quality scores of the shapes world: data to train and to test judges, with known truth.

An image has a utility for a prompt: u = 2·[all checks hold] + (partial credit) + ½·richness + quality, with
richness and quality in [0, 1] (`Scene`). An annotator does not see u but u + s·ε, with ε standard normal and
s = 0.15 + 1.2·(1 − quality): of a degraded image it is harder to say how good it is. So votes disagree for
a reason that can be seen in the images, and a judge's standard deviation can be right or wrong.

Source of the vote model: Thurstone, "A law of comparative judgment", 1927, case III (unequal variances).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from visalign.errors import UserError

from .neighbours import Neighbours
from .prompts import CATEGORIES, Record, heldout_prompts, train_prompts
from .render import render
from .scenes import DISTORTIONS, STYLES, Scene, sample_scene
from .surroundings import surround
from .verifier import verify_scene

SPLITS = ("train", "heldout")
Kind = Literal["alignment", "quality", "richness", "mixed"]
"""Differences between the images of a pair; "mixed" draws everything freely."""
KINDS: tuple[Kind, ...] = get_args(Kind)

CLEAR = 0.3  # From this difference of utility on, the truth of a pair counts as clear

_BASE_NOISE, _QUALITY_NOISE = 0.15, 1.2
_DISTORTED = {"blur": "blurred", "noise": "noisy", "jpeg": "compression marks", "contrast": "low contrast"}
VISIBLE = 0.3  # Severity below which a distortion is neither asked about nor named in a reason


@dataclass(frozen=True, kw_only=True)
class ShapesPair:
    """Two images of one prompt, their true utilities, and the votes of annotators."""

    record: Record
    left: Scene
    right: Scene
    kind: str
    utility: tuple[float, float]  # Values of left and right
    noise: tuple[float, float]  # Standard deviation with which an annotator sees each
    votes: tuple[int, int]  # For left and for right

    @property
    def prompt(self) -> str:
        return self.record["prompt"]

    @property
    def is_clear(self) -> bool:
        """True if the utilities differ by at least `CLEAR`."""
        return abs(self.utility[0] - self.utility[1]) >= CLEAR

    @property
    def prob(self) -> float:
        """True probability that an annotator prefers the left: Φ((u_l − u_r) / √(s_l² + s_r²))."""
        std = math.hypot(*self.noise) * math.sqrt(2)
        return 0.5 * (1 + math.erf((self.utility[0] - self.utility[1]) / std))

    @property
    def reason(self) -> str:
        """Teacher's reason: for each image the first fault against the prompt, the distortion, the style."""
        faults = []
        for number, scene in enumerate((self.left, self.right), 1):
            fault = verify_scene(scene, self.record).reason.partition(";")[0]
            distortion = _DISTORTED.get(scene.distortion.kind) if scene.distortion.severity >= VISIBLE else ""
            faults.append(f"picture {number}: {', '.join(filter(None, (fault, distortion, scene.style)))}")
        return "; ".join(faults)

    def images(self) -> tuple[np.ndarray, np.ndarray]:
        """Render left and right, uint8 [64, 64, 3]."""
        return render(self.left), render(self.right)


@dataclass(frozen=True, kw_only=True)
class ShapesQuality:
    """An image and its ratings by annotators from 1 to 5."""

    scene: Scene
    mos: float  # Mean opinion score, 1 + 4·quality plus the error of the mean of the ratings
    std: float  # Standard deviation of the ratings


def utility(scene: Scene, record: Record) -> float:
    """Compute the utility of an image for a prompt, in [0, 4.5]."""
    verdict = verify_scene(scene, record)
    return 2.0 * verdict.correct + verdict.score + 0.5 * scene.richness + scene.quality


def annotator_noise(scene: Scene) -> float:
    """Compute the standard deviation of an annotator's error about an image's utility."""
    return _BASE_NOISE + _QUALITY_NOISE * (1.0 - scene.quality)


class ShapesPreferences:
    """Generator of endless pairs and rated images; number n is a function of (seed, split, n) alone.

    `annotators` vote on a pair; `kinds` are differences of KINDS, each equally often; `surroundings` is the share of
    images on other grounds, with specks or on a canvas (`surround`).
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        split: str = "train",
        annotators: int = 9,
        kinds: Sequence[str] = KINDS,
        surroundings: float = 0.0,
    ) -> None:
        if split not in SPLITS:
            raise UserError(f"The shapes world has no split {split!r}; allowed: {', '.join(SPLITS)}.")
        records = train_prompts() if split == "train" else heldout_prompts()
        self._groups = [[r for r in records if r["tag"] == name] for name in CATEGORIES]
        self._neighbours = Neighbours(records)
        self._seed = (seed, SPLITS.index(split))
        self._annotators, self._kinds, self._surroundings = annotators, tuple(kinds), surroundings

    def pair(self, number: int) -> ShapesPair:
        """Generate pair `number`."""
        rng = np.random.default_rng([*self._seed, 0, number])
        record = self.record(rng)
        kind = self._kinds[int(rng.integers(len(self._kinds)))]
        left, right = self._scenes(record, kind, rng)
        if rng.random() < 0.5:
            left, right = right, left
        values = utility(left, record), utility(right, record)
        noise = annotator_noise(left), annotator_noise(right)
        perceived = rng.normal(values, noise, size=(self._annotators, 2))
        left_votes = int((perceived[:, 0] > perceived[:, 1]).sum())
        left, right = self.surrounded([left, right], number)
        return ShapesPair(
            record=record,
            left=left,
            right=right,
            kind=kind,
            utility=values,
            noise=noise,
            votes=(left_votes, self._annotators - left_votes),
        )

    def quality(self, number: int) -> ShapesQuality:
        """Generate rated image `number`."""
        rng = np.random.default_rng([*self._seed, 1, number])
        scene = degraded(sample_scene(self.record(rng), rng), rng)
        ratings = rng.normal(1.0 + 4.0 * scene.quality, 2 * annotator_noise(scene), self._annotators)
        ratings = ratings.clip(1, 5)
        std = float(ratings.std(ddof=1)) if len(ratings) > 1 else 0.0
        (scene,) = self.surrounded([scene], number)
        return ShapesQuality(scene=scene, mos=float(ratings.mean()), std=std)

    def image(self, number: int) -> tuple[Record, Scene]:
        """Generate the prompt record of image `number`, and a scene that satisfies it."""
        rng = np.random.default_rng([*self._seed, 3, number])
        record = self.record(rng)
        return record, sample_scene(record, rng)

    def record(self, rng: np.random.Generator) -> Record:
        """Draw a prompt record of the split, each category equally often."""
        group = self._groups[int(rng.integers(len(self._groups)))]
        return group[int(rng.integers(len(group)))]

    def near(self, record: Record, rng: np.random.Generator) -> Record:
        """Draw a record of the split whose prompt differs in one word."""
        return self._neighbours.near(record, rng)

    def surrounded(self, scenes: list[Scene], number: int) -> list[Scene]:
        """Add the surroundings of example `number` to its scenes."""
        rng = np.random.default_rng([*self._seed, 2, number])
        if rng.random() >= self._surroundings:
            return scenes
        if rng.random() < 0.5:
            return surround(scenes, rng)
        return [surround([scene], rng)[0] for scene in scenes]

    def _scenes(self, record: Record, kind: str, rng: np.random.Generator) -> tuple[Scene, Scene]:
        if kind == "alignment":
            style = str(rng.choice(STYLES))
            first = sample_scene(record, rng, style=style)
            return first, sample_scene(self.near(record, rng), rng, style=style)
        if kind == "quality":
            scene = sample_scene(record, rng)
            return scene, degraded(scene, rng)
        if kind == "richness":
            poor, rich = sorted(rng.choice(len(STYLES), size=2, replace=False))
            first = sample_scene(record, rng, style=STYLES[rich])
            return first, sample_scene(record, rng, style=STYLES[poor])
        first, second = (sample_scene(record if rng.random() < 0.5 else self.near(record, rng), rng) for _ in range(2))
        return degraded(first, rng), degraded(second, rng)


def degraded(scene: Scene, rng: np.random.Generator) -> Scene:
    """Distort a scene by a random kind and severity; every fifth keeps none."""
    kind = str(rng.choice(DISTORTIONS))
    return scene.distorted(kind, 0.0 if kind == "none" else float(rng.uniform(0.1, 1.0)))
