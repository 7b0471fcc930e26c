# SPDX-License-Identifier: Apache-2.0
"""Prompts and rewards of a Flow-GRPO job, read and checked before the model is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from visalign.adapters.catalogue import (
    edits_of,
    family_of,
    has_two_halves,
    is_distilled,
    is_guided_by_call,
    joins_sources,
)
from visalign.adapters.model_folder import pipeline_index
from visalign.data.assets import resolve_model
from visalign.data.sets.image_references import file_and_position
from visalign.data.sets.prompt_files import Edits, listed_sources, record_key
from visalign.errors import UserError, suggestion
from visalign.evaluation.heldout.correctness import check_judge
from visalign.interfaces import PairwiseReward, PointwiseReward
from visalign.pipelines.shared.parts import (
    Records,
    build_records,
    check_routes,
    first_routed,
    load_terms,
    own_heldout,
    pointwise_only,
    prompt_strata,
    weighted_sum,
)
from visalign.pipelines.shared.run_folder import fingerprint
from visalign.pipelines.shared.sections import RewardsConfig, RewardTerm
from visalign.precision import default_device
from visalign.settings import refuse
from visalign.training.diffusion.experts import check_experts
from visalign.training.diffusion.references import ReferenceImages
from visalign.training.diffusion.reward_gradient import check_differentiable
from visalign.training.diffusion.rollout_settings import check_more_samples, check_processes
from visalign.training.diffusion.samples import Features, StoredPreference
from visalign.training.loop.sampler import PromptSampler

from .config import ComparisonConfig, EvaluationConfig, FlowGRPOConfig
from .stored_pairs import read_captioned, read_stored


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Prompts and rewards of a job."""

    records: Records
    heldout: Records
    rewards: Mapping[str, PointwiseReward]
    """label -> reward to report on held-out images: all that can score one image by itself."""
    reward: PointwiseReward  # The optimized sum, or the preferences of stored pairs
    references: ReferenceImages | None  # Of the term that has some
    features: Features | None  # Image features for the monitor
    strata: list[str] | None  # Label per training record, with data.balance
    heldout_trained_on: int  # Number of held-out prompts that are trained on as well
    fingerprints: Mapping[str, str]  # Input -> SHA-256 of its content
    notes: tuple[str, ...] = ()  # Oddities of the inputs that do not stop the run


def prepare(config: FlowGRPOConfig, world: int, device: str | None = None) -> Inputs:
    """Read and check all inputs that a run of `world` processes has without its model."""
    from visalign.rewards.catalogue import load_judge
    from visalign.rewards.combine.weighted_sum import WeightedSum

    data, evaluation = config.data, config.evaluation
    model = config.model.described_by, config.model.adapter
    edits, reading = edits_of(*model), dict[str, Any](several=joins_sources(*model), names=data.map)
    source, records, notes = _training_records(config, edits, reading)
    if data.heldout is None:
        records, heldout = own_heldout(records, config.seed)
    else:
        heldout = build_records(data.heldout, "data.heldout", edits=edits, **reading)
    terms = {**evaluation.rewards, **config.rewarded}
    if is_distilled(config.model.path, *model):
        notes = (*notes, *_distilled_notes(config))
    if data.is_stored and (config.rollout.guidance is not None or config.rollout.merge_adapters):
        notes = (*notes, "rollout.guidance and rollout.merge_adapters are unused: stored images replace samples.")
    notes = (*notes, *_guidance_notes(config))
    check_routes(config.rewarded, records)
    judges = load_terms(terms, load_judge, device)
    rewards: dict[str, Any] = {
        label: judge
        for label, judge in pointwise_only(judges, needed=evaluation.rewards).items()
        if not (judge.capabilities.compares_samples or judge.capabilities.discriminators or terms[label].references)
    }
    refuse(_unscored(evaluation, [label for label in terms if label not in rewards]))
    if not rewards:
        notes = (*notes, "Held-out prompts are not scored: name a reward, evaluation.rewards={clip_score: {}}.")
    if config.learns_unrewarded:
        reward: Any = StoredPreference()
    elif config.comparison is None:
        reward = weighted_sum(config.rewards, pointwise_only(judges, needed=config.rewards.terms), WeightedSum)
    else:
        reward = weighted_sum(config.rewards, build_win_rates(config.comparison, config.rewards, judges), WeightedSum)
    references = build_references(config.rewarded, judges, records)
    strata = prompt_strata(records, data.balance)
    _check_method(config, reward, records, strata, world)
    if (label := evaluation.correctness) is not None:
        check_judge(label, rewards[label], first_routed(heldout, terms[label]))
    towers = {label: judge.towers for label, judge in judges.items() if hasattr(judge, "towers")}
    name = next(iter(towers), None) if config.monitor.features == "auto" else config.monitor.features
    _check_monitor(config, has_features=name is not None)
    trained_prompts = {_prompt_key(record) for record in records} & {_prompt_key(record) for record in heldout}
    return Inputs(
        records=records,
        heldout=heldout,
        rewards=rewards,
        reward=reward,
        references=references,
        features=None if name is None else build_features(name, towers.get(name), device or default_device()),
        strata=strata,
        heldout_trained_on=len(trained_prompts),
        fingerprints=fingerprint_inputs(source, records) | fingerprint_inputs("data.heldout", heldout),
        notes=notes,
    )


