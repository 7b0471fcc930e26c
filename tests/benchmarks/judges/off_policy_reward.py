# SPDX-License-Identifier: Apache-2.0
"""Does OCRM's weighting of old pairs fit a reward better for a policy that has moved on?

    python tests/benchmarks/judges/off_policy_reward.py --output runs/ocrm --seeds 0 1 2

A linear reward learns from pairs of the start's images, a policy follows it, and the reward is fitted again
on the same pairs, weighed by OCRM (arXiv 2507.15507). Measured is the accuracy on pairs of the policy's
images of held-out prompts. Beside it: as many fresh labels of the policy's own images.

What was decided before the runs, and how they came out: docs/evidence/claims.md#ocrm.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.benchmarks.judges.linear_reward import features, fit, strength_of
from tests.benchmarks.judges.which_labels import log_ratios, sampled, sampling, truth
from tests.support.benchmarks import lead_text, run_parser, train_once, write_rows
from visalign.core import effective_sample_size, off_policy_pair_weights
from visalign.data.shapes.prompts import heldout_prompts, train_prompts

WEIGHTS = {"α = .1, m = .01, as released": (0.1, 0.01), "α = .1, m = .1": (0.1, 0.1), "α = .1, m = 1": (0.1, 1.0),
           "α = 0, m = .1": (0.0, 0.1), "α = 0, m = 1, as published": (0.0, 1.0)}  # fmt: skip


def pairs(tasks: list) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list]:
    """States of both images, labels and tasks of the pairs that the verifier tells apart."""
    label = truth(tasks)
    tasks = [task for task, share in zip(tasks, label, strict=True) if share != 0.5]
    images = list({image: task.prompt for task in tasks for image in task.images}.items())
    states = dict(zip(dict(images), features([i for i, _ in images], [p for _, p in images]), strict=True))
    left, right = (torch.stack([states[task.images[side]] for task in tasks]) for side in (0, 1))
    return left, right, torch.tensor(label[label != 0.5]), tasks


def policy(folder: Path, reward: Path, seed: int, iterations: int) -> Path:
    """Train `shapes_nft` on the linear reward alone, without guidance."""
    few = write_rows(folder.with_name("few.jsonl"), heldout_prompts()[::40])
    term = f"{Path(__file__).with_name('linear_reward.py')}:LinearReward"
    train_once(
        folder, "shapes_nft", f"rewards.terms={{r: {{name: '{term}', options: {{file: '{reward}'}}}}}}",
        "objective.changes_for.diffusion_nft_closed.reference_guidance=null", f"data.heldout={few}",
        "rollout.prompts_per_iteration=12", f"run.iterations={iterations}", f"seed={seed}",
        f"optimizer.decay_updates={4 * iterations}", "run.max_seconds=null", "evaluation.every=0",
    )  # fmt: skip
    return folder / "lora"


def one_seed(folder: Path, seed: int, prompts: int, iterations: int) -> dict[str, list]:
    """Fitting -> what it has right of each pair of the policy; and "prompts"."""
    folder.mkdir(parents=True, exist_ok=True)
    start = sampled(folder / "old", train_prompts(), None, seed, prompts)
    left, right, label, old = pairs(start)
    names = sorted({task.prompt for task in old})
    strength = strength_of(left, right, label, torch.tensor([names.index(task.prompt) % 5 for task in old]))
    equal = fit(left, right, label, torch.ones(len(old)), strength)
    torch.save(equal, folder / "equal.pt")
    lora = policy(folder / "policy", folder / "equal.pt", seed, iterations)
    images = [task.images[side] for side in (0, 1) for task in old]
    ratios = log_ratios(sampling(None), sampling(lora), images, [task.prompt for task in old] * 2, seed=seed)
    sides, zeros = ratios.split(len(old)), torch.zeros(len(old))
    fits, shares = {"equal": equal}, {}
    for name, (alpha, power) in WEIGHTS.items():
        weight = off_policy_pair_weights(*sides, zeros, zeros, alpha=alpha, multiplier=power)
        fits[name], shares[name] = (
            fit(left, right, label, weight, strength),
            float(effective_sample_size(weight)) / len(old),
        )
    new = pairs(sampled(folder / "fresh", train_prompts(), lora, seed, prompts))
    count = min(len(old), len(new[2]))
    fits["fresh labels"] = fit(new[0][:count], new[1][:count], new[2][:count], torch.ones(count), strength)
    test = pairs(sampled(folder / "test", heldout_prompts(), lora, seed, 208))
    print(f"seed {seed}: {len(old)} old, {count} fresh, {len(test[3])} test pairs, L2 {strength}, sd of log-ratios "
          f"{float(ratios.std()):.2f}, effective shares {shares}", flush=True)  # fmt: skip
    right_of = {name: (((test[0] - test[1]) @ w > 0) == (test[2] == 1)).double().tolist() for name, w in fits.items()}
    return {**right_of, "prompts": [task.prompt for task in test[3]]}


def main() -> None:
    parser = run_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=150, help="training prompts, four images each")
    parser.add_argument("--iterations", type=int, default=24)
    args = parser.parse_args()
    seeds = [one_seed(args.output / f"seed{s}", s, args.prompts, args.iterations) for s in args.seeds]
    labels = [prompt for results in seeds for prompt in results["prompts"]]
    equal = np.concatenate([results["equal"] for results in seeds])
    for name in [name for name in seeds[0] if name != "prompts"]:
        values = np.concatenate([results[name] for results in seeds])
        means = ", ".join(f"{np.mean(results[name]):.3f}" for results in seeds)
        print(f"| {name} | {values.mean():.3f} ({means}) | {lead_text(values, equal, labels)} |")


if __name__ == "__main__":
    main()
