# SPDX-License-Identifier: Apache-2.0
"""What can be chosen when a text policy is trained: how completions are made and become an update."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, cast

from visalign.core import Objective
from visalign.dotted_path import import_by_path
from visalign.errors import UserError
from visalign.text import Sampling, StoppingCriteria
from visalign.text.calculator import calculator
from visalign.text.steps import StepReading
from visalign.text.tool_calls import Tool, ToolUse
from visalign.text.tools import Branching
from visalign.training.loop.optimizer import above_zero, at_least, choice
from visalign.training.policy.settings import ObjectiveSettings, Positive, check_overlap, check_stale

from .dynamic_groups import DynamicGroups

TRUNCATED = ("keep", "mask")


@dataclass(frozen=True, kw_only=True)
class ToolSettings:
    """A tool, and how completions call it."""

    use: str = "calculator"
    """calculator, or package.module:name or FILE.py:name of a function: the text of a call -> its answer, or
    null where it is no call. One that raises, or takes longer than `seconds`, has failed: the completion is
    not judged."""
    open: str | None = None
    """What a call begins behind, for example <call>; null: the beginning of the completion."""
    close: str = " = "
    """What ends a call, for example </call>."""
    answer: str = "{answer}"
    """What is put into the completion: {answer}, and what stands around it."""
    max_calls: int = 8
    """Answers in a completion."""
    max_answer_tokens: int = 64
    """A longer answer is cut."""
    seconds: float = 10.0
    """For one call."""
    branch: Branching | None = None
    """ARPO's branches (arXiv 2507.19849): a completion goes on in two ways where its entropy rises after an
    answer; {initial: 4} draws four of a group from the prompt, {initial: null} as many as AEPO's rule says.
    What branches have in common counts once."""

    def __post_init__(self) -> None:
        self.build()

    def build(self) -> ToolUse:
        """The tool.

        Raises:
            UserError: there is no such function, or a number is out of range.
        """
        tool: Any = calculator
        if self.use != "calculator":
            tool = import_by_path(self.use, what="tool")
        if not callable(tool):
            raise UserError(f"rollout.tool.use is {self.use!r}, which names no function.")
        return ToolUse(
            tool=cast("Tool", tool),
            name=self.use,
            open=self.open,
            close=self.close,
            answer=self.answer,
            max_calls=self.max_calls,
            max_answer_tokens=self.max_answer_tokens,
            seconds=self.seconds,
        )


@dataclass(frozen=True, kw_only=True)
class TextRolloutSettings:
    """How completions are made."""

    prompts_per_iteration: int = 16
    """P, groups per iteration."""
    group_size: int = 8
    """G, completions per prompt."""
    temperature: float = 1.0
    """τ of sampling; the ratio is that of the distribution that was sampled."""
    top_k: int = 0
    """Tokens that may be drawn; 0: all."""
    top_p: float = 1.0
    """Nucleus; 1: all."""
    max_new_tokens: int = 256
    """Tokens of a completion at most, its end token included."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a completion."""
    separator: str | None = None
    """What ends a step of a completion, for rows that look at steps; null: a newline, and for pear </think>,
    the end of the thinking."""
    answer_prefix: str = "\\boxed{"
    """For rows that look at the likelihood of the reference answer: it is scored after this text, which takes
    the place of its first occurrence in a completion and of all behind it."""
    truncated: str = "keep"
    """What becomes of completions that met the length limit: keep, or mask (overlong filtering of DAPO: they
    keep their place in the group's statistics and leave the loss)."""
    recompute: bool = False
    """Compute the old log-probs anew instead of taking the sampler's. Always so with an off-policy
    correction, which a server needs."""
    routing_replay: bool = False
    """Of a mixture of experts: every update of an iteration sends each token to the experts that it went to
    before the first one (GSPO, arXiv 2507.18071, section 5.3), at the cost of a forward pass. Without, the
    router's own changes move ratios by whole experts."""
    allowed_gap: float = 0.5
    """Largest mean |log π_old − log μ| per token, nats, between the policy and another engine: beyond it the
    engine has other weights or reports other log-probs, and the run stops."""
    overlap: int = 1
    """Stretches that an iteration's samples are made in: while one is made, the one before is judged in a
    thread. 1: all are made, then all are judged. It gains where the judge works elsewhere (a server, another
    GPU, processes that run code), and changes no sample, nor a score that neither the batch nor torch's
    own random numbers are part of."""
    staleness: int = 0
    """1: the samples of an iteration are made before the update of the one before, which hides the judge
    behind it. They come from weights one iteration old, so the objective needs `importance_sampling`."""
    max_failure_rate: float = 0.1
    """Share of completions that may go unjudged before the run stops."""
    tool: ToolSettings | None = None
    """A tool that answers in the middle of completions, in training and in evaluations; {} is a calculator
    that writes what follows " = "."""

    def __post_init__(self) -> None:
        if self.tool is not None and self.tool.branch is not None:
            self._check_branch(self.tool.branch)
        if self.truncated not in TRUNCATED:
            raise UserError(
                f"rollout.truncated is {self.truncated!r}; it must be one of {', '.join(TRUNCATED)}."
            )
        if not 0 <= self.max_failure_rate <= 1:
            raise UserError(f"rollout.max_failure_rate is {self.max_failure_rate}; it is a share, 0 to 1.")
        check_overlap(self.overlap, self.staleness)
        if self.sampling.greedy:
            raise UserError(
                "rollout.temperature is 0, which draws nothing: there is no probability to learn from. Give "
                "a temperature above 0, for example 1."
            )
        self.stopping()
        if self.separator is not None:
            StepReading(separator=self.separator)

    def _check_branch(self, branch: Branching) -> None:
        if branch.initial is not None and branch.initial > self.group_size:
            raise UserError(
                f"rollout.tool.branch.initial is {branch.initial}, and rollout.group_size {self.group_size}: "
                "a group has no more completions than that."
            )

    @property
    def scores_in_thread(self) -> bool:
        """Whether the judge is asked in a thread."""
        return self.overlap > 1 or self.staleness > 0

    @property
    def sampling(self) -> Sampling:
        """The distribution that tokens are drawn from."""
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)

    def stopping(self) -> StoppingCriteria:
        """What ends a completion."""
        return StoppingCriteria(max_new_tokens=self.max_new_tokens, strings=tuple(self.stop))


