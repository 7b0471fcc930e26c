# SPDX-License-Identifier: Apache-2.0
"""Who takes part in the training of a text policy: the policy, who writes, who judges, the heads."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from accelerate import Accelerator
from torch import Tensor, nn

from visalign.core import Objective
from visalign.core.objective.stages import ADVANTAGES
from visalign.errors import UserError
from visalign.interfaces import TextReward
from visalign.text import Prompt, Sampling, StoppingCriteria, TextPolicy, TextRollout, ToolPolicy
from visalign.training.loop.judging import RewardScorer
from visalign.training.loop.sampler import check_batch_algebra
from visalign.training.policy.reference import Reference

from .settings import TextRolloutSettings

Records = Sequence[Mapping[str, Any]]


class Generates(Protocol):
    """Who writes the completions: the policy itself, or a server with its weights."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        seeds: Sequence[int],
        num_generations: int = 1,
        sampling: Sampling | None = None,
        stopping: StoppingCriteria | None = None,
        group: Sequence[Hashable] | None = None,
    ) -> TextRollout:
        """Complete P prompts G times each, as `TextPolicy.generate`."""
        ...


class ValueFunction(Protocol):
    """A value network of its own (`visalign.adapters.causal_lm.value_head.ValueModel`)."""

    def values(self, rollout: TextRollout, rows: Tensor | slice | None = None) -> Tensor:
        """V before each token, [b, T], differentiable."""
        ...

    def named_parameters(self) -> Any:
        """Names and parameters."""
        ...


class LogPartition(Protocol):
    """FlowRL's learned log Z of a prompt."""

    def features(self, rollout: TextRollout) -> Tensor:
        """[B, H] of the prompts, without gradient."""
        ...

    @property
    def head(self) -> nn.Module:
        """[b, H] -> [b] log Z."""
        ...


class StepScores(Protocol):
    """Judgements of the steps of B completions (`visalign.text.steps.StepRewards`)."""

    valid: Tensor
    """[B] bool."""

    def tokens(self, place: Any = "last") -> Tensor:
        """[B, T] rewards, on the last token of each step; 0 elsewhere and in invalid completions."""
        ...


class ProcessJudge(Protocol):
    """A process reward model for the policy's rollouts. One with `replaces = True` takes the place of the
    reward of the whole completion; else the two are added."""

    def score_rollout(self, rollout: TextRollout) -> StepScores:
        """Judge the steps of every completion."""
        ...


class Demonstrations(Protocol):
    """A stream of given completions: batch n is the same in every run of a seed."""

    def batch(self, number: int) -> TextRollout:
        """Given completions, with loss mask 1 on the tokens to be learnt."""
        ...


class CompletionPairs(Demonstrations, Protocol):
    """A stream of records with two completions each: a batch has the first of all its records, then the
    second, and its groups are the places of the records."""

    def __len__(self) -> int:
        """N, records."""
        ...

    def rows(self, places: Sequence[int]) -> TextRollout:
        """Some records, as a batch has them."""
        ...


@dataclass(frozen=True, kw_only=True)
class TextParts:
    """What all phases of a run work with."""

    policy: TextPolicy
    reference: Reference
    """What the policy is drawn to."""
    generator: Generates
    """Writes the completions; the policy itself unless a server does."""
    reward: TextReward
    """Higher is better."""
    judging: RewardScorer
    """How it is asked."""
    records: Records
    """Each has "prompt"; they are handed to the reward as metadata."""
    value_model: ValueFunction | None
    log_partition: LogPartition | None
    process: ProcessJudge | None
    demonstrations: Demonstrations | None
    seed: int
    accelerator: Accelerator
    """Of the processes that share the samples."""

    @property
    def branches(self) -> bool:
        """Whether completions go on from others of their group, which are then made in one call."""
        return isinstance(self.generator, ToolPolicy) and self.generator.branching is not None

    @property
    def own_writer(self) -> Generates:
        """The policy itself, with the tool where completions have one."""
        if not isinstance(self.generator, ToolPolicy):
            return self.policy
        engine: Any = self.policy
        return ToolPolicy(engine, self.generator.tokenizer, self.generator.use)

    @property
    def tokenizer(self) -> Any:
        """The policy's; None where it has none."""
        return getattr(self.policy, "tokenizer", None)


PER_DECISION = ("gae", "remax", "reinforce_pp", "group_returns")
"""Advantages that take rewards of single tokens."""