def _training_records(
    config: FlowGRPOConfig, edits: Edits, reading: Mapping[str, Any]
) -> tuple[str, Records, tuple[str, ...]]:
    """Read (key, records, notes) of the prompts, stored pairs or images with captions that are learnt from."""
    data = config.data
    if data.pairs is not None:
        row, size = config.objective.regression, config.rollout.group_size
        soft = bool(row and row.loss_options.get("soft"))
        return "data.pairs", *read_stored(data.pairs, edits, size=size, soft=soft, limit=data.pairs_size, **reading)
    if data.images is not None:
        sizes = config.rollout.image_sizes
        return "data.images", *read_captioned(data.images, edits, data.images_size, sizes, data.map)
    return "data.train", build_records(data.train, "data.train", edits=edits, **reading), ()


def _unscored(evaluation: EvaluationConfig, unfit: Sequence[str]) -> Iterator[str]:
    """Yield why the labels `unfit`, of rewards of a training's samples, measure no held-out image."""
    measures = {"rewards": [*evaluation.rewards], "correctness": [evaluation.correctness]}
    for setting, labels in measures.items():
        for label in (label for label in labels if label in unfit):
            yield (
                f"evaluation.{setting} names {label}, which needs a training's samples and scores no held-out image. "
                "Name it in rewards.terms only."
            )


def _guidance_notes(config: FlowGRPOConfig) -> Iterator[str]:
    """Warn where a model that is used with guidance learns from stored images, and is evaluated, without."""
    model, is_unset = config.model, config.model.guidance is None and config.evaluation.guidance is None
    if config.data.is_stored and is_unset and is_guided_by_call(model.path, model.described_by, model.adapter):
        yield "Held-out images are drawn without guidance. Set evaluation.guidance to the scale that you use."


def _distilled_notes(config: FlowGRPOConfig) -> Iterator[str]:
    """Refuse a distilled student without its teacher; warn of losses that blur it."""
    objective, path = config.objective, config.model.path
    if objective.few_step is not None and objective.teacher is None:
        raise UserError(
            f"{path} is distilled, and objective.algorithm={objective.algorithm} compares it with a teacher of many "
            "steps, which is missing. Set objective.teacher to the model before its distillation, e.g. "
            "Tongyi-MAI/Z-Image of Z-Image-Turbo, or to model.path itself to hold it where it is."
        )
    if objective.regression is not None:
        yield (
            f"{path} is distilled to few steps, and objective.algorithm={objective.algorithm} trains it as a "
            "denoiser, which blurs it. objective.algorithm=tdm_r1 with objective.teacher keeps it sharp."
        )


