# SPDX-License-Identifier: Apache-2.0
"""Settings of the reinforcement learning of text policies: rollout, objective, dynamic sampling, replay."""

from __future__ import annotations

from dataclasses import field, fields
from inspect import iscoroutinefunction
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor

from visalign.core import Objective, filtration_weights
from visalign.core.rewards.best_of import Filtration
from visalign.dotted_path import import_by_path
from visalign.errors import UserError
from visalign.settings import Count, Natural, Positive, PositiveShare, Share, settings
from visalign.text import Sampling, StoppingCriteria
from visalign.text.calculator import calculator
from visalign.text.tool_calls import Tool, ToolFormat, ToolUse
from visalign.text.turns import EnvironmentUse
from visalign.training.policy.settings import ObjectiveSettings
from visalign.training.policy.winners import ReplaySettings

Text = Annotated[str, Field(min_length=1)]


@settings("rollout.tool")
class ToolSettings(ToolFormat):
    """Tool that completions can call."""

    use: str = "calculator"
    """calculator, or package.module:name or FILE.py:name of a function: text of a call -> its answer, or null where it
    is no call. A call that raises or takes longer than `seconds` fails: the completion is not scored."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.build()

    def build(self) -> ToolUse:
        tool: Any = calculator if self.use == "calculator" else import_by_path(self.use, what="tool")
        if not callable(tool):
            raise UserError(f"rollout.tool.use is {self.use!r}, which names no function.")
        tool_format = {f.name: getattr(self, f.name) for f in fields(ToolFormat)}
        return ToolUse(tool=cast("Tool", tool), name=self.use, **tool_format)


@settings("rollout.environment")
class EnvironmentSettings:
    """Tools and environment that a conversation goes on with, in the form of the chat template."""

    use: str | None = None
    """package.module:Class or FILE.py:Class of an environment, made without arguments. reset(**record) begins a
    sample, and may return a text that is put behind the prompt. Its public methods are tools (as with TRL's
    environment_factory); or step(text) returns the next message, or (message, reward, done). The reward
    "environment" reads get_reward(), or the sum over the steps. A sample whose environment raises, or takes longer
    than `seconds`, is not scored."""
    tools: list[Text] = field(default_factory=list)
    """Functions package.module:name or FILE.py:name with type hints and a docstring, called by the template's form."""
    max_turns: Count = 8
    """Most turns of the policy; behind the last one nothing is answered."""
    max_answer_tokens: Count = 256
    """Tokens of an answer or a message; a longer one is cut."""
    seconds: Positive = 30.0
    """Time limit of a turn's tools, or of a step."""

    def __post_init__(self) -> None:
        if self.use is None and not self.tools:
            raise UserError(
                "rollout.environment names nothing. Set its use to an environment, or its tools to functions."
            )
        self.build()

    def build(self) -> EnvironmentUse:
        factory: Any = None if self.use is None else import_by_path(self.use, what="environment")
        tools: list[Any] = [import_by_path(path, what="tool") for path in self.tools]
        for path, loaded in zip([self.use or "", *self.tools], [factory, *tools], strict=True):
            if loaded is not None and (not callable(loaded) or iscoroutinefunction(loaded)):
                raise UserError(
                    f"rollout.environment: {path} is no class or plain function; name one that can be called."
                )
        if isinstance(factory, type) and not callable(getattr(factory, "reset", None)):
            raise UserError(
                f"rollout.environment: {self.use} has no method reset. An environment has reset(**record), and "
                "step(text) or methods that are tools."
            )
        name = self.use or ", ".join(self.tools)
        limits = {key: getattr(self, key) for key in ("max_turns", "max_answer_tokens", "seconds")}
        return EnvironmentUse(name=name, factory=factory, tools=tools, **limits)


