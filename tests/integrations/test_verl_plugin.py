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
