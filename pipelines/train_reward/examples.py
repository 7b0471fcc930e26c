# SPDX-License-Identifier: Apache-2.0
"""Labelled examples for a judge, from the shapes world or from files, by their number and in batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from visalign.data.sets.columns import image_path
from visalign.data.sets.marks import MarkedImage
from visalign.data.sets.records import PreferenceSet, QualitySet
from visalign.data.shapes.preferences import ShapesPreferences, degraded
from visalign.data.shapes.prompts import heldout_prompts, train_prompts
from visalign.data.shapes.render import render
from visalign.data.shapes.scenes import STYLES, Scene, sample_scene
from visalign.errors import UserError, excerpt
from visalign.pipelines.shared.parts import Row, read_images
from visalign.settings import Finite
from visalign.training.reward.batch import RewardBatch


@dataclass(frozen=True, kw_only=True)
class Example:
    """A pair (two images), triple (three, ascending), rated image (one) or answer about an image."""

    prompt: str
    images: tuple[Tensor, ...] = ()  # Each float32 [3, H, W] in [0, 1]
    label: float = math.nan  # Pairs: probability that the first is better, for training
    truth: float = math.nan  # Pairs: 1 or 0 for who is truly better (of votes: their majority), NaN where nobody knows
    clear: bool = True  # Pairs: whether the truth is clear
    votes: tuple[int, int, int] | None = None  # Pairs: for the first, for the second, for neither
    target: float = math.nan
    """Rated images: the mean opinion, 1 to 5 for the embedded models; answers: 1 or 0 for right."""
    spread: float = math.nan  # Rated images: standard deviation of the opinions, or of the judge
    critique: str = ""  # Answers: what a judge wrote
    weight: float = 1.0  # Pairs: how much it counts beside the others
    iteration: float = 0.0  # Pairs: progress of the generator's RL, 0 to 1
    refined: str | None = None  # Triples: the prompt of the third image; None: the same
    features: Tensor | None = None  # [images, F] what a frozen model says of the images, in their stead
    heat: Tensor | None = None  # Marked images: [h, w] share of the voters who boxed each cell
    view: Any = None  # Marked images: what HEIE's frozen model reads of the image, in its stead
    answers: Mapping[str, float] | None = None  # Marked images: question -> share of yes


@dataclass(frozen=True, kw_only=True)
class Examples:
    count: int
    example: Callable[[int], Example]  # Number -> example
    prompts: frozenset[str]
    """All prompts of the set, or of where it is drawn from, as `plain` writes them; of rated images from
    files, which need not have prompts, and of answers, the images or their references."""
    rows: tuple[Row, ...] = ()  # Rows of a set from files
    content: tuple[dict[str, object], ...] = ()  # Content of the files, for a fingerprint

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Example:
        return self.example(number)


def as_image(image: np.ndarray) -> Tensor:
    """Convert uint8 [H, W, 3] to float32 [3, H, W] in [0, 1]."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div_(255)


def plain(prompt: str) -> str:
    """Return a prompt without what does not count when prompts are compared."""
    return " ".join(prompt.split()).casefold()


def _shapes(count: int, split: str, example: Callable[[int], Example]) -> Examples:
    records = train_prompts() if split == "train" else heldout_prompts()
    return Examples(count=count, example=example, prompts=frozenset(plain(record["prompt"]) for record in records))


def shapes_pairs(seed: int, count: int, *, split: str = "train", labels: str = "votes", **world: Any) -> Examples:
    """Draw pairs of the shapes world; `world` are annotators, kinds and surroundings of `ShapesPreferences`."""
    preferences = ShapesPreferences(seed, split=split, **world)

    def example(number: int) -> Example:
        pair = preferences.pair(number)
        left, right = pair.utility
        truth = 0.5 if left == right else float(left > right)
        won, lost = pair.votes
        return Example(
            prompt=pair.prompt,
            images=tuple(as_image(image) for image in pair.images()),
            label={"votes": won / (won + lost), "truth": truth, "probability": pair.prob}[labels],
            truth=truth,
            clear=pair.is_clear,
            votes=(won, lost, 0) if labels == "votes" else None,
        )

    return _shapes(count, split, example)


def shapes_triples(seed: int, count: int, *, split: str = "train", **world: Any) -> Examples:
    """Draw three images of a prompt, ascending: of another prompt or spoilt; right but poor; right and rich."""
    preferences = ShapesPreferences(seed, split=split, **world)

    def example(number: int) -> Example:
        rng = np.random.default_rng([seed, 41, number])
        record = preferences.record(rng)
        poor, rich = (STYLES[style] for style in sorted(rng.choice(len(STYLES), size=2, replace=False)))
        right = [sample_scene(record, rng, style=style) for style in (poor, rich)]
        if rng.random() < 0.7:
            worse: Scene = sample_scene(preferences.near(record, rng), rng, style=poor)
        else:
            worse = degraded(sample_scene(record, rng, style=poor), rng)
        images = tuple(as_image(render(scene)) for scene in preferences.surrounded([worse, *right], number))
        return Example(prompt=record["prompt"], images=images)

    return _shapes(count, split, example)


