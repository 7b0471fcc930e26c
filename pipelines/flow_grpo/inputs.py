# SPDX-License-Identifier: Apache-2.0
"""What a Flow-GRPO job needs besides its model: prompts and rewards, read and checked with the settings."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
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
from visalign.training.diffusion.experts import check_experts
from visalign.training.diffusion.flow_grpo import step_weights
from visalign.training.diffusion.images import Features
from visalign.training.diffusion.regression import regression_for_run
from visalign.training.diffusion.reward_gradient import ascent_for_run, check_differentiable
from visalign.training.diffusion.stored_pairs import StoredPreference
from visalign.training.loop.sampler import PromptSampler, check_batch_algebra, check_whole_groups

from .config import ComparisonConfig, FlowGRPOConfig
from .stored_pairs import read_stored


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Prompts and rewards of a job."""

    records: Records
    heldout: Records
    rewards: Mapping[str, PointwiseReward]
    """label -> reward to report on held-out images: all that can judge one image by itself."""
    reward: PointwiseReward
    """The sum that is optimized, or what was said of stored pairs."""
    features: Features | None
    """Of images, for the monitor."""
    strata: list[str] | None
    """Label per training record, with data.balance."""
    seen: int
    """Held-out prompts that are trained on as well."""
    fingerprints: Mapping[str, str]
    """What was read -> SHA-256 of its content."""
    notes: tuple[str, ...] = ()
    """What is odd but can be worked with."""


def prepare(config: FlowGRPOConfig, world: int, device: str | None = None) -> Inputs:
    """Read what the configuration names and check it: all that can be known without the model."""
    from visalign.rewards.catalogue import load_judge

    rollout, data = config.rollout, config.data
    check_batch_algebra(rollout.prompts_per_iteration, rollout.group_size, world)
    if rollout.branch is not None:
        check_whole_groups(rollout.prompts_per_iteration, world)
    model = resolve_model(config.model.path), config.model.adapter
    edits = edits_of(*model)
    several = joins_sources(*model)
    read = partial(build_records, edits=edits, several=several)
    pairs = None if data.pairs is None else read_stored(data, edits, several=several)
    records = read(data.train, "data.train") if pairs is None else pairs.records
    heldout = read(data.heldout, "data.heldout")
    judges = load_terms({**config.evaluation.rewards, **config.rewarded}, load_judge, device)
    rewards = _judging_alone(judges, config.evaluation.rewards)
    reward = _build_reward(config, judges, world) if pairs is None else StoredPreference()
    config.objective.check_constrained(reward)
    strata = [str(record.get("tag", "")) for record in records] if data.balance else None
    PromptSampler(
        len(records),
        rollout.prompts_per_iteration,
        rollout.group_size,
        config.seed,
        strata=strata,
        cycle=data.cycle,
    )
    if config.objective.ascent is not None:
        ascent_for_run(config.objective, rollout)
        check_differentiable(reward)
    elif config.objective.regression is None:
        sigmas = torch.linspace(1, 0, rollout.steps + 1)  # the model's own has as many steps
        step_weights(config.objective, rollout, sigmas)
    else:
        regression_for_run(config.objective, rollout, world)
        if config.objective.experts:
            check_experts(config.objective.experts, records)
    features = build_features(config, judges, device)
    if (judge := config.evaluation.correctness) is not None:
        check_judge(judge, rewards[judge], heldout[0])
    return Inputs(
        records=records,
        heldout=heldout,
        rewards=rewards,
        reward=reward,
        features=features,
        strata=strata,
        seen=len(_prompts(records) & _prompts(heldout)),
        fingerprints=_fingerprints(config, records, heldout),
        notes=() if pairs is None else pairs.notes,
    )


def _build_reward(config: FlowGRPOConfig, judges: Mapping[str, Any], world: int) -> PointwiseReward:
    """The sum that is optimized."""
    from visalign.rewards.combine.weighted_sum import WeightedSum

    config.rewards.check_processes(world)
    size = config.rollout.prompts_per_iteration
    if config.comparison is None:
        terms = pointwise_only(judges, needed=config.rewards.terms)
        _check_sets(terms, size, world)
    else:
        check_whole_groups(size, world)
        terms = build_win_rates(config.comparison, config.rewards, judges)
    return weighted_sum(config.rewards, terms, WeightedSum)


def build_features(config: FlowGRPOConfig, judges: Mapping[str, Any], device: str | None) -> Features | None:
    """Images [b, 3, H, W] -> [b, d] of an image tower, by `monitor.features`; None where there is none."""
    from visalign.rewards.base.contract import read_request
    from visalign.rewards.clip.towers import ClipTowers

    name = config.monitor.features
    found = {label: one.towers for label, one in judges.items() if hasattr(one, "towers")}
    is_there = name is not None and (name != "auto" or bool(found))
    _check_monitor(config, is_there)
    if name is None or not is_there:
        return None
    towers = next(iter(found.values())) if name == "auto" else found.get(name)
    if towers is None:
        towers = ClipTowers(name, device=device or "cpu", cache_bytes=0)

    def features(images: Tensor) -> Tensor:
        reasons: list[str | None] = [None] * len(images)
        request = read_request("monitor.features", images, [""] * len(images), None)
        rows, values = towers.image_features(request, reasons)
        if len(rows) < len(images):
            why = next(why for why in reasons if why)
            raise UserError(f"monitor.features: an image has none: {why}. Set monitor.features to null.")
        return values

    return features


