# SPDX-License-Identifier: Apache-2.0
"""Prompts and rewards of a Flow-GRPO job, read and checked before the model is loaded."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from visalign.adapters.catalogue import edits_of, joins_sources
from visalign.data.assets import resolve_model
from visalign.data.sets.prompt_files import listed_sources, record_key
from visalign.errors import UserError, suggestion
from visalign.evaluation.heldout.correctness import check_judge
from visalign.interfaces import PairwiseReward, PointwiseReward
from visalign.pipelines.shared.parts import Records, build_records, load_terms, pointwise_only, weighted_sum
from visalign.pipelines.shared.run_folder import fingerprint
from visalign.pipelines.shared.sections import RewardsConfig
from visalign.settings import refuse
from visalign.training.diffusion.experts import check_experts
from visalign.training.diffusion.images import Features, StoredPreference
from visalign.training.diffusion.reward_gradient import check_differentiable
from visalign.training.diffusion.rollout_settings import check_processes
from visalign.training.loop.sampler import PromptSampler, check_batch_algebra, check_whole_groups

from .config import ComparisonConfig, FlowGRPOConfig
from .stored_pairs import read_stored


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Prompts and rewards of a job."""

    records: Records
    heldout: Records
    rewards: Mapping[str, PointwiseReward]
    """label -> reward to report on held-out images: all that can score one image by itself."""
    reward: PointwiseReward
    """The optimized sum, or the preferences of stored pairs."""
    features: Features | None
    """Image features for the monitor."""
    strata: list[str] | None
    """Label per training record, with data.balance."""
    seen: int
    """Number of held-out prompts that are trained on as well."""
    fingerprints: Mapping[str, str]
    """Input -> SHA-256 of its content."""
    notes: tuple[str, ...] = ()
    """Oddities of the inputs that do not stop the run."""


def prepare(config: FlowGRPOConfig, world: int, device: str | None = None) -> Inputs:
    """Read and check all inputs that a run of `world` processes has without its model."""
    from visalign.rewards.catalogue import load_judge
    from visalign.rewards.combine.weighted_sum import WeightedSum

    data, evaluation = config.data, config.evaluation
    model = resolve_model(config.model.path), config.model.adapter
    edits, several = edits_of(*model), joins_sources(*model)
    read = partial(build_records, edits=edits, several=several)
    pairs = None if data.pairs is None else read_stored(data, edits, several=several)
    records = read(data.train, "data.train") if pairs is None else pairs.records
    heldout = read(data.heldout, "data.heldout")
    judges = load_terms({**evaluation.rewards, **config.rewarded}, load_judge, device)
    pointwise: dict[str, Any] = pointwise_only(judges, needed=evaluation.rewards)
    rewards = {label: reward for label, reward in pointwise.items() if not reward.capabilities.needs_group}
    refuse(_unfit_rewards(config, judges, rewards, world))
    if pairs is not None:
        reward: Any = StoredPreference()
    elif config.comparison is None:
        reward = weighted_sum(config.rewards, pointwise_only(judges, needed=config.rewards.terms), WeightedSum)
    else:
        rates = build_win_rates(config.comparison, config.rewards, judges)
        reward = weighted_sum(config.rewards, rates, WeightedSum)
    strata = [str(record.get("tag", "")) for record in records] if data.balance else None
    _check_method(config, reward, records, strata, world)
    if any(judges[label].capabilities.needs_group for label in config.rewarded):
        check_whole_groups(config.rollout.prompts_per_iteration, world)
    if evaluation.correctness is not None:
        check_judge(evaluation.correctness, rewards[evaluation.correctness], heldout[0])
    return Inputs(
        records=records,
        heldout=heldout,
        rewards=rewards,
        reward=reward,
        features=build_features(config, judges, device),
        strata=strata,
        seen=len(_prompts(records) & _prompts(heldout)),
        fingerprints=_fingerprints(config, records, heldout),
        notes=() if pairs is None else pairs.notes,
    )


def _unfit_rewards(
    config: FlowGRPOConfig, judges: Mapping[str, Any], rewards: Mapping[str, Any], world: int
) -> Iterator[str]:
    if sets := [label for label in config.evaluation.rewards if label not in rewards]:
        yield (
            f"evaluation.rewards names {', '.join(sets)}, which judges sets of a training and no held-out "
            "image. Name it in rewards.terms only."
        )
    for label in config.rewarded:
        if world > 1 and judges[label].capabilities.needs_batch:
            yield (
                f"rewards.terms.{label} judges all images of an iteration as one set, and {world} processes "
                f"would each have their own. Set its options.over=group, or use one process."
            )


def _check_method(config: FlowGRPOConfig, reward: Any, records: Records, strata: list[str] | None, world: int) -> None:
    """Refuse an algorithm that the reward, the prompts or the processes do not fit."""
    rollout, objective = config.rollout, config.objective
    size = rollout.prompts_per_iteration, rollout.group_size
    check_batch_algebra(*size, world)
    check_processes(objective, rollout, world)
    if config.data.pairs is None:
        config.rewards.check_processes(world)
    if config.comparison is not None:
        check_whole_groups(rollout.prompts_per_iteration, world)
    PromptSampler(len(records), *size, config.seed, strata=strata, cycle=config.data.cycle)
    objective.check_constrained(reward)
    if objective.ascent is not None:
        check_differentiable(reward)
    if objective.experts:
        check_experts(objective.experts, records)


