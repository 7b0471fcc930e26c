# SPDX-License-Identifier: Apache-2.0
"""Do the members of an ensemble doubt where it is wrong: one tower and other seeds, data, grounds, or towers.

    python tests/benchmarks/judges/shared_blind_spots.py --seeds 0 1 2

A member is a head of HPSv3's kind on the frozen states of a packaged model; an ensemble has three, by other
seeds, thirds of the pairs, thirds on three grounds, or three models; beside them the packaged LoRA ensemble.
On clear held-out pairs, on own grounds and on pink: accuracy of the mean lead, AUROC of the deviation for its
errors. That other data, grounds or towers cure a shared blind spot is refuted where the interval of their
AUROC on pink does not lie above that of seeds; 95 %, by bootstrap over the pairs of all seeds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.benchmarks.judges.lora_ensemble_quality import ask
from tests.benchmarks.judges.uncertainty_loss import FeaturePairs, train_head
from tests.support.benchmarks import argument_parser, first_pairs, quantile_text
from visalign.data.shapes.preferences import ShapesPair, ShapesPreferences
from visalign.data.shapes.surroundings import GROUNDS, is_visible
from visalign.pipelines.train_reward.examples import as_image
from visalign.rewards.base.contract import read_request
from visalign.rewards.hpsv3.ensemble_judge import LoraEnsembleReward
from visalign.rewards.questions.reward_dance import YES_NO
from visalign.rewards.scorers.clip_score import ClipScore
from visalign.rewards.scorers.ict import Ict
from visalign.rewards.vlm.engine import Query, VisionLanguageEngine
from visalign.training.reward.batch import RewardBatch
from visalign.training.reward.heldout import auroc

MEMBERS, DRAWS = 3, 1_000
Tower = Callable[[list[Tensor], list[str]], Tensor]


def drawn(split: str, seed: int, ground: str | None, count: int, *, clear: bool) -> list[ShapesPair]:
    """Pairs on a ground, None for the world's own, from which their objects stand out."""
    color = None if ground is None else GROUNDS[ground]

    def fits(pair: ShapesPair) -> bool:
        visible = color is None or all(is_visible(scene, color) for scene in (pair.left, pair.right))
        return visible and (pair.is_clear or not clear)

    pairs = first_pairs(ShapesPreferences(seed, split=split), count, fits)
    if color is None:
        return pairs
    on_color = partial(replace, background=color)
    return [replace(pair, left=on_color(pair.left), right=on_color(pair.right)) for pair in pairs]


def seeing() -> Tower:
    """States of `shapes-vlm` where it is about to say whether an image shows its prompt."""
    engine = VisionLanguageEngine.from_pretrained("shapes-vlm", feature_bytes=1 << 20)
    template = engine.template("yes_no", YES_NO)

    def states(images: list[Tensor], prompts: list[str]) -> Tensor:
        queries = [Query(images=[image], prompt=prompt) for image, prompt in zip(images, prompts, strict=True)]
        return engine.hidden(template, queries).states

    return states


def contrastive(judge: ClipScore | Ict) -> Tower:
    """Image, prompt and their product, of unit length each."""

    def states(images: list[Tensor], prompts: list[str]) -> Tensor:
        request = read_request("clip", images, prompts, None)
        _, image = judge.towers.image_features(request, list(request.images.reasons))
        image, text = (torch.nn.functional.normalize(x, dim=-1) for x in (image, judge.towers.text_features(prompts)))
        return torch.cat([image, text, image * text], 1)

    return states


@torch.no_grad()
def features(tower: Tower, pairs: Sequence[ShapesPair]) -> FeaturePairs:
    """States of all left images, then of all right ones, with the votes."""
    sides: tuple[list[Tensor], list[Tensor]] = ([], [])
    for start in range(0, len(pairs), 50):
        part = pairs[start : start + 50]
        both = [[as_image(image) for image in pair.images()] for pair in part]
        for side, states in enumerate(sides):
            states.append(tower([two[side] for two in both], [pair.prompt for pair in part]))
    votes = torch.tensor([[*pair.votes, 0] for pair in pairs]).float()
    labels = RewardBatch(
        inputs=None, size=len(pairs), label=votes[:, 0] / votes.sum(1), votes=votes,
        clear=torch.tensor([pair.is_clear for pair in pairs]),
    )  # fmt: skip
    return FeaturePairs(torch.cat([*sides[0], *sides[1]]), labels)


def third(pairs: FeaturePairs, number: int) -> FeaturePairs:
    """Every third pair from `number` on."""
    chosen = torch.arange(number, pairs.labels.size, MEMBERS)
    return of(pairs, chosen)


