# SPDX-License-Identifier: Apache-2.0
"""The configuration of supervised fine-tuning. YAML files hold only what differs from these."""

from __future__ import annotations

from dataclasses import dataclass, field

from visalign.errors import UserError, suggestion
from visalign.pipelines.shared.sections import RunConfig, at_least
from visalign.text import Sampling, StoppingCriteria
from visalign.training.loop.optimizer import OptimizerSettings

from .config import TextEvaluationConfig, TextModelConfig

TOO_LONG = ("refuse", "drop")


@dataclass(frozen=True, kw_only=True)
class DemonstrationsDataConfig:
    """The demonstrations, and the prompts of the evaluation."""

    train: str = "tasks:train"
    """tasks:train, or a .jsonl file of records with "prompt" and a completion, such as the dataset.jsonl of
    the job text_sample; a prompt may have several."""
    field: str | None = None
    """Where the completion stands in a record; null: completion, or solution where there is none."""
    too_long: str = "refuse"
    """A record that is longer than the model's context is an error (refuse), or left out (drop)."""
    batch: int = 32
    """Demonstrations per update; each epoch reads every record once, in a new order."""
    heldout: str = "tasks:heldout"
    """tasks:heldout, or a .jsonl file of prompts with what the rewards read."""
    tasks: list[str] | None = None
    """Kinds of the packaged tasks; null: all."""
    levels: list[int] | None = None
    """Difficulties of the packaged tasks, 1 to 3; null: all."""
    size: int = 1900
    """Records of tasks:train."""
    heldout_per_task: int = 15
    """Records of each kind in tasks:heldout."""

    def __post_init__(self) -> None:
        for name in ("batch", "size", "heldout_per_task"):
            at_least(f"data.{name}", getattr(self, name), 1)
        if self.too_long not in TOO_LONG:
            raise UserError(
                f"data.too_long is {self.too_long!r}. {suggestion(self.too_long, TOO_LONG)}Allowed: "
                f"{', '.join(TOO_LONG)}."
            )
        if self.field is not None and not self.field:
            raise UserError("data.field is empty; name the field of the completions, or null.")


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How the held-out completions are made."""

    temperature: float = 1.0
    """τ of the sampled completions; the greedy ones need none."""
    top_p: float = 1.0
    """Nucleus; 1: all."""
    max_new_tokens: int = 256
    """Tokens of a completion at most, its end token included."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a completion."""

    def __post_init__(self) -> None:
        if self.sampling.greedy:
            raise UserError(
                "generation.temperature is 0; greedy completions are measured besides the sampled ones. Give "
                "a temperature above 0, for example 1."
            )
        self.stopping()

    @property
    def sampling(self) -> Sampling:
        """The distribution that tokens are drawn from."""
        return Sampling(temperature=self.temperature, top_p=self.top_p)

    def stopping(self) -> StoppingCriteria:
        """What ends a completion."""
        return StoppingCriteria(max_new_tokens=self.max_new_tokens, strings=tuple(self.stop))


@dataclass(frozen=True, kw_only=True)
class TextSFTConfig:
    """Learn demonstrations: a cold start, or one round of rejection sampling."""

    seed: int = 0
    """Of the run: order of the demonstrations, new weights of adapters."""
    model: TextModelConfig = field(default_factory=TextModelConfig)
    """The language model."""
    data: DemonstrationsDataConfig = field(default_factory=DemonstrationsDataConfig)
    """The demonstrations."""
    optimizer: OptimizerSettings = field(
        default_factory=lambda: OptimizerSettings(
            lr=1e-4, weight_decay=0.0, updates_per_iteration=1, micro_batch=32, ema_decay=0.0, ema_every=1
        )
    )
    """How the weights move; micro_batch counts demonstrations, ema_decay 0 leaves averaging out."""
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    """How the held-out completions are made."""
    evaluation: TextEvaluationConfig = field(default_factory=TextEvaluationConfig)
    """What is measured before, on the way, and after."""
    run: RunConfig = field(default_factory=RunConfig)
    """Length, checkpoints, machine."""

    def __post_init__(self) -> None:
        at_least("seed", self.seed, 0)
        if self.model.value != "none":
            raise UserError(
                f"model.value is {self.model.value!r}, and supervised fine-tuning fits no value function. "
                "Set model.value to none; the job text_ppo adds one to the model that this job saves."
            )
        judged, judge = self.evaluation.rewards, self.evaluation.correctness
        if not judged:
            raise UserError(
                "evaluation.rewards is empty; name at least one reward that judges the held-out completions, "
                "e.g. {exact_answer: {}}."
            )
        if judge is not None and judge not in judged:
            raise UserError(
                f"evaluation.correctness is {judge!r}, which is no label of evaluation.rewards. "
                f"{suggestion(judge, judged)}Labels: {', '.join(judged)}; or null."
            )
