# SPDX-License-Identifier: Apache-2.0
"""Three losses for a judge that says how sure it is, side by side on the same noisy votes.

The packaged vision-language model is frozen; its hidden states at three questions (what the picture shows,
its quality, its style) are computed once, and one head of HPSv3's kind is trained on them per loss: the
likelihood by quadrature, Bradley-Terry, and the Monte-Carlo form of HPSv3's released code. Votes of an
annotator are noisier where a picture is degraded, so a standard deviation can be right or wrong.

    python tests/benchmarks/uncertainty_loss.py --pairs 20000
    python tests/benchmarks/uncertainty_loss.py --pairs 6000 --labels

With --labels Bradley-Terry alone, on pairs of one, three or nine votes, which are told to it in four ways.
That soft labels and counts of votes beat a filter by agreement is refuted where the interval of what it loses
against them holds 0.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from visalign.core.preference.uncertainty import soft_clamp
from visalign.pipelines.train_reward.examples import Examples, pair_batch, pair_images, shapes_pairs
from visalign.rewards.hpsv3.head import RanknetHead
from visalign.rewards.hpsv3.judge import HPSv3
from visalign.rewards.questions.reward_dance import YES_NO
from visalign.rewards.questions.visual_quality_r1 import RATING
from visalign.rewards.vlm.engine import Query, VisionLanguageEngine
from visalign.training.loop.trainer import RunSettings, Trainer
from visalign.training.reward.batch import Outputs, RewardBatch
from visalign.training.reward.heldout import HeldoutPairs, auroc, judge_pairs, lead_stratum, pair_measures
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


@torch.no_grad()
def features_of(engine: VisionLanguageEngine, pairs: Examples, chunk: int = 50) -> tuple[Tensor, RewardBatch]:
    """[2 N, D] hidden states (left pictures, then right ones), and the labels of the N pairs.

    Args:
        engine: frozen.
        pairs: the set.
        chunk: pairs at a time.
    """
    shows, rating = engine.template("yes_no", YES_NO), engine.template("rating", RATING)
    style = engine.template("checklist", YES_NO)
    sides: tuple[list[Tensor], list[Tensor]] = ([], [])
    examples = []
    for start in range(0, len(pairs), chunk):
        part = [pairs[n] for n in range(start, min(start + chunk, len(pairs)))]
        images, prompts = pair_images(part), [example.prompt for example in part] * 2
        asked = {"question": "Is the background textured?"}
        columns = [
            engine.hidden(
                template,
                [Query(images=[i], prompt=p, fields=asked) for i, p in zip(images, prompts, strict=True)],
            )
            for template in (shows, rating, style)
        ]
        states = torch.cat([column.states for column in columns], 1)
        for side, rows in zip(sides, states.split(len(part)), strict=True):
            side.append(rows)
        examples += [replace(example, images=()) for example in part]
    return torch.cat([*sides[0], *sides[1]]), pair_batch(None, examples, heldout=True)


def kept_features(engine: VisionLanguageEngine, pairs: Examples, file: Path | None) -> FeaturePairs:
    """Features and labels of pairs, from a file that an earlier call left where there is one.

    Args:
        engine: frozen.
        pairs: the set.
        file: where they are kept; None keeps nothing.
    """
    if file is None or not file.is_file():
        features, labels = features_of(engine, pairs)
        assert labels.label is not None and labels.votes is not None and labels.clear is not None
        tensors = {"features": features, "label": labels.label, "votes": labels.votes, "clear": labels.clear}
        if file is not None:
            save_file(tensors, file)
    else:
        tensors = load_file(file)
    count = len(tensors["label"])
    if count != len(pairs):
        raise SystemExit(f"{file} holds {count} pairs, and {len(pairs)} are asked for; remove it.")
    labels = RewardBatch(
        inputs=None, size=count, label=tensors["label"], votes=tensors["votes"], clear=tensors["clear"]
    )
    return FeaturePairs(tensors["features"], labels)


@torch.no_grad()
def judged_by(place: str, pairs: Examples, chunk: int = 100) -> HeldoutPairs:
    """What a trained judge of HPSv3's kind says of pairs.

    Args:
        place: its folder or packaged name.
        pairs: the set.
        chunk: pairs at a time.
    """
    judge, parts = HPSv3(place, feature_bytes=1 << 20), []
    for start in range(0, len(pairs), chunk):
        part = [pairs[n] for n in range(start, min(start + chunk, len(pairs)))]
        found = judge.score(pair_images(part), [example.prompt for example in part] * 2)
        assert found.std is not None and bool(found.valid.all())
        said = {"value": found.value, "log_std": found.std.log()}
        parts.append(pair_batch(said, part, heldout=True))
    return judge_pairs(_Said(), parts, TASKS["uncertainty"])


class _Said(nn.Module):
    """A judge that has spoken already."""

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
        found = self.head((inputs - self.mean) / self.std)
        return {"value": found[:, 0], "log_std": soft_clamp(found[:, 1])}


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
            inputs=both,
            size=len(chosen),
            left=torch.arange(len(chosen)),
            right=torch.arange(len(chosen), 2 * len(chosen)),
            label=self.labels.label[chosen],
            votes=self.labels.votes[chosen],
            clear=self.labels.clear[chosen],
        )


def train_head(
    task: str, train: FeaturePairs, epochs: float, lr: float, seed: int, **settings: Any
) -> HeadJudge:
    """A head trained with one loss; all losses see the same batches from the same start."""
    features = train.features
    judge = HeadJudge(features.shape[1], features.mean(0), features.std(0) + 1e-4, seed)
    updates = int(epochs * train.labels.size / BATCH)
    plain: dict[str, Any] = {"smoothing": 0.0, **settings}
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            RewardModeling(
                judge,
                train,
                objective=RewardObjectiveSettings(task=task, **plain),
                accelerator=Accelerator(cpu=True),
                seed=seed,
            ),
            optimizer=RewardOptimizerSettings(
                lr=lr,
                warmup_updates=50,
                decay_updates=updates,
                updates_per_iteration=updates,
                weight_decay=1e-3,
            ),
            run=RunSettings(folder=Path(folder), iterations=1, config={}),
        ).train()
    return judge


def auroc_interval(
    score: Tensor, wrong: Tensor, stratum: Tensor, seed: int = 0
) -> tuple[float, float, float]:
    """AUROC with its 95 % bootstrap interval over pairs."""
    rng = np.random.default_rng(seed)
    draws = []
    for _ in range(DRAWS):
        rows = torch.from_numpy(rng.integers(len(score), size=len(score)))
        draws.append(auroc(score[rows], wrong[rows], stratum[rows]))
    low, high = np.nanquantile(draws, [0.025, 0.975])
    return auroc(score, wrong, stratum), float(low), float(high)


def row_of(task: str, found: HeldoutPairs) -> str:
    """One line of the table."""
    measures = pair_measures(found)
    cells = [f"{measures[name]:.4f}" for name in ("accuracy", "accuracy_all", "nll", "ece")]
    if task == "bradley_terry":
        return f"| {LOSSES.get(task, task)} | {' | '.join(cells)} | – | – | – |"
    assert found.std is not None
    voted = (found.share != 0.5) & (found.difference != 0)  # the same picture twice is nobody's error
    difference, std = found.difference[voted], found.std[voted]
    wrong = torch.sign(difference) != torch.sign(found.share[voted] - 0.5)
    cells.append(f"{measures['std_mean']:.3f}")
    for stratum in (torch.zeros(len(std)), lead_stratum(difference)):
        middle, low, high = auroc_interval(std, wrong, stratum)
        cells.append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
    return f"| {LOSSES.get(task, task)} | {' | '.join(cells)} |"


def labelled(train: FeaturePairs, kind: str, seed: int) -> FeaturePairs:
    """The pairs with one, three or nine of their votes, by lot, as labels of a kind."""
    labels, rng = train.labels, np.random.default_rng([seed, 5])
    assert labels.votes is not None and labels.label is not None and labels.clear is not None
    votes = labels.votes.numpy().astype(int)
    asked = rng.choice((1, 3, 9), len(votes))
    won = rng.hypergeometric(votes[:, 0], votes[:, 1], asked)
    kept = np.ones(len(votes), dtype=bool)
    counts = np.stack((won, asked - won), 1)
    if kind.startswith("majority"):
        kept = np.maximum(won, asked - won) >= (0.95 * asked if "95" in kind else 0)
        counts = np.stack((2 * won > asked, 2 * won < asked), 1).astype(int)
    chosen = torch.from_numpy(np.flatnonzero(kept))
    given = torch.from_numpy(np.concatenate((counts, 0 * counts[:, :1]), 1)).float()
    own = replace(
        labels,
        size=len(chosen),
        label=(given[:, 0] / given.sum(1))[chosen],
        votes=given[chosen],
        clear=labels.clear[chosen],
    )
    both = train.features.view(2, labels.size, -1)[:, chosen]
    return FeaturePairs(both.flatten(0, 1), own, seed)


def compare_labels(
    train: FeaturePairs, held: FeaturePairs, epochs: float, lr: float, seeds: Sequence[int]
) -> None:
    """A row per way of labelling; as many updates for each."""
    names = ("accuracy", "accuracy_all", "nll", "ece")
    updates = epochs * train.labels.size
    found: dict[str, np.ndarray] = {}
    pairs = {}
    for kind, weight in LABELS.items():
        rows = []
        for seed in seeds:
            own = labelled(train, kind, seed)
            pairs[kind] = own.labels.size
            judge = train_head("bradley_terry", own, updates / own.labels.size, lr, seed, pair_weight=weight)
            said = judge_pairs(judge, [held.rows(torch.arange(held.labels.size))], TASKS["bradley_terry"])
            rows.append([pair_measures(said)[name] for name in names])
        found[kind] = np.array(rows)
    first = next(iter(found.values()))
    print(f"| labels | pairs | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}")
    for kind, rows in found.items():
        cells = []
        for column in range(len(names)):
            gap = rows[:, column] - first[:, column]
            error = 1.96 * gap.std(ddof=1) / len(gap) ** 0.5 if len(gap) > 1 else float("nan")
            own = f"{rows[:, column].mean():.4f}"
            cells.append(own if rows is first else f"{own} ({gap.mean():+.4f} ± {error:.4f})")
        print(f"| {kind} | {pairs[kind]} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Three losses for an uncertain judge.")
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--heldout", type=int, default=4_000)
    parser.add_argument("--epochs", type=float, default=20.0)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--model", default="shapes-vlm")
    parser.add_argument("--judge", help="also measure this trained judge; with --pairs 0 it alone")
    parser.add_argument("--cache", type=Path, help="folder that keeps the features")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--labels", action="store_true", help="compare ways of labelling, not losses")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the ways of labelling")
    given = parser.parse_args()
    heldout = shapes_pairs(given.seed + 7, given.heldout, split="heldout")
    if given.labels:
        compare_labels(*features(given, heldout), given.epochs, given.lr, given.seeds)
        return
    head = "accuracy, clear truth | accuracy, all | NLL | ECE | mean σ of a pair"
    print(
        f"{given.pairs} pairs with 9 votes each, {given.epochs:g} epochs; {given.heldout} held-out pairs; "
        "accuracy against the noise-free truth, likelihood and calibration against the votes.\n\n"
        f"| loss | {head} | AUROC of σ for errors against the votes | at equal lead |\n"
        "|---|---|---|---|---|---|---|---|",
        flush=True,
    )
    if given.judge is not None:
        print(row_of(given.judge, judged_by(given.judge, heldout)), flush=True)
    if given.pairs:
        compare_losses(given, heldout)


def features(given: argparse.Namespace, heldout: Examples) -> tuple[FeaturePairs, FeaturePairs]:
    """What the losses learn from, and what they are measured on."""
    engine = VisionLanguageEngine.from_pretrained(
        given.model, feature_bytes=1 << 20, max_tokens_per_batch=1 << 15
    )
    cache: list[Path | None] = [None, None]
    if given.cache is not None:
        given.cache.mkdir(parents=True, exist_ok=True)
        cache = [given.cache / f"{name}.safetensors" for name in ("train", "heldout")]
    train = kept_features(engine, shapes_pairs(given.seed, given.pairs), cache[0])
    return train, kept_features(engine, heldout, cache[1])


def compare_losses(given: argparse.Namespace, heldout: Examples) -> None:
    """A row per loss."""
    train, held = features(given, heldout)
    for task in LOSSES:
        judge = train_head(task, train, given.epochs, given.lr, given.seed)
        found = judge_pairs(judge, [held.rows(torch.arange(given.heldout))], TASKS[task])
        print(row_of(task, found), flush=True)


if __name__ == "__main__":
    main()
