# SPDX-License-Identifier: Apache-2.0
"""What can be chosen when a text policy is trained: how completions are made and become an update."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from visalign.errors import UserError
from visalign.text import Sampling, StoppingCriteria
from visalign.text.steps import StepReading
from visalign.training.policy.settings import ObjectiveSettings, check_overlap, check_stale

from .dynamic_groups import DynamicGroups

TRUNCATED = ("keep", "mask")


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

    def __post_init__(self) -> None:
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

    @property
    def judged_beside(self) -> bool:
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
class TextObjectiveSettings(ObjectiveSettings):
    """What is optimized on tokens."""

    algorithm: str = "grpo"
    """A row of `visalign.core.NAMED`: grpo, dr_grpo, rloo, reinforce_pp, gspo, dapo, cispo, sapo, gmpo,
    flowrl, clip_cov, kl_cov, ppo, ppo_kl, ppo_ptx, ..."""
    heads_lr: float | None = None
    """Learning rate of the value head or network and of FlowRL's log-partition head; null: the policy's."""
    target_kl: float | None = None
    """Nats per token: PPO-KL's β is doubled or halved after an iteration that is off by more than 1.5 times
    (arXiv 1707.06347, section 4); only for ppo_kl."""
    ratio_bound: float | None = 0.01
    """Largest |log r| at the first update, where r must be 1; raise it under autocast, null switches the
    check off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("tokens")
        objective = self.build(length=1)
        if self.heads_lr is not None and not (math.isfinite(self.heads_lr) and self.heads_lr > 0):
            raise UserError(f"objective.heads_lr is {self.heads_lr}; it must be above 0, or null.")
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
