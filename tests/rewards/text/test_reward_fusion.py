# SPDX-License-Identifier: Apache-2.0
"""RewardFusion around a reward for text: the worked case, failures, order, what is kept of what it wraps."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from visalign.interfaces import Scores
from visalign.rewards import RewardFusion, load_text_reward

VECTORS = {"own": (1.0, 0.0), "near": (0.95, math.sqrt(1 - 0.95**2)), "next": (0.9, math.sqrt(1 - 0.9**2))}
VALUES = {"own": 0.2, "near": 0.6, "next": 0.7, "far": 5.0}


def embed(texts: Sequence[str]) -> torch.Tensor:
    return torch.tensor([VECTORS.get(text, (0.0, 1.0)) for text in texts])


class Table:
    """A value for each prompt; it keeps its requests."""

    name, unit, range, higher_is_better = "table", "points", (0.0, 9.0), False

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def score(self, completions: Any, prompts: Any, metadata: Any = None) -> Scores:
        self.asked.append(list(zip(completions, prompts, metadata or [None] * len(prompts), strict=True)))
        value = torch.tensor([VALUES.get(prompt, math.nan) for prompt in prompts])
        reason = [None if prompt in VALUES else "unknown" for prompt in prompts]
        valid = torch.tensor([prompt in VALUES for prompt in prompts])
        return Scores(value=value, valid=valid, unit=self.unit, reason=reason, text=list(prompts))


def fused(pool: Any, **options: Any) -> RewardFusion:
    return RewardFusion(Table(), pool, embed=embed, threshold=0.89, **options)


def test_the_worked_case() -> None:
    table = Table()
    pool = [{"prompt": "near", "answer": 3}, "next", "far", "own", "near"]
    reward = RewardFusion(table, pool, embed=embed, threshold=0.89)
    scores = reward.score(["x"], ["own"])
    assert scores.value.item() == pytest.approx(0.491228, abs=1e-6)
    assert scores.parts["own"].item() == pytest.approx(0.2) and scores.parts["neighbours"].item() == 2
    assert table.asked == [[("x", "own", None)], [("x", "near", {"answer": 3}), ("x", "next", {})]]
    assert fused(["near", "next"], top=1).score(["x"], ["own"]).value.item() == pytest.approx((0.2 + 0.57) / 1.95)
    assert (reward.unit, reward.range, reward.higher_is_better) == ("points", (0.0, 9.0), False)
    assert reward.name == "table_fused" and scores.text == ["own"]


def test_neighbours_that_fail_are_none_and_what_fails_itself_stays_failed() -> None:
    VECTORS["broken"] = VECTORS["near"]
    reward = fused(["broken", "next"])
    scores = reward.score(["x", "y"], ["own", "broken"])
    assert scores.value[0].item() == pytest.approx((0.2 + 0.9 * 0.7) / 1.9)
    assert scores.valid.tolist() == [True, False] and scores.reason == [None, "unknown"]
    assert scores.parts["neighbours"][0] == 1 and scores.value[1].isnan()


def test_without_neighbours_the_score_is_that_of_the_reward_to_the_bit() -> None:
    plain = load_text_reward("repetition")
    reward = load_text_reward("reward_fusion", reward="repetition", pool=["quite another question", "2 + 2 = ?"])
    texts = ["a b a b a b", "x y z", "no no no no no no"]
    own, other = (scorer.score(texts, ["2 + 2 = ?"] * 3) for scorer in (plain, reward))
    assert torch.equal(own.value, other.value) and other.parts["neighbours"].tolist() == [0, 0, 0]


def test_scores_do_not_depend_on_their_order_and_the_pool_stays() -> None:
    reward = fused(["near", "next", "far"])
    prompts = ["own", "near", "next", "far", "own"]
    first = reward.score(list("vwxyz"), prompts).value
    assert torch.equal(reward.score(list("zyxwv"), prompts[::-1]).value.flip(0), first)
    singly = [reward.score([text], [prompt]).value for text, prompt in zip("vwxyz", prompts, strict=True)]
    assert torch.equal(torch.cat(singly), first)
    assert [record["prompt"] for record in reward.pool] == ["far", "next", "near"]


def test_a_prompt_is_no_neighbour_of_itself_when_its_file_lost_the_blanks_at_its_ends(tmp_path: Path) -> None:
    (tmp_path / "pool.jsonl").write_text(json.dumps({"prompt": "What is 2 + 2?\n", "answer": "5"}))
    reward = load_text_reward("reward_fusion", reward="exact_answer", pool=str(tmp_path / "pool.jsonl"))
    scores = reward.score(["4"], ["What is 2 + 2?\n"], [{"answer": "4"}])
    assert scores.parts["neighbours"].item() == 0 and scores.value.item() == 1


def test_what_is_refused(tmp_path: Path) -> None:
    for options, message in (
        ({"threshold": 0}, "threshold is 0 and top 5; allowed are 0 to 1"),
        ({"pool": []}, "the pool must hold prompts"),
        ({"pool": [{"text": "own"}]}, "the pool must hold prompts"),
        ({"flags": 1}, "flags: options are of a reward given by name"),
    ):
        with pytest.raises(ValueError, match=message):
            RewardFusion(**{"reward": Table(), "pool": ["own"], **options})
