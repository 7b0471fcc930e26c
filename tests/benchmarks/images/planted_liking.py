# SPDX-License-Identifier: Apache-2.0
"""Scores against win rates where both judges have a planted liking: does comparing protect from it?

    python tests/benchmarks/images/planted_liking.py --output runs/planted --seeds 0 1 2
    python tests/benchmarks/images/planted_liking.py --start 150

Pref-GRPO (arXiv 2508.20751) says that scores are hacked because meaningless differences are divided by their
group's deviation, and that win rates are not. A judge likes u = q + λ g/s: q the verifier's mixed score, g
brightness or saturation, s its spread within groups, λ = 0.3. `shapes_grpo_guard` learns from

- score: u + 0.15 n, n ~ N(0, 1) of the image;
- win rate: votes u_left - u_right + 0.15 √2 n > 0, n of the pair, by a judge with mistakes of its own;
- score, one deviation: the scores divided by the deviation of the batch;
- adversarial: the score and a discriminator with references of the world (Adv-GRPO), a logit for 0.5;
- artefact: the score and a classifier of artefacts (--artefact FOLDER, of shapes_artefact), weight 2.

**The claim is refuted** where the interval (mean ± t of seeds × likings, 95 %) of the verified accuracy under
win rates less that under scores holds 0 or lies below, at equal iterations and at equal KL; it is undecided
where the scores' own run loses nothing. **A term stops the hack** where the accuracy of all held-out prompts ends no
more than 0.05 below its start, and does not where it ends 0.2 or more below; in between is undecided.

--start trains nothing: slopes of the first advantages on truth and liking; the explanation is refuted where
groups without true difference teach the liking under win rates as under scores.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.support.benchmarks import absolute_path, argument_parser, train_once
from visalign.config import load_config, resolve_config
from visalign.interfaces import Metadata, Preferences, RewardCapabilities, Scores
from visalign.pipelines.flow_grpo.job import FlowGRPOConfig
from visalign.rewards import load_reward, make_scores, read_request
from visalign.rewards.base.contract import Request, group_labels, read_pairs
from visalign.rewards.pairs.as_pointwise import GroupWinRate
from visalign.training.loop.metrics import read_metrics

SPREAD = {"brightness": 0.059, "saturation": 0.053}
"""Mean deviation within groups of 8 of the packaged model's images, 40 training prompts."""
STRENGTH, NOISE = 0.3, 0.15
THIS = "tests/benchmarks/images/planted_liking.py"
WATCHED = ("truth", "brightness", "saturation", "sharpness", "tied")


class Score:
    """u + σ n of each image; n is the image's own, so an image has one score."""

    unit, range, higher_is_better = "mixed score + liking", (-math.inf, math.inf), True

    def __init__(self, liking: str, seed: int = 0, strength: float = STRENGTH) -> None:
        self.name, self.seed, self.liking, self.strength = f"likes_{liking}", seed, liking, strength
        self.truth = load_reward("shapes_verifier", mode="mixed")
        self.style = load_reward(liking)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        request = read_request(self.name, images, prompts, metadata)
        utility, reasons = self.utility(request)
        for row, image in request.images.readable():
            utility[row] += NOISE * normal(self.seed, image)
        return make_scores(utility, reasons, self.unit)

    def utility(self, request: Request) -> tuple[Tensor, list[str | None]]:
        """u [B], NaN with its reason where the verifier has no answer."""
        images: Any = request.images.images
        truth = self.truth.score(images, request.prompts, request.metadata)
        style = self.style.score(images, request.prompts, request.metadata).value
        reasons: list[str | None] = [*(truth.reason or [None] * len(request))]
        return truth.value + self.strength * style / SPREAD[self.liking], reasons


