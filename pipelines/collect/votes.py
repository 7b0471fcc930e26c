# SPDX-License-Identifier: Apache-2.0
"""Analysis of votes: agreement, annotators, soft labels; as a report and as a set to train on."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from visalign.atomic import write_atomic
from visalign.data.sets.columns import SIDES
from visalign.data.sets.image_references import TEXT
from visalign.data.sets.records import PreferencePair, QualityRecord
from visalign.data.sets.text_rows import text_prompt
from visalign.errors import UserError, suggestion
from visalign.evaluation.rewards.judged_pairs import IntervalSettings
from visalign.evaluation.rewards.people import alpha_interval
from visalign.evaluation.statistics import agreement, annotators
from visalign.evaluation.statistics.intervals import Interval, RatioTable, cluster_index, cluster_sums, wilson_interval
from visalign.pipelines.score.report import load_shown_images

from .store import Vote, VoteStore
from .tasks import PAIR_COLUMNS, Task

MOST_DISPUTED = 12  # Pairs that the page shows with their images
FORMAT = "visalign votes report 1"
SIDE_WORD = re.compile(r"\b(left|right)\b", re.IGNORECASE)
FITTED = ("reliability", "reliability_std", "side_bias", "agreement")
"""Numbers of the annotator model in a voter's entry."""

Array = NDArray[np.float64]


def select_votes(store: VoteStore, leave_out: Collection[str] = ()) -> list[Vote]:
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
    """Analyse the votes as JSON: agreement as Krippendorff's α, each voter's reliability, disputed pairs, oddities.

    Of each voter: `rest` (agreement with the majority of the others), `repeats` and `gold` (shares of equal
    and of right answers), and of pairs the share of the left of the screen and the annotator model.
    """
    first = _countable(store, votes)
    analysis: dict[str, Any] = {"models": [], "by_name": {}, "notes": []}
    analysis = _analyse_choices(store, first, settings) if store.choices else analysis
    analysis["alphas"], distances = _analyse_marks(store, first, settings)
    statistics, entries = analysis.pop("by_name"), []
    for name, ballots in _group(votes, "annotator").items():
        seconds = [vote.seconds for vote in ballots if vote.seconds is not None]
        answers = [(store.tasks[vote.task].gold, vote.answer.get("choice")) for vote in ballots]
        right = [gold == choice for gold, choice in answers if gold is not None]
        entry = {"name": name, "is_judge": ballots[0].is_judge, "votes": len(ballots)}
        entry |= {"seconds": median(seconds) if seconds else None, "repeats": _repeats(ballots).to_dict()}
        entry |= {"gold": wilson_interval(sum(right), len(right)).to_dict()}
        entries.append(entry | statistics.get(name, {}) | distances.get(name, {}))
    people = sum(not entry["is_judge"] for entry in entries)
    if unseen := store.unseen():
        analysis["notes"].append(f"{unseen} times an image could not be shown: no votes.")
    rated_tasks = sum(task.gold is None for task in store.tasks.values())
    counts = {"tasks": rated_tasks, "voted": len({vote.task for vote in first}), "votes": len(votes)}
    counts |= {"people": people, "judges": len(entries) - people}
    return {"format": FORMAT, "pairs": bool(store.choices), **counts, "annotators": entries, **analysis}


