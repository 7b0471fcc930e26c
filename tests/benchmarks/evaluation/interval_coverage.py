# SPDX-License-Identifier: Apache-2.0
"""How often the intervals of evaluations hold the truth: simulated sets, independent and clustered.

    python tests/benchmarks/evaluation/interval_coverage.py [--sets 400] [--worlds NAME ...] [--json FILE]

The truth of an interval is the mean estimate on eight very large sets of the same world; of stacked judges
and of gains by a cross-fit the mean over the sets. In a clustered world four pairs or images share a prompt
and part of everything random. Printed is the share of sets whose interval holds the truth; with 200 sets a
true .95 gives .93 to .97 in 95 % of the cases. A leaderboard's intervals count as one, `together`.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from visalign.data.sets.records import PreferencePair, PreferenceSet, QualityRecord, QualitySet
from visalign.evaluation.rewards.agreement import agreement
from visalign.evaluation.rewards.certainty import std_numbers
from visalign.evaluation.rewards.comparison import compare_on_preferences, compare_on_quality, leaderboard
from visalign.evaluation.rewards.fusion import fuse_preferences, fuse_quality
from visalign.evaluation.rewards.judged_pairs import IntervalSettings, judged_pairs
from visalign.evaluation.rewards.pair_scores import PairScores, from_scores
from visalign.evaluation.rewards.people import people_numbers
from visalign.evaluation.rewards.preferences import evaluate_preferences
from visalign.evaluation.rewards.quality import evaluate_quality, from_values
from visalign.evaluation.statistics.agreement import HEADLINE, POLICIES, policy_credit
from visalign.evaluation.statistics.intervals import RatioTable, paired_bootstrap, share_interval

Array = NDArray[np.float64]
Index = NDArray[np.int64]

RESAMPLES = 1_000
TRUTHS = 8
"""Large sets that have the truth: of one, the difference of two SRCC is off by a third of its deviation."""
LARGE = 8_000
"""Pairs or images of each of them; of held-out images 20,000."""
OF_THEIR_SIZE = ("std/nll_gain", "fused")
"""Beginnings of intervals whose truth is the mean over the sets."""
TOGETHER = "together"


class Shared:
    """Standard normal numbers of which a share of the variance is the prompt's."""

    def __init__(self, rng: np.random.Generator, prompts: int, size: int, share: float = 0.5) -> None:
        self._rng, self._prompts, self._each = rng, prompts, size
        self._share = share if size > 1 else 0.0
        self.index = np.repeat(np.arange(prompts), size)

    def __call__(self) -> Array:
        common = self._rng.normal(size=self._prompts)[self.index]
        own = self._rng.normal(size=len(self.index))
        return np.sqrt(self._share) * common + np.sqrt(1 - self._share) * own


VOTERS = (0.6, 0.8, 1.0, 1.2, 1.5)
"""How noisy each annotator is, in the noise of the pair."""
STRENGTH = (0.6, 0.0, -0.6)
"""Of three generators."""


def voted(rng: np.random.Generator, prompts: int, size: int) -> tuple[Index, Index, Array, Array, Array, Array]:
    """Prompts [N], generators [N, 2], the first judge's deviations and margins, the second's margins [N], and
    what five annotators say [N, 5]: noise differs between pairs, and the first judge knows it.
    """
    draw = Shared(rng, prompts, size)
    models = rng.integers(0, 3, (len(draw.index), 2))
    gap = np.array(STRENGTH)[models[:, 0]] - np.array(STRENGTH)[models[:, 1]]
    std = np.exp(0.5 * draw())
    true = gap + 1.2 * draw() * np.exp(0.4 * draw())
    margin = np.round(true + std * draw(), 1)
    other = true + 1.5 * draw()
    noisy = true[:, None] + std[:, None] * np.array(VOTERS) * np.stack([draw() for _ in VOTERS], axis=1)
    votes = np.where(np.abs(noisy) < 0.2, 0.5, np.where(noisy > 0, 1.0, 0.0))
    return draw.index, models, std, margin, other, votes


def shares(rng: np.random.Generator, prompts: int, settings: IntervalSettings, *, size: int) -> dict[str, Any]:
    """The accuracies of `pairs` alone, under policies without a threshold and in slices: cheap."""
    index, models, _, margin, _, votes = voted(rng, prompts, size)
    table = RatioTable(index, prompts)
    for name, policy in POLICIES.items():
        if not policy.has_threshold:
            table.add(name, *policy_credit(name, margin, votes.mean(1)))
    credit, count = policy_credit(HEADLINE, margin, votes.mean(1))
    parts = {f"generator {g}": (models == g).any(1) for g in range(3)}
    parts |= {"one generator": models[:, 0] == models[:, 1], "two generators": models[:, 0] != models[:, 1]}
    for name, rows in parts.items():
        table.add(name, credit * rows, count * rows)
    return {str(key): interval.to_dict() for key, interval in table.intervals(**settings.drawing()).items()}