class Votes:
    """One vote on each pair in each order; another order is another vote."""

    def __init__(self, liking: str, seed: int = 0, strength: float = STRENGTH) -> None:
        self.judge = Score(liking, seed, strength)
        self.name = f"votes_{liking}"

    def compare(self, left: Any, right: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Preferences:
        request, pairs = read_pairs(self.name, left, right, prompts, metadata)
        return self._votes(request, pairs)

    def compare_pairs(
        self, images: Any, pairs: Tensor, prompts: Sequence[str], metadata: Metadata | None = None
    ) -> Preferences:
        """Pairs [N, 2] of numbered images, so that each is looked at once."""
        return self._votes(read_request(self.name, images, prompts, metadata), pairs)

    def _votes(self, request: Request, pairs: Tensor) -> Preferences:
        utility, reasons = self.judge.utility(request)
        images = request.images.images
        noise = [normal(self.judge.seed, *(images[i] for i in pair)) for pair in pairs.tolist()]
        gap = utility[pairs[:, 0]] - utility[pairs[:, 1]] + NOISE * math.sqrt(2) * torch.tensor(noise)
        prob = torch.where(gap.isnan(), torch.nan, (gap > 0).float())
        why = [reasons[i] or reasons[j] for i, j in pairs.tolist()]
        return Preferences(prob=prob, valid=~gap.isnan(), reason=why)


class Tied:
    """1 for each image of a group that the verifier finds all equally good, else 0."""

    name, unit, range, higher_is_better = "tied", "1 = nothing to choose", (0, 1), True
    capabilities = RewardCapabilities(needs_group=True)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        request = read_request(self.name, images, prompts, metadata)
        truth = load_reward("shapes_verifier", mode="mixed").score(images, prompts, metadata).value
        groups: dict[Any, set[float]] = {}
        labels = group_labels(self.name, request)
        for label, value in zip(labels, truth.tolist(), strict=True):
            groups.setdefault(label, set()).add(value)
        tied = torch.tensor([float(len(groups[label]) == 1) for label in labels])
        return make_scores(tied, [None] * len(tied), self.unit)


def normal(seed: int, *images: Any) -> float:
    """A draw of N(0, 1) that is these images' own, by their bytes."""
    content = b"".join((255 * image).round().byte().numpy().tobytes() for image in images)
    digest = hashlib.sha256(content + str(seed).encode()).digest()
    return float(np.random.default_rng(list(digest)).standard_normal())


WIN_RATES = f"comparison={{both_orders: false, hard: true, scores: [{', '.join(WATCHED)}]}}"
BATCH = "objective.changes_for.grpo_guard.advantage_options={scale: batch}"
MIXED = "rewards.allow_mixed_units=true"
ARMS: dict[str, tuple[str, list[str]]] = {
    "score": ("Score", []),
    "win rate": ("Votes", [WIN_RATES]),
    "score, one deviation": ("Score", [BATCH]),
    "adversarial": (
        "Score",
        [MIXED, "rewards.terms.adversarial={weight: 0.5, options: {references: 'shapes:images'}}"],
    ),
    "artefact": ("Score", [MIXED]),
}


def run(folder: Path, arm: str, liking: str, seed: int, iterations: int, artefact: Path | None = None) -> None:
    """Train by the command that a user gives, unless the run has a summary."""
    judge, changes = ARMS[arm]
    if arm == "artefact":
        changes = [*changes, f"rewards.terms.artefact={{weight: 2.0, options: {{model: {artefact}}}}}"]
    own = 2 * seed + (judge == "Votes")  # the mistakes of two judges have nothing in common
    watched = (
        "truth: {name: shapes_verifier, options: {mode: mixed}, weight: 0}, brightness: {weight: 0}, "
        f"saturation: {{weight: 0}}, sharpness: {{weight: 0}}, tied: {{name: '{THIS}:Tied', weight: 0}}"
    )
    planted = f"judge: {{name: '{THIS}:{judge}', options: {{liking: {liking}, seed: {own}}}}}"
    train_once(
        folder,
        "shapes_grpo_guard",
        f"rewards.terms={{{planted}, {watched}}}",
        *(f"seed={seed}", f"run.iterations={iterations}", "run.max_seconds=null", "run.threads=1"),
        *("rollout.prompts_per_iteration=8", "rollout.group_size=8", "evaluation.every=0"),
        "objective.changes={kl: 1.0e-9}",  # measures the divergence and moves nothing
        *changes,
    )


def read(folder: Path, liking: str) -> dict[str, Any]:
    """What a run recorded, a list by iteration for each name, and the accuracy before and after."""
    rows = read_metrics(folder / "metrics.jsonl")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    history = {
        name: [row[key] for row in rows]
        for name, key in {
            "accuracy": "reward_part/truth.correct",
            "truth": "recorded/truth",
            "brightness": "recorded/brightness",
            "saturation": "recorded/saturation",
            "sharpness": "recorded/sharpness",
            "tied": "recorded/tied",
            "std": "reward_group_std",
            "truth_std": "recorded_std/truth",
            "agreement": "agreement/truth",
            "agreement_liking": f"agreement/{liking}",
            "kl": "kl",
        }.items()
    }
    pairs = zip(history["truth"], history[liking], strict=True)
    history["judge"] = [truth + STRENGTH * style / SPREAD[liking] for truth, style in pairs]
    ends = {when: summary[when]["accuracy"] for when in ("before", "after")}
    return {**history, **ends}


def smooth(values: Sequence[float], width: int = 5) -> np.ndarray:
    """Mean of each value and the `width` - 1 before it: an iteration has 64 images."""
    return np.array([np.mean(values[max(0, at + 1 - width) : at + 1]) for at in range(len(values))])


def at_kl(history: dict[str, Any], kl: float) -> float:
    """Accuracy of the rollouts where the smoothed KL first reaches `kl`."""
    reached = np.flatnonzero(smooth(history["kl"]) >= kl)
    return float(smooth(history["accuracy"])[reached[0] if len(reached) else -1])


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """(mean, half width) of the 95 % interval, by Student's t."""
    from scipy.stats import t

    half = t.ppf(0.975, len(differences) - 1) * np.std(differences, ddof=1) / math.sqrt(len(differences))
    return float(np.mean(differences)), float(half)


def course(runs: dict[tuple[str, str, int], dict[str, Any]], points: Sequence[int]) -> str:
    """Markdown: means over the seeds of a liking at some iterations, five iterations each."""
    names = ("accuracy", "judge", "brightness", "saturation", "sharpness", "std", "truth_std", "tied")
    names += ("agreement", "agreement_liking", "kl")
    lines = [f"| reward | liking | iteration | {' | '.join(names)} |", "|" + "---|" * (3 + len(names))]
    for arm, liking in dict.fromkeys(key[:2] for key in runs):
        own = [history for key, history in runs.items() if key[:2] == (arm, liking)]
        for point in points:
            cells = [np.mean([smooth(history[name])[point - 1] for history in own]) for name in names]
            row = " | ".join(f"{cell:.3g}" for cell in cells)
            lines.append(f"| {arm} | {liking} | {point} | {row} |")
    return "\n".join(lines)


def verdict(runs: dict[tuple[str, str, int], dict[str, Any]], against: str = "score") -> str:
    """Markdown: verified accuracy at the end, and what each arm has over `against`, three ways."""
    ways = {"all held-out prompts": [], "rollouts, equal iterations": [], "rollouts, equal KL": []}
    lines = [f"| over {against} | repeats | accuracy before, after | {' | '.join(ways)} |"]
    lines.append("|" + "---|" * (3 + len(ways)))
    for arm in ARMS:
        repeats = [key[1:] for key in runs if key[0] == arm and (against, *key[1:]) in runs]
        if not repeats:
            continue
        pairs = [(runs[arm, *repeat], runs[against, *repeat]) for repeat in repeats]
        ends = [np.mean([own[when] for own, _ in pairs]) for when in ("before", "after")]
        line = f"| {arm} | {len(repeats)} | {ends[0]:.3f}, {ends[1]:.3f} |"
        if arm != against and len(repeats) > 1:
            ways["all held-out prompts"] = [own["after"] - other["after"] for own, other in pairs]
            ways["rollouts, equal iterations"] = [
                smooth(own["accuracy"])[-1] - smooth(other["accuracy"])[-1] for own, other in pairs
            ]
            shared_kl = [min(smooth(history["kl"]).max() for history in pair) for pair in pairs]
            ways["rollouts, equal KL"] = [
                at_kl(own, kl) - at_kl(other, kl) for (own, other), kl in zip(pairs, shared_kl, strict=True)
            ]
            for differences in ways.values():
                mean, half = interval(differences)
                line += f" {mean:+.3f} ± {half:.3f} |"
        else:
            line += " |" * len(ways)
        lines.append(line)
    return "\n".join(lines)


def images_of(prompts: int) -> tuple[Tensor, list[str], list[dict[str, Any]]]:
    """Groups of 8 images of the packaged model, of training prompts evenly spaced."""
    from visalign.evaluation import evaluate
    from visalign.pipelines.flow_grpo.inputs import prepare
    from visalign.pipelines.flow_grpo.parts import build_policy

    config = load_config(FlowGRPOConfig, resolve_config("shapes_grpo_guard"), [])
    records = prepare(config, 1).records
    chosen = [records[i * len(records) // prompts] for i in range(prompts)]
    policy = build_policy(config.model, torch.device("cpu"), 0)
    verifier = {"shapes_verifier": load_reward("shapes_verifier")}
    result = evaluate(
        policy, verifier, chosen, seeds=range(8), sigmas=policy.sigmas(config.rollout.steps),
        batch_size=160, correctness="shapes_verifier",
    )  # fmt: skip
    images = torch.from_numpy(result.images[result.image_index]).permute(0, 3, 1, 2).float() / 255
    group_ids = {record["prompt"]: number for number, record in enumerate(chosen)}
    return images, list(result.prompts), [{"group_id": group_ids[prompt]} for prompt in result.prompts]


def start(prompts: int, arms: Sequence[str], likings: Sequence[str], seeds: Sequence[int]) -> str:
    """Markdown: what each rule's advantages follow before training, means over likings and seeds."""
    images, texts, records = images_of(prompts)
    group = np.array([record["group_id"] for record in records])
    order = np.argsort(group, kind="stable")

    def by_group(value: Tensor) -> np.ndarray:
        return value.double().numpy()[order].reshape(-1, 8)

    truth = by_group(load_reward("shapes_verifier", mode="mixed").score(images, texts).value)
    tied = np.ptp(truth, 1) < 1e-9
    lines = [
        f"{len(truth)} groups, {tied.mean():.0%} without true difference",
        "",
        "| λ | reward | right on pairs | truth | liking | tied: liking | tied: mean advantage, absolute |",
        "|---|---|---|---|---|---|---|",
    ]
    for strength in (0.3, 0.1, 0.03):
        for arm in arms:
            rows = []
            for liking in likings:
                style = by_group(load_reward(liking).score(images, texts).value)
                for seed in seeds:
                    judge: Any = Score(liking, 2 * seed, strength)
                    votes = Votes(liking, 2 * seed + 1, strength)
                    if arm == "win rate":
                        judge = GroupWinRate(votes, both_orders=False, hard=True)
                    value = by_group(judge.score(images, texts, records).value)
                    scores = None if arm == "win rate" else value
                    right = accuracy(truth, scores, votes, images[order], [texts[i] for i in order])
                    advantage = standard(value, of_all=arm == "score, one deviation")
                    rows.append([right, *followed(advantage, truth, style, tied)])
            cells = " | ".join(f"{cell:.3f}" for cell in np.mean(rows, 0))
            lines.append(f"| {strength} | {arm} | {cells} |")
    return "\n".join(lines)


def accuracy(truth: np.ndarray, value: np.ndarray | None, votes: Votes, images: Tensor, texts: list[str]) -> float:
    """Share of the pairs of different truth that a judge has right: by its scores, or by one vote each."""
    left, right = np.triu_indices(8, 1)
    gap = truth[:, left] - truth[:, right]
    if value is not None:
        lead = value[:, left] - value[:, right]
    else:
        first = 8 * np.arange(len(truth))[:, None]
        pairs = torch.from_numpy(np.stack([first + left, first + right], -1).reshape(-1, 2))
        lead = votes.compare_pairs(images, pairs, texts).prob.numpy().reshape(gap.shape) - 0.5
    return float((lead * gap > 0)[np.abs(gap) > 1e-9].mean())


def standard(value: np.ndarray, *, of_all: bool = False) -> np.ndarray:
    """Advantages [groups, 8]: centred, by the group's deviation or that of all; 0 where that is 0."""
    centred = value - value.mean(1, keepdims=True)
    deviation = centred.std(ddof=1) if of_all else centred.std(1, keepdims=True, ddof=1)
    return centred / np.maximum(deviation, 1e-6)


def followed(advantage: np.ndarray, truth: np.ndarray, style: np.ndarray, tied: np.ndarray) -> list[float]:
    """Slopes on truth and liking where both differ; on the liking, and mean |A|, where the truth is tied."""
    differ = [standard(truth)[~tied].ravel(), standard(style)[~tied].ravel()]
    slopes = np.linalg.lstsq(np.stack(differ, 1), advantage[~tied].ravel(), rcond=None)[0]
    own, of_tied = advantage[tied].ravel(), standard(style)[tied].ravel()
    return [*slopes, float(own @ of_tied / (of_tied @ of_tied)), float(np.abs(own).mean())]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--output", type=absolute_path, help="runs that are there are not repeated")
    parser.add_argument("--start", type=int, metavar="PROMPTS", help="train nothing: before the first update")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS)[:3])
    parser.add_argument(
        "--artefact", type=absolute_path, help="folder of the classifier of artefacts, for the arm of that name"
    )
    parser.add_argument("--likings", nargs="+", choices=list(SPREAD), default=list(SPREAD))
    options = parser.parse_args()
    if options.start is not None:
        print(start(options.start, options.arms, options.likings, options.seeds))
        return
    if options.output is None:
        parser.error("--output says where the runs are; or give --start PROMPTS, which trains nothing")
    runs = {}
    for seed in options.seeds:
        for liking in options.likings:
            for arm in options.arms:
                name = f"{arm.replace(', ', '_').replace(' ', '_')}_{liking}_{seed}"
                run(options.output / name, arm, liking, seed, options.iterations, options.artefact)
                runs[arm, liking, seed] = read(options.output / name, liking)
                print(name, f"{runs[arm, liking, seed]['after']:.3f}", flush=True)
    points = sorted({1, *range(10, options.iterations + 1, 10), options.iterations})
    print(f"\n{course(runs, points)}\n\n{verdict(runs)}")


if __name__ == "__main__":
    main()
