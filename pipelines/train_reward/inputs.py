# SPDX-License-Identifier: Apache-2.0
"""Training and held-out examples of a reward's training, read and checked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from visalign.core.preference.off_policy import off_policy_pair_weights
from visalign.core.surrogates.off_policy import effective_sample_size
from visalign.data.sets.checks import (
    check_preferences,
    check_quality,
    refuse_shared_images,
    summed_votes,
    without_duplicates,
)
from visalign.data.sets.columns import Columns
from visalign.data.sets.marks import MarkedImage, load_marks
from visalign.data.sets.prompt_files import load_demonstrations
from visalign.data.sets.records import PreferenceSet, QualitySet
from visalign.data.sets.sources import GENERATED, load_source
from visalign.data.sets.tables import listed
from visalign.errors import UserError, excerpt
from visalign.pipelines.shared.parts import check_images, name_key
from visalign.pipelines.shared.run_folder import fingerprint
from visalign.rewards.questions.checklist import Checklist

from .config import ChecklistModel, Hpsv3Model, OffPolicyConfig, TrainRewardConfig
from .examples import (
    Examples,
    file_answers,
    file_marks,
    file_pairs,
    file_ratings,
    file_triples,
    shapes_pairs,
    shapes_ratings,
    shapes_triples,
    with_prompts,
)

_HELDOUT_SEED = 1_000_003  # Added to the seed of generated held-out examples


@dataclass(frozen=True, kw_only=True)
class RewardInputs:
    train: Examples
    heldout: Examples | None
    notes: tuple[str, ...]  # Oddities of the sets that do not stop the run
    fingerprints: Mapping[str, str]  # data.train, data.heldout, model.checklist -> SHA-256 of what was read from files


def prepare_reward(config: TrainRewardConfig) -> RewardInputs:
    """Read what the configuration names and check it: all that can be known without the judge."""
    data, model, notes = config.data, config.model, list[str]()
    train = _load(config, "train", notes)
    heldout = None if data.heldout is None else _load(config, "heldout", notes)
    if heldout is not None:
        if shared := sorted(train.prompts & heldout.prompts):
            count = f"{len(shared)} prompts (of rated images: references) of data.heldout are also in data.train"
            raise UserError(f"{count}: {listed([repr(prompt) for prompt in shared])}. Keep each in one.")
        both = {"data.heldout": heldout, "data.train": train}
        images = {name: [ref for row in side.rows for ref in row.images] for name, side in both.items()}
        refuse_shared_images(images, what="of data.heldout are also in data.train")
    if data.convex_da is not None:
        variants = data.convex_da.variants([row.prompt for row in train.rows], config.seed)
        train = with_prompts(train, variants)
        notes.append(f"data.train: {len(variants)} pairs become {len(train)} by ConvexDA.")
    prints: dict[str, str] = {}
    for name, examples in (("data.train", train), ("data.heldout", heldout)):
        if examples is None or not examples.rows:
            continue
        for where, prompt, _ in examples.rows:
            if prompt is not None and not prompt.strip() and (model.kind != "hp" or config.reads == "triples"):
                blank = f"{name}: the prompt in {where} is {prompt!r}, and a judge of kind {model.kind} reads it"
                raise UserError(f"{blank}. Write one, or take the row out.")
        check_images(examples.rows, name)
        prints[name] = fingerprint(examples.content)
    if len(train) < data.batch:
        notes.append(f"data.train has {len(train)} examples, fewer than data.batch {data.batch}: some are read again.")
    if isinstance(model, ChecklistModel):
        if model.train == "head":
            notes.append("Each image is asked about once, when first read: the first iterations take the longest.")
        if model.checklist is not None:
            try:
                checklist = Checklist.read(model.checklist)
            except (FileNotFoundError, ValueError) as error:
                raise UserError(f"model.checklist: {error}") from error
            prints["model.checklist"] = fingerprint([checklist.to_dict()])
    return RewardInputs(train=train, heldout=heldout, notes=tuple(notes), fingerprints=prints)


def _load(config: TrainRewardConfig, side: str, notes: list[str]) -> Examples:
    """Load and check data.train or data.heldout; oddities go into `notes`."""
    data, is_train = config.data, side == "train"
    source, limit, split = str(data.heldout), data.heldout_size, data.heldout_split
    if is_train:
        source, limit, split = data.train, data.size, data.train_split
    if source in GENERATED:
        if limit is None:
            raise UserError(f"{source} has no end; give numbers for data.size and data.heldout_size.")
        seed = config.seed + (0 if is_train else _HELDOUT_SEED)
        world = {"split": side, "surroundings": data.surroundings if is_train else 0.0}
        if source == "shapes:quality":
            return shapes_ratings(seed, limit, annotators=data.annotators, **world)
        if config.reads == "triples" and is_train:
            return shapes_triples(seed, limit, **world)
        world |= {"kinds": config.pair_kinds(side), "labels": data.labels, "annotators": data.annotators}
        return shapes_pairs(seed, limit, **world)
    with name_key(f"data.{side}"):
        if config.reads == "answers":
            return file_answers(load_demonstrations(source)[:limit], name=Path(source).name, right=data.right)
        if config.reads in ("faults", "checks"):
            return _marks(config, load_marks(source, limit=limit), source)
        columns = Columns(names=data.map, labels=data.coding)
        records = load_source(source, split=split, limit=limit, columns=columns)
        is_rated = isinstance(records, QualitySet)
        return _ratings(config, records, side) if is_rated else _pairs(config, records, side, notes)


def _marks(config: TrainRewardConfig, images: list[MarkedImage], source: str) -> Examples:
    """Check that people marked what the task reads, and leave out images without an answer to the checklist."""
    if config.reads == "checks":
        images = [image for image in images if image.checklist]
    if not images:
        raise UserError(f"'{source}' has no answers about single images. Collect them: visalign collect --single -q.")
    if config.reads == "faults" and not any(image.boxes for image in images):
        raise UserError(f"'{source}' has no box around a fault. Collect them: visalign collect --boxes.")
    return file_marks(images)


def _ratings(config: TrainRewardConfig, records: QualitySet, side: str) -> Examples:
    if config.reads != "rows":
        raise UserError(f"the set holds single rated images, and judges of kind {config.model.kind} learn from pairs.")
    check_quality(records)
    ratings = records.ratings or records
    outside = [(record.mos, ratings.row(i)) for i, record in enumerate(ratings.records) if not 1 <= record.mos <= 5]
    if outside:
        values = listed([f"{mos:g} in row {row}" for mos, row in outside])
        raise UserError(f"mos is {values}; this judge answers from 1 to 5. Rescale the column.")
    lacking = [records.row(i) for i, record in enumerate(records.records) if record.std is None]
    if config.objective.task == "rating_distribution" and lacking and side == "train":
        raise UserError(
            f"objective.task is rating_distribution, and row {lacking[0]} has a mos without its std. Give the column "
            "(scores of visalign score have it), a row per rater, or objective.task=rating."
        )
    return file_ratings(records)


def _pairs(config: TrainRewardConfig, pairs: PreferenceSet, side: str, notes: list[str]) -> Examples:
    if config.reads == "rows":
        raise UserError("the set holds pairs, and a judge of kind rating learns from image and mos.")
    findings = check_preferences(pairs, judge_sees_sides=config.model.kind == "pair")
    _refuse_contradictions(pairs)
    pairs, summed = summed_votes(without_duplicates(pairs))
    notes += [f"data.{side}: {finding.message}" for finding in (*findings, *summed)]
    reads_iteration = isinstance(config.model, Hpsv3Model) and config.model.condition is not None
    if not reads_iteration and any("iteration" in pair.extra for pair in pairs.pairs):
        notes.append(f"data.{side} has the column iteration: only hpsv3 with model.condition reads it.")
    if side == "heldout":
        return file_pairs(pairs, with_iteration=reads_iteration)
    if config.reads == "triples":
        return file_triples(pairs, Path(config.data.train).parent)
    triples_in = Path(config.data.train).parent if config.objective.task == "hp" else None
    ties = sum(pair.label == 0.5 for pair in pairs.pairs)
    if triples_in and ties == len(pairs):
        raise UserError(f"all {ties} pairs are ties, and hp learns from pairs with a winner. Give other pairs.")
    if triples_in and ties:  # hp weighs a pair by |2p − 1|
        notes.append(f"data.train: {ties} ties are left out; hp learns from pairs with a winner.")
    if any(pair.extra.get("image_refined") for pair in pairs.pairs):
        reading = "each is to win over the better image of its row" if triples_in else "only ict and hp read it"
        notes.append(f"data.train has the column image_refined: {reading}.")
    settings = config.data.off_policy
    weights = settings and _off_policy_weights(pairs, settings, notes)
    reading: dict[str, Any] = {"triples_in": triples_in, "with_iteration": reads_iteration}
    return file_pairs(pairs, weights=weights, **reading, with_ties=triples_in is None)


def _off_policy_weights(pairs: PreferenceSet, settings: OffPolicyConfig, notes: list[str]) -> list[float]:
    """Compute the weights of pairs, with the mean 1."""
    ratios = []
    for number, pair in enumerate(pairs.pairs):
        values = [pair.extra.get(f"log_ratio_{side}") for side in ("left", "right")]
        try:
            ratios.append([float(value) for value in values])  # type: ignore[arg-type]  # None is caught
        except (TypeError, ValueError):
            ratios.append([math.nan])
        if not all(map(math.isfinite, ratios[-1])):
            columns = f"log_ratio_left {excerpt(values[0])} and log_ratio_right {excerpt(values[1])}"
            raise UserError(f"row {pairs.row(number)} has {columns}; needed is ln of π_today/π_maker in both.")
    left, right = torch.tensor(ratios, dtype=torch.float64).T
    zeros = torch.zeros_like(left)
    weights = off_policy_pair_weights(left, right, zeros, zeros, alpha=settings.alpha, multiplier=settings.multiplier)
    size, count = float(effective_sample_size(weights.log())), len(pairs)
    notes.append(f"data.train: {size:.1f} of {count} pairs count for the policy of today.")
    return weights.tolist()


def _refuse_contradictions(pairs: PreferenceSet) -> None:
    """Refuse single labels that say the opposite of one another; disagreement belongs into votes."""
    wins_of: dict[tuple[str, ...], Counter[bool]] = {}
    for pair in pairs.pairs:
        if pair.votes is None and pair.annotator is None and pair.label in (0.0, 1.0):
            first, second = sorted((pair.image_left, pair.image_right))
            wins = (pair.label == 1.0) == (pair.image_left == first)
            wins_of.setdefault((pair.prompt, first, second), Counter())[wins] += 1
    split = [key for key, counts in wins_of.items() if len(counts) == 2 and counts[True] == counts[False]]
    if split:
        images = listed([f"{key[1]} and {key[2]}" for key in split])
        raise UserError(
            f"{len(split)} pairs of '{pairs.name}' are judged as often one way as the other, by single labels: "
            f"{images}. Count them as votes of one row (votes_left, votes_right), or take them out."
        )
