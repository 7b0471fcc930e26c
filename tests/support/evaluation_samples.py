# SPDX-License-Identifier: Apache-2.0
"""Small held-out results for the tests of the report, without a model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from visalign.evaluation import HeldoutResult

TAGS = ("single_object", "counting", "position")


def make_result(
    share: float, *, prompts: int = 12, seeds: int = 2, side: int = 8, seed: int = 0, **changes: Any
) -> HeldoutResult:
    """A result in which sample i is correct where a fixed number u_i in [0, 1) lies below `share`.

    Results with the same `seed` share u, so a larger share only turns wrong into correct.
    """
    rng = np.random.default_rng(seed)
    count = prompts * seeds
    level = rng.permutation(count) / count
    names = [f"prompt {number}" for number in range(prompts) for _ in range(seeds)]
    fields: dict[str, Any] = {
        "prompts": tuple(names),
        "tags": tuple(TAGS[number % len(TAGS)] for number in range(prompts) for _ in range(seeds)),
        "seeds": np.tile(np.arange(seeds), prompts),
        "correct": level < share,
        "judged": np.ones(count, dtype=bool),
        "reasons": tuple("" if value < share else f"found {value:.2f}" for value in level),
        "scores": {
            "shapes_verifier": (level < share).astype(np.float32),
            "clip_score": (level * 10 + share).astype(np.float32),
            "sharpness": (1500 + 100 * level - 40 * share).astype(np.float32),
        },
        "units": {"shapes_verifier": "1 = correct", "clip_score": "cosine × 100", "sharpness": "levels²"},
        "higher_is_better": {"shapes_verifier": True, "clip_score": True, "sharpness": True},
        "images": rng.integers(0, 256, (count, side, side, 3), dtype=np.uint8),
        "image_index": np.arange(count),
    }
    return HeldoutResult(**(fields | changes))


def make_text_result(share: float, *, long: bool = False, **changes: Any) -> HeldoutResult:
    """The same of completions: wrong ones say so, and with `long` texts have hundreds of words."""
    plain = make_result(share, **changes)
    tail = " and so on, word after word" * 60 if long else ""
    written = (f"<think> {k}\n</think> {'right' if c else 'wrong'}{tail}" for k, c in enumerate(plain.correct))
    fields = {
        "prompts": tuple(f"{prompt}: what is\n1 + 1?{tail}" for prompt in plain.prompts),
        "completions": tuple(written),
        "scores": {"checker": plain.correct.astype(np.float32), "length": plain.scores["clip_score"]},
        "units": {"checker": "1 = correct", "length": "tokens"},
        "higher_is_better": {"checker": True, "length": False},
        "images": np.zeros((0, 1, 1, 3), dtype=np.uint8),
        "image_index": np.zeros(0, dtype=np.int64),
    }
    return replace(plain, **fields)


def blind_result(share: float = 0.5) -> HeldoutResult:
    """A result in which nothing could be judged and one reward has no valid score."""
    result = make_result(share)
    missing = np.full(len(result), math.nan, dtype=np.float32)
    return make_result(
        share, correct=np.zeros(len(result), dtype=bool), judged=np.zeros(len(result), dtype=bool),
        reasons=("cannot see",) * len(result),
        scores=dict(result.scores) | {"shapes_verifier": missing, "sharpness": missing},
    )  # fmt: skip
