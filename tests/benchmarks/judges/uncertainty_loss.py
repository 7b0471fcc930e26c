# SPDX-License-Identifier: Apache-2.0
"""Three losses for a judge that says how sure it is, side by side on the same noisy votes.

    python tests/benchmarks/judges/uncertainty_loss.py --pairs 20000
    python tests/benchmarks/judges/uncertainty_loss.py --pairs 6000 --labels
    python tests/benchmarks/judges/uncertainty_loss.py --pairs 5000 --heldout 2000 --clutter

One head of HPSv3's kind is trained per loss on the frozen states of the packaged model: the likelihood by
quadrature, Bradley-Terry, and HPSv3's released Monte-Carlo form. Votes are noisier where an image is
degraded. --labels: Bradley-Terry on pairs of one, three or nine votes, labelled in four ways; that soft labels
and counts beat a filter by agreement is refuted where the interval of their lead holds 0. --clutter: the
noise can be seen in the images (`ClutteredPairs`); a deviation is refuted where σ does not rank the noise,
tells errors at equal lead no better than chance, or costs accuracy or likelihood.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.support.benchmarks import argument_parser, quantile_text
from visalign.core.preference.uncertainty import soft_clamp
from visalign.data.shapes.preferences import ShapesPair, ShapesPreferences, annotator_noise
from visalign.data.shapes.render import render
from visalign.data.shapes.surroundings import with_specks
from visalign.evaluation.statistics.correlations import srcc
from visalign.pipelines.train_reward.examples import Example, Examples, as_image, pair_batch, pair_images, shapes_pairs
from visalign.rewards.hpsv3.head import RanknetHead
from visalign.rewards.hpsv3.judge import HPSv3
from visalign.rewards.questions.reward_dance import YES_NO
from visalign.rewards.questions.visual_quality_r1 import RATING
from visalign.rewards.vlm.engine import Query, VisionLanguageEngine
from visalign.training.loop.trainer import RunSettings, Trainer
from visalign.training.reward.batch import Outputs, RewardBatch
from visalign.training.reward.heldout import HeldoutPairs, auroc, lead_stratum, pair_measures, score_pairs
from visalign.training.reward.settings import RewardObjectiveSettings, RewardOptimizerSettings
from visalign.training.reward.tasks import TASKS
from visalign.training.reward.trainer import RewardModeling

LOSSES = {
    "uncertainty": "likelihood by quadrature",
    "bradley_terry": "Bradley-Terry",
    "upstream_monte_carlo": "Monte Carlo of ln σ(z), as released",
}
LABELS = {
    "shares of the votes": "pair",
    "shares, each pair as often as it has votes": "votes",
    "majority": "pair",
    "majority, pairs of at least 95 % agreement alone": "pair",
}
"""How votes become labels -> `pair_weight`."""
BATCH, DRAWS = 64, 500
SPECK_NOISE, ANNOTATORS = 0.15, 9
"""Standard deviation that each speck adds to how an annotator sees an image's utility; voters per pair."""


@torch.no_grad()
def features_of(pairs: Examples, chunk: int = 50) -> FeaturePairs:
    """Hidden states [2 N, D] of `shapes-vlm` (left images, then right ones) with the labels of the N pairs."""
    engine = VisionLanguageEngine.from_pretrained("shapes-vlm", feature_bytes=1 << 20, max_tokens_per_batch=1 << 15)
    questions = (("yes_no", YES_NO), ("rating", RATING), ("checklist", YES_NO))
    templates = [engine.template(name, question) for name, question in questions]
    fields = {"question": "Is the background textured?"}
    sides: tuple[list[Tensor], list[Tensor]] = ([], [])
    examples = []
    for start in range(0, len(pairs), chunk):
        part = [pairs[n] for n in range(start, min(start + chunk, len(pairs)))]
        prompts = [example.prompt for example in part] * 2
        queries = [
            Query(images=[image], prompt=prompt, fields=fields)
            for image, prompt in zip(pair_images(part), prompts, strict=True)
        ]
        states = torch.cat([engine.hidden(template, queries).states for template in templates], 1)
        for side, rows in zip(sides, states.split(len(part)), strict=True):
            side.append(rows)
        examples += [replace(example, images=()) for example in part]
    return FeaturePairs(torch.cat([*sides[0], *sides[1]]), pair_batch(None, examples, heldout=True))