def export_rows(store: VoteStore, votes: Sequence[Vote], *, model: bool = False) -> list[dict[str, Any]]:
    """Build rows of a preference set (pairs) or of a quality set (single images, mos = mean of the slider).

    A choice among more images gives every two of them as a pair with the votes of the two: by Luce's axiom their share
    does not depend on the other images. Labels of pairs are shares of the votes, or with `model` the annotator model's
    probability that a typical one of these voters prefers the left image.
    """
    countable = sorted(_countable(store, votes), key=lambda vote: vote.task)
    by_task = _group(countable, "task")
    if not by_task:
        raise UserError(f"All votes in '{store.path}' are on gold pairs: there is nothing to export.")
    if model and not store.is_pairs:
        raise UserError("--model is of pairs, and these votes are on single images or groups. Leave --model out.")
    if len(store.places) > 2:
        return [row for task, ballots in by_task.items() for row in _group_rows(store.tasks[task], ballots)]
    if not store.is_pairs:
        best = {"mos_best": len(store.form.slider)} if store.form.slider else {}
        return [_image_row(store.tasks[task], ballots, best) for task, ballots in by_task.items()]
    soft: list[tuple[float, float] | None] = [None] * len(by_task)
    if model:
        fit = _fit(countable, list(by_task))
        soft = list(zip(fit.soft_label.tolist(), fit.posterior_std.tolist(), strict=True))
    rows = [_pair_row(store.tasks[t], by_task[t], label) for t, label in zip(by_task, soft, strict=True)]
    decided = [row for row in rows if row.get("share") != 0.5]  # of two completions that tie none is chosen
    if not decided:
        raise UserError(f"All {len(rows)} pairs of '{store.path}' are ties: no completion is chosen.")
    return decided


def vote_rows(store: VoteStore, votes: Sequence[Vote]) -> list[dict[str, Any]]:
    """Build a row per vote for the exports to other tools: prompt, images, annotator, and label or mos.

    Other answers are left out, with a warning that counts them.
    """
    rows, left_out = [], Counter[str]()
    label, answer = ("label", "choice") if store.is_pairs else ("mos", "slider")
    if len(store.places) > 2:
        raise UserError("--format is for votes on pairs and single images, and these are on groups. Leave it out.")
    for vote in sorted(_countable(store, votes), key=lambda vote: vote.task):
        task = store.tasks[vote.task]
        names = ("image_left", "image_right") if store.is_pairs else ("image",)
        models = {name: task.extra[name] for name in ("generator_left", "generator_right") if name in task.extra}
        row = {"prompt": task.prompt, **dict(zip(names, task.images, strict=True)), **models}
        left_out.update(vote.answer.keys() & {"slider", "checklist", "boxes", "text"} - {answer})
        if answer in vote.answer:
            rows.append(row | {"annotator": vote.annotator, label: vote.answer[answer]})
    if not rows:
        raise UserError(f"'{store.path}' holds no choice and no grade to export. Leave --format out.")
    if left_out:
        counts = ", ".join(f"{name} of {count} votes" for name, count in sorted(left_out.items()))
        message = f"--format writes the {label} of each vote. Left out: {counts}. Without --format all are written."
        warnings.warn(message, stacklevel=2)
    return rows


