# SPDX-License-Identifier: Apache-2.0
"""Analysis of votes: agreement, annotators, soft labels; as a report and as a set to train on."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from visalign.atomic import write_atomic
from visalign.data.sets.columns import SIDES
from visalign.data.sets.image_references import resolve_image
from visalign.data.sets.records import PreferencePair, QualityRecord
from visalign.errors import UserError, suggestion
from visalign.evaluation.pages.base import embedded
from visalign.evaluation.rewards.judged_pairs import IntervalSettings
from visalign.evaluation.statistics import agreement, annotators
from visalign.evaluation.statistics.intervals import (
    Interval,
    RatioTable,
    bootstrap,
    cluster_index,
    cluster_sums,
    interval,
    wilson_interval,
)
from visalign.rewards.base.images import load_images

from .store import CHOICES, Vote, VoteStore
from .tasks import PAIR_COLUMNS, Task

MOST_DISPUTED = 12
"""Pairs that the page shows with their images."""
FORMAT = "visalign votes report 1"
FITTED = ("reliability", "reliability_std", "side_bias", "agreement")
"""Numbers of the annotator model in a voter's entry."""

Array = NDArray[np.float64]


def select_votes(store: VoteStore, leave_out: Collection[str] = ()) -> list[Vote]:
    """Return the votes that count, without those of some voters."""
    votes = store.votes()
    names = {vote.annotator for vote in votes}
    for name in leave_out:
        if name not in names:
            raise UserError(f"Nobody voted as {name!r}. {suggestion(name, names)}Voters: {', '.join(sorted(names))}.")
    selected = [vote for vote in votes if vote.annotator not in leave_out]
    if not selected:
        raise UserError(f"'{store.path}' holds no vote{' besides those left out' if leave_out else ' yet'}.")
    return selected


def report(store: VoteStore, votes: Sequence[Vote], settings: IntervalSettings) -> dict[str, Any]:
    """Analyse the votes as JSON: agreement as Krippendorff's α, each voter's reliability, disputed pairs.

    Of each voter: median seconds, `rest` (agreement with the majority of the others), `repeats` and `gold`
    (shares of equal and of right answers), and of pairs the share of the left of the screen and the annotator
    model. `notes` report what is odd.
    """
    first = _countable(store, votes)
    by_voter: dict[str, list[Vote]] = {}
    for vote in votes:
        by_voter.setdefault(vote.annotator, []).append(vote)
    analyse = _analyse_pairs if store.is_pairs else _analyse_images
    analysis = analyse(store, first, list(by_voter), settings)
    statistics, entries = analysis.pop("by_name"), []
    for name, ballots in by_voter.items():
        seconds = [vote.seconds for vote in ballots if vote.seconds is not None]
        entry = {
            "name": name,
            "is_judge": ballots[0].is_judge,
            "votes": len(ballots),
            "seconds": median(seconds) if seconds else None,
            "repeats": _repeats(ballots).to_dict(),
            "gold": _gold(store, ballots).to_dict(),
        }
        entries.append(entry | statistics.get(name, {}))
    people = sum(not entry["is_judge"] for entry in entries)
    if unseen := store.unseen():
        analysis["notes"].append(f"{unseen} times an image could not be shown: no votes.")
    return {
        "format": FORMAT,
        "pairs": store.is_pairs,
        "tasks": sum(task.gold is None for task in store.tasks.values()),
        "voted": len({vote.task for vote in first}),
        "votes": len(votes),
        "people": people,
        "judges": len(entries) - people,
        "annotators": entries,
        **analysis,
    }


def export_rows(store: VoteStore, votes: Sequence[Vote], *, model: bool = False) -> list[dict[str, Any]]:
    """Build rows of a preference set (pairs) or of a quality set (single images, mos = mean of the slider).

    Gold tasks and repeats are left out. Labels of pairs are shares of the votes, or with `model` the
    probability, by the annotator model, that a typical one of these voters prefers the left image.
    """
    by_task: dict[int, list[Vote]] = {}
    for vote in _countable(store, votes):
        by_task.setdefault(vote.task, []).append(vote)
    if not by_task:
        raise UserError(f"All votes in '{store.path}' are on gold pairs: there is nothing to export.")
    if model and not store.is_pairs:
        raise UserError("The annotator model is of pairs, and these votes are on single images.")
    order = sorted(by_task)
    if not store.is_pairs:
        return [_image_row(store.tasks[task], by_task[task]) for task in order]
    soft: list[tuple[float, float] | None] = [None] * len(order)
    if model:
        fit = _fit([vote for task in order for vote in by_task[task]], order)
        soft = list(zip(fit.soft_label.tolist(), fit.posterior_std.tolist(), strict=True))
    return [_pair_row(store.tasks[t], by_task[t], label) for t, label in zip(order, soft, strict=True)]


