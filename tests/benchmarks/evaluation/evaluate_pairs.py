# SPDX-License-Identifier: Apache-2.0
"""How long `visalign evaluate` takes on 20,000 pairs with precomputed scores.

    python tests/benchmarks/evaluation/evaluate_pairs.py

One and two judges, four kinds of slices, 12 generators, votes, deviations, 1,000 bootstrap draws, page and
JSON written; reading the file is part of it. It prints the seconds, and the peak memory of the process.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from visalign.evaluation.rewards.judged_pairs import IntervalSettings
from visalign.pipelines.evaluate.job import evaluate

LIMIT = 20.0
"""Seconds that an evaluation may take."""


def write_pairs(path: Path, count: int, prompts: int, seed: int = 0) -> Path:
    """A JSONL file of pairs with a known judge."""
    rng = np.random.default_rng(seed)
    strength = rng.normal(0, 0.7, 12)
    words = rng.integers(2, 60, prompts)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            prompt = int(rng.integers(prompts))
            a, b = rng.integers(0, 12, 2)
            utility = rng.normal(0, 1, 2) + strength[[a, b]]
            noise = rng.normal(0, 1, (2, 2))
            votes = rng.binomial(9, 1 / (1 + np.exp(utility[1] - utility[0])))
            row = {
                "prompt": f"{prompt} " + "word " * int(words[prompt]),
                "image_left": f"{number}-left.png",
                "image_right": f"{number}-right.png",
                "votes_left": int(votes),
                "votes_right": int(9 - votes),
                "generator_left": f"generator {a}",
                "generator_right": f"generator {b}",
                "category": f"category {prompt % 8}",
                "resolution": ("512x512", "1024x1024", "1280x768")[prompt % 3],
                "good_left": float(utility[0] + 0.5 * noise[0, 0]),
                "good_right": float(utility[1] + 0.5 * noise[0, 1]),
                "good_std_left": 0.5,
                "good_std_right": float(0.3 + rng.random()),
                "poor_left": float(utility[0] + 2 * noise[1, 0]),
                "poor_right": float(utility[1] + 2 * noise[1, 1]),
            }
            file.write(json.dumps(row) + "\n")
    return path


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Time visalign evaluate on a generated set.")
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--prompts", type=int, default=4_000)
    parser.add_argument("--resamples", type=int, default=1_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = write_pairs(Path(folder) / "pairs.jsonl", options.pairs, options.prompts)
        for columns in (("good",), ("good", "poor")):
            start = time.perf_counter()
            result = evaluate(
                str(source),
                columns=columns,
                output=Path(folder) / "-".join(columns),
                settings=IntervalSettings(resamples=options.resamples),
            )
            seconds = time.perf_counter() - start
            number = result["judges"][0]["agreement"]["half_credit"]["micro"]
            verdict = "within" if seconds <= LIMIT else "ABOVE"
            print(
                f"{options.pairs} pairs, {options.prompts} prompts, {options.resamples} draws, {len(columns)} judges: "
                f"{seconds:.1f} s ({verdict} {LIMIT:.0f} s); accuracy {number['estimate']:.4f} [{number['low']:.4f}, "
                f"{number['high']:.4f}]"
            )
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