def two_judges(rng: np.random.Generator, prompts: int, size: int) -> tuple[PreferenceSet, PairScores, PairScores]:
    """Votes of five annotators, and two judges of them."""
    index, models, std, margin, other, votes = voted(rng, prompts, size)
    n = len(index)
    records = PreferenceSet(
        name="pairs",
        pairs=tuple(
            PreferencePair(
                prompt=f"prompt {index[k]}",
                image_left=f"{k}a",
                image_right=f"{k}b",
                label=float(row.mean()),
                votes=tuple(int((row == vote).sum()) for vote in (1.0, 0.0, 0.5)),  # pyright: ignore[reportArgumentType]
                ballots=tuple((f"annotator {v}", float(vote)) for v, vote in enumerate(row)),
                generator_left=f"generator {models[k, 0]}",
                generator_right=f"generator {models[k, 1]}",
                category="ab"[index[k] % 2],
            )
            for k, row in enumerate(votes)
        ),
    )
    zeros, half = np.zeros(n), std / np.sqrt(2)
    one = from_scores("one", "logit", margin, zeros, std_left=half, std_right=half)
    return records, one, from_scores("two", "logit", other, zeros)


def pairs(rng: np.random.Generator, prompts: int, settings: IntervalSettings, *, size: int) -> dict[str, Any]:
    """All numbers on a judge of pairs, and on two."""
    records, one, two = two_judges(rng, prompts, size)
    report = evaluate_preferences(records, one, settings)
    return report | {"comparison": compare_on_preferences(records, one, two, settings)}


def people(rng: np.random.Generator, prompts: int, settings: IntervalSettings, *, size: int) -> dict[str, Any]:
    """What `pairs` has on people's votes and on the std alone: cheaper."""
    records, one, _ = two_judges(rng, prompts, size)
    scored_pairs = judged_pairs(records, one)
    return {"people": people_numbers(scored_pairs, settings), "std": std_numbers(scored_pairs, settings)}


def ratings(rng: np.random.Generator, prompts: int, size: int) -> tuple[Array, Array, Array, NDArray]:
    """Opinions, two judges' scores, prompts: the first judge is right but for a curve and noise."""
    draw = Shared(rng, prompts, size)
    good = draw()
    mos = 1 + 4 * special.expit(1.5 * good + 0.2) + 0.3 * draw()
    return mos, good + 0.8 * draw(), good + 1.5 * draw(), draw.index


def quality(rng: np.random.Generator, prompts: int, settings: IntervalSettings, *, size: int) -> dict[str, Any]:
    """Two judges on mean opinion scores."""
    mos, x, other, index = ratings(rng, prompts, size)
    records = QualitySet(
        name="quality",
        records=tuple(
            QualityRecord(image=str(k), mos=float(value), prompt=f"prompt {index[k]}", category="ab"[index[k] % 2])
            for k, value in enumerate(mos)
        ),
    )
    one, two = from_values("one", "x", x), from_values("two", "x", other)
    report = evaluate_quality(records, one, settings)
    return report | {"comparison": compare_on_quality(records, one, two, settings)}


def agree(rng: np.random.Generator, prompts: int, settings: IntervalSettings, *, size: int) -> dict[str, Any]:
    """How far two rewards agree."""
    _, x, other, index = ratings(rng, prompts, size)
    (row,) = agreement(
        ["one", "two"], np.stack([x, other]), [str(k) for k in index], seed=settings.seed, resamples=settings.resamples
    )
    return row


def heldout(rng: np.random.Generator, prompts: int, settings: IntervalSettings, *, size: int) -> dict[str, Any]:
    """Right and wrong images of a model before and after training, the same seeds of each prompt."""
    draw = Shared(rng, prompts, size)
    before, after = draw() > 0.3, draw() > -0.5
    change = paired_bootstrap(before, after, draw.index, **settings.drawing())
    accuracies = {"before": share_interval(before, draw.index), "after": share_interval(after, draw.index)}
    return {name: number.to_dict() for name, number in (accuracies | {"change": change}).items()}


NOISES = (0.8, 1.2, 1.5, 2.0)
"""Of four judges that are compared and stacked."""


def judges_pairs(rng: np.random.Generator, prompts: int, settings: IntervalSettings, *, size: int) -> dict[str, Any]:
    """Four judges and their stack on the majority of three votes: all together, and the stack by itself."""
    draw = Shared(rng, prompts, size)
    true = 1.2 * draw()
    labels = np.mean([true + draw() > 0 for _ in range(3)], axis=0)
    records = PreferenceSet(
        name="pairs",
        pairs=tuple(
            PreferencePair(prompt=f"prompt {g}", image_left=f"{k}a", image_right=f"{k}b", label=float(share))
            for k, (g, share) in enumerate(zip(draw.index, labels, strict=True))
        ),
    )
    zeros = np.zeros(len(true))
    judges = [from_scores(f"{noise}", "logit", true + noise * draw(), zeros) for noise in NOISES]
    fused, _ = fuse_preferences(records, judges)
    own = evaluate_preferences(records, fused, settings)["agreement"]["half_credit"]
    over = compare_on_preferences(records, fused, judges[0], settings)["difference"]
    return _together(records, judges, settings) | {"fused": {"accuracy": own, "over the best": over}}


