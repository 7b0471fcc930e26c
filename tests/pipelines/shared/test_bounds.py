# SPDX-License-Identifier: Apache-2.0
"""Absurd numbers are refused before lists and tensors of that size are made."""

from __future__ import annotations

from typing import Any

import pytest

from visalign.config import load_config
from visalign.data.sets.sources import shapes_pairs
from visalign.errors import ConfigError, UserError
from visalign.pipelines.cli.sample import numbers
from visalign.pipelines.flow_grpo.config import FlowGRPOConfig
from visalign.pipelines.shared.reward_options import parse_options
from visalign.pipelines.text.config import TextConfig


@pytest.mark.parametrize(
    ("config", "override"),
    [
        *((FlowGRPOConfig, f"rollout.{text}") for text in ("steps=1e8", "group_size=1e9", "batch_size=1e18")),
        *((FlowGRPOConfig, f"model.{text}") for text in ("image_size=1e5", "lora.rank=0", "lora.alpha=nan")),
        *((FlowGRPOConfig, text) for text in ("model.lora.alpha=.inf", "optimizer.lr=1e38", "evaluation.steps=20000")),
        *((TextConfig, f"rollout.{text}") for text in ("max_new_tokens=1e8", "temperature=1e31")),
    ],
)
def test_absurd_settings(config: Any, override: str) -> None:
    with pytest.raises(ConfigError, match=rf"Key '{override.partition('=')[0]}.* Input should be"):
        load_config(config, None, [override])


@pytest.mark.parametrize("kind", [FlowGRPOConfig, TextConfig])
def test_a_lora_to_continue_from_is_trained_as_a_lora(kind) -> None:
    model = load_config(kind, None, ["model.lora=null", "model.lora_path=runs/first"]).model
    assert model.lora is not None and model.lora_path == "runs/first"


def test_absurd_counts_of_commands() -> None:
    assert numbers("0,2-4") == [0, 2, 3, 4]
    for text in ("0-4294967295", "9" * 5000, ",".join(["0-600000"] * 2)):
        with pytest.raises(UserError, match="give numbers from 0 up"):
            numbers(text)
    with pytest.raises(UserError, match=r"at most 100000 records; got 1000000000"):
        shapes_pairs(10**9)
    for value in ("9" * 4400, "0x" + "f" * 4000, "[" * 40 + "]" * 40, '"a\\0b"'):
        with pytest.raises(UserError, match=r"^--option 'quality=.* cannot be read") as refused:
            parse_options([f"quality={value}"])
        assert len(str(refused.value)) < 400
