# SPDX-License-Identifier: Apache-2.0
"""A text trainer on a random model of a few thousand numbers, rewarded for the letter a."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from tests.support.models.language import tiny_model, tiny_tokenizer
from visalign.adapters.causal_lm.demonstrations import DemonstrationBatches
from visalign.adapters.causal_lm.log_partition import PromptLogPartition
from visalign.adapters.causal_lm.policy import CausalLMPolicy
from visalign.adapters.causal_lm.value_head import ValueHead, ValueModel
from visalign.interfaces import Metadata, Scores
from visalign.training import (
    DynamicSettings,
    LatentFlowSettings,
    OptimizerSettings,
    RunSettings,
    TextObjectiveSettings,
    TextRL,
    TextRolloutSettings,
    Trainer,
)

RECORDS = [
    {"prompt": prompt, "tag": prompt[0], "answer": "aa"} for prompt in ("b c", "d e f", "g", "h i", "k l m", "n")
]
DEMONSTRATIONS = [{"prompt": prompt, "completion": "zz"} for prompt in ("b c", "g", "n")]

ROLLOUT = {"prompts_per_iteration": 4, "group_size": 6, "max_new_tokens": 5}
OPTIMIZER = {
    "lr": 3e-3, "weight_decay": 0.0, "updates_per_iteration": 2, "micro_batch": 8, "ema_decay": 0.0,
    "ema_every": 1,
}  # fmt: skip


class Letters:
    """Share of a completion's characters that are a wanted letter; fails where `fail` says so."""

    name, unit, range, higher_is_better = "letters", "share", (0.0, 1.0), True

    def __init__(self, letter: str = "a", fail: Any = None) -> None:
        self.letter, self.fail, self.seen = letter, fail, 0

    def score(self, completions: Sequence[str], prompts: Sequence[Any], metadata: Metadata | None = None) -> Scores:
        """Scores with `valid` False where `fail(text, record)` is true."""
        assert metadata is not None and len(prompts) == len(metadata) == len(completions)
        self.seen += len(completions)
        value = torch.tensor([text.count(self.letter) / max(1, len(text)) for text in completions])
        pairs = zip(completions, metadata, strict=True)
        bad = [self.fail is not None and bool(self.fail(text, record)) for text, record in pairs]
        valid = ~torch.tensor(bad)
        return Scores(
            value=torch.where(valid, value, torch.nan),
            valid=valid,
            unit=self.unit,
            reason=["unreadable" if b else None for b in bad],
        )


def toy_policy(**options: Any) -> CausalLMPolicy:
    """The random model; `value=True` gives it a value head."""
    critics = int(options.pop("value", 0))
    head = ValueHead(32, critics=critics) if critics else None
    return CausalLMPolicy(tiny_model(seed=3), tiny_tokenizer(), value_head=head, **options)


def toy_text_trainer(
    folder: Path,
    algorithm: str = "grpo",
    *,
    policy: CausalLMPolicy | None = None,
    reward: Any = None,
    rollout: dict[str, Any] | None = None,
    objective: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    run: dict[str, Any] | None = None,
    dynamic: dict[str, Any] | None = None,
    separate_value: bool = False,
    evaluate: Any = None,
    progress: Any = None,
    **arguments: Any,
) -> Trainer[TextRL]:
    """A trainer with the parts that the algorithm needs; each dictionary changes single settings."""
    settings = TextObjectiveSettings(**{"algorithm": algorithm, **(objective or {})})
    built = settings.build(length=5)
    if policy is None:
        critics = 2 if algorithm == "safe" else 1
        policy = toy_policy(value=critics if built.value and not separate_value else 0)
    if separate_value:
        trunk: Any = tiny_model(seed=3).model
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            arguments["value_model"] = ValueModel(trunk, critics=2 if algorithm == "safe" else 1)
    if built.surrogate == "flow_balance":
        arguments.setdefault("log_partition", PromptLogPartition(policy))
    if built.advantage in ("group_returns", "process", "prime") and "process" not in arguments:
        flow = LatentFlowSettings(warmup=0, width=8, batch=64, steps=2, right_at=0.1)
        arguments.setdefault("latent_flow", flow)
    if built.ptx:
        arguments.setdefault("demonstrations", DemonstrationBatches(policy, DEMONSTRATIONS, size=2, seed=0))
    trained = TextRL(
        policy,
        reward or Letters(),
        RECORDS,
        rollout=TextRolloutSettings(**{**ROLLOUT, **(rollout or {})}),
        objective=settings,
        dynamic=None if dynamic is None else DynamicSettings(**{"enabled": True, **dynamic}),
        accelerator=arguments.pop("accelerator", None) or Accelerator(cpu=True),
        **{"seed": 0, **arguments},
    )
    return Trainer(
        trained,
        run=RunSettings(**{"folder": folder, "iterations": 3, "config": {"seed": 0}, **(run or {})}),
        optimizer=OptimizerSettings(**{**OPTIMIZER, **(optimizer or {})}),
        evaluate=evaluate,
        progress=progress,
    )


def weights_of(trainer: Trainer) -> torch.Tensor:
    """All trained numbers, in a row."""
    return torch.cat([p.detach().flatten() for _, p in trainer.weights.named])


class OtherEngine:
    """The policy's completions with log-probs that are off by a constant, as another engine's would be."""

    def __init__(self, policy: CausalLMPolicy, shift: float) -> None:
        self.policy, self.shift = policy, shift

    def generate(self, prompts: Sequence[Any], **options: Any) -> Any:
        """As the policy's, with each log-prob lowered by `shift`."""
        rollout = self.policy.generate(prompts, **options)
        return replace(rollout, log_prob=rollout.log_prob - self.shift * rollout.loss_mask)