def shapes_ratings(seed: int, count: int, *, split: str = "train", **world: Any) -> Examples:
    preferences = ShapesPreferences(seed, split=split, **world)

    def example(number: int) -> Example:
        rated = preferences.quality(number)
        return Example(
            prompt=rated.scene.record["prompt"],
            images=(as_image(render(rated.scene)),),
            target=rated.mos,
            spread=rated.std,
        )

    return _shapes(count, split, example)


def _from_files(
    rows: Sequence[Row],
    labels: Sequence[Example],
    content: Iterable[dict[str, object]],
    prompts: Iterable[str] | None = None,
) -> Examples:
    """Build a set whose examples are labels with the images of their row, read when they are needed."""

    def example(number: int) -> Example:
        return replace(labels[number], images=read_images(rows[number].images, rows[number].where))

    names = frozenset(plain(label.prompt) for label in labels) if prompts is None else frozenset(prompts)
    return Examples(count=len(rows), example=example, prompts=names, rows=tuple(rows), content=tuple(content))


def file_pairs(
    pairs: PreferenceSet,
    *,
    weights: Sequence[float] | None = None,
    triples_in: Path | None = None,
    with_iteration: bool = False,
    with_ties: bool = True,
) -> Examples:
    """Pairs of a checked preference set; an `image_refined` in the folder `triples_in` wins over the better one.

    `with_iteration` reads the column iteration, as a number or a text of one.
    """
    rows, labels, refined = [], [], []
    for number, pair in enumerate(pairs.pairs):
        if pair.label == 0.5 and not with_ties:
            continue
        where = f"row {pairs.row(number)} of '{pairs.name}'"
        rows.append(Row(where, pair.prompt, (pair.image_left, pair.image_right)))
        truth = pair.label if pair.label == 0.5 else float(pair.label > 0.5)
        weight = 1.0 if weights is None else weights[number]
        step = _iteration(pair.extra.get("iteration", 0.0), where) if with_iteration else 0.0
        values = {"label": pair.label, "truth": truth, "weight": weight}
        values["votes"] = None if pair.label_against_votes else pair.votes
        labels.append(Example(prompt=pair.prompt, iteration=step, **values))
        if triples_in is not None and pair.label != 0.5 and pair.extra.get("image_refined"):
            better = pair.image_left if pair.label > 0.5 else pair.image_right
            images = (image_path(dict(pair.extra), "image_refined", triples_in), better)
            refined.append((Row(where, pair.prompt, images), replace(labels[-1], label=1.0, truth=1.0, votes=None)))
    rows += [row for row, _ in refined]
    labels += [label for _, label in refined]
    return _from_files(rows, labels, (pair.to_row() for pair in pairs.pairs))


def _iteration(value: Any, where: str) -> float:
    """Read an iteration; tables of text hold numbers as text."""
    try:
        step = float(value)
    except (TypeError, ValueError):
        step = math.nan
    if not 0 <= step <= 1:
        raise UserError(
            f"{where} has iteration {excerpt(value)}; needed is a number from 0 (before RL) to 1 (its end)."
        )
    return step


def file_triples(pairs: PreferenceSet, folder: Path) -> Examples:
    """Triples of a checked preference set: the worse image, the better one, `image_refined` relative to `folder`."""
    rows, labels = [], []
    for number, pair in enumerate(pairs.pairs):
        where = f"row {pairs.row(number)} of '{pairs.name}'"
        if pair.label == 0.5 or "image_refined" not in pair.extra:
            raise UserError(f"{where} is a tie or lacks image_refined (visalign sample PAIRS.jsonl --refine MODEL).")
        images = (pair.image_left, pair.image_right)
        ascending = images[::-1] if pair.label > 0.5 else images
        rows.append(Row(where, pair.prompt, (*ascending, image_path(dict(pair.extra), "image_refined", folder))))
        refined = pair.extra.get("prompt_refined")
        labels.append(Example(prompt=pair.prompt, refined=None if refined is None else str(refined)))
    return _from_files(rows, labels, (pair.to_row() for pair in pairs.pairs))


def with_prompts(examples: Examples, variants: Sequence[Sequence[str]]) -> Examples:
    """Repeat examples from files under other prompts, `variants` of each in place of its own."""
    sources = [(number, prompt) for number, prompts in enumerate(variants) for prompt in prompts]

    def example(number: int) -> Example:
        index, prompt = sources[number]
        return replace(examples[index], prompt=prompt)

    rows = tuple(examples.rows[index]._replace(prompt=prompt) for index, prompt in sources)
    content = tuple({**examples.content[index], "prompt": prompt} for index, prompt in sources)
    return replace(examples, count=len(sources), example=example, rows=rows, content=content)


