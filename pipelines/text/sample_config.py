# SPDX-License-Identifier: Apache-2.0
"""The configuration of sampling completions to a dataset. YAML files hold only what differs from these."""

from __future__ import annotations

from dataclasses import dataclass, field

from visalign.errors import UserError, suggestion
from visalign.pipelines.shared.sections import RewardsConfig, RewardTerm, at_least
from visalign.text import StoppingCriteria
from visalign.training.text.sampling_grid import GridPoint, grid_points

from .config import TextModelConfig

RULES = ("all", "best_of_n", "rejection")


@dataclass(frozen=True, kw_only=True)
class PromptsConfig:
    """The prompts that are completed."""

    train: str = "tasks:train"
    """tasks:train, tasks:heldout, or a .jsonl file of records with "prompt" and what the rewards read."""
    tasks: list[str] | None = None
    """Kinds of the packaged tasks; null: all."""
    levels: list[int] | None = None
    """Difficulties of the packaged tasks, 1 to 3; null: all."""
    size: int = 1900
    """Records of tasks:train."""

    def __post_init__(self) -> None:
        at_least("data.size", self.size, 1)


@dataclass(frozen=True, kw_only=True)
class GridConfig:
    """How completions are made: every combination of temperature, nucleus and seed is a point of the grid."""

    temperatures: list[float] = field(default_factory=lambda: [1.0])
    """τ."""
    top_p: list[float] = field(default_factory=lambda: [1.0])
    """Nuclei; 1: all tokens."""
    seeds: list[int] = field(default_factory=lambda: [0])
    """More seeds give more completions of the same distributions, without changing those that there are."""
    samples: int = 8
    """n, completions to each prompt at each point."""
    max_new_tokens: int = 256
    """Tokens of a completion at most, its end token included."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a completion."""
    prompts_per_call: int = 64
    """Prompts that are completed and judged together; memory only."""
    max_failure_rate: float = 0.1
    """Share of a point's completions that may go unjudged before the run stops."""

    def __post_init__(self) -> None:
        for name in ("samples", "prompts_per_call"):
            at_least(f"rollout.{name}", getattr(self, name), 1)
        if not 0 <= self.max_failure_rate <= 1:
            raise UserError(f"rollout.max_failure_rate is {self.max_failure_rate}; it is a share, 0 to 1.")
        try:
            self.points()
        except UserError as error:
            raise UserError(f"rollout.{error}") from error
        self.stopping()

    def points(self) -> list[GridPoint]:
        """The points of the grid, the seeds of one distribution next to each other."""
        return grid_points(self.temperatures, self.top_p, self.seeds)

    def stopping(self) -> StoppingCriteria:
        """What ends a completion."""
        return StoppingCriteria(max_new_tokens=self.max_new_tokens, strings=tuple(self.stop))


@dataclass(frozen=True, kw_only=True)
class SelectionConfig:
    """Which completions become the dataset. Completions that could not be judged never do."""

    rule: str = "rejection"
    """all; best_of_n (the highest reward of each prompt over the whole grid, ties by lot); or rejection
    (those of at least the threshold)."""
    threshold: float = 1.0
    """Reward from which a completion is accepted; under every rule it is also what pass@k counts."""
    per_prompt: int | None = 4
    """With rejection, completions of one prompt at most, completions that differ first; null: no limit."""
    truncated: bool = False
    """Whether completions that met the length limit may be chosen. A dataset takes them for whole."""
    seed: int = 0
    """Of the lots."""

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise UserError(
                f"selection.rule is {self.rule!r}. {suggestion(self.rule, RULES)}Allowed: {', '.join(RULES)}."
            )
        at_least("selection.per_prompt", self.per_prompt, 1)
        at_least("selection.seed", self.seed, 0)
        if self.threshold != self.threshold:
            raise UserError("selection.threshold is not a number; give the smallest reward to accept.")


@dataclass(frozen=True, kw_only=True)
class MachineConfig:
    """Where it runs."""

    device: str = "auto"
    """auto (an accelerator where there is one) or cpu."""
    threads: int | None = None
    """CPU threads; null: as torch chooses."""

    def __post_init__(self) -> None:
        at_least("run.threads", self.threads, 1)
        if self.device not in ("auto", "cpu"):
            raise UserError(f"run.device is {self.device!r}; it must be auto or cpu.")


@dataclass(frozen=True, kw_only=True)
class TextSampleConfig:
    """Sample completions over a grid, judge them, and keep the good ones as a dataset."""

    seed: int = 0
    """Of the run: the packaged prompts and all completions."""
    model: TextModelConfig = field(default_factory=TextModelConfig)
    """The language model."""
    data: PromptsConfig = field(default_factory=PromptsConfig)
    """The prompts."""
    rewards: RewardsConfig = field(default_factory=lambda: RewardsConfig(terms={"task_answer": RewardTerm()}))
    """What judges the completions."""
    rollout: GridConfig = field(default_factory=GridConfig)
    """How completions are made."""
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    """Which completions become the dataset; may change when a finished run is resumed."""
    run: MachineConfig = field(default_factory=MachineConfig)
    """Where it runs."""

    def __post_init__(self) -> None:
        at_least("seed", self.seed, 0)
        if self.model.value != "none":
            raise UserError(
                f"model.value is {self.model.value!r}, and sampling needs no value function. Set model.value "
                "to none."
            )
