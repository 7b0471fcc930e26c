# SPDX-License-Identifier: Apache-2.0
"""Ranking 24 images on 30 % of the round robin's calls: agreement with the full order, coverage.

    python tests/benchmarks/evaluation/ranking_budget.py [--groups 200] [--size 24] [--budget 0.3]
    python tests/benchmarks/evaluation/ranking_budget.py --judge reward_dance_pairs --groups 20
    python tests/benchmarks/evaluation/ranking_budget.py --peers    # needs `pip install choix trueskill`

A simulated judge's log-odds for an ordered pair are the difference of normal true scores plus a bias for the
left side plus logistic noise, drawn once per ordered pair; "votes" are their sign. With --judge a packaged
judge ranks images of a held-out prompt. The round robin asks each pair once and orders by win rate.

    accuracy   share of the judge's answers that name the truly better one
    swap       share of pairs for which both orders name the same image
    full       Spearman of the budgeted order with the round robin's (n(n − 1)/2 calls), mean and 5 % quantile
    both       Spearman with the round robin in both orders (n(n − 1) calls), mean
    truth      Spearman with the true scores: on the budget, and of the full round robin
    cover      share of true scores inside their 90 % intervals, on the budget

With --peers choix's Bradley-Terry fit of random pairs, TrueSkill with the pair nearest to a draw next, and
insertion by bisection get the same simulated votes and as many calls.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from visalign.core import fit_ranking, group_pairs, next_pairs, win_rates
from visalign.core.preference.pairing import Method
from visalign.core.preference.ranking import Model
from visalign.data.shapes.preferences import ShapesPreferences, degraded, utility
from visalign.data.shapes.render import render_many
from visalign.data.shapes.scenes import sample_scene
from visalign.rewards import load_judge, rank


@dataclass(frozen=True)
class Judge:
    """What the simulated answers are like."""

    answers: str
    spread: float
    bias: float
    noise: float


JUDGES = (
    Judge("probabilities", 2.0, 0.5, 0.3), Judge("probabilities", 2.0, 0.5, 0.6),
    Judge("probabilities", 2.0, 1.5, 0.6), Judge("probabilities", 2.0, 0.5, 1.0),
    Judge("votes", 2.0, 0.5, 1.0), Judge("votes", 5.0, 1.0, 1.0), Judge("votes", 8.0, 1.0, 1.0),
)  # fmt: skip


def spearman(first: Tensor, second: Tensor) -> float:
    """Rank correlation; ties get their average rank."""
    ranks = []
    for values in (first, second):
        above = (values[:, None] > values[None, :]).sum(1).double()
        equal = (values[:, None] == values[None, :]).sum(1).double()
        ranks.append(above + equal / 2)
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def simulated_odds(judge: Judge, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """True scores [n] of a group and the judge's log-odds [n, n] for each ordered pair (row on the left)."""
    generator = torch.Generator().manual_seed(seed)
    true = judge.spread * torch.randn(size, generator=generator, dtype=torch.float64)
    true = true - true.mean()
    noise = torch.logit(torch.rand(size, size, generator=generator, dtype=torch.float64), eps=1e-12)
    return true, true[:, None] - true[None, :] + judge.bias + judge.noise * noise


def both_orders(size: int) -> Tensor:
    """Return each pair once, then each in the other order, [n(n - 1), 2]; the first half alternates its sides."""
    pairs = group_pairs([0] * size, size)
    once = torch.where((pairs.sum(1) % 2 == 1)[:, None], pairs.flip(1), pairs)
    return torch.cat([once, once.flip(1)])


