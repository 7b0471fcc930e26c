# SPDX-License-Identifier: Apache-2.0
"""Does a larger judge pick better, and more so for a larger generator? Two generators, three judges.

    python tests/benchmarks/judges/generator_judge_size.py --output runs/sizes --seeds 0 1 2

RewardDance's claim (arXiv 2509.08826). Judges are linear heads on the states of the first 1, 2 or 4 language
layers of `shapes-vlm`, fitted on 1,500 pairs of the shapes world that differ in what was asked for. Generators
are `shapes-sd15` (1.5 million parameters) and `shapes-sd3` (6.3 million). Each judge tilts each generator to
1 nat on held-out prompts, w ∝ exp(βr) over 16 samples; the verifier's accuracy there is what counts.

A seed is a draw of training pairs. What was decided before the runs, and how they came out:
docs/evidence/claims.md#generator-judge.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.benchmarks.judges.judge_size import MOST, cut, sampled
from tests.benchmarks.judges.linear_reward import features, fit, strength_of, tilted
from tests.benchmarks.judges.votes_over_kl import truth
from tests.support.benchmarks import lead_text, read_rows, run_parser, write_rows
from visalign.data.shapes.preferences import ShapesPreferences
from visalign.data.shapes.prompts import heldout_prompts

GENERATORS, LAYERS = ("shapes-sd15", "shapes-sd3"), (1, 2, MOST)


def head(model: str, pairs: int, seed: int) -> tuple[torch.Tensor, float]:
    """Weights of a judge, and its accuracy on a fifth of the pairs that it did not learn from."""
    drawn = [*map(ShapesPreferences(seed, kinds=["alignment"]).pair, range(pairs))]
    images = [image for side in (0, 1) for image in (pair.images()[side] for pair in drawn)]
    left, right = features(images, [pair.prompt for pair in drawn] * 2, model).split(pairs)
    label = torch.tensor([pair.votes[0] / sum(pair.votes) for pair in drawn], dtype=torch.float64)
    better = torch.tensor([pair.utility[0] > pair.utility[1] for pair in drawn])
    fold, one = torch.arange(pairs) % 5, torch.ones(())
    strength = strength_of(left, right, label, fold)
    is_train = fold > 0
    part = fit(left[is_train], right[is_train], label[is_train], one, strength)
    accuracy = (((left - right) @ part > 0) == better)[~is_train].double().mean()
    return fit(left, right, label, one, strength), float(accuracy)


def main() -> None:
    parser = run_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=1500)
    parser.add_argument("--samples", type=int, default=16, help="of a held-out prompt")
    options = parser.parse_args()
    output = options.output
    table = write_rows(output / "heldout.jsonl", heldout_prompts()[::2])
    models = {layers: str(cut(output / f"cut{layers}", layers)) for layers in LAYERS}
    heads = {(n, seed): head(model, options.pairs, seed) for n, model in models.items() for seed in options.seeds}
    for layers in LAYERS:
        shares = [heads[layers, seed][1] for seed in options.seeds]
        print(
            f"{layers} layers: {np.mean(shares):.3f} ({', '.join(f'{v:.3f}' for v in shares)}) of unseen pairs",
            flush=True,
        )
    leads, labels = {}, []
    for generator in GENERATORS:
        folder = output / f"{generator}_{options.samples}"
        by_prompt = sampled(folder, table, "--model", generator, size=options.samples)
        images = [image for record in read_rows(table) for image in by_prompt[record["prompt"]]]
        prompts = [record["prompt"] for record in read_rows(table) for _ in range(options.samples)]
        right = truth(images, prompts).view(-1, options.samples).numpy()
        outcomes = {}
        for layers, model in models.items():
            states = features(images, prompts, model)
            scores = [(states @ heads[layers, seed][0]).view(-1, options.samples).numpy() for seed in options.seeds]
            parts = [tilted(score, right, 1.0) for score in scores]
            outcomes[layers] = np.concatenate(parts)
            by_seed = ", ".join(f"{part.mean():.3f}" for part in parts)
            print(
                f"| {generator} | {right.mean():.3f} | {layers} layers | {outcomes[layers].mean():.3f} ({by_seed}) |",
                flush=True,
            )
        labels = prompts[:: options.samples] * len(options.seeds)
        leads[generator] = outcomes[MOST] - outcomes[1]
        for layers in LAYERS[:-1]:
            print(f"{generator}: 4 layers over {layers}: {lead_text(outcomes[MOST], outcomes[layers], labels)}")
    small, large = (leads[generator] for generator in GENERATORS)
    print(f"the lead of 4 over 1, larger over smaller generator: {lead_text(large, small, labels)}")


if __name__ == "__main__":
    main()
