# SPDX-License-Identifier: Apache-2.0
"""Parts of a text training: policy, generator, reward, heads; and the check that they suit the objective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from accelerate import Accelerator
from torch import Tensor, nn

from visalign.core import Objective
from visalign.core.objective.stages import ADVANTAGES
from visalign.settings import refuse
from visalign.text import TextPolicy, TextRollout
from visalign.text.steps import StepRewards
from visalign.training.loop.judging import RewardScorer
from visalign.training.policy.reference import Reference
from visalign.training.policy.settings import stale_message

from .settings import TextRolloutSettings

Records = Sequence[Mapping[str, Any]]


class CompletionGenerator(Protocol):
    """Generator of completions: the policy itself, or a server with its weights; see `TextPolicy.generate`."""

    def generate(self, *args: Any, **options: Any) -> TextRollout: ...


class ValueFunction(Protocol):
    """Separate value network (`visalign.adapters.causal_lm.value_head.ValueModel`), V before each token [b, T]."""

    def values(self, rollout: TextRollout, rows: Tensor | slice | None = None) -> Tensor: ...

    def named_parameters(self) -> Any: ...


class LogPartition(Protocol):
    """FlowRL's learned log Z of a prompt: features [B, H] without gradient, and a head [b, H] -> [b]."""

    def features(self, rollout: TextRollout) -> Tensor: ...

    @property
    def head(self) -> nn.Module: ...


class ProcessReward(Protocol):
    """Process reward of rollouts; added to the reward of the completion, or with `replaces = True` in its place."""

    def score_rollout(self, rollout: TextRollout) -> StepRewards: ...


class Demonstrations(Protocol):
    """Stream of demonstrations, loss mask 1 on the tokens to learn: batch n is the same in every run of a seed."""

    def batch(self, number: int) -> TextRollout: ...


class CompletionPairs(Demonstrations, Protocol):
    """Stream of N records with two completions each: first ones, then second; groups are indices of records."""

    def __len__(self) -> int: ...

    def rows(self, index: Sequence[int]) -> TextRollout: ...


@dataclass(frozen=True, kw_only=True)
class TextParts:
    """Parts that all phases of a run share."""

    policy: TextPolicy
    reference: Reference
    generator: CompletionGenerator  # The policy itself unless a server generates
    scorer: RewardScorer
    records: Records  # Prompt records, each with "prompt"; handed to the reward as metadata
    rollout: TextRolloutSettings
    objective: Objective  # Before the coefficients that move (PPO-KL, SAFE)
    value_model: ValueFunction | None
    log_partition: LogPartition | None
    process: ProcessReward | None
    demonstrations: Demonstrations | None
    seed: int
    accelerator: Accelerator

    @property
    def reward(self) -> Any:
        """`TextReward` with `capabilities`, higher is better, with its weights of the present iteration."""
        return self.scorer.reward

    @property
    def recomputes(self) -> bool:
        """True if the old log-probs are the policy's own instead of the sampler's."""
        return self.rollout.recompute or self.objective.importance_sampling is not None

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer; None where it has none."""
        return getattr(self.policy, "tokenizer", None)


PER_DECISION = ("gae", "remax", "reinforce_pp", "optimal_token_baseline", "prime", "process", "group_returns")
"""Advantages that take rewards of single tokens."""


def check_parts(parts: TextParts, *, name: str, dynamic: bool) -> None:
    """Refuse parts that do not suit the algorithm `name`; a part that is missing is named by the objective."""
    policy, objective, rollout = parts.policy, parts.objective, parts.rollout
    needs = ADVANTAGES[objective.advantage].needs
    no_model = parts.value_model is None
    head = getattr(policy, "value_head", None) if no_model else getattr(parts.value_model, "head", None)
    critics = getattr(getattr(head, "linear", None), "out_features", 1)
    algorithm = f"objective.algorithm={name}"
    problems = {
        f"{algorithm} takes the soft minimum of several critics, and there is one. Set model.critics=2, or use "
        "'ppo'.": "temperature" in objective.advantage_options and critics < 2,
        f"{algorithm} clips the value (value_clip {objective.value_clip}), which is one number for {critics} critics. "
        "Set objective.changes={value_clip: null}, or use 'safe'.": critics > 1 and objective.value_clip is not None,
        f"{algorithm} adds rewards of single tokens to those of completions, and none are given. Set latent_flow={{}} "
        "(RLFR), or process.model to a process reward model.": parts.process is None and "process_reward" in needs,
        f"{algorithm} has one advantage per completion (advantage {objective.advantage}), so rewards of single steps "
        f"(process, latent_flow) have no place in it. Use an advantage of {', '.join(PER_DECISION)} (the last three "
        "are the algorithms prime, grpo_process and rlfr), or process_reward in rewards.terms.": (
            parts.process is not None and objective.advantage not in PER_DECISION
        ),
        "rollout.routing_replay goes without demonstrations (ptx), whose tokens were never routed. Leave one of the "
        "two out.": rollout.routing_replay and bool(objective.ptx),
        stale_message(name): rollout.staleness > 0 and objective.importance_sampling is None,
        "rollout.staleness=1 draws completions before the last ones are scored, and dynamic.enabled decides by scores "
        "how many there are. Leave one of the two out.": rollout.staleness > 0 and dynamic,
    }
    refuse(message for message, is_broken in problems.items() if is_broken)
    if rollout.routing_replay:
        getattr(policy, "check_routes", lambda: None)()