def _unfit_teacher(config: FlowGRPOConfig) -> Iterator[str]:
    objective, model = config.objective, config.model
    family, few_step, teacher = family_of(model.described_by, model.adapter), objective.few_step, objective.teacher
    if family is None or few_step is None:
        return
    if family.guidance == "none" and (few_step.teacher_guidance or 1) > 1:
        yield (
            f"objective.changes.teacher_guidance is {few_step.teacher_guidance}, and {model.path} is guided by "
            "nothing. Set it to null."
        )
    if teacher is None:
        return
    student, other = (pipeline_index(f) for f in (model.described_by, resolve_model(teacher)))
    for part in family.present(student):
        if (kind := (other.get(part) or [None, None])[1]) != student[part][1]:
            yield (
                f"objective.teacher is {teacher}, whose {part} is a {kind}, and that of {model.path} a "
                f"{student[part][1]}. Name the model of the same architecture that was not distilled."
            )


def _unfit_guidance(config: FlowGRPOConfig) -> Iterator[str]:
    """Yield why a scale besides `model.guidance`, which the model checks itself, is none of the model's."""
    path, adapter = config.model.described_by, config.model.adapter
    family = family_of(path, adapter)
    off = 1.0 if family is None else family.off
    without = family is not None and (family.guidance == "none" or bool(pipeline_index(path).get("is_distilled")))
    scales = {"rollout": config.rollout.guidance, "evaluation": config.evaluation.guidance}
    for section, scale in scales.items() if adapter in (None, "pipeline", "sd3") else ():
        if scale is not None and (scale < off or (without and scale > off)):
            allowed = "takes no guidance" if without else f"is guided by at least {off:g}, which switches guidance off"
            yield f"{section}.guidance is {scale:g}, and {config.model.path} {allowed}. Leave it out, or change it."


def _check_method(config: FlowGRPOConfig, reward: Any, records: Records, strata: list[str] | None, world: int) -> None:
    """Refuse an algorithm that the reward, the prompts or the processes do not fit, before the model is loaded."""
    rollout, objective = config.rollout, config.objective
    size = rollout.prompts_per_iteration, rollout.group_size
    check_processes(objective, rollout, reward, world)
    # built for its refusals: the algorithm makes its own, but only once the model is there
    order: dict[str, Any] = {"strata": strata, "cycle": config.data.cycle, "compared": objective.compares}
    PromptSampler(len(records), *size, config.seed, **order)
    renewed = any(term.references and term.references.every for term in config.rewarded.values())
    objective.check_reward(reward, renewed=renewed)
    more = config.dynamic, config.self_imitation
    check_more_samples(objective, rollout, *more, reward=reward, renewed=renewed)
    if objective.ascent is not None:
        check_differentiable(reward)
    model = config.model
    refuse(_unfit_teacher(config))
    refuse(_unfit_guidance(config))
    family = family_of(model.described_by, model.adapter)
    if config.data.images and has_two_halves(model.described_by, model.adapter, model.guidance):
        raise UserError(
            f"model.guidance is {model.guidance}, and captions teach the velocity that guidance adds up, not its sum. "
            "Set model.guidance=null; evaluation.guidance is that of held-out images."
        )
    if config.data.cache is not None and family is not None and (family.modular or family.source != "none"):
        why = "diffusers has this model as a modular pipeline" if family.modular else "this model edits an image"
        raise UserError(f"data.cache keeps prompts of classic pipelines by their text, and {why}. Leave it out.")
    if objective.experts:
        check_experts(objective.experts, records)


def build_references(
    terms: Mapping[str, RewardTerm], judges: Mapping[str, Any], records: Records
) -> ReferenceImages | None:
    """Build the reference images of the term that has some; those of a record stay its prompt's."""
    compared = {label: term.references for label, term in terms.items() if term.references}
    if not compared:
        return None
    if len(compared) > 1:
        raise UserError(
            f"rewards.terms: {' and '.join(compared)} have references, and one term can. Leave others out."
        )
    label, settings = next(iter(compared.items()))
    prompts = {record_key(record) for record in records}
    if len(prompts) > len({prompt for prompt, *_ in prompts}):
        raise UserError(
            f"rewards.terms.{label}.references: references are drawn per prompt, and prompts of data.train come with "
            "several sources. Leave references out, or word the prompts differently."
        )
    reward = judges[label]
    references = {str(record["prompt"]): record["references"] for record in records if "references" in record}
    reward.references.update(references)
    return ReferenceImages(reward, count=settings.count, keep=settings.keep, every=settings.every)