def build_features(config: FlowGRPOConfig, judges: Mapping[str, Any], device: str | None) -> Features | None:
    """Return a function from images [b, 3, H, W] to features [b, d] by `monitor.features`; None for none."""
    from visalign.rewards.base.contract import read_request
    from visalign.rewards.clip.towers import ClipTowers

    name = config.monitor.features
    loaded = {label: judge.towers for label, judge in judges.items() if hasattr(judge, "towers")}
    if name == "auto":
        name = next(iter(loaded), None)
    _check_monitor(config, features=name is not None)
    if name is None:
        return None
    towers = loaded.get(name) or ClipTowers(name, device=device or "cpu", cache_bytes=0)

    def features(images: Tensor) -> Tensor:
        reasons: list[str | None] = [None] * len(images)
        request = read_request("monitor.features", images, [""] * len(images), None)
        rows, values = towers.image_features(request, reasons)
        if len(rows) < len(images):
            reason = next(reason for reason in reasons if reason)
            raise UserError(f"monitor.features: an image has none: {reason}. Set monitor.features to null.")
        return values

    return features


def _check_monitor(config: FlowGRPOConfig, *, features: bool) -> None:
    """Refuse a monitor that would stop a run by what it does not measure."""
    remedy = "Set monitor.features to a CLIP model"
    drift = features and config.evaluation.every > 0
    measured = {
        "diversity_ratio": (features, f"{remedy}, or leave it null."),
        "feature_drift": (drift, f"{remedy} and evaluation.every above 0."),
    }
    unscored = ("agreement", "agreement_change", "recorded_change", "judge_std_ratio", "diversity_ratio")
    if config.objective.ascent is not None:
        measured |= dict.fromkeys(
            unscored, (False, "Its samples are asked for the reward's gradient only; take group_std_ratio.")
        )
    if config.data.pairs is not None:
        measured |= dict.fromkeys(
            unscored, (False, "Stored pairs are not judged; limit heldout_change or feature_drift.")
        )
    config.rewards.check_monitor(config.monitor, config.evaluation, **measured)


def _prompts(records: Records) -> set[tuple[str, ...]]:
    """Return the prompts with their sources; blanks and capitals of a prompt do not count."""
    keys = map(record_key, records)
    return {(" ".join(prompt.split()).casefold(), *source) for prompt, *source in keys}


def _fingerprints(config: FlowGRPOConfig, records: Records, heldout: Records) -> dict[str, str]:
    """Hash prompt records, the sizes of their image files (not in Parquet), and the user's reward files."""
    stored = config.data.pairs is not None
    inputs = {"data.pairs" if stored else "data.train": records, "data.heldout": heldout}
    hashes = {name: fingerprint(rows) for name, rows in inputs.items()}
    for name, rows in inputs.items():
        images = [image for record in rows for image in listed_sources(record.get("source"))]
        if name == "data.pairs":
            images += [candidate["image"] for record in rows for candidate in record["candidates"]]
        files = [image for image in images if isinstance(image, str | Path) and os.path.isfile(image)]
        if files:
            hashes[f"images of {name}"] = fingerprint([{"bytes": [Path(f).stat().st_size for f in files]}])
    for label, term in {**config.evaluation.rewards, **config.rewarded}.items():
        file = Path((term.name or label).rpartition(":")[0])
        if file.suffix == ".py":
            hashes[f"reward {label}"] = hashlib.sha256(file.read_bytes()).hexdigest()
    return hashes


def build_win_rates(
    config: ComparisonConfig, rewards: RewardsConfig, judges: Mapping[str, PointwiseReward | PairwiseReward]
) -> dict[str, PointwiseReward]:
    """Build the terms of the sum: a win rate for each judge, the score itself for those in `config.scores`.

    A pointwise judge compares by its mean and standard deviation, a pairwise one directly.
    """
    from visalign.rewards.pairs.as_pairwise import as_pairwise
    from visalign.rewards.pairs.as_pointwise import GroupWinRate

    refuse(_unfit_comparison(config, rewards, judges))
    terms: dict[str, Any] = {}
    for label in rewards.terms:
        judge: Any = judges[label]
        if label in config.scores:
            terms[label] = judge
        else:
            pairwise = judge if isinstance(judge, PairwiseReward) else as_pairwise(judge)
            options: dict[str, Any] = {"both_orders": config.both_orders, "hard": config.hard}
            terms[label] = GroupWinRate(pairwise, budget=config.budget, **options)
    return terms


def _unfit_comparison(config: ComparisonConfig, rewards: RewardsConfig, judges: Mapping[str, Any]) -> Iterator[str]:
    for label in config.scores:
        if label not in rewards.terms:
            yield (
                f"comparison.scores names {label!r}, which is no term. {suggestion(label, rewards.terms)}"
                f"Terms: {', '.join(rewards.terms)}."
            )
        if not isinstance(judges[label], PointwiseReward):
            yield f"comparison.scores names {label!r}, a judge that only compares; take it out."
    compared = {label: term for label, term in rewards.terms.items() if label not in config.scores}
    if not compared:
        yield "comparison.scores names every term, so nothing is compared. Take one out, or train on scores."
    for label, term in compared.items():
        remedy = f"Name it in comparison.scores: [{label}]."
        if term.bound is not None:
            yield (f"rewards.terms.{label}.bound is {term.bound}, and win rates have the mean 0.5. {remedy}")
        if judges[label].capabilities.needs_group:
            yield f"rewards.terms.{label} judges sets of images, and no two can be compared by it. {remedy}"
