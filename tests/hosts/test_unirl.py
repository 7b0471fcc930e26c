# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""Inside UniRL: its own request and answer around a judge."""

from __future__ import annotations

import math
from types import SimpleNamespace

from unirl.reward.base import RewardBackend
from unirl.types.reward import RewardRequest

from visalign.integrations.unirl import JudgeBackend


def failing(completions: list[str], prompts: list[str]) -> list[float | None]:
    """No number for an empty text."""
    return [float(len(text)) or None for text in completions]


def request(texts: list[str], metadata: list[dict] | None = None) -> RewardRequest:
    """As UniRL's trainer makes it."""
    completions = SimpleNamespace(texts=texts)
    return RewardRequest(
        primitives={"text": SimpleNamespace(texts=["2 + 2?"] * len(texts))},
        generated={"text": completions},
        metadata=metadata,
    )


def test_a_judge_of_text() -> None:
    backend = JudgeBackend("boxed_answer", input_kind="text")
    assert isinstance(backend, RewardBackend) and backend.is_available()
    assert backend.preferred_input_kind == "text" and backend.get_model_name() == "boxed_answer"
    got = backend.compute_rewards(request(["\\boxed{4}", "\\boxed{5}"], [{"answer": "4"}] * 2))
    assert (got.rewards, got.successes, got.errors) == ([1.0, 0.0], [True, True], [None, None])


def test_a_failure_is_no_success() -> None:
    got = JudgeBackend(f"{__file__}:failing", input_kind="text").compute_rewards(request(["ab", ""]))
    assert got.rewards[0] == 2.0 and math.isnan(got.rewards[1]) and got.successes == [True, False]
    assert got.errors[0] is None and "returned None" in str(got.errors[1])