@dataclass(frozen=True, kw_only=True)
class DynamicSettings:
    """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): sample on until enough groups carry signal."""

    enabled: bool = False
    """Whether to sample on."""
    max_rounds: int = 4
    """Rounds of P prompts for one iteration at most."""
    rule: str = "spread"
    """Which groups carry signal: spread, accuracy or both; see `DynamicGroups`."""
    right_at: float | None = None
    """A reward of at least this is right; for the rule accuracy and the counts."""
    when_spent: str = "take"
    """What happens when the rounds are used up: take (train on what there is), fill or stop."""

    def __post_init__(self) -> None:
        try:
            self.groups(1)
        except UserError as error:
            raise UserError(f"dynamic: {error}") from error
        if self.rule != "spread" and self.right_at is None:
            raise UserError(
                f"dynamic.rule={self.rule} asks which completions are right, and dynamic.right_at is null. "
                "Set it to the reward of a right completion, for example 1.0."
            )

    def groups(self, wanted: int) -> DynamicGroups:
        """The collector of a run."""
        return DynamicGroups(
            wanted,
            rule=self.rule,
            right_at=self.right_at,
            max_rounds=self.max_rounds,
            when_spent=self.when_spent,
        )


@dataclass(frozen=True, kw_only=True)
class SelfImitationSettings:
    """Self-imitation (SPEAR, arXiv 2509.22601): completions with A > 0 are kept, and learnt from again while
    they beat the median of the groups' mean rewards. The numbers are those of its scripts."""

    capacity: int = 2048
    """Completions kept, the newest."""
    max_age: int = 10
    """Iterations after which one is dropped."""
    history: int = 10240
    """Groups whose mean rewards are kept, the newest."""
    batch: int | None = None
    """Completions replayed in an iteration, drawn by lot; null: as many as it has of its own."""
    weight: float = 1.0
    """c₀ of the loss's factor c(s) = c₀ (1 − cos(π min(s, T)/T))/2, s iterations."""
    warmup: int = 200
    """T."""
    eps_low: float = 0.2
    """The replay's clip below 1 ..."""
    eps_high: float = 0.28
    """... and above."""
    cov_share: float = 0.02
    """Share of the tokens, of those with a covariance of log-prob and advantage of 1 to 40, that leave the
    replay's loss (Clip-Cov); 0: none."""
    max_megabytes: float = 256.0
    """Largest size of the buffer, if all completions were as long as they may be: beyond it the run is
    refused."""

    def __post_init__(self) -> None:
        for name in ("capacity", "max_age", "history", "warmup"):
            at_least(f"self_imitation.{name}", getattr(self, name), 1)
        if self.batch is not None:
            at_least("self_imitation.batch", self.batch, 1)
        above_zero("self_imitation.max_megabytes", self.max_megabytes)
        if not 0 <= self.weight < math.inf:
            raise UserError(f"self_imitation.weight is {self.weight}; it must be at least 0 and finite.")
        for name in ("eps_low", "eps_high"):
            above_zero(f"self_imitation.{name}", getattr(self, name))
        if not 0 <= self.cov_share < 1:
            raise UserError(f"self_imitation.cov_share is {self.cov_share}; it is a share, 0 to 1.")

    def build(self, like: Objective) -> Objective:
        """The replay's loss, averaged as that of another row."""
        covered = {"ratio": self.cov_share, "cov_low": 1.0, "cov_high": 40.0}
        return Objective(
            source="SPEAR, arXiv 2509.22601; constants of its scripts",
            advantage="given",
            surrogate_options={"eps_low": self.eps_low, "eps_high": self.eps_high},
            selection="clip_cov" if self.cov_share else None,
            selection_options=covered if self.cov_share else {},
            aggregation=like.aggregation,
            length=like.length,
            mean_rows=like.mean_rows,
        )


