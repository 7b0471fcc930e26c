# SPDX-License-Identifier: Apache-2.0
"""What votes say: agreement, annotators, soft labels; as numbers, as a page, and as a set to train on."""

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
from .tasks import KEPT, Task

SAID = {"left": 1.0, "right": 0.0, "tie": 0.5}
MOST_DISPUTED = 12
"""Pairs that the page shows with their images."""
FORMAT = "visalign votes report 1"

Array = NDArray[np.float64]


def votes_of(store: VoteStore, leave_out: Collection[str] = ()) -> list[Vote]:
    """The votes that count without those of some voters.

    Raises:
        UserError: nobody has such a name, or there is no vote.
    """
    found = store.votes()
    names = {vote.annotator for vote in found}
    for name in leave_out:
        if name not in names:
            raise UserError(
                f"Nobody voted as {name!r}. {suggestion(name, names)}Those who did: "
                f"{', '.join(sorted(names))}."
            )
    kept = [vote for vote in found if vote.annotator not in leave_out]
    if not kept:
        raise UserError(f"'{store.path}' holds no vote{' beside those left out' if leave_out else ' yet'}.")
    return kept


def report(store: VoteStore, votes: Sequence[Vote], settings: IntervalSettings) -> dict[str, Any]:
    """What the votes say, JSON-able.

    Returns:
        `tasks`, `voted`, `votes`, `people`, `judges`; of pairs `alpha` (Krippendorff's, of left, right, tie),
        `disputed` tasks and `fit`; of single images `alphas` of the slider and of each question; and
        `annotators`: name, is_judge, votes, median seconds, `rest` (how often the majority of the others
        says the same), `repeats` and `gold` (share that was the same, right), and of pairs the share of the
        left of the screen and the annotator model. `notes` say what is odd.
    """
    first = [vote for vote in votes if not vote.again and store.tasks[vote.task].gold is None]
    names = list(dict.fromkeys(vote.annotator for vote in votes))
    is_pair = len(next(iter(store.tasks.values())).images) == 2
    measured = (
        _of_pairs(store, first, names, settings) if is_pair else _of_images(store, first, names, settings)
    )
    rest = measured.pop("by_name")
    entries = []
    for name in names:
        own = [vote for vote in votes if vote.annotator == name]
        seconds = [vote.seconds for vote in own if vote.seconds is not None]
        entries.append(
            {
                "name": name,
                "is_judge": own[0].is_judge,
                "votes": len(own),
                "seconds": median(seconds) if seconds else None,
                "repeats": _repeats(own).to_dict(),
                "gold": _gold(store, own).to_dict(),
                **rest.get(name, {}),
            }
        )
    people = sum(not entry["is_judge"] for entry in entries)
    if unseen := store.unseen():
        measured["notes"] = [*measured["notes"], f"{unseen} times an image could not be shown: no votes."]
    return {
        "format": FORMAT,
        "pairs": is_pair,
        "tasks": sum(task.gold is None for task in store.tasks.values()),
        "voted": len({vote.task for vote in first}),
        "votes": len(votes),
        "people": people,
        "judges": len(entries) - people,
        "annotators": entries,
        **measured,
    }


def exported(store: VoteStore, votes: Sequence[Vote], *, model: bool = False) -> list[dict[str, Any]]:
    """Rows of a preference set (pairs) or of a quality set (single images, whose mos is the slider's mean).

    Gold tasks and repeats are left out. What else was answered stands in `answers`.

    Args:
        store: of the votes.
        votes: `votes_of` it.
        model: labels of pairs from the annotator model, the probability that a typical one of these voters
            prefers the left image, in place of the share of the votes.

    Raises:
        UserError: no vote on what is no gold task; model for single images.
    """
    by_task: dict[int, list[Vote]] = {}
    for vote in votes:
        if not vote.again and store.tasks[vote.task].gold is None:
            by_task.setdefault(vote.task, []).append(vote)
    if not by_task:
        raise UserError(f"All votes in '{store.path}' are on gold pairs: there is nothing to export.")
    is_pair = len(store.tasks[next(iter(by_task))].images) == 2
    if model and not is_pair:
        raise UserError("The annotator model is of pairs, and these votes are on single images.")
    order = sorted(by_task)
    fit = _fit([vote for task in order for vote in by_task[task]], order) if model else None
    rows = []
    for number, task in enumerate(order):
        soft = None if fit is None else (float(fit.soft_label[number]), float(fit.posterior_std[number]))
        make = _pair_row(store.tasks[task], by_task[task], soft) if is_pair else _image_row
        rows.append(make if isinstance(make, dict) else make(store.tasks[task], by_task[task]))
    return rows