def measures(score: Tensor, true: Tensor, twice: Tensor, prob: Tensor, answers: Tensor) -> dict[str, float]:
    """Compare a budgeted order with the round robins and the truth; `prob` and `answers` [n(n - 1)] are of `twice`."""
    half, size = len(twice) // 2, len(true)
    full, both = win_rates(twice[:half], prob[:half], size), win_rates(twice, prob, size)
    left, right = (true[twice[:, side]] for side in (0, 1))
    clear = left != right
    return {
        "accuracy": float((answers == (left > right))[clear].double().mean()),
        "swap": float((answers[:half] != answers[half:]).double().mean()),
        "full": spearman(score, full),
        "both": spearman(score, both),
        "truth": spearman(score, true),
        "full_truth": spearman(full, true),
    }


def simulate(judge: Judge, size: int, budget: float, method: Method, seed: int) -> dict[str, float]:
    """One group: the numbers of one row."""
    true, odds = simulated_odds(judge, size, seed)
    is_vote = judge.answers == "votes"
    prob = (odds > 0).double() if is_vote else odds.sigmoid()
    model: Model = "bradley_terry" if is_vote else "log_odds"
    calls = int(budget * size * (size - 1) / 2)
    judged_pairs = torch.zeros(0, 2, dtype=torch.int64)
    fit = fit_ranking(judged_pairs, prob[judged_pairs[:, 0], judged_pairs[:, 1]], size, model=model)
    while len(judged_pairs) < calls:
        new = next_pairs(fit, judged_pairs, min(size // 2, calls - len(judged_pairs)), method=method)
        judged_pairs = torch.cat([judged_pairs, new])
        fit = fit_ranking(judged_pairs, prob[judged_pairs[:, 0], judged_pairs[:, 1]], size, model=model)
    low, high = fit.interval(0.9)
    left, right = (twice := both_orders(size)).T
    row = measures(fit.score, true, twice, prob[left, right], odds[left, right] > 0)
    cover = float(((low <= true) & (true <= high)).double().mean())
    return {**row, "cover": cover, "calls": float(len(judged_pairs))}


def ask(name: str, size: int, budget: float, method: Method, seed: int) -> dict[str, float]:
    """One group of images and a real judge: the numbers of one row."""
    judge: Any = load_judge(name)
    world = ShapesPreferences(seed, split="heldout")
    rng = np.random.default_rng(seed)
    record = world.record(rng)
    scenes = [
        degraded(sample_scene(record if rng.random() < 0.5 else world.near(record, rng), rng), rng)
        for _ in range(size)
    ]
    true = torch.tensor([utility(scene, record) for scene in scenes]).double()
    images = torch.from_numpy(render_many(scenes)).permute(0, 3, 1, 2).float() / 255
    twice = both_orders(size)
    prob = judge.compare_pairs(images, twice, [record["prompt"]] * size).prob.double()
    ranking = rank(images, record["prompt"], judge, budget=budget, method=method)
    row = measures(ranking.score, true, twice, prob, prob > 0.5)
    return {**row, "cover": float("nan"), "calls": float(ranking.calls)}


def peer(name: str, prob: Tensor, calls: int, seed: int) -> Tensor:
    """[n] scores by another package's method, from `calls` of the votes prob [n, n] (row on the left)."""
    size, rng = len(prob), np.random.default_rng(seed)
    won = (prob > 0.5).numpy()  # [i, j]: the left one, i
    if name == "insertion":
        order, left = [0], calls
        for new in range(1, size):
            low, high = 0, len(order)
            while low < high and left:
                middle, left = (low + high) // 2, left - 1
                first = bool(rng.random() < 0.5)
                beats = won[new, order[middle]] if first else not won[order[middle], new]
                low, high = (low, middle) if beats else (middle + 1, high)
            order.insert(low, new)
        return -torch.tensor(order).argsort().double()
    if name == "choix":
        import choix  # type: ignore[import-not-found]

        pairs = [(i, j) for i in range(size) for j in range(i)]
        chosen = [pairs[k] for k in rng.choice(len(pairs), calls, replace=False)]
        sides = [pair if rng.random() < 0.5 else pair[::-1] for pair in chosen]
        data = [(i, j) if won[i, j] else (j, i) for i, j in sides]
        return torch.from_numpy(choix.opt_pairwise(size, data, alpha=0.1))
    import trueskill  # type: ignore[import-not-found]

    # a game's noise and the spread of the scores in one unit, as in the simulation
    world: Any = trueskill.TrueSkill(mu=0, sigma=2, beta=1.2, tau=0, draw_probability=0)
    ratings, played = [world.create_rating() for _ in range(size)], np.zeros((size, size))
    for _ in range(calls):
        quality = np.array([[world.quality_1vs1(a, b) for b in ratings] for a in ratings])
        i, j = np.unravel_index(np.argmax(quality - 10 * played - 100 * np.eye(size)), played.shape)
        i, j = (i, j) if rng.random() < 0.5 else (j, i)
        played[i, j] = played[j, i] = 1
        better, worse = (i, j) if won[i, j] else (j, i)
        ratings[better], ratings[worse] = world.rate_1vs1(ratings[better], ratings[worse])
    return torch.tensor([rating.mu for rating in ratings]).double()


def compare_peers(groups: int, size: int, budget: float, seed: int) -> None:
    """Print Spearman with the truth of each method on the judges that vote."""
    names = ("active", "choix", "trueskill", "insertion", "round_robin")
    print("| accuracy | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
    for judge in (j for j in JUDGES if j.answers == "votes"):
        rows: list[list[float]] = []
        for number in range(seed, seed + groups):
            row = simulate(judge, size, budget, "active", number)
            true, odds = simulated_odds(judge, size, number)
            peers = [spearman(peer(n, odds.sigmoid(), int(row["calls"]), number), true) for n in names[1:-1]]
            rows.append([row["accuracy"], row["truth"], *peers, row["full_truth"]])
        mean = torch.tensor(rows).double().mean(0).tolist()
        print(f"| {mean[0]:.2f} | " + " | ".join(f"{value:.3f}" for value in mean[1:]) + " |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Budgeted ranking against the full round robin.")
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--size", type=int, default=24)
    parser.add_argument("--budget", type=float, default=0.3)
    parser.add_argument("--methods", nargs="+", choices=get_args(Method), default=list(get_args(Method)))
    # Pairing rule and priors were chosen on seeds below 224.
    parser.add_argument("--seed", type=int, default=1000, help="of the first group")
    parser.add_argument("--judge", default=None, help="a packaged judge that compares, not a simulated one")
    parser.add_argument("--peers", action="store_true", help="compare with choix, TrueSkill and insertion")
    options = parser.parse_args()
    if options.peers:
        compare_peers(options.groups, options.size, options.budget, options.seed)
        return
    print("| answers | spread | bias | noise | accuracy | swap | method | calls | full (5 %) | both | truth | cover |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    judges = JUDGES if options.judge is None else (options.judge,)
    for judge in judges:
        for method in options.methods:
            measure = partial(ask, judge) if isinstance(judge, str) else partial(simulate, judge)
            seeds = range(options.seed, options.seed + options.groups)
            rows = [measure(options.size, options.budget, method, seed) for seed in seeds]
            columns = {key: torch.tensor([row[key] for row in rows]).double() for key in rows[0]}
            mean = {key: float(values.mean()) for key, values in columns.items()}
            settings = (
                f"{judge} | – | – | –"
                if isinstance(judge, str)
                else f"{judge.answers} | {judge.spread:g} | {judge.bias:g} | {judge.noise:g}"
            )
            print(
                f"| {settings} | {mean['accuracy']:.2f} | {mean['swap']:.2f} | {method} | {mean['calls']:.0f} | "
                f"{mean['full']:.3f} ({float(columns['full'].quantile(0.05)):.3f}) | {mean['both']:.3f} | "
                f"{mean['truth']:.3f} (all: {mean['full_truth']:.3f}) | {mean['cover']:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