def file_ratings(records: QualitySet) -> Examples:
    """Rated images of a quality set from 1 to 5; where 1 is best, the scale is turned round."""
    up = records.higher_is_better
    where = [f"row {records.row(number)} of '{records.name}'" for number in range(len(records))]
    rows = [Row(w, None, (record.image,)) for w, record in zip(where, records.records, strict=True)]
    labels = [
        Example(prompt=r.prompt, target=r.mos if up else 6 - r.mos, spread=math.nan if r.std is None else r.std)
        for r in records.records
    ]
    content = (record.to_row() for record in records.records)
    return _from_files(rows, labels, content, prompts=(record.origin for record in records.records))


def file_marks(images: Sequence[MarkedImage]) -> Examples:
    """Images with what people marked in an export of `visalign collect`."""
    rows = [Row(image.where, image.prompt, (image.image,)) for image in images]
    labels = [
        Example(prompt=i.prompt, target=i.plausibility, heat=torch.from_numpy(i.heat()), answers=i.checklist)
        for i in images
    ]
    return _from_files(rows, labels, map(asdict, images), prompts=(image.image for image in images))


class _Answer(BaseModel, strict=True):
    image: str
    caption: str
    completion: str
    reward: Finite


def file_answers(records: Sequence[Mapping[str, Any]], *, name: str, right: float) -> Examples:
    """Answers of a judge about single images, lines of text_sample's dataset; from the reward `right` on right."""
    rows, labels, content = [], [], []
    for number, record in enumerate(records, start=1):
        try:
            answer = _Answer.model_validate(dict(record))
        except ValidationError as error:
            field = str(error.errors()[0]["loc"][0])
            value = f"row {number} of '{name}' has {excerpt(record.get(field))} under {field!r}"
            needed = "image, caption, completion and reward, as text_sample writes them with data.question"
            raise UserError(f"{value}; needed are {needed}.") from error
        rows.append(Row(f"row {number} of '{name}'", answer.caption, (answer.image,)))
        is_right = float(answer.reward >= right)
        labels.append(Example(prompt=answer.caption, target=is_right, critique=answer.completion))
        content.append({key: record[key] for key in _Answer.model_fields})
    if len({label.target for label in labels}) < 2:
        rewards = [row["reward"] for row in content]
        raise UserError(
            f"{'all' if labels[0].target else 'none'} of the {len(labels)} answers of '{name}' are right by "
            f"data.right {right:g}. Set it between: rewards go from {min(rewards):g} to {max(rewards):g}."
        )
    return _from_files(rows, labels, content, prompts=(image for row in rows for image in row.images))


@dataclass(frozen=True, kw_only=True)
class ExampleBatches:
    """Stream of examples, each once per epoch in a new order; a batch is a function of (seed, number) alone."""

    examples: Examples
    encode: Callable[[Sequence[Example]], RewardBatch]
    size: int
    micro: int
    seed: int

    def batch(self, number: int, part: tuple[int, int] = (0, 1)) -> Iterator[RewardBatch]:
        """Yield the micro-batches of share `part` of batch `number`."""
        total = len(self.examples)
        indices = range(number * self.size, (number + 1) * self.size)[part[0] :: part[1]]
        numbers = [int(_order(self.seed, index // total, total)[index % total]) for index in indices]
        for start in range(0, len(numbers), self.micro):
            yield self.encode([self.examples[i] for i in numbers[start : start + self.micro]])


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, total: int) -> np.ndarray:
    return np.random.default_rng([seed, 51, epoch]).permutation(total)


def pair_batch(inputs: Any, examples: Sequence[Example], *, heldout: bool) -> RewardBatch:
    """Build a batch of pairs, all left ones, then all right ones; with `heldout` the label is the truth.

    Held-out pairs whose label is a share count as one vote, so that calibration is measured against it.
    """
    count, unknown = len(examples), (math.nan,) * 3
    votes = [e.votes or ((e.label, 1 - e.label, 0) if heldout else unknown) for e in examples]
    label = [example.truth if heldout else example.label for example in examples]
    return RewardBatch(
        inputs=inputs,
        size=count,
        left=torch.arange(count),
        right=torch.arange(count, 2 * count),
        label=torch.tensor(label, dtype=torch.float32),
        votes=torch.tensor(votes, dtype=torch.float32),
        clear=torch.tensor([example.clear for example in examples]),
        weight=torch.tensor([example.weight for example in examples]),
    )


def pair_images(examples: Sequence[Example]) -> list[Tensor]:
    """List all first images, then all second ones, ..."""
    return [example.images[side] for side in range(len(examples[0].images)) for example in examples]