def with_images(store: VoteStore, result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The disputed pairs of a report with what the page shows of them."""
    pairs = []
    for pair in result.get("disputed", ()):
        task = store.tasks[pair["task"]]
        pairs.append({**pair, "prompt": task.prompt, "images": images_of(task)})
    return pairs


def images_of(task: Task) -> list[dict[str, Any] | None]:
    """The images of a task as a page shows them; None where one cannot be read."""
    found = load_images([resolve_image(image) for image in task.images])
    return [None if image is None else embedded(image, side=256) for image in found.images]


def _pair_row(task: Task, votes: Sequence[Vote], soft: tuple[float, float] | None) -> dict[str, Any]:
    said = Counter(vote.answer["choice"] for vote in votes)
    counts = (said["left"], said["right"], said["tie"])
    share = (counts[0] + counts[2] / 2) / sum(counts)
    known = {name: str(value) for name, value in task.more.items() if name in KEPT}
    extra = {name: value for name, value in task.more.items() if name not in KEPT}
    if soft is not None:
        extra |= {"vote_share": share, "difference_std": soft[1]}
    return PreferencePair(
        prompt=task.prompt,
        image_left=task.images[0],
        image_right=task.images[1],
        label=share if soft is None else soft[0],
        votes=counts if soft is None else None,
        ballots=tuple((vote.annotator, SAID[vote.answer["choice"]]) for vote in votes),
        extra=extra | _answers(votes),
        **known,
    ).to_row()


def _image_row(task: Task, votes: Sequence[Vote]) -> dict[str, Any]:
    grades = [float(vote.answer["slider"]) for vote in votes if "slider" in vote.answer]
    more = dict(task.more) | _answers(votes)
    if not grades:
        return {"image": task.images[0], "prompt": task.prompt, **more}
    std = stdev(grades) if len(grades) > 1 else None
    return QualityRecord(
        image=task.images[0], mos=fmean(grades), std=std, prompt=task.prompt, extra=more
    ).to_row()


def _answers(votes: Iterable[Vote]) -> dict[str, Any]:
    """What was answered beside choice and slider: counts of the checklist, and who boxed and wrote what."""
    questions: dict[str, list[int]] = {}
    said = []
    for vote in votes:
        for question, yes in vote.answer.get("checklist", {}).items():
            questions.setdefault(question, [0, 0])[0 if yes else 1] += 1
        own = {name: vote.answer[name] for name in ("boxes", "text", "prob") if vote.answer.get(name)}
        said += [{"annotator": vote.annotator, **own}] if own else []
    found: dict[str, Any] = {"checklist": questions} if questions else {}
    return found | ({"answers": said} if said else {})


def _of_pairs(
    store: VoteStore, first: Sequence[Vote], names: Sequence[str], settings: IntervalSettings
) -> dict[str, Any]:
    order = sorted({vote.task for vote in first})
    row = {task: number for number, task in enumerate(order)}
    index, clusters = cluster_index([store.tasks[task].prompt for task in order])
    own = {name: np.zeros((len(order), 3)) for name in names}
    for vote in first:
        own[vote.annotator][row[vote.task], CHOICES.index(vote.answer["choice"])] += 1
    votes = sum(own.values(), np.zeros((len(order), 3)))
    if not order:
        notes = ["All votes are on gold pairs."]
        alpha = Interval(estimate=math.nan).to_dict()
        return {"alpha": alpha, "disputed": [], "split": 0, "with_two": 0, "by_name": {}, "notes": notes}
    table = RatioTable(index, clusters)
    for name, mine in own.items():
        table.add(name, *agreement.majority_credit(mine, votes - mine))
    rest = table.intervals(**settings.drawing(), level=settings.level)
    fit = _fit(first, order)
    spoken = list(dict.fromkeys(vote.annotator for vote in first))
    by_name: dict[str, dict[str, Any]] = {}
    for name in spoken:
        number = spoken.index(name)
        sides = [
            v.answer["choice"] == ("right" if v.swapped else "left")
            for v in first
            if v.annotator == name and v.answer["choice"] != "tie"
        ]
        by_name[name] = {
            "rest": rest[name].to_dict(),
            "ties": float(own[name][:, 2].sum() / own[name].sum()),
            "left_of_screen": wilson_interval(sum(sides), len(sides), level=settings.level).to_dict(),
            "reliability": float(fit.reliability[number]),
            "reliability_std": float(fit.reliability_std[number]),
            "side_bias": float(fit.side_bias[number]),
            "agreement": float(fit.agreement[number]),
        }
    alpha = _alpha(agreement.alpha_sums(votes), agreement.alpha_of_sums, index, clusters, settings)
    spread = votes.max(1, initial=0) / np.maximum(votes.sum(1), 1)
    many = [n for n in np.argsort(spread, kind="stable") if votes[n].sum() > 1 and spread[n] < 1]
    disputed = [
        {"task": order[n], "votes": votes[n].astype(int).tolist(), "soft_label": float(fit.soft_label[n])}
        for n in many
    ]
    return {
        "alpha": alpha.to_dict(),
        "disputed": disputed[:MOST_DISPUTED],
        "split": len(many),
        "with_two": int((votes.sum(1) > 1).sum()),
        "by_name": by_name,
        "notes": _pair_notes(votes, first),
    }


def _pair_notes(votes: Array, first: Sequence[Vote]) -> list[str]:
    left, right, ties = votes.sum(0)
    notes = []
    if len(first) and not left + right:
        notes.append("All votes are ties: they teach a judge nothing, and no agreement can be computed.")
    elif not ties and not min(left, right) and len(first) > 1:
        side = "left" if left else "right"
        notes.append(f"All votes are for the {side} image of the table: check whether its sides were mixed.")
    if (votes.sum(1) > 1).sum() == 0:
        notes.append("No pair has two votes, so agreement between voters is not known.")
    return notes


def _of_images(
    store: VoteStore, first: Sequence[Vote], names: Sequence[str], settings: IntervalSettings
) -> dict[str, Any]:
    """Slider and checklist: α of numbers, and each voter's distance from the mean of the others."""
    order = sorted({vote.task for vote in first})
    row = {task: number for number, task in enumerate(order)}
    index, clusters = cluster_index(
        [store.tasks[task].prompt or store.tasks[task].images[0] for task in order]
    )
    if clusters < 2:
        index, clusters = np.arange(len(order)), len(order)
    asked = {
        "slider": [(v.task, v.annotator, float(v.answer["slider"])) for v in first if "slider" in v.answer]
    }
    for question in store.form.checklist:
        asked[question] = [
            (v.task, v.annotator, float(v.answer["checklist"][question]))
            for v in first
            if question in v.answer.get("checklist", {})
        ]
    alphas = {}
    for what, said in asked.items():
        if said:
            sums = annotators.rating_sums(
                [value for *_, value in said], [row[task] for task, *_ in said], items=len(order)
            )
            alphas[what] = _alpha(sums, annotators.alpha_of_rating_sums, index, clusters, settings).to_dict()
    grades: dict[int, list[tuple[str, float]]] = {}
    for task, who, value in asked["slider"]:
        grades.setdefault(task, []).append((who, value))
    by_name = {}
    for name in names:
        apart = []
        for said_of in grades.values():
            others = [value for who, value in said_of if who != name]
            apart += [value - fmean(others) for who, value in said_of if who == name and others]
        by_name[name] = {
            "above_the_rest": fmean(apart) if apart else None,
            "apart_from_the_rest": fmean(map(abs, apart)) if apart else None,
        }
    return {"alphas": alphas, "by_name": by_name, "notes": []}


def _alpha(sums: Array, statistic: Any, index: Any, clusters: int, settings: IntervalSettings) -> Interval:
    """An α with its interval over prompts."""
    by_prompt = cluster_sums(sums, index, clusters) if len(sums) else sums
    by_prompt = by_prompt[by_prompt[:, 1:].sum(1) > 0]
    if not len(by_prompt):
        return Interval(estimate=math.nan, level=settings.level)
    draws = bootstrap(by_prompt, lambda s: statistic(s)[:, None], **settings.drawing())[:, 0]
    return interval(float(statistic(by_prompt.sum(0)[None])[0]), draws, len(by_prompt), level=settings.level)


def _fit(first: Sequence[Vote], order: Sequence[int]) -> annotators.AnnotatorFit:
    names = list(dict.fromkeys(vote.annotator for vote in first))
    row = {task: number for number, task in enumerate(order)}
    return annotators.fit_annotators(
        [row[vote.task] for vote in first],
        [names.index(vote.annotator) for vote in first],
        [SAID[vote.answer["choice"]] for vote in first],
        [-1 if vote.swapped else 1 for vote in first],
        pairs=len(order),
        annotators=len(names),
    )


def _repeats(own: Sequence[Vote]) -> Interval:
    """How often somebody said the same of a task that came twice: choice, checklist, and a slider within half
    a grade; boxes and words are not compared."""
    first = {vote.task: vote.answer for vote in own if not vote.again}
    again = [(first[vote.task], vote.answer) for vote in own if vote.again and vote.task in first]
    same = [_said_again(one, two) for one, two in again if {*one, *two} & {"choice", "slider", "checklist"}]
    return wilson_interval(sum(same), len(same))


def _said_again(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    near = ("slider" in one) == ("slider" in two) and abs(one.get("slider", 0) - two.get("slider", 0)) <= 0.5
    return near and all(one.get(name) == two.get(name) for name in ("choice", "checklist"))


def _gold(store: VoteStore, own: Sequence[Vote]) -> Interval:
    known = [(store.tasks[vote.task].gold, vote.answer.get("choice")) for vote in own]
    asked = [(gold, said) for gold, said in known if gold is not None]
    return wilson_interval(sum(gold == said for gold, said in asked), len(asked))


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Rows as a JSONL file, whole or not at all; images below its folder are named from there."""
    from visalign.atomic import write_atomic

    folder = path.resolve().parent

    def near(value: Any) -> Any:
        inside = isinstance(value, str) and "://" not in value and Path(value).is_relative_to(folder)
        return str(Path(value).relative_to(folder)) if inside else value

    lines = [
        json.dumps({k: near(v) if k.startswith("image") else v for k, v in row.items()}, ensure_ascii=False)
        for row in rows
    ]
    write_atomic(path, "".join(f"{line}\n" for line in lines))