class ClutteredPairs:
    """Pairs of which half of the images have 1 to 10 specks, and whose votes are noisier for them.

    Each annotator sees u + s ε with s = `annotator_noise` + `SPECK_NOISE` times the number of specks, which
    change nothing of the truth; the last annotator tosses a coin. All but the coin can be seen in the
    images, and specks go with neither image's utility.
    """

    def __init__(self, seed: int, split: str) -> None:
        self._world, self._seed = ShapesPreferences(seed, split=split), seed

    def drawn(self, number: int) -> tuple[ShapesPair, np.random.Generator]:
        """Pair `number`, and the generator of its votes."""
        pair, rng = self._world.pair(number), np.random.default_rng([self._seed, 71, number])
        left, right = (with_specks(scene, rng) if rng.random() < 0.5 else scene for scene in (pair.left, pair.right))
        noise = [annotator_noise(scene) + SPECK_NOISE * len(scene.specks) for scene in (left, right)]
        return replace(pair, left=left, right=right, noise=(noise[0], noise[1])), rng

    def example(self, number: int) -> Example:
        """The pair with its votes."""
        pair, rng = self.drawn(number)
        perceived = rng.normal(pair.utility, pair.noise, size=(ANNOTATORS - 1, 2))
        won = int((perceived[:, 0] > perceived[:, 1]).sum()) + int(rng.integers(2))
        return Example(
            prompt=pair.prompt,
            images=tuple(as_image(render(scene)) for scene in (pair.left, pair.right)),
            label=won / ANNOTATORS,
            truth=(1 + np.sign(pair.utility[0] - pair.utility[1])) / 2,
            clear=pair.is_clear,
            votes=(won, ANNOTATORS - won, 0),
        )

    def noise(self, count: int) -> Tensor:
        """[count] standard deviation of the difference that a careful annotator sees."""
        return torch.tensor([float(np.hypot(*self.drawn(n)[0].noise)) for n in range(count)])

    def examples(self, count: int) -> Examples:
        """The first `count`."""
        return Examples(count=count, example=self.example, prompts=frozenset())


@torch.no_grad()
def judged_by(model: str, pairs: Examples, chunk: int = 100) -> HeldoutPairs:
    """What a trained judge of HPSv3's kind says of pairs."""
    judge, parts = HPSv3(model, feature_bytes=1 << 20), []
    for start in range(0, len(pairs), chunk):
        part = [pairs[n] for n in range(start, min(start + chunk, len(pairs)))]
        scores = judge.score(pair_images(part), [example.prompt for example in part] * 2)
        assert scores.std is not None and bool(scores.valid.all())
        outputs = {"value": scores.value, "log_std": scores.std.log()}
        parts.append(pair_batch(outputs, part, heldout=True))
    return score_pairs(_Said(), parts, TASKS["uncertainty"])


class _Said(nn.Module):
    """A judge whose inputs are its outputs."""

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return []

    def forward(self, inputs: Outputs) -> Outputs:
        return inputs


class HeadJudge(nn.Module):
    """A head on given features."""

    def __init__(self, width: int, mean: Tensor, std: Tensor, seed: int) -> None:
        super().__init__()
        self.mean, self.std = mean, std
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.head = RanknetHead(width, hidden=(256, 16))

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.named_parameters())

    def forward(self, inputs: Tensor) -> Outputs:
        outputs = self.head((inputs - self.mean) / self.std)
        return {"value": outputs[:, 0], "log_std": soft_clamp(outputs[:, 1])}


class FeaturePairs:
    """Batches of pairs whose features are known."""

    def __init__(self, features: Tensor, labels: RewardBatch, seed: int = 0) -> None:
        self.features, self.labels, self.seed = features, labels, seed

    def batch(self, number: int, part: tuple[int, int] = (0, 1)) -> Iterator[RewardBatch]:
        """A draw of pairs without repeats; their votes alone are known."""
        total = self.labels.size
        chosen = np.random.default_rng([self.seed, number]).choice(total, BATCH, replace=False)
        yield self.rows(torch.from_numpy(chosen))

    def rows(self, chosen: Tensor) -> RewardBatch:
        """These pairs."""
        assert self.labels.label is not None and self.labels.votes is not None
        assert self.labels.clear is not None
        both = torch.cat([self.features[chosen], self.features[chosen + self.labels.size]])
        return RewardBatch(
            inputs=both, size=len(chosen), left=torch.arange(len(chosen)),
            right=torch.arange(len(chosen), 2 * len(chosen)), label=self.labels.label[chosen],
            votes=self.labels.votes[chosen], clear=self.labels.clear[chosen],
        )  # fmt: skip