def with_images(store: VoteStore, result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Add prompts and images to the disputed pairs of a report."""
    return [
        {**pair, "prompt": store.tasks[pair["task"]].prompt, "images": images_of(store.tasks[pair["task"]])}
        for pair in result.get("disputed", ())
    ]


def images_of(task: Task) -> list[dict[str, Any] | None]:
    """Embed the images of a task for a page; None where one cannot be read."""
    batch = load_images([resolve_image(image) for image in task.images])
    return [None if image is None else embedded(image, side=256) for image in batch.images]


def _countable(store: VoteStore, votes: Iterable[Vote]) -> list[Vote]:
    """Leave out repeats and votes on gold tasks."""
    return [vote for vote in votes if not vote.is_repeat and store.tasks[vote.task].gold is None]


def _pair_row(task: Task, votes: Sequence[Vote], soft: tuple[float, float] | None) -> dict[str, Any]:
    choices = Counter(vote.answer["choice"] for vote in votes)
    counts = (choices["left"], choices["right"], choices["tie"])
    share = (counts[0] + counts[2] / 2) / sum(counts)
    columns = {name: str(value) for name, value in task.extra.items() if name in PAIR_COLUMNS}
    extra = {name: value for name, value in task.extra.items() if name not in PAIR_COLUMNS}
    if soft is not None:
        extra |= {"vote_share": share, "difference_std": soft[1]}
    return PreferencePair(
        prompt=task.prompt,
        image_left=task.images[0],
        image_right=task.images[1],
        label=share if soft is None else soft[0],
        votes=counts if soft is None else None,
        ballots=tuple((vote.annotator, SIDES[vote.answer["choice"]]) for vote in votes),
        extra=extra | _other_answers(votes),
        **columns,
    ).to_row()


def _image_row(task: Task, votes: Sequence[Vote]) -> dict[str, Any]:
    grades = [float(vote.answer["slider"]) for vote in votes if "slider" in vote.answer]
    image, extra = task.images[0], dict(task.extra) | _other_answers(votes)
    if not grades:
        return {"image": image, "prompt": task.prompt, **extra}
    std = stdev(grades) if len(grades) > 1 else None
    return QualityRecord(image=image, mos=fmean(grades), std=std, prompt=task.prompt, extra=extra).to_row()


def _other_answers(votes: Iterable[Vote]) -> dict[str, Any]:
    """Collect the counts [yes, no] of the checklist, and the boxes, texts and probabilities of each voter."""
    checklist: dict[str, list[int]] = {}
    answers = []
    for vote in votes:
        for question, yes in vote.answer.get("checklist", {}).items():
            checklist.setdefault(question, [0, 0])[0 if yes else 1] += 1
        marks = {name: vote.answer[name] for name in ("boxes", "text", "prob") if vote.answer.get(name)}
        answers += [{"annotator": vote.annotator, **marks}] if marks else []
    return ({"checklist": checklist} if checklist else {}) | ({"answers": answers} if answers else {})


def _analyse_pairs(
    store: VoteStore, first: Sequence[Vote], names: Sequence[str], settings: IntervalSettings
) -> dict[str, Any]:
    order = sorted({vote.task for vote in first})
    if not order:
        alpha = Interval(estimate=math.nan).to_dict()
        notes = ["All votes are on gold pairs."]
        return {"alpha": alpha, "disputed": [], "split": 0, "with_two": 0, "by_name": {}, "notes": notes}
    row = {task: index for index, task in enumerate(order)}
    index, clusters = cluster_index([store.tasks[task].prompt for task in order])
    by_voter = {name: np.zeros((len(order), 3)) for name in names}
    for vote in first:
        by_voter[vote.annotator][row[vote.task], CHOICES.index(vote.answer["choice"])] += 1
    votes = sum(by_voter.values(), np.zeros((len(order), 3)))
    table = RatioTable(index, clusters)
    for name, counts in by_voter.items():
        table.add(name, *agreement.majority_credit(counts, votes - counts))
    rest = table.intervals(**settings.drawing(), level=settings.level)
    fit = _fit(first, order)
    by_name: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(dict.fromkeys(vote.annotator for vote in first)):
        chosen = [v for v in first if v.annotator == name and v.answer["choice"] != "tie"]
        on_left = sum(vote.answer["choice"] == CHOICES[vote.swapped] for vote in chosen)
        fitted = {key: float(getattr(fit, key)[number]) for key in FITTED}
        by_name[name] = fitted | {
            "rest": rest[name].to_dict(),
            "ties": float(by_voter[name][:, 2].sum() / by_voter[name].sum()),
            "left_of_screen": wilson_interval(on_left, len(chosen), level=settings.level).to_dict(),
        }
    alpha = _alpha(agreement.alpha_sums(votes), agreement.alpha_of_sums, index, clusters, settings)
    majority = votes.max(1, initial=0) / np.maximum(votes.sum(1), 1)
    split = [i for i in np.argsort(majority, kind="stable") if votes[i].sum() > 1 and majority[i] < 1]
    disputed = [
        {"task": order[i], "votes": votes[i].astype(int).tolist(), "soft_label": float(fit.soft_label[i])}
        for i in split[:MOST_DISPUTED]
    ]
    return {
        "alpha": alpha.to_dict(),
        "disputed": disputed,
        "split": len(split),
        "with_two": int((votes.sum(1) > 1).sum()),
        "by_name": by_name,
        "notes": _pair_notes(votes),
    }


def _pair_notes(votes: Array) -> list[str]:
    left, right, ties = votes.sum(0)
    rules = (
        (
            not left + right,
            "All votes are ties: they teach a judge nothing, and no agreement can be computed.",
        ),
        (left > 1 and not right + ties, "All votes are for the left image of the table: mix its sides."),
        (right > 1 and not left + ties, "All votes are for the right image of the table: mix its sides."),
        (votes.sum(1).max() < 2, "No pair has two votes, so agreement between voters is not known."),
    )
    return [note for holds, note in rules if holds]


def _analyse_images(
    store: VoteStore, first: Sequence[Vote], names: Sequence[str], settings: IntervalSettings
) -> dict[str, Any]:
    """Compute α of the slider and of each question, and each voter's distance from the mean of the others."""
    order = sorted({vote.task for vote in first})
    row = {task: index for index, task in enumerate(order)}
    prompts = [store.tasks[task].prompt or store.tasks[task].images[0] for task in order]
    index, clusters = cluster_index(prompts)
    if clusters < 2:
        index, clusters = np.arange(len(order)), len(order)
    answers: dict[str, list[tuple[int, float]]] = {}
    grades: dict[int, dict[str, float]] = {}
    for vote in first:
        marks = vote.answer.get("checklist", {})
        if "slider" in vote.answer:
            marks = {"slider": vote.answer["slider"], **marks}
            grades.setdefault(vote.task, {})[vote.annotator] = float(vote.answer["slider"])
        for question, mark in marks.items():
            answers.setdefault(question, []).append((row[vote.task], float(mark)))
    alphas = {}
    for question in filter(answers.__contains__, ("slider", *store.form.checklist)):
        items, values = zip(*answers[question], strict=True)
        sums = annotators.rating_sums(values, items, items=len(order))
        alpha = _alpha(sums, annotators.alpha_of_rating_sums, index, clusters, settings)
        alphas[question] = alpha.to_dict()
    by_name = {}
    for name in names:
        gaps = [
            of_task[name] - fmean(value for other, value in of_task.items() if other != name)
            for of_task in grades.values()
            if name in of_task and len(of_task) > 1
        ]
        by_name[name] = {
            "above_the_rest": fmean(gaps) if gaps else None,
            "apart_from_the_rest": fmean(map(abs, gaps)) if gaps else None,
        }
    return {"alphas": alphas, "by_name": by_name, "notes": []}


def _alpha(sums: Array, statistic: Any, index: Any, clusters: int, settings: IntervalSettings) -> Interval:
    """Compute an α with its interval over prompts."""
    by_prompt = cluster_sums(sums, index, clusters) if len(sums) else sums
    by_prompt = by_prompt[by_prompt[:, 1:].sum(1) > 0]
    if not len(by_prompt):
        return Interval(estimate=math.nan, level=settings.level)
    draws = bootstrap(by_prompt, lambda s: statistic(s)[:, None], **settings.drawing())[:, 0]
    return interval(float(statistic(by_prompt.sum(0)[None])[0]), draws, len(by_prompt), level=settings.level)


def _fit(first: Sequence[Vote], order: Sequence[int]) -> annotators.AnnotatorFit:
    names = list(dict.fromkeys(vote.annotator for vote in first))
    row = {task: index for index, task in enumerate(order)}
    return annotators.fit_annotators(
        [row[vote.task] for vote in first],
        [names.index(vote.annotator) for vote in first],
        [SIDES[vote.answer["choice"]] for vote in first],
        [-1 if vote.swapped else 1 for vote in first],
        pairs=len(order),
        annotators=len(names),
    )


def _repeats(votes: Sequence[Vote]) -> Interval:
    """Share of a voter's repeated tasks with an equal answer: choice, checklist, and a slider within half a
    grade; boxes and texts are not compared."""
    first = {vote.task: vote.answer for vote in votes if not vote.is_repeat}
    same = []
    for vote in votes:
        before, again = first.get(vote.task), vote.answer
        if not vote.is_repeat or before is None or not again.keys() & {"choice", "slider", "checklist"}:
            continue
        near = abs(before.get("slider", 0) - again.get("slider", 0)) <= 0.5
        same.append(near and all(before.get(name) == again.get(name) for name in ("choice", "checklist")))
    return wilson_interval(sum(same), len(same))


def _gold(store: VoteStore, votes: Sequence[Vote]) -> Interval:
    answers = [(store.tasks[vote.task].gold, vote.answer.get("choice")) for vote in votes]
    right = [gold == choice for gold, choice in answers if gold is not None]
    return wilson_interval(sum(right), len(right))


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows atomically as JSONL; images below the file's folder get relative paths."""
    folder = path.resolve().parent

    def relative(name: str, value: Any) -> Any:
        if name.startswith("image") and isinstance(value, str) and Path(value).is_relative_to(folder):
            return str(Path(value).relative_to(folder))
        return value

    lines = [json.dumps({k: relative(k, v) for k, v in row.items()}, ensure_ascii=False) for row in rows]
    write_atomic(path, "".join(f"{line}\n" for line in lines))