@dataclass(frozen=True, kw_only=True)
class LatentFlowSettings:
    """A flow over the hidden states of right completions: what strays from it is paid less (RLFR, arXiv
    2510.10201); for advantage group_returns (the row rlfr), and those with returns of their own, as
    reinforce_pp. Depths, time, keep, top and scale are the paper's."""

    right_at: float = 1.0
    """A reward of at least this is right."""
    warmup: int = 10
    """Iterations that it learns in before it pays."""
    depths: list[float] = field(default_factory=lambda: [0.25, 0.5, 0.75])
    """Shares of the layers behind which states are taken."""
    width: int = 256
    """Of its networks."""
    lr: float = 1e-3
    """Of its AdamW."""
    steps: int = 8
    """Of AdamW in an iteration."""
    batch: int = 2048
    """Tokens of a step."""
    time: float = 0.8
    """At which a state is compared with the flow."""
    keep: float = 0.6
    """Share of a completion's range below which a token is as expected."""
    top: int = 15
    """Most tokens of a completion that are paid less."""
    scale: float = 0.01
    """What the farthest token loses, in units of the advantage."""

    def __post_init__(self) -> None:
        for name in ("width", "steps", "batch", "top"):
            at_least(f"latent_flow.{name}", getattr(self, name), 1)
        at_least("latent_flow.warmup", self.warmup, 0)
        for name in ("lr", "scale"):
            above_zero(f"latent_flow.{name}", getattr(self, name))
        if not self.depths or not all(0 < depth <= 1 for depth in self.depths):
            raise UserError(f"latent_flow.depths is {self.depths}; it needs shares of the layers in (0, 1].")
        if not (0 < self.time < 1 and 0 <= self.keep < 1):
            raise UserError(
                f"latent_flow.time must be in (0, 1) and latent_flow.keep in [0, 1); got {self.time} and "
                f"{self.keep}."
            )


@dataclass(frozen=True, kw_only=True)
class TextObjectiveSettings(ObjectiveSettings):
    """What is optimized on tokens."""

    algorithm: str = "grpo"
    """A row of `visalign.core.NAMED`: grpo, dr_grpo, rloo, reinforce_pp, gspo, dapo, cispo, sapo, gmpo,
    flowrl, clip_cov, kl_cov, ppo, ppo_kl, ppo_ptx, ..."""
    metric: str | None = None
    """What splits the groups of canon: "entropy", the mean of a completion's tokens, or its "length"; null:
    entropy."""
    heads_lr: float | None = None
    """Learning rate of the value head or network and of FlowRL's log-partition head; null: the policy's."""
    target_kl: float | None = None
    """Nats per token: PPO-KL's β is doubled or halved after an iteration that is off by more than 1.5 times
    (arXiv 1707.06347, section 4); only for ppo_kl."""
    kl_threshold: float | None = None
    """Nats per token from the reference from which on the KL term acts (SAFE, `gate_threshold`); only for
    safe. null: 0.3."""
    ratio_bound: Positive | None = 0.01
    """Largest |log r| at the first update, where r must be 1; raise it under autocast, null switches the
    check off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("tokens", ["metric"])
        objective = self.build(length=1)
        if self.metric is not None:
            choice("objective.metric", self.metric, ("entropy", "length"))
            if objective.advantage != "canon":
                raise UserError(
                    f"objective.metric is {self.metric!r}, which splits the groups of advantage='canon' "
                    "alone. Set objective.algorithm=canon, or objective.metric=null."
                )
        if self.heads_lr is not None and not (math.isfinite(self.heads_lr) and self.heads_lr > 0):
            raise UserError(f"objective.heads_lr is {self.heads_lr}; it must be above 0, or null.")
        if self.kl_threshold is not None:
            above_zero("objective.kl_threshold", self.kl_threshold)
            if self.algorithm != "safe":
                raise UserError(
                    f"objective.kl_threshold is {self.kl_threshold}, the threshold of SAFE's gate, and "
                    f"objective.algorithm={self.algorithm} has none. Set objective.algorithm=safe, or "
                    "kl_threshold=null."
                )
        if self.target_kl is not None and objective.surrogate != "ppo_kl":
            raise UserError(
                f"objective.target_kl adapts the penalty of the surrogate ppo_kl, and {self.algorithm} has "
                f"{objective.surrogate}. Set objective.algorithm=ppo_kl, or leave target_kl null."
            )


def check_ahead(rollout: TextRolloutSettings, objective: TextObjectiveSettings, dynamic: bool) -> None:
    """Refuse completions made ahead where nothing corrects for it, or their number is not known yet.

    Raises:
        UserError: with what to set instead.
    """
    if not rollout.staleness:
        return
    check_stale(objective.build(length=1), objective.algorithm)
    if dynamic:
        raise UserError(
            "rollout.staleness=1 writes completions before the last ones are judged, and dynamic.enabled "
            "decides by judgements how many there are. Leave one of the two out."
        )