def _critics(parts: TextParts) -> int:
    """C of the value function, 1 where nobody says."""
    own = getattr(parts.policy, "value_head", None)
    head = own if parts.value_model is None else getattr(parts.value_model, "head", None)
    return getattr(getattr(head, "linear", None), "out_features", 1)


def check_sizes(parts: TextParts, prompts: int, group_size: int) -> None:
    """Refuse numbers of samples that the processes cannot share, some without a group where none is divided.

    Raises:
        UserError: with what would do.
    """
    world = parts.accelerator.num_processes
    check_batch_algebra(prompts, group_size, world)
    if parts.branches and prompts < world:
        raise UserError(
            f"rollout.prompts_per_iteration is {prompts} for {world} processes, and with rollout.tool.branch "
            "a group stays in one. Start fewer processes, or raise it."
        )


def check_parts(parts: TextParts, objective: Objective, *, name: str, rollout: TextRolloutSettings) -> None:
    """Refuse an algorithm whose parts were not given.

    Raises:
        UserError: with what is missing.
    """
    has_value = parts.value_model is not None or getattr(parts.policy, "value_head", None) is not None
    if objective.advantage == "gae" and not has_value:
        raise UserError(
            f"objective.algorithm={name} needs a value function: give the policy a value head, or a value "
            "model (model.value in a configuration)."
        )
    critics = _critics(parts)
    if "temperature" in objective.advantage_options and critics < 2:
        raise UserError(
            f"objective.algorithm={name} takes the soft minimum of several critics, and there is one. Set "
            "model.critics=2, or take 'ppo'."
        )
    if critics > 1 and objective.value_clip is not None:
        raise UserError(
            f"objective.algorithm={name} holds values near the rollout's (value_clip "
            f"{objective.value_clip:g}), which are one number for {critics} critics. Set "
            "objective.changes={value_clip: null}, or take 'safe'."
        )
    if objective.surrogate == "flow_balance" and parts.log_partition is None:
        raise UserError(f"objective.algorithm={name} needs a log-partition head, and none was given.")
    if {"step", "likelihood"} & {*ADVANTAGES[objective.advantage].needs} and parts.tokenizer is None:
        raise UserError(
            f"objective.algorithm={name} looks at the steps of completions, or an answer after them, by "
            "the policy's tokenizer, and this policy has none. Give it the attribute `tokenizer`, or take "
            "'grpo'."
        )
    if parts.process is None and "process_reward" in ADVANTAGES[objective.advantage].needs:
        raise UserError(
            f"objective.algorithm={name} adds rewards of single tokens to those of completions, and nothing "
            "gives any. Set latent_flow={} (RLFR), or process.model to a process reward model."
        )
    if parts.process is not None and objective.advantage not in PER_DECISION:
        raise UserError(
            f"objective.algorithm={name} has one advantage per completion (advantage {objective.advantage}), "
            "so rewards of single steps (process, latent_flow) have no place in it. Use an advantage of "
            f"{', '.join(PER_DECISION)} (the last is the row rlfr), or the process reward model as a reward "
            "of the whole completion (process_reward in rewards.terms)."
        )
    if objective.ptx and parts.demonstrations is None:
        raise UserError(
            f"objective.algorithm={name} has a ptx term (γ = {objective.ptx:g}) and no text for it. Give "
            "records with prompt and completion (data.demonstrations in a configuration), or set ptx to 0."
        )
    if rollout.routing_replay:
        _check_routing(parts.policy, objective)
    writer = parts.generator
    engine = writer.engine if isinstance(writer, ToolPolicy) else writer
    recomputed = rollout.recompute or objective.importance_sampling is not None
    if engine is not parts.policy and not recomputed:
        raise UserError(
            "Another engine writes the completions, so its log-probs are not the policy's. Set "
            "rollout.recompute=true, and importance_sampling in objective.changes for what is left between "
            "the two."
        )


def _check_routing(policy: TextPolicy, objective: Objective) -> None:
    if objective.ptx:
        raise UserError(
            "rollout.routing_replay goes without demonstrations (ptx), whose tokens have not been sent "
            "anywhere before. Leave one of the two out."
        )
    if not hasattr(policy, "with_routes"):
        raise UserError(
            f"rollout.routing_replay asks the policy where its tokens go, and {type(policy).__name__} "
            "has no method with_routes. Give it one as CausalLMPolicy has, or leave routing_replay out."
        )
    getattr(policy, "check_routes", lambda: None)()
