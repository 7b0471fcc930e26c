# SPDX-License-Identifier: Apache-2.0
"""Do counts of votes make a reward that is over-optimised less than majorities do; are best-of-four labels better?

    python tests/benchmarks/judges/votes_over_kl.py --output runs/votes --seeds 0 1 2

Simulated voters compare images of the packaged generator (probability σ(γ Δu), u the verifier's mixed score,
γ as in `votes_to_policy`); a pair has 1, 3 or 9 votes by lot. Linear rewards learn from as many pairs labelled in
four ways, or from choices among four images by one voter each, with as many looks at images. Each reward
tilts the generator on held-out prompts, w ∝ exp(βr) over 16 samples, to a KL; the verifier's accuracy there
is what counts. No policy is trained: the tilt is the optimum that training under a KL penalty aims at.

Each seed has five draws of pairs and votes. What was decided before the runs, and how they came out:
docs/evidence/claims.md#votes-over-kl.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.benchmarks.judges.judge_size import sampled as sampled_by
from tests.benchmarks.judges.linear_reward import features, fit, fit_choices, strength_of, tilted
from tests.benchmarks.judges.votes_to_policy import VOTERS
from tests.benchmarks.judges.which_labels import sampled
from tests.support.benchmarks import lead_text, run_parser, write_rows
from visalign.data.shapes.prompts import heldout_prompts, parse_prompt, train_prompts
from visalign.rewards.catalogue import load_reward

LEVELS, DRAWS = (0.25, 0.5, 1.0, 1.5, 2.0), 5
LEADS = (
    ("counts", "majority"),
    ("counts", "majority, 95 %"),
    ("counts", "shares"),
    ("best of four", "one pair of four"),
)


def truth(images: list[str], prompts: list[str], **options: str) -> torch.Tensor:
    records = [parse_prompt(prompt) for prompt in prompts]
    return load_reward("shapes_verifier", **options).score(images, prompts, records).value.double()


def rewards(
    states: torch.Tensor, utility: torch.Tensor, pairs: int, rng: np.random.Generator
) -> dict[str, torch.Tensor]:
    """Arm -> weights of the reward; states [P, 4, D] and utilities [P, 4] of four images a prompt."""
    group = rng.integers(len(states), size=pairs)
    four = np.argsort(rng.random((pairs, 4)), 1)
    left, right = (states[group, four[:, side]] for side in (0, 1))
    gap = (utility[group, four[:, 0]] - utility[group, four[:, 1]]).numpy()
    votes = rng.choice((1, 3, 9), pairs)
    gamma = np.array(list(VOTERS.values()))[rng.integers(len(VOTERS), size=(pairs, 9))]
    ballots = (rng.random((pairs, 9)) < 1 / (1 + np.exp(-gamma * gap[:, None]))) & (np.arange(9) < votes[:, None])
    share = torch.tensor(ballots.sum(1) / votes)
    one, major = torch.ones(pairs), (share > 0.5).double()
    sure = torch.maximum(share, 1 - share) >= 0.95
    first = torch.tensor(ballots[:, 0]).double()
    strength = strength_of(left, right, share, torch.arange(pairs) % 5)  # of the shares, for all arms
    half = pairs // 2  # a choice among four looks at as many images as two pairs
    noise = rng.gumbel(size=(half, 4))
    best = (gamma[:half, :1] * utility[group[:half]].numpy() + noise).argmax(1)
    weights = {
        "counts": fit(left, right, share, torch.tensor(votes / votes.mean()), strength),
        "shares": fit(left, right, share, one, strength),
        "majority": fit(left, right, major, one, strength),
        "majority, 95 %": fit(left[sure], right[sure], major[sure], one[sure], strength),
        "best of four": fit_choices(states[group[:half]], torch.tensor(best), strength),
        "one pair of four": fit(left, right, first, one, strength),
    }
    return weights


def main() -> None:
    parser = run_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=200)
    options = parser.parse_args()
    output = options.output
    prompt_file = write_rows(output / "heldout.jsonl", heldout_prompts()[::2])
    candidates = [sampled_by(output / f"candidates{part}", prompt_file, first=8 * part) for part in (0, 1)]
    prompts = list(candidates[0])
    images = [image for prompt in prompts for part in candidates for image in part[prompt]]
    texts = [prompt for prompt in prompts for _ in range(16)]
    states, right = features(images, texts), truth(images, texts).view(-1, 16).numpy()
    by_arm: dict[str, list[list[np.ndarray]]] = {}
    for seed in options.seeds:
        tasks = sampled(output / f"seed{seed}" / "old", train_prompts(), None, seed, 150)
        groups: dict[str, list[str]] = {}
        for task in tasks:
            groups[task.prompt] = sorted({*groups.get(task.prompt, []), *task.images})
        group_images = [image for group in groups.values() for image in group]
        group_prompts = [prompt for prompt in groups for _ in range(4)]
        own = features(group_images, group_prompts).view(len(groups), 4, -1)
        utility = truth(group_images, group_prompts, mode="mixed").view(-1, 4)
        draws: dict[str, list[list[np.ndarray]]] = {}
        for draw in range(DRAWS):
            for arm, weights in rewards(own, utility, options.pairs, np.random.default_rng([seed, draw])).items():
                scores = (states @ weights).view(-1, 16).numpy()
                draws.setdefault(arm, []).append([tilted(scores, right, level) for level in LEVELS])
        for arm, accuracies in draws.items():
            by_arm.setdefault(arm, []).append(np.mean(accuracies, 0))
    print(f"before: {right.mean():.3f}\n| labels | {' | '.join(f'{level} nats' for level in LEVELS)} |")
    table = {arm: np.concatenate(means, 1) for arm, means in by_arm.items()}
    for arm, values in table.items():
        by_seed = ", ".join(f"{part[2].mean():.3f}" for part in by_arm[arm])
        print(f"| {arm} | {' | '.join(f'{value:.3f}' for value in values.mean(1))} | at 1 nat: {by_seed} |")
    labels = prompts * len(options.seeds)
    for one, other in LEADS:
        for name, column in (("at 1 nat", lambda t: t[2]), ("from 1 to 2 nats", lambda t: t[4] - t[2])):
            print(f"{one} over {other}, {name}: {lead_text(column(table[one]), column(table[other]), labels)}")


if __name__ == "__main__":
    main()