def judges_quality(rng: np.random.Generator, prompts: int, settings: IntervalSettings, *, size: int) -> dict[str, Any]:
    """Four judges and their stack on mean opinion scores."""
    draw = Shared(rng, prompts, size)
    good = draw()
    mos = 1 + 4 * special.expit(1.5 * good + 0.2) + 0.3 * draw()
    records = QualitySet(
        name="quality",
        records=tuple(
            QualityRecord(image=str(k), mos=float(value), prompt=f"prompt {draw.index[k]}")
            for k, value in enumerate(mos)
        ),
    )
    judges = [from_values(f"{noise}", "x", good + noise * draw()) for noise in NOISES]
    fused, _ = fuse_quality(records, judges)
    over = compare_on_quality(records, fused, judges[0], settings)["difference"]
    return _together(records, judges, settings) | {"fused": {"over the best": over}}


def _together(records: Any, judges: list[Any], settings: IntervalSettings) -> dict[str, Any]:
    """The leaderboard's intervals."""
    board = leaderboard(records, judges, [], settings)
    return {TOGETHER: {row["judge"]: row for row in board["rows"]} if board else {}}


MAKES: dict[str, Callable[..., dict[str, Any]]] = {
    **{"shares": shares, "people": people, "pairs": pairs, "quality": quality},
    **{"agree": agree, "heldout": heldout},
    **{"judges_pairs": judges_pairs, "judges_quality": judges_quality},
}
SIZES = {"independent": (1, 240), "clustered": (4, 60)}
"""Pairs or images of a prompt, prompts."""
WORLDS: dict[str, tuple[str, int, int]] = {
    f"{name}-{kind}": (name, size, 100 if (name, kind) == ("heldout", "clustered") else prompts)
    for name in MAKES
    for kind, (size, prompts) in SIZES.items()
}
"""Name -> what is simulated, pairs or images of a prompt, prompts."""


def intervals(entry: Any, path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every interval of a report by its path."""
    if isinstance(entry, Mapping):
        if {"estimate", "low", "high"} <= set(entry):
            yield path, entry
            return
        for key, value in entry.items():
            yield from intervals(value, f"{path}/{key}" if path else str(key))
    elif isinstance(entry, list) and entry and isinstance(entry[0], Mapping) and "name" in entry[0]:
        for value in entry:
            yield from intervals(value, f"{path}/{value['name']}")


@cache
def truths(name: str, size: int) -> dict[str, float]:
    """Path of an interval -> its mean estimate over the large sets."""
    large, settings = (20_000 if name == "heldout" else LARGE) // size, IntervalSettings(resamples=100)
    estimates: dict[str, list[float]] = defaultdict(list)
    for seed in range(10**6, 10**6 + TRUTHS):
        report = MAKES[name](np.random.default_rng(seed), large, settings, size=size)
        for path, number in intervals(report):
            if number["estimate"] is not None:
                estimates[path].append(number["estimate"])
    return {path: float(np.mean(values)) for path, values in estimates.items()}


def coverage(world: str, sets: int, *, first: int = 0, resamples: int = RESAMPLES) -> dict[str, tuple[float, int]]:
    """Path of an interval -> (share of sets whose interval holds the truth, of how many that have one).

    Set `n` is drawn from the seed `first` + n.
    """
    name, size, prompts = WORLDS[world]
    truth = dict(truths(name, size))
    by_path: dict[str, list[Mapping[str, float]]] = defaultdict(list)
    for seed in range(first, first + sets):
        settings = IntervalSettings(seed=seed, resamples=resamples)
        for path, number in intervals(MAKES[name](np.random.default_rng(seed), prompts, settings, size=size)):
            if number["low"] is not None and path in truth:
                by_path[path].append(number)
    for path in by_path:
        if path.startswith(OF_THEIR_SIZE):
            truth[path] = float(np.mean([number["estimate"] for number in by_path[path]]))
    covered = {
        path: [number["low"] <= truth[path] <= number["high"] for number in numbers]
        for path, numbers in by_path.items()
    }
    if rows := [covered.pop(path) for path in list(covered) if path.startswith(TOGETHER)]:
        covered[TOGETHER] = list(np.all(rows, axis=0))
    return {path: (float(np.mean(values)), len(values)) for path, values in covered.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=400)
    parser.add_argument("--first", type=int, default=0, help="seed of the first set")
    parser.add_argument("--resamples", type=int, default=RESAMPLES)
    parser.add_argument("--worlds", nargs="*", default=list(WORLDS), choices=list(WORLDS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    coverages = {}
    for world in options.worlds:
        coverages[world] = coverage(world, options.sets, first=options.first, resamples=options.resamples)
        values = [share for share, _ in coverages[world].values()]
        print(f"{world}: {len(values)} intervals, coverage {min(values):.3f} to {max(values):.3f}")
        for path, (share, count) in coverages[world].items():
            odd = " *" if not 0.93 <= share <= 0.97 else ""
            print(f"    {share:.3f} of {count:3d}  {path}{odd}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(coverages, indent=1))


if __name__ == "__main__":
    main()