def of(pairs: FeaturePairs, chosen: Tensor) -> FeaturePairs:
    rows = pairs.rows(chosen)
    return FeaturePairs(rows.inputs, replace(rows, inputs=None, left=None, right=None))


def member(train: FeaturePairs, tests: Sequence[FeaturePairs], seed: int, epochs: float) -> list[Tensor]:
    """Leads on each test set of a head that learnt these pairs."""
    judge = train_head("bradley_terry", train, epochs, 3e-3, seed)
    judge.train(False)

    def lead(pairs: FeaturePairs) -> Tensor:
        with torch.no_grad():
            left, right = judge(pairs.features)["value"].view(2, -1)
        return (left - right).double()

    scale = lead(train).std()
    return [lead(pairs) / scale for pairs in tests]


def lora_members(judge: LoraEnsembleReward, pairs: Sequence[Sequence[ShapesPair]]) -> list[Tensor]:
    """[M, N] leads of the ensemble's members on each set."""
    leads = []
    for own in pairs:
        both = [[as_image(image) for image in pair.images()] for pair in own]
        prompts = [pair.prompt for pair in own]
        left, right = (ask(judge, [two[side] for two in both], prompts).mean for side in range(2))
        leads.append(left - right)
    return leads


def together(
    members: Sequence[tuple[FeaturePairs, str, int]], heldout: dict[str, list[FeaturePairs]], epochs: float
) -> list[Tensor]:
    """[M, N] leads of the members on each test set; a member is its pairs, its tower, and its seed."""
    by_member = [member(pairs, heldout[tower], seed, epochs) for pairs, tower, seed in members]
    return [torch.stack(leads) for leads in zip(*by_member, strict=True)]


def one_seed(seed: int, options: argparse.Namespace) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Ensemble -> per test set ([N] whether the mean lead is wrong, [N] deviation of the members)."""
    tests = [drawn("heldout", seed + 500, ground, options.heldout, clear=True) for ground in (None, "pink")]
    train = drawn("train", seed, None, options.pairs, clear=False)
    towers = {"vlm": seeing(), "clip": contrastive(ClipScore("shapes-clip")), "ict": contrastive(Ict("shapes-ict"))}
    train_features = {name: features(tower, train) for name, tower in towers.items()}
    test_features = {name: [features(tower, pairs) for pairs in tests] for name, tower in towers.items()}
    grounds = [third(train_features["vlm"], 0)] + [
        features(towers["vlm"], drawn("train", seed + 1000, ground, options.pairs // MEMBERS, clear=False))
        for ground in ("white", "teal")
    ]
    own, indices = 10 * seed, range(MEMBERS)
    plan: dict[str, list[tuple[FeaturePairs, str, int]]] = {
        "one tower, other seeds": [(train_features["vlm"], "vlm", own + m) for m in indices],
        "one tower, thirds of the pairs": [(third(train_features["vlm"], m), "vlm", own + m) for m in indices],
        "one tower, thirds on three grounds": [(grounds[m], "vlm", own + m) for m in indices],
        "three towers": [(pairs, name, own) for name, pairs in train_features.items()],
    }
    leads = {name: together(members, test_features, options.epochs) for name, members in plan.items()}
    leads["packaged LoRA ensemble, other seeds"] = lora_members(LoraEnsembleReward("shapes-hpsv3-ensemble"), tests)
    truth = [torch.tensor([pair.utility[0] > pair.utility[1] for pair in pairs]) for pairs in tests]
    return {
        name: [((lead.mean(0) > 0) != right, lead.std(0)) for lead, right in zip(by_ground, truth, strict=True)]
        for name, by_ground in leads.items()
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=3000, help="to learn from")
    parser.add_argument("--heldout", type=int, default=500, help="pairs on each ground")
    parser.add_argument("--epochs", type=float, default=15.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = [one_seed(seed, options) for seed in options.seeds]
    print("| members | accuracy, own grounds | AUROC | accuracy, pink | AUROC |\n|---|---|---|---|---|")
    rng = np.random.default_rng(0)
    for name in seeds[0]:
        cells = []
        for ground in range(2):
            wrong, std = (torch.cat([outcomes[name][ground][what] for outcomes in seeds]) for what in range(2))
            draws = torch.from_numpy(rng.integers(len(wrong), size=(DRAWS, len(wrong))))
            cells += [f"{1 - wrong.double().mean():.3f}", "–"]
            if wrong.any():
                aurocs = [auroc(std[rows], wrong[rows]) for rows in draws]
                cells[-1] = quantile_text(auroc(std, wrong), aurocs, ".3f")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
