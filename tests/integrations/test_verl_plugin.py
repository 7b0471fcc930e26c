# SPDX-License-Identifier: Apache-2.0
"""The plugin of verl with verl's registries alone: rewards on masked tokens, prompts of images."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from visalign.rewards.base.contract import RewardError

PLUGIN = "visalign.integrations.verl"


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The plugin, imported with the two registries of verl's algorithms."""
    algorithms: Any = ModuleType("verl.trainer.ppo.core_algos")
    algorithms.ADV_ESTIMATOR_REGISTRY = {}
    algorithms.register_policy_loss = lambda name: lambda function: function
    algorithms.register_adv_est = lambda name: lambda f: algorithms.ADV_ESTIMATOR_REGISTRY.setdefault(name, f)
    for name in ("verl", "verl.trainer", "verl.trainer.ppo"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, algorithms.__name__, algorithms)
    sys.modules.pop(PLUGIN, None)
    yield importlib.import_module(PLUGIN)
    del sys.modules[PLUGIN]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "dapo", "gspo", "opo", "reinforce_pp"])
def test_a_reward_on_a_masked_token_counts(plugin: Any, name: str) -> None:
    """verl writes the reward on the last token, which a tool may have written, and sums over all tokens."""
    mask = torch.ones(5, 5)
    mask[1, 3:] = 0
    last, own = torch.zeros(5, 5), torch.zeros(5, 5)
    last[:, 4] = torch.tensor([1.0, 1.0, 0.0, 0.0, torch.nan])
    last[2, 1] = own[2, 1] = 0.25  # a reward of a token in the middle
    own[:, 4], own[1, 4], own[1, 2] = last[:, 4], 0.0, 1.0
    estimate = plugin.algorithms.ADV_ESTIMATOR_REGISTRY[f"visalign:{name}"]
    advantage, expected = (estimate(rewards, mask, ["a"] * 5)[0] for rewards in (last, own))
    assert torch.allclose(advantage, expected, atol=1e-6) and advantage[1, 0] > 0.2
    if name == "grpo":
        total = torch.tensor([1.0, 1.0, 0.25, 0.0])
        assert torch.allclose(advantage[:4, 0], (total - total.mean()) / total.std(), atol=5e-4)


def test_rows_of_other_inputs_have_no_advantage(plugin: Any) -> None:
    """Rows that need what verl does not pass to an estimator are refused by name."""
    estimate = plugin.algorithms.ADV_ESTIMATOR_REGISTRY["visalign:optimal_token_baseline"]
    with pytest.raises(ValueError, match=r"needs sum_p2, which verl does not hand to an estimator"):
        estimate(torch.ones(2, 3), torch.ones(2, 3), ["a"] * 2)


def test_an_image_is_scored_for_a_text_alone(plugin: Any) -> None:
    image = torch.rand(3, 16, 16)

    def score(truth: Any, judge: str = f"{__file__}:length", **extra: Any) -> float:
        return plugin.compute_score("set", None, truth, extra, judge=judge, solution_image=image)

    assert (score("a cup"), score("a cup", prompt="a red cup"), score({"answer": 4}, prompt="cup")) == (5, 9, 3)
    for truth in (None, " ", {"answer": "a cup"}):
        with pytest.raises(RewardError, match=r"The sample has no prompt.*extra_info\[\"prompt\"\]"):
            score(truth)
    assert score(None, "saturation") == score("a cup", "saturation")  # reads no prompt


def length(images: Any, prompts: list[str], metadata: Any) -> list[float]:
    """Number of characters of each prompt."""
    return [float(len(prompt)) for prompt in prompts]
