# SPDX-License-Identifier: Apache-2.0
"""Training data of the vision-language model: images, questions about them, and true answers.

Each question ends where the answer begins. An image is asked many questions at once: they share the
image's tokens and do not see each other (`Packed`), so each is what a judge will later ask alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from visalign.data.shapes.preferences import VISIBLE, ShapesPreferences, annotator_noise, degraded, utility
from visalign.data.shapes.prompts import COLORS, COUNT_WORDS, RELATIONS, SHAPES, Record, parse_prompt
from visalign.data.shapes.scenes import Scene, sample_scene
from visalign.data.shapes.verifier import verify_scene

YES, NO = "yes", "no"

SHOWS = "Does the picture show {prompt}?"
EXPLAIN = "Does the picture show {prompt}? Answer, then say why."
DESCRIBE = "What does the picture show?"
RATE = "Rate the quality of the picture from 1 to 5."
BETTER = "Is picture 2 better than picture 1 for {prompt}?"

LOOKS = {
    "Is the picture blurred?": ("distortion", "blur"),
    "Is the picture noisy?": ("distortion", "noise"),
    "Does the picture have compression marks?": ("distortion", "jpeg"),
    "Is the contrast of the picture low?": ("distortion", "contrast"),
    "Are the shapes outlined?": ("style", "outlined"),
    "Are the shapes shaded?": ("style", "shaded"),
    "Is the background textured?": ("style", "textured"),
    "Are the shapes flat?": ("style", "flat"),
}
"""Questions about quality and style -> what makes their answer yes."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """Text up to the answer, and the answer."""

    text: str
    answer: str
    weight: float = 1.0
    """Of each of its tokens in the loss."""


class Questions:
    """Draws images and questions of a split."""

    def __init__(self, seed: int, split: str = "train", surroundings: float = 0.0) -> None:
        self._world = ShapesPreferences(seed, split=split, surroundings=surroundings)
        self._seed = seed

    def scene(self, number: int) -> Scene:
        """Image `number`: half of them clean."""
        rng = np.random.default_rng([self._seed, 31, number])
        scene = sample_scene(self._world.record(rng), rng)
        scene = scene if rng.random() < 0.5 else degraded(scene, rng)
        return self._world.surrounded([scene], number)[0]

    def about(self, scene: Scene, number: int, count: int) -> list[Question]:
        """Questions on one image: half on alignment, the others on parts, quality and style."""
        rng = np.random.default_rng([self._seed, 32, number])
        questions = [self.shows(scene, rng) for _ in range(count // 2)]
        builders: list[Callable[..., Question]] = [part, part, appearance, appearance, rate]
        questions += [builders[int(rng.integers(len(builders)))](scene, rng) for _ in range(count - count // 2 - 1)]
        return [*questions, self.explain(scene, rng) if rng.random() < 0.5 else describe(scene)]

    def shows(self, scene: Scene, rng: np.random.Generator) -> Question:
        """Its own prompt, or one a word or two away; the truth is the verifier's."""
        record = self._asked(scene, rng)
        return Question(
            text=SHOWS.replace("{prompt}", record["prompt"]), answer=YES if verify_scene(scene, record).correct else NO
        )

    def explain(self, scene: Scene, rng: np.random.Generator) -> Question:
        """Decision first, then the verifier's reason."""
        record = self._asked(scene, rng)
        verdict = verify_scene(scene, record)
        return Question(
            text=EXPLAIN.replace("{prompt}", record["prompt"]),
            answer=f"{YES}, all of it" if verdict.correct else f"{NO}, {verdict.reason}",
            weight=0.3,
        )

    def _asked(self, scene: Scene, rng: np.random.Generator) -> Record:
        record, steps = scene.record, int(rng.choice(4, p=(0.4, 0.35, 0.15, 0.1)))
        if steps == 3:
            return self._world.record(rng)
        for _ in range(steps):
            record = self._world.near(record, rng)
        return record

    def pair(self, number: int) -> tuple[Scene, Scene, list[Question]]:
        """Two images of one prompt and the vote of an annotator on them, for the prompt and for another."""
        rng = np.random.default_rng([self._seed, 33, number])
        pair = self._world.pair(number)
        records = [pair.record, *(self._world.near(pair.record, rng) for _ in range(2))]
        return pair.left, pair.right, [better(pair.left, pair.right, record, rng) for record in records]


def better(first: Scene, second: Scene, record: Record, rng: np.random.Generator) -> Question:
    """Whether one annotator prefers the second image."""
    noisy = [utility(s, record) + annotator_noise(s) * rng.normal() for s in (first, second)]
    return Question(text=BETTER.replace("{prompt}", record["prompt"]), answer=YES if noisy[1] > noisy[0] else NO)


def part(scene: Scene, rng: np.random.Generator) -> Question:
    """Whether some objects are there, whatever else is."""
    if len(scene.objects) > 1 and rng.random() < 0.4:
        i, j = rng.choice(len(scene.objects), size=2, replace=False)
        a, b = scene.objects[i], scene.objects[j]
        prompt = f"a {a.color} {a.shape} {rng.choice(RELATIONS)} a {b.color} {b.shape}"
    elif rng.random() < 0.5:
        shape = str(rng.choice(SHAPES)) if rng.random() < 0.3 else str(scene.objects[0].shape)
        plural = shape + ("es" if shape == "cross" else "s")
        prompt = f"{rng.choice(list(COUNT_WORDS.values()))} {plural}"
    else:
        item = scene.objects[int(rng.integers(len(scene.objects)))]
        color = item.color if rng.random() < 0.5 else str(rng.choice(COLORS))
        shape = item.shape if rng.random() < 0.7 else str(rng.choice(SHAPES))
        prompt = f"a {color} {shape}"
    prompt = prompt.replace("a orange", "an orange")
    record = parse_prompt(prompt) | {"exclude": [], "only": False}
    verb = "Are there" if "two" in prompt or "three" in prompt or "four" in prompt else "Is there"
    if verb == "Are there":
        entry = record["include"][0]
        record["exclude"] = [{"class": entry["class"], "count": entry["count"] + 1}]
    return Question(text=f"{verb} {prompt}?", answer=YES if verify_scene(scene, record).correct else NO)


def appearance(scene: Scene, rng: np.random.Generator) -> Question:
    """A question about quality or style whose answer can be seen."""
    faint = scene.distortion.kind != "none" and scene.distortion.severity < VISIBLE
    texts = [text for text, (axis, _) in LOOKS.items() if axis == "style" or not faint]
    text = str(rng.choice(texts))
    axis, expected = LOOKS[text]
    actual = scene.style if axis == "style" else scene.distortion.kind
    return Question(text=text, answer=YES if actual == expected else NO)


def rate(scene: Scene, rng: np.random.Generator) -> Question:
    """A whole number from 1 to 5 whose expectation is 1 + 4·quality."""
    rating = 1.0 + 4.0 * scene.quality
    answer = int(rating) + int(rng.random() < rating - int(rating))
    return Question(text=RATE, answer=f"<answer>{answer}</answer>", weight=0.5)


def describe(scene: Scene) -> Question:
    """What is in the image, in words."""
    return Question(text=DESCRIBE, answer=scene.record["prompt"], weight=0.3)