def train_head(task: str, train: FeaturePairs, epochs: float, lr: float, seed: int, **settings: Any) -> HeadJudge:
    """A head trained with one loss; all losses see the same batches from the same start."""
    features = train.features
    judge = HeadJudge(features.shape[1], features.mean(0), features.std(0) + 1e-4, seed)
    updates = int(epochs * train.labels.size / BATCH)
    plain: dict[str, Any] = {"smoothing": 0.0, **settings}
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            RewardModeling(
                judge, train, objective=RewardObjectiveSettings(task=task, **plain),
                accelerator=Accelerator(cpu=True), seed=seed,
            ),
            optimizer=RewardOptimizerSettings(
                lr=lr, warmup_updates=50, decay_updates=updates, updates_per_iteration=updates,
                weight_decay=1e-3,
            ),
            run=RunSettings(folder=Path(folder), iterations=1, config={}),
        ).train()  # fmt: skip
    return judge


def auroc_text(score: Tensor, wrong: Tensor, stratum: Tensor) -> str:
    """Write the AUROC with its 95 % bootstrap interval over pairs."""
    rng = np.random.default_rng(0)
    draws = []
    for _ in range(DRAWS):
        rows = torch.from_numpy(rng.integers(len(score), size=len(score)))
        draws.append(auroc(score[rows], wrong[rows], stratum[rows]))
    return quantile_text(auroc(score, wrong, stratum), draws, ".3f")


def row_of(task: str, pairs: HeldoutPairs) -> str:
    """One line of the table."""
    measures = pair_measures(pairs)
    cells = [f"{measures[name]:.4f}" for name in ("accuracy", "accuracy_all", "nll", "ece")]
    if task == "bradley_terry":
        return f"| {LOSSES.get(task, task)} | {' | '.join(cells)} | – | – | – |"
    assert pairs.std is not None
    voted = (pairs.share != 0.5) & (pairs.difference != 0)  # the same image twice is nobody's error
    difference, std = pairs.difference[voted], pairs.std[voted]
    wrong = torch.sign(difference) != torch.sign(pairs.share[voted] - 0.5)
    cells.append(f"{measures['std_mean']:.3f}")
    for stratum in (torch.zeros(len(std)), lead_stratum(difference)):
        cells.append(auroc_text(std, wrong, stratum))
    return f"| {LOSSES.get(task, task)} | {' | '.join(cells)} |"


def labelled(train: FeaturePairs, kind: str, seed: int) -> FeaturePairs:
    """The pairs with one, three or nine of their votes, by lot, as labels of a kind."""
    labels, rng = train.labels, np.random.default_rng([seed, 5])
    assert labels.votes is not None and labels.label is not None and labels.clear is not None
    votes = labels.votes.numpy().astype(int)
    totals = rng.choice((1, 3, 9), len(votes))
    won = rng.hypergeometric(votes[:, 0], votes[:, 1], totals)
    selected = np.ones(len(votes), dtype=bool)
    counts = np.stack((won, totals - won), 1)
    if kind.startswith("majority"):
        selected = np.maximum(won, totals - won) >= (0.95 * totals if "95" in kind else 0)
        counts = np.stack((2 * won > totals, 2 * won < totals), 1).astype(int)
    chosen = torch.from_numpy(np.flatnonzero(selected))
    new_votes = torch.from_numpy(np.concatenate((counts, 0 * counts[:, :1]), 1)).float()
    own = replace(
        labels, size=len(chosen), label=(new_votes[:, 0] / new_votes.sum(1))[chosen], votes=new_votes[chosen],
        clear=labels.clear[chosen],
    )  # fmt: skip
    both = train.features.view(2, labels.size, -1)[:, chosen]
    return FeaturePairs(both.flatten(0, 1), own, seed)


def compare_labels(train: FeaturePairs, test: FeaturePairs, epochs: float, lr: float, seeds: Sequence[int]) -> None:
    """A row per way of labelling; as many updates for each."""
    names = ("accuracy", "accuracy_all", "nll", "ece")
    updates = epochs * train.labels.size
    by_kind: dict[str, np.ndarray] = {}
    pairs = {}
    for kind, weight in LABELS.items():
        rows = []
        for seed in seeds:
            own = labelled(train, kind, seed)
            pairs[kind] = own.labels.size
            judge = train_head("bradley_terry", own, updates / own.labels.size, lr, seed, pair_weight=weight)
            scored = score_pairs(judge, [test.rows(torch.arange(test.labels.size))], TASKS["bradley_terry"])
            rows.append([pair_measures(scored)[name] for name in names])
        by_kind[kind] = np.array(rows)
    first = next(iter(by_kind.values()))
    print(f"| labels | pairs | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}")
    for kind, rows in by_kind.items():
        cells = []
        for column in range(len(names)):
            gap = rows[:, column] - first[:, column]
            error = 1.96 * gap.std(ddof=1) / len(gap) ** 0.5 if len(gap) > 1 else float("nan")
            own = f"{rows[:, column].mean():.4f}"
            cells.append(own if rows is first else f"{own} ({gap.mean():+.4f} ± {error:.4f})")
        print(f"| {kind} | {pairs[kind]} | {' | '.join(cells)} |", flush=True)