@settings("rollout")
class CompletionSettings:
    """End of completions, and the tool that they may call."""

    max_new_tokens: Count = 256
    """Most tokens of a completion, its end token included."""
    stop: list[Text] = field(default_factory=list)
    """Texts that end a completion."""
    tool: ToolSettings | None = None
    """Tool that answers in the middle of completions; {} is a calculator that writes what follows " = "."""
    environment: EnvironmentSettings | None = None
    """Tools and environment of conversations of several turns; null: none."""

    def __post_init__(self) -> None:
        if self.tool is not None and self.environment is not None:
            raise UserError("rollout.tool and rollout.environment both answer the policy. Set one of the two to null.")

    def stopping(self) -> StoppingCriteria:
        return StoppingCriteria(max_new_tokens=self.max_new_tokens, strings=tuple(self.stop))


@settings("generation")
class GenerationSettings(CompletionSettings):
    """Generation of held-out completions."""

    temperature: Positive = 1.0
    """τ of the sampled completions; the greedy ones need none."""
    top_p: PositiveShare = 1.0
    """Nucleus; 1: all."""

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_p=self.top_p)


@settings("rollout")
class TextRolloutSettings(GenerationSettings):
    """Sampling of an iteration's completions."""

    prompts_per_iteration: Count = 16
    """P, groups per iteration."""
    group_size: Count = 8
    """G, completions per prompt."""
    temperature: Positive = 1.0
    """τ of sampling; the ratio is that of the distribution that was sampled."""
    top_k: Natural = 0
    """Number of tokens that may be drawn; 0: all."""
    separator: Text | None = None
    """Text that ends a step of a completion, for algorithms that look at steps; null: a newline, and for pear
    </think>, the end of the thinking."""
    answer_prefix: str = "\\boxed{"
    """For algorithms that use the likelihood of the reference answer: it is scored after this text, which
    replaces its first occurrence in a completion and everything after it."""
    truncated: Literal["keep", "mask"] = "keep"
    """Treatment of completions that met the length limit: keep, or mask (DAPO's overlong filtering: they stay
    in the group's statistics and leave the loss)."""
    recompute: bool = False
    """Recompute the old log-probs instead of taking the sampler's. Always so with an off-policy correction,
    which a server needs."""
    routing_replay: bool = False
    """For a mixture of experts: every update of an iteration sends each token to the experts that it went to
    before the first one (GSPO, arXiv 2507.18071, section 5.3), at the cost of a forward pass."""
    allowed_gap: Annotated[float, Field(ge=0)] = 0.5
    """Largest mean |log π_old − log μ| per token, nats, between the policy and another engine. Beyond it the
    engine has other weights or reports other log-probs, and the run stops."""
    overlap: Count = 1
    """Chunks that an iteration's samples are drawn in: while one is drawn, a thread scores the one before.
    It helps where the reward works elsewhere (a server, another GPU), and changes no sample."""
    staleness: Literal[0, 1] = 0
    """1: draw an iteration's samples before the update of the one before, which hides the reward's time.
    Their weights are one iteration old, so the objective needs `importance_sampling`."""
    max_failure_rate: Share = 0.1
    """Share of completions that may fail to be scored before the run stops."""

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)


@settings("self_imitation")
class SelfImitationSettings(ReplaySettings):
    """Self-imitation of completions."""

    cov_share: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """Share of the tokens, of those with a covariance of log-prob and advantage of 1 to 40, that leave the
    replay's loss (Clip-Cov); 0: none."""

    def build(self, objective: Objective) -> Objective:
        """Return the replay's objective, aggregated as the run's."""
        selection = {"ratio": self.cov_share, "cov_low": 1.0, "cov_high": 40.0}
        return Objective(
            source="SPEAR, arXiv 2509.22601; constants of its scripts",
            advantage="given",
            surrogate_options={"eps_low": 0.2, "eps_high": 0.28},
            selection="clip_cov" if self.cov_share else None,
            selection_options=selection if self.cov_share else {},
            aggregation=objective.aggregation,
            length=objective.length,
        )


@settings("process.online")
class OnlineProcessSettings:
    """Updates of an implicit process reward on the policy's own completions (PRIME, arXiv 2502.01456)."""

    right_at: float = 1.0
    """Reward from which a completion is right."""
    lr: Positive = 1e-6
    """Learning rate of its AdamW."""
    batch: Count = 64
    """Completions of an update; an iteration is a pass over its completions."""