def _check_monitor(config: FlowGRPOConfig, features: bool) -> None:
    """Refuse a monitor that would stop a run by what it does not measure."""
    remedy = "Set monitor.features to a CLIP model, or leave it null."
    drift = features and config.evaluation.every > 0
    own = {
        "diversity_ratio": (features, remedy),
        "feature_drift": (
            drift,
            f"{remedy.removesuffix(', or leave it null.')} and evaluation.every above 0.",
        ),
    }
    if config.objective.ascent is not None:
        other = "The reward's gradient is all that its samples are asked for; take group_std_ratio."
        names = ("agreement", "agreement_change", "recorded_change", "judge_std_ratio", "diversity_ratio")
        own |= dict.fromkeys(names, (False, other))
    if config.data.pairs is not None:
        other = "Stored pairs are not judged; hold an evaluation to heldout_change or feature_drift."
        names = ("agreement", "agreement_change", "recorded_change", "judge_std_ratio", "diversity_ratio")
        own |= dict.fromkeys(names, (False, other))
    config.rewards.check_monitor(config.monitor, config.evaluation, **own)


def _prompts(records: Records) -> set[tuple[str, ...]]:
    """The prompts, with their sources, alike where only a prompt's blanks or capitals differ."""
    keys = map(record_key, records)
    return {(" ".join(prompt.split()).casefold(), *source) for prompt, *source in keys}


def _fingerprints(config: FlowGRPOConfig, records: Records, heldout: Records) -> dict[str, str]:
    """SHA-256 of the prompt records, of how many bytes the image files have that they name (not of those in
    Parquet), and of the files of the user's own rewards."""
    train = "data.train" if config.data.pairs is None else "data.pairs"
    read = {train: records, "data.heldout": heldout}
    found = {name: fingerprint(given) for name, given in read.items()}
    for name, given in read.items():
        stored = name == "data.pairs"
        if sizes := [Path(file).stat().st_size for record in given for file in _files(record, stored)]:
            found[f"images of {name}"] = fingerprint([{"bytes": sizes}])
    for label, term in {**config.evaluation.rewards, **config.rewarded}.items():
        file = Path((term.name or label).rpartition(":")[0])
        if file.suffix == ".py":
            found[f"reward {label}"] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def _files(record: Mapping[str, Any], stored: bool) -> Iterable[str | Path]:
    """The image files that a record names: what is to be edited, and of a stored pair both."""
    named = [one["image"] for one in record["candidates"]] if stored else []
    named += listed_sources(record.get("source"))
    return [file for file in named if isinstance(file, str | Path) and os.path.isfile(file)]


def build_win_rates(
    config: ComparisonConfig, rewards: RewardsConfig, judges: Mapping[str, PointwiseReward | PairwiseReward]
) -> dict[str, PointwiseReward]:
    """The terms of the sum: a win rate for each judge, the score itself for those in `config.scores`.

    A pointwise judge compares by its mean and standard deviation, a pairwise one directly.
    """
    from visalign.rewards.pairs.as_pairwise import as_pairwise
    from visalign.rewards.pairs.as_pointwise import GroupWinRate

    for label in config.scores:
        if label not in rewards.terms:
            raise UserError(
                f"comparison.scores names {label!r}, which is no term. {suggestion(label, rewards.terms)}"
                f"Terms: {', '.join(rewards.terms)}."
            )
    if set(config.scores) >= set(rewards.terms):
        raise UserError(
            "comparison.scores names every term, so nothing is compared. Take one out, or write "
            "'pipeline: flow_grpo' to train on scores."
        )
    built: dict[str, PointwiseReward] = {}
    for label in rewards.terms:
        judge: Any = judges[label]
        if label not in config.scores:
            if rewards.terms[label].bound is not None:
                raise UserError(
                    f"rewards.terms.{label}.bound is {rewards.terms[label].bound}, and the mean of its win "
                    f"rates is always 0.5. Name it in comparison.scores: [{label}], or set the bound to null."
                )
            if _is_of_sets(judge):
                raise UserError(
                    f"rewards.terms.{label} judges sets of images, and no two can be compared by it. Name "
                    f"it in comparison.scores: [{label}]."
                )
            pairwise = judge if isinstance(judge, PairwiseReward) else as_pairwise(judge)
            built[label] = GroupWinRate(
                pairwise, both_orders=config.both_orders, hard=config.hard, budget=config.budget
            )
        elif isinstance(judge, PointwiseReward):
            built[label] = judge
        else:
            raise UserError(f"comparison.scores names {label!r}, a judge that only compares; take it out.")
    return built


def _judging_alone(judges: Mapping[str, Any], needed: Iterable[str]) -> dict[str, PointwiseReward]:
    """Those that judge a held-out image by itself."""
    found = pointwise_only(judges, needed=needed)
    alone = {label: one for label, one in found.items() if not _is_of_sets(one)}
    if named := [label for label in needed if label not in alone]:
        raise UserError(
            f"evaluation.rewards names {', '.join(named)}, which judges sets of a training and no held-out "
            "image. Leave it in rewards.terms alone."
        )
    return alone


def _is_of_sets(judge: Any) -> bool:
    """Whether a judge needs to be told which images belong together."""
    return judge.capabilities.needs_group


def _check_sets(terms: Mapping[str, Any], prompts_per_iteration: int, world: int) -> None:
    """Refuse processes that would each see a part of a set."""
    for label, term in terms.items():
        if term.capabilities.needs_batch and world > 1:
            raise UserError(
                f"rewards.terms.{label} judges all images of an iteration as one set, and {world} "
                f"processes would each have their own. Set rewards.terms.{label}.options.over=group, or use "
                "one process."
            )
        if _is_of_sets(term):
            check_whole_groups(prompts_per_iteration, world)