def compare_under_noise(options: argparse.Namespace) -> None:
    """A row per loss: means over seeds of data and heads, each seed's number in brackets."""
    by_task: dict[str, list[dict[str, float]]] = {task: [] for task in LOSSES}
    for seed in options.seeds:
        sizes = {"train": options.pairs, "heldout": options.heldout}
        sets = [features_of(ClutteredPairs(seed, split).examples(size)) for split, size in sizes.items()]
        noise = ClutteredPairs(seed, "heldout").noise(options.heldout)
        for task in LOSSES:
            judge = train_head(task, sets[0], options.epochs, options.lr, seed)
            scored = score_pairs(judge, [sets[1].rows(torch.arange(options.heldout))], TASKS[task])
            by_task[task].append(noise_measures(task, scored, noise))
            print(f"seed {seed}, {task}: {by_task[task][-1]}", flush=True)
    names = list(next(iter(by_task.values()))[0])
    print(f"\n| loss | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for task, rows in by_task.items():
        cells = []
        for name in names:
            values = [row[name] for row in rows]
            by_seed = ", ".join(f"{value:.3f}" for value in values)
            cells.append("" if np.isnan(values).all() else f"{np.mean(values):.3f} ({by_seed})")
        print(f"| {LOSSES[task]} | {' | '.join(cells)} |")


def noise_measures(task: str, pairs: HeldoutPairs, noise: Tensor) -> dict[str, float]:
    """`pair_measures`, and the rank correlation of σ with the true noise, over all and among equal leads."""
    measures = pair_measures(pairs)
    names = ("accuracy", "accuracy_all", "nll", "ece")
    row = {name: measures[name] for name in names}
    if task == "bradley_terry" or pairs.std is None:
        return row | dict.fromkeys(("noise", "noise_lead", "auroc", "auroc_lead"), float("nan"))
    lead = lead_stratum(pairs.difference).numpy()
    std, truth = pairs.std.numpy(), noise.numpy()
    within = [srcc(std[lead == stratum], truth[lead == stratum]) for stratum in np.unique(lead)]
    return row | {
        "noise": float(srcc(std, truth)),
        "noise_lead": float(np.mean(within)),
        "auroc": measures["std_auroc_votes"],
        "auroc_lead": measures["std_auroc_lead"],
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--heldout", type=int, default=4_000)
    parser.add_argument("--epochs", type=float, default=20.0)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--judge", help="also measure this trained judge; with --pairs 0 it alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--labels", action="store_true", help="compare ways of labelling, not losses")
    parser.add_argument("--clutter", action="store_true", help="votes whose noise can be seen: specks")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of --labels and --clutter")
    options = parser.parse_args()
    if options.clutter:
        compare_under_noise(options)
        return
    heldout = shapes_pairs(options.seed + 7, options.heldout, split="heldout")
    if options.labels:
        train = features_of(shapes_pairs(options.seed, options.pairs))
        compare_labels(train, features_of(heldout), options.epochs, options.lr, options.seeds)
        return
    head = "accuracy, clear truth | accuracy, all | NLL | ECE | mean σ of a pair"
    print(
        f"{options.pairs} pairs with 9 votes each, {options.epochs:g} epochs; {options.heldout} held-out pairs; "
        "accuracy against the noise-free truth, likelihood and calibration against the votes.\n\n"
        f"| loss | {head} | AUROC of σ for errors against the votes | at equal lead |\n"
        "|---|---|---|---|---|---|---|---|",
        flush=True,
    )
    if options.judge is not None:
        print(row_of(options.judge, judged_by(options.judge, heldout)), flush=True)
    if options.pairs:
        compare_losses(options, heldout)


def compare_losses(options: argparse.Namespace, heldout: Examples) -> None:
    """A row per loss."""
    train, test = features_of(shapes_pairs(options.seed, options.pairs)), features_of(heldout)
    for task in LOSSES:
        judge = train_head(task, train, options.epochs, options.lr, options.seed)
        scored = score_pairs(judge, [test.rows(torch.arange(options.heldout))], TASKS[task])
        print(row_of(task, scored), flush=True)


if __name__ == "__main__":
    main()