@settings("latent_flow")
class LatentFlowSettings:
    """Flow over the hidden states of right completions: tokens that deviate from it are penalised (RLFR,
    arXiv 2510.10201). For the algorithm rlfr (advantage group_returns), and those with returns of their own,
    as reinforce_pp."""

    right_at: float = 1.0
    """Reward from which a completion is right."""
    warmup: Natural = 10
    """Iterations of learning before the first penalty."""
    width: Count = 256
    """Width of its networks."""
    lr: Positive = 1e-3
    """Learning rate of its AdamW."""
    steps: Count = 8
    """AdamW steps in an iteration."""
    batch: Count = 2048
    """Tokens of a step."""


@settings("objective.pf_ppo")
class FiltrationSettings:
    """Draw of the trained completions by their rewards, with replacement (PF-PPO, arXiv 2409.06957, as in verl)."""

    reweight_method: Filtration = "pow"
    """Chance of a completion: pow, |reward|^weight_pow; max_min, the largest and smallest rewards of the iteration
    alone; max_random, 0.4 for the largest and 0.1 for the others."""
    weight_pow: Positive = 2.0
    """Exponent of pow."""

    def __post_init__(self) -> None:
        if self.reweight_method != "pow" and self.weight_pow != 2:
            unread = f"weight_pow is {self.weight_pow:g}, and reweight_method={self.reweight_method} does not read it"
            raise UserError(f"objective.pf_ppo: {unread}. Take reweight_method=pow, or leave weight_pow out.")

    def draw(self, reward: Tensor, seed: int) -> Tensor:
        """Draw B of the samples of rewards [B]."""
        weights = filtration_weights(reward, method=self.reweight_method, power=self.weight_pow)
        weights += torch.finfo(weights.dtype).tiny  # some sample, where no reward is known
        return weights.multinomial(len(weights), True, generator=torch.Generator().manual_seed(seed))


@settings("objective")
class TextObjectiveSettings(ObjectiveSettings):
    """Objective on tokens."""

    algorithm: str = "grpo"
    """An algorithm of `visalign.core.NAMED`: grpo, dr_grpo, rloo, reinforce_pp, gspo, dapo, cispo, sapo,
    gmpo, flowrl, clip_cov, kl_cov, ppo, ppo_kl, ppo_ptx, ..."""
    metric: Literal["entropy", "length"] | None = None
    """Quantity that splits the groups of canon: "entropy", the mean of a completion's tokens, or its
    "length"; null: entropy."""
    heads_lr: Positive | None = None
    """Learning rate of the value head or network and of FlowRL's log-partition head; null: the policy's."""
    target_kl: Positive | None = None
    """Nats per token: PPO-KL's β is doubled or halved after an iteration that is off by more than 1.5 times
    (arXiv 1707.06347, section 4); only for ppo_kl."""
    kl_threshold: Positive | None = None
    """Nats per token from the reference from which the KL term acts (SAFE, `gate_threshold`); only for safe.
    null: 0.3."""
    pf_ppo: FiltrationSettings | None = None
    """Draw of the completions that are trained on, behind the advantages; null: each once."""
    ratio_bound: Positive | None = 0.01
    """Largest |log r| at the first update, where r must be 1; raise it under autocast, null switches the check off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("tokens", ["metric"])
        objective = self.build(length=1)
        read = {
            "metric of canon": self.metric is None or objective.advantage == "canon",
            "kl_threshold of safe": self.kl_threshold is None or self.algorithm == "safe",
            "target_kl of ppo_kl": self.target_kl is None or objective.surrogate == "ppo_kl",
            "pf_ppo, whose draw parts its pairs": self.pf_ppo is None or objective.advantage != "online_dpo",
        }
        if unread := next((name for name, is_read in read.items() if not is_read), None):
            raise UserError(
                f"objective.algorithm={self.algorithm} does not read objective.{unread}. Take one that does, or "
                "leave it out."
            )

    @property
    def compares(self) -> bool:
        """True if a completion is learnt from by what the others of its group are worth."""
        return self.build(length=1).advantage not in ("gae", "remax", "reinforce_pp")
