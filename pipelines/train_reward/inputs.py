# SPDX-License-Identifier: Apache-2.0
"""Checked training and held-out examples of a reward's training."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
from visalign.data.sets.prompt_files import load_demonstrations
from visalign.data.sets.records import PreferenceSet, QualitySet
from visalign.data.sets.sources import GENERATED, load_source
from visalign.data.sets.tables import listed
from visalign.errors import UserError
from visalign.pipelines.shared.images import check_images
from visalign.pipelines.shared.run_folder import fingerprint
from visalign.training.reward.tasks import TASKS

from .config import ChecklistModel, OffPolicyConfig, TrainRewardConfig
from .examples import (
    Examples,
    file_answers,
    file_pairs,
    file_ratings,
    shapes_pairs,
    shapes_ratings,
    shapes_triples,
    with_prompts,
)

_HELDOUT_SEED = 1_000_003
"""Added to the seed of generated held-out examples."""


@dataclass(frozen=True, kw_only=True)
class RewardInputs:
    """Examples of a job."""

    train: Examples
    heldout: Examples | None
    notes: tuple[str, ...]
    """Oddities of the sets that do not stop the run."""
    fingerprints: Mapping[str, str]
    """data.train, data.heldout, model.checklist -> SHA-256 of what was read from files."""


def prepare_reward(config: TrainRewardConfig) -> RewardInputs:
    """Read what the configuration names and check it: all that can be known without the judge."""
    data, notes = config.data, list[str]()
    generated = data.train in GENERATED
    train = _generated(config) if generated else _read(config, "train", notes)
    heldout: Examples | None = None
    if data.heldout in GENERATED:
        heldout = _generated(config, heldout=True)
    elif data.heldout is not None:
        heldout = _read(config, "heldout", notes)
    if heldout is not None:
        shared = sorted(train.prompts & heldout.prompts)
        if shared:
            raise UserError(
                f"{len(shared)} prompts (of rated images: references) of data.heldout are also in "
                f"data.train: {listed([repr(prompt) for prompt in shared])}. Training and test would share "
                "them. Put each prompt into one of the two."
            )
        both = {"data.heldout": heldout, "data.train": train}
        sets = {name: [ref for row in side.rows for ref in row.images] for name, side in both.items()}
        refuse_shared_images(sets, what="of data.heldout are also in data.train")
    if data.convex_da is not None:
        variants = data.convex_da.variants([row.prompt for row in train.rows], config.seed)
        train = with_prompts(train, variants)
        notes.append(f"data.train: {len(variants)} pairs become {len(train)} by ConvexDA.")
    prints: dict[str, str] = {}
    for name, examples in (("data.train", train), ("data.heldout", heldout)):
        if examples is not None and examples.rows:
            _check_rows(config, examples, name)
            prints[name] = fingerprint(examples.content)
    if len(train) < data.batch:
        notes.append(
            f"data.train holds {len(train)} examples, fewer than data.batch {data.batch}: each update reads "
            "some of them more than once."
        )
    if isinstance(config.model, ChecklistModel) and config.model.checklist is not None:
        prints["model.checklist"] = _checklist_print(config.model.checklist)
    return RewardInputs(train=train, heldout=heldout, notes=tuple(notes), fingerprints=prints)


def _checklist_print(file: str) -> str:
    """Fingerprint of a checklist that can be read."""
    from visalign.rewards.questions.checklist import Checklist

    try:
        return fingerprint([Checklist.read(file).to_dict()])
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"model.checklist: {error}") from error


def _check_rows(config: TrainRewardConfig, examples: Examples, name: str) -> None:
    """Refuse an image that is none or a prompt without a visible character, naming the row."""
    for where, prompt, _ in examples.rows:
        if prompt is not None and not prompt.strip() and config.model.kind != "hp":
            raise UserError(
                f"{name}: the prompt in {where} is {prompt!r}, and a judge of kind {config.model.kind} reads "
                "it. Write one, or take the row out."
            )
    check_images(examples.rows, name)


def _generated(config: TrainRewardConfig, *, heldout: bool = False) -> Examples:
    data = config.data
    source = data.heldout if heldout else data.train
    count = (data.heldout_size if heldout else data.size) or 0
    if not count:
        raise UserError(
            f"data.{'heldout_size' if heldout else 'size'} is null, and {source} has no end; give a number."
        )
    seed = config.seed + (_HELDOUT_SEED if heldout else 0)
    split = "heldout" if heldout else "train"
    around = {"split": split, "surroundings": 0.0 if heldout else data.surroundings}
    if source == "shapes:quality":
        return shapes_ratings(seed, count, annotators=data.annotators, **around)
    if TASKS[config.objective.task].labels == "triples" and not heldout:
        return shapes_triples(seed, count, **around)
    kinds = (data.heldout_kinds or data.kinds) if heldout else data.kinds
    return shapes_pairs(seed, count, labels=data.labels, annotators=data.annotators, kinds=kinds, **around)


def _read(config: TrainRewardConfig, which: str, notes: list[str]) -> Examples:
    """A set of files, checked."""
    data, name = config.data, f"data.{which}"
    source = getattr(data, which)
    limit = data.size if which == "train" else data.heldout_size
    split = data.train_split if which == "train" else data.heldout_split
    columns = Columns(names=data.columns, labels=data.coding)
    try:
        if TASKS[config.objective.task].labels == "answers":
            return file_answers(load_demonstrations(source)[:limit], name=Path(source).name, right=data.right)
        records = load_source(source, split=split, limit=limit, columns=columns)
        if isinstance(records, QualitySet):
            return _ratings(config, records, name)
        return _pairs(config, records, which, notes)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error


def _ratings(config: TrainRewardConfig, records: QualitySet, name: str) -> Examples:
    if config.model.kind != "rating":
        raise UserError(
            f"the set holds single rated images, and a judge of kind {config.model.kind} learns from "
            "pairs. Give a set with image_left and image_right, or model.kind rating."
        )
    check_quality(records)
    low = min(record.mos for record in records.records)
    high = max(record.mos for record in records.records)
    if not (1 <= low and high <= 5):
        raise UserError(
            f"mos of the set goes from {low:g} to {high:g}; this judge answers from 1 to 5. Rescale the "
            "column."
        )
    return file_ratings(records)


def _pairs(config: TrainRewardConfig, pairs: PreferenceSet, which: str, notes: list[str]) -> Examples:
    if config.model.kind == "rating":
        raise UserError("the set holds pairs, and a judge of kind rating learns from image and mos.")
    findings = check_preferences(pairs, judge_sees_sides=config.model.kind == "pair")
    _refuse_contradictions(pairs)
    notes += [f"data.{which}: {finding.message}" for finding in findings]
    triples = which == "train" and TASKS[config.objective.task].labels == "triples"
    folder = Path(str(getattr(config.data, which))).parent
    pairs, summed = summed_votes(without_duplicates(pairs))
    notes += [f"data.{which}: {finding.message}" for finding in summed]
    weights = None
    if which == "train" and (settings := config.data.off_policy) is not None:
        weights = _off_policy_weights(pairs, settings, notes)
    return file_pairs(pairs, triples=folder if triples else None, weights=weights)


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
            raise UserError(
                f"row {pairs.row(number)} has log_ratio_left {values[0]!r} and log_ratio_right "
                f"{values[1]!r}, and data.off_policy weighs pairs by them: ln of the probability of an "
                "image under the policy of today over that under its maker. Add them, or leave "
                "data.off_policy out."
            )
    left, right = torch.tensor(ratios, dtype=torch.float64).T
    zeros = torch.zeros_like(left)
    weights = off_policy_pair_weights(
        left, right, zeros, zeros, alpha=settings.alpha, multiplier=settings.multiplier
    )
    size, count = float(effective_sample_size(weights.log())), len(pairs)
    if not size >= settings.least_effective * count:
        raise UserError(
            f"of {count} pairs only {size:.1f} count for the policy of today (effective sample size), less "
            f"than data.off_policy.least_effective {settings.least_effective:g} of them. Label samples of "
            f"the policy of today, or lower data.off_policy.multiplier, now {settings.multiplier:g}."
        )
    notes.append(f"data.train: {size:.1f} of {count} pairs count for the policy of today.")
    return weights.tolist()


def _refuse_contradictions(pairs: PreferenceSet) -> None:
    """Single labels that say the opposite of one another; disagreement belongs into votes."""
    wins_of: dict[tuple[str, ...], Counter[bool]] = {}
    for pair in pairs.pairs:
        if pair.votes is not None or pair.annotator is not None or pair.label not in (0.0, 1.0):
            continue
        first, second = sorted((pair.image_left, pair.image_right))
        wins = (pair.label == 1.0) == (pair.image_left == first)
        wins_of.setdefault((pair.prompt, first, second), Counter())[wins] += 1
    odd = [key for key, counts in wins_of.items() if len(counts) == 2 and counts[True] == counts[False]]
    if odd:
        raise UserError(
            f"{len(odd)} pairs of '{pairs.name}' are judged as often one way as the other, by single labels: "
            f"{listed([f'{key[1]} and {key[2]}' for key in odd])}. Count them as votes of one row "
            "(votes_left, votes_right), or take them out."
        )