def with_images(store: VoteStore, result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Add prompts and images to the disputed pairs of a report."""
    pairs = [(pair, store.tasks[pair["task"]]) for pair in result.get("disputed", ())]
    images = [list(load_shown_images(task.images).values()) for _, task in pairs]
    return [{**p, "prompt": task.prompt, "images": i} for (p, task), i in zip(pairs, images, strict=True)]


def _group(votes: Iterable[Vote], by: str) -> dict[Any, list[Vote]]:
    groups: dict[Any, list[Vote]] = {}
    for vote in votes:
        groups.setdefault(getattr(vote, by), []).append(vote)
    return groups


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
    pair = PreferencePair(
        prompt=task.prompt,
        image_left=task.images[0],
        image_right=task.images[1],
        label=share if soft is None else soft[0],
        votes=counts if soft is None else None,
        ballots=tuple((vote.annotator, SIDES[vote.answer["choice"]]) for vote in votes),
        extra=extra | _other_answers(votes) | _reason(votes, share),
        **columns,
    )
    return _completions(pair) if task.images[0].startswith(TEXT) else pair.to_row()


def _group_rows(task: Task, votes: Sequence[Vote]) -> list[dict[str, Any]]:
    """Build the pairs of a group of which one image or both were chosen; each has the other answers of all voters."""
    counts, rows = Counter(vote.answer["choice"] for vote in votes), []
    for (first, left), (second, right) in combinations(zip(task.places, task.images, strict=True), 2):
        if total := counts[first] + counts[second]:
            sides = {first: 1.0, second: 0.0}
            ballots = [(vote.annotator, sides.get(vote.answer["choice"])) for vote in votes]
            answers = _other_answers(votes, {first: "left", second: "right"})
            pair = PreferencePair(
                prompt=task.prompt,
                image_left=left,
                image_right=right,
                label=counts[first] / total,
                votes=(counts[first], counts[second], 0),
                ballots=tuple((name, side) for name, side in ballots if side is not None),
                extra={**task.extra, "best_of": len(task.images), "voters": len(votes), **answers},
            )
            rows.append(pair.to_row())
    return rows


def _completions(pair: PreferencePair) -> dict[str, Any]:
    """Write a pair of completions in TRL's columns; `share` is that of the votes for chosen, `prob` is a judge's."""
    swap = pair.label < 0.5
    row = (pair.swapped() if swap else pair).to_row()
    share, chosen, rejected = row.pop("label"), *(row.pop(f"image_{s}").removeprefix(TEXT) for s in ("left", "right"))
    answers = [dict(answer) for answer in row.pop("answers", ())]
    probs = [1 - a.pop("prob") if swap else a.pop("prob") for a in answers if "prob" in a]
    row |= {"answers": rest} if (rest := [answer for answer in answers if answer.keys() - {"annotator"}]) else {}
    row |= {"vote_share": 1 - row["vote_share"]} if swap and "vote_share" in row else {}
    texts = {"prompt": text_prompt(row["prompt"]), "chosen": chosen, "rejected": rejected, "share": share}
    return row | texts | ({"prob": fmean(probs)} if probs else {})


def _image_row(task: Task, votes: Sequence[Vote], best: Mapping[str, int]) -> dict[str, Any]:
    grades = [float(vote.answer["slider"]) for vote in votes if "slider" in vote.answer]
    image, extra = task.images[0], dict(task.extra) | _other_answers(votes) | {"voters": len(votes), **best}
    if not grades:
        return {"image": image, "prompt": task.prompt, **extra}
    std = stdev(grades) if len(grades) > 1 else None
    return QualityRecord(image=image, mos=fmean(grades), std=std, prompt=task.prompt, extra=extra).to_row()


def _other_answers(votes: Iterable[Vote], sides: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Collect the counts [yes, no] of the checklist, and each voter's grade, boxes, text and probability.

    `sides` names the side of each place whose boxes are kept: left and right, or the two places of a group's pair.
    """
    sides = sides or {"left": "left", "right": "right"}
    checklist: dict[str, list[int]] = {}
    answers = []
    for vote in votes:
        for question, yes in vote.answer.get("checklist", {}).items():
            checklist.setdefault(question, [0, 0])[0 if yes else 1] += 1
        boxes = [[sides[name], *ends] for name, *ends in vote.answer.get("boxes", ()) if name in sides]
        answer = {**vote.answer, "boxes": boxes}
        marks = {name: answer[name] for name in ("slider", "boxes", "text", "prob") if answer.get(name)}
        answers += [{"annotator": vote.annotator, **marks}] if marks else []
    return ({"checklist": checklist} if checklist else {}) | ({"answers": answers} if answers else {})


def _reason(votes: Iterable[Vote], share: float) -> dict[str, str]:
    """Choose the text of the first voter with the majority, whose "left" and "right", if any, are not exchanged."""
    side = "left" if share > 0.5 else "right" if share < 0.5 else "tie"
    for vote in votes:
        text = vote.answer.get("text", "").strip()
        if text and vote.answer["choice"] == side and not (vote.swapped and SIDE_WORD.search(text)):
            return {"reason": text}
    return {}


def _analyse_choices(store: VoteStore, first: Sequence[Vote], settings: IntervalSettings) -> dict[str, Any]:
    order = sorted({vote.task for vote in first})
    if not order:
        alpha = Interval(estimate=math.nan).to_dict()
        notes = ["All votes are on gold pairs."]
        empty: dict[str, Any] = {"disputed": [], "split": 0, "with_two": 0, "models": [], "by_name": {}}
        return {"alpha": alpha, **empty, "notes": notes}
    row = {task: index for index, task in enumerate(order)}
    index, clusters = cluster_index([store.tasks[task].prompt for task in order])
    by_voter, columns = _group(first, "annotator"), (*store.places, "tie")
    counts = np.zeros((len(by_voter), len(order), len(columns)))
    for ballots, count in zip(by_voter.values(), counts, strict=True):
        for vote in ballots:
            count[row[vote.task], columns.index(vote.answer["choice"])] += 1
    votes = counts.sum(0)
    table = RatioTable(index, clusters)
    for name, count in zip(by_voter, counts, strict=True):
        table.add(name, *agreement.majority_credit(count, votes - count))  # the others, without this voter
    rest = table.intervals(**settings.drawing(), level=settings.level)
    fit = _fit(first, order) if store.is_pairs else None
    by_name: dict[str, dict[str, Any]] = {}
    for number, (name, ballots) in enumerate(by_voter.items()):
        decided = [vote for vote in ballots if vote.answer["choice"] != "tie"]
        on_left = sum(vote.answer["choice"] == store.places[-vote.swapped] for vote in decided)  # of the screen
        left = (0, 0) if fit is None else (on_left, len(decided))
        by_name[name] = {key: None if fit is None else float(getattr(fit, key)[number]) for key in FITTED} | {
            "rest": rest[name].to_dict(),
            "ties": (len(ballots) - len(decided)) / len(ballots),
            "left_of_screen": wilson_interval(*left, level=settings.level).to_dict(),
        }
    alpha_of = partial(agreement.alpha_of_sums, options=len(store.places))
    alpha = alpha_interval(cluster_sums(agreement.alpha_sums(votes), index, clusters), alpha_of, settings)
    majority = votes.max(1, initial=0) / np.maximum(votes.sum(1), 1)
    split = [i for i in np.argsort(majority, kind="stable") if votes[i].sum() > 1 and majority[i] < 1]
    disputed = [
        {"task": order[i], "votes": votes[i].astype(int).tolist(), "soft_label": float(fit.soft_label[i])}
        for i in split[:MOST_DISPUTED]
        if fit is not None
    ]
    left, right, ties = votes.sum(0) if store.is_pairs else (1, 1, 0)  # the notes below are of sides
    notes = (
        (not left + right, "All votes are ties: they teach a judge nothing, and no agreement can be computed."),
        (left > 1 and not right + ties, "All votes are for the left image of the table: mix its sides."),
        (right > 1 and not left + ties, "All votes are for the right image of the table: mix its sides."),
        (votes.sum(1).max() < 2, "Nothing has two votes, so agreement between voters is not known."),
    )
    return {
        "alpha": alpha.to_dict(),
        "disputed": disputed,
        "split": len(split),
        "with_two": int((votes.sum(1) > 1).sum()),
        "models": _models([store.tasks[task] for task in order], votes, index, clusters, settings),
        "by_name": by_name,
        "notes": [note for holds, note in notes if holds],
    }


def _models(
    tasks: Sequence[Task], votes: Array, index: Any, clusters: int, settings: IntervalSettings
) -> list[dict[str, Any]]:
    """Rank the models of the pairs by their mean share of the votes [N, 3], ties half; none without names of two.

    The intervals hold for all models together (Bonferroni); the shares of two models are one number.
    """
    sides = [[task.extra.get(f"generator_{side}") for side in task.places] for task in tasks]
    names = sorted({str(name) for pair in sides if None not in pair and pair[0] != pair[1] for name in pair})
    left, table = (votes[:, 0] + votes[:, 2] / 2) / votes.sum(1), RatioTable(index, clusters)
    pairs: dict[Any, int] = {}
    for name in names:
        credit = np.array([(a == name) * x + (b == name) * (1 - x) for (a, b), x in zip(sides, left, strict=True)])
        counted = np.array([None not in pair and (pair[0] == name) != (pair[1] == name) for pair in sides])
        pairs[name] = int(counted.sum())
        table.add(name, credit * counted, counted.astype(float))
    level = 1 - (1 - settings.level) / (len(names) if len(names) > 2 else 1)
    rows = [
        {"name": name, "pairs": pairs[name], **share.to_dict(), "level": settings.level}
        for name, share in table.intervals(**settings.drawing(), level=level).items()
    ]
    return sorted(rows, key=lambda row: -row["estimate"])


def progress(store: VoteStore) -> dict[str, Any]:
    """Count the votes for whoever runs the collection: of how many, and of each voter with the last one's time."""
    tasks = {number for number, task in store.tasks.items() if task.gold is None}
    counts = Counter(vote.task for vote in store.votes() if not (vote.is_repeat or vote.is_judge))
    goal, people = store.plan.votes, [row for row in store.voters() if not row["is_judge"]]
    target = len(tasks) * (goal or len(people))
    counted = sum(min(count, goal or count) for task, count in counts.items() if task in tasks)
    return {"tasks": len(tasks), "goal": goal, "votes": counted, "target": target, "voters": store.voters()}


def _analyse_marks(
    store: VoteStore, first: Sequence[Vote], settings: IntervalSettings
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compute α of the slider and of each question, and each voter's distance from the mean of the others."""
    order = sorted({vote.task for vote in first})
    row = {task: index for index, task in enumerate(order)}
    prompts = [store.tasks[task].prompt or store.tasks[task].images[0] for task in order]
    index, clusters = cluster_index(prompts)
    if clusters < 2:  # one prompt of all images: the images are drawn instead
        index, clusters = np.arange(len(order)), len(order)
    answers: dict[str, list[tuple[int, float]]] = {}
    grades: dict[int, dict[str, float]] = {}
    for vote in first:
        marks = dict(vote.answer.get("checklist", {}))
        if "slider" in vote.answer:
            marks["slider"] = grades.setdefault(vote.task, {})[vote.annotator] = float(vote.answer["slider"])
        for question, mark in marks.items():
            answers.setdefault(question, []).append((row[vote.task], float(mark)))
    alphas = {}
    for question in filter(answers.__contains__, ("slider", *store.form.checklist)):
        items, values = zip(*answers[question], strict=True)
        sums = annotators.rating_sums(values, items, items=len(order))
        by_prompt = cluster_sums(sums, index, clusters)
        alphas[question] = alpha_interval(by_prompt, annotators.alpha_of_rating_sums, settings).to_dict()
    gaps: dict[str, list[float]] = {vote.annotator: [] for vote in first}
    for by_name in grades.values():
        for name, grade in by_name.items() if len(by_name) > 1 else ():  # alone there is no rest
            gaps[name].append(grade - fmean(by_name[other] for other in by_name if other != name))
    distances = {
        name: {
            "above_the_rest": fmean(of_voter) if of_voter else None,
            "apart_from_the_rest": fmean(map(abs, of_voter)) if of_voter else None,
        }
        for name, of_voter in gaps.items()
    }
    return alphas, distances


def _fit(first: Sequence[Vote], order: Sequence[int]) -> annotators.AnnotatorFit:
    names = list(_group(first, "annotator"))
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
    """Compute the share of a voter's repeats with an equal choice and checklist, and a slider within half a grade."""
    first = {vote.task: vote.answer for vote in votes if not vote.is_repeat}
    same = []
    for vote in votes:
        before, again = first.get(vote.task), vote.answer
        if vote.is_repeat and before is not None and again.keys() & {"choice", "slider", "checklist"}:
            near = abs(before.get("slider", 0) - again.get("slider", 0)) <= 0.5
            same.append(near and all(before.get(name) == again.get(name) for name in ("choice", "checklist")))
    return wilson_interval(sum(same), len(same))


def write_rows(
    path: Path, rows: Iterable[Mapping[str, Any]], build: Callable[[list[dict[str, Any]]], Any] | None = None
) -> None:
    """Write rows as JSONL, or as the JSON that `build` makes of them; paths of images in its folder are relative."""
    folder = path.resolve().parent

    def relative(name: str, value: Any) -> Any:
        if name.startswith("image") and isinstance(value, str) and Path(value).is_relative_to(folder):
            return str(Path(value).relative_to(folder))
        return value

    local = [{k: relative(k, v) for k, v in row.items()} for row in rows]
    items, indent = (local, None) if build is None else ([build(local)], 2)
    write_atomic(path, "".join(f"{json.dumps(item, ensure_ascii=False, indent=indent)}\n" for item in items))