def build_features(name: str, towers: Any, device: str) -> Features:
    """Return a function from images [b, 3, H, W] to features [b, d] of `towers`, or of the CLIP model `name`."""
    from visalign.rewards.base.contract import read_request
    from visalign.rewards.clip.towers import ClipTowers

    towers = towers or ClipTowers(name, device=device, cache_bytes=0)

    def features(images: Tensor) -> Tensor:
        reasons: list[str | None] = [None] * len(images)
        request = read_request("monitor.features", images, [""] * len(images), None)
        rows, values = towers.image_features(request, reasons)
        if len(rows) < len(images):
            reason = next(filter(None, reasons))
            raise UserError(f"monitor.features: an image has none: {reason}. Set monitor.features to null.")
        return values

    return features


def _check_monitor(config: FlowGRPOConfig, *, has_features: bool) -> None:
    """Refuse a monitor that would stop a run by what it does not measure, and an objective that needs it."""
    config.objective.check_features(has_features)
    remedy, drift = "Set monitor.features to a CLIP model", has_features and config.evaluation.every > 0
    measured = {
        "diversity_ratio": (has_features, f"{remedy}, or leave it null."),
        "feature_drift": (drift, f"{remedy} and evaluation.every above 0."),
    }
    unscored = ("agreement", "agreement_change", "recorded_change", "judge_std_ratio", "diversity_ratio")
    if config.objective.ascent is not None:
        reason = "Its samples are asked for the reward's gradient only; take group_std_ratio."
        measured |= dict.fromkeys(unscored, (False, reason))
    if config.learns_unrewarded:
        reason = "Images are not judged; limit heldout_change or feature_drift."
        measured |= dict.fromkeys(unscored, (False, reason))
    config.rewards.check_monitor(config.monitor, config.evaluation, **measured)


def _prompt_key(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the prompt with its sources; blanks and capitals of a prompt do not count."""
    prompt, *source = record_key(record)
    return " ".join(prompt.split()).casefold(), *source  # tokenizers of CLIP and T5 hardly tell such prompts apart


def fingerprint_inputs(key: str, records: Records) -> dict[str, str]:
    """Hash the records of a source, and the sizes of their image files, or of the tables and tar files with them."""
    images = [image for record in records for image in listed_sources(record.get("source"))]
    if key in ("data.pairs", "data.images"):
        images += [candidate["image"] for record in records for candidate in record["candidates"]]
    files = [file for image in images if os.path.isfile(file := file_and_position(str(image))[0])]
    sizes = {f"images of {key}": fingerprint([{"bytes": [Path(f).stat().st_size for f in files]}])} if files else {}
    return {key: fingerprint(records), **sizes}


def build_win_rates(
    config: ComparisonConfig, rewards: RewardsConfig, judges: Mapping[str, PointwiseReward | PairwiseReward]
) -> dict[str, PointwiseReward]:
    """Build the terms of the sum: a win rate for each judge, the score itself for those in `config.scores`.

    A pointwise judge compares by its mean and standard deviation, a pairwise one directly.
    """
    from visalign.rewards.pairs.as_pairwise import as_pairwise
    from visalign.rewards.pairs.as_pointwise import GroupWinRate

    refuse(_unfit_comparison(config, rewards, judges))
    options: dict[str, Any] = {"both_orders": config.both_orders, "hard": config.hard, "budget": config.budget}
    terms: dict[str, Any] = {label: judges[label] for label in rewards.terms}
    for label, judge in terms.items():
        if label not in config.scores:
            pairwise = judge if isinstance(judge, PairwiseReward) else as_pairwise(judge)
            terms[label] = GroupWinRate(pairwise, **options)
    return terms


def _unfit_comparison(config: ComparisonConfig, rewards: RewardsConfig, judges: Mapping[str, Any]) -> Iterator[str]:
    for label in (label for label, term in rewards.terms.items() if term.where):
        yield f"rewards.terms.{label}.where: pref_grpo compares all samples of a group. Leave it out."
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
        if term.references:
            yield f"rewards.terms.{label}.references: pref_grpo compares the images of a group instead. {remedy}"
        if judges[label].capabilities.needs_group:
            yield f"rewards.terms.{label} judges sets of images, and no two can be compared by it. {remedy}"
