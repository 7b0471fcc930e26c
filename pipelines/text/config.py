# SPDX-License-Identifier: Apache-2.0
"""The configuration of jobs that train a text policy. YAML files hold only what differs from these."""

from __future__ import annotations

import math
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from visalign.data.assets import assets_folder
from visalign.errors import UserError
from visalign.pipelines.shared.sections import (
    Count,
    Dtype,
    HeldoutConfig,
    LoraConfig,
    Natural,
    PolicyRunConfig,
    RewardsConfig,
    RewardTerm,
)
from visalign.precision import Autocast
from visalign.schema import STRICT
from visalign.text import Sampling, StoppingCriteria
from visalign.training.loop.monitor import MonitorSettings
from visalign.training.loop.optimizer import OptimizerSettings
from visalign.training.loop.sampler import check_batch_algebra
from visalign.training.text.settings import (
    DynamicSettings,
    LatentFlowSettings,
    SelfImitationSettings,
    TextObjectiveSettings,
    TextRolloutSettings,
    ToolSettings,
)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextModelConfig:
    """The language model."""

    path: str = "tasks-qwen3"
    """A packaged model, a transformers folder, or a hub id."""
    lora: LoraConfig | None = None
    """null trains the whole model; {} trains adapters on all linear layers."""
    chat: Literal["auto", "plain", "chat"] = "auto"
    """How plain prompts are read: auto (by the chat template where there is one), plain, or chat."""
    system: str | None = None
    """System message of every chat."""
    dtype: Dtype = "float32"
    """Of the weights: float32, bfloat16 or float16. Adapters are float32 always."""
    autocast: Autocast | None = None
    """Run the model under autocast in this dtype; raise objective.ratio_bound with it. auto: bfloat16 where
    the device multiplies it, else none (a processor without that arithmetic takes ten times as long)."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass, for memory."""
    max_prompt_tokens: Count | None = None
    """Longest prompt; null: what the context leaves."""
    long_prompts: Literal["refuse", "mask"] = "refuse"
    """A longer prompt is an error (refuse), or its completions have a loss mask of 0 (mask)."""
    generate_batch: Count = 128
    """Completions that grow together; memory and speed only."""
    score_batch: Count = 64
    """Completions per forward pass without gradient; memory and speed only."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ActorCriticConfig(TextModelConfig):
    """The language model and its value function."""

    value: Literal["none", "shared", "separate"] = "none"
    """Value function of PPO: none, shared (a head on the policy's hidden states) or separate (a network of
    its own that starts from the same weights)."""
    critics: Count = 1
    """Heads of the value function, each fitted to the returns; V is their soft minimum (SAFE has two)."""

    def __post_init__(self) -> None:
        if self.critics > 1 and self.value == "none":
            raise UserError(
                f"model.critics is {self.critics} and model.value none. Set model.value=separate."
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PromptsConfig:
    """The prompts that are completed."""

    train: str = "tasks:train"
    """tasks:train, tasks:heldout, or a .jsonl file of records with "prompt" and what the rewards read."""
    tasks: list[str] | None = None
    """Kinds of the packaged tasks; null: all."""
    levels: list[int] | None = None
    """Difficulties of the packaged tasks, 1 to 3; null: all."""
    size: Count = 1900
    """Records of tasks:train."""
    question: str | None = None
    """What is asked of images: with it the sets are shapes:quality or shapes:pairs, tables of rated
    images or of pairs, or LAYOUT:FOLDER, of data.train at most data.size; {prompt} is theirs.
    null: the sets are prompts."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HeldoutPromptsConfig(PromptsConfig):
    """Prompts to train on and prompts to measure on."""

    heldout: str = "tasks:heldout"
    """tasks:heldout, or a .jsonl file of prompts with what the rewards read."""
    heldout_per_task: Count = 15
    """Records of each kind in tasks:heldout."""
    heldout_size: Count = 300
    """Of data.heldout at most, with a question."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextDataConfig(HeldoutPromptsConfig):
    """The prompts."""

    demonstrations: str | None = None
    """Demonstrations for PPO-ptx: tasks:train, or a .jsonl file of records with prompt and completion."""
    demonstrations_batch: Count = 32
    """Demonstrations per update."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextEvaluationConfig(HeldoutConfig):
    """Held-out evaluation: fixed seeds, the rollout's distribution, averaged weights."""

    seeds: Annotated[list[Natural], Field(min_length=1)] = field(default_factory=lambda: [0, 1, 2, 3])
    """Completions per prompt, one for each seed; one more is greedy."""
    rewards: dict[str, RewardTerm] = field(default_factory=lambda: {"task_answer": RewardTerm()})
    """label -> reward to report besides those trained on; weights play no part."""
    correctness: str | None = "task_answer"
    """The reward that says right or wrong; null where none does."""


def check_no_branches(section: str, tool: ToolSettings | None) -> None:
    """Refuse branches where groups are not compared."""
    if tool is not None and tool.branch is not None:
        raise UserError(
            f"{section}.tool.branch is of the groups that a policy is trained on. Set it to null here."
        )


@dataclass(frozen=True, kw_only=True, config=STRICT)
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
    tool: ToolSettings | None = None
    """A tool that answers in the middle of completions; {} is a calculator behind " = "."""

    def __post_init__(self) -> None:
        check_no_branches("generation", self.tool)
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


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SupervisedConfig:
    """What jobs have in common that learn from records and write completions for the evaluation alone."""

    seed: Natural = 0
    """Of the run: order and split of the records, new weights of adapters."""
    model: TextModelConfig = field(default_factory=TextModelConfig)
    """The language model; before training it is the reference where a loss has one."""
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    """How the held-out completions are made."""
    evaluation: TextEvaluationConfig = field(default_factory=TextEvaluationConfig)
    """What is measured before, on the way, and after."""
    run: PolicyRunConfig = field(default_factory=PolicyRunConfig)
    """Length, checkpoints, machine."""

    def __post_init__(self) -> None:
        if not self.evaluation.rewards:
            raise UserError(
                "evaluation.rewards is empty; name at least one reward that judges the held-out completions, "
                "e.g. {exact_answer: {}}."
            )
        self.evaluation.check_correctness()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ProcessConfig:
    """A process reward model that judges a completion's steps (`visalign.rewards.text.process_reward`)."""

    model: str
    """A transformers folder or hub id of a token classifier with two labels, or with one: a progress
    estimator (SPA-RL, arXiv 2505.20732). The job text_process leaves either in its folder `judge`."""
    separator: str = "\n"
    """What ends a step in a completion."""
    clip: float | None = None
    """η of Clip (arXiv 2410.15115): a step's reward is min(r − η, 0), so that a step can only cost. A
    probability of being right has it between 0 and 1; null leaves it out."""
    delta: bool = False
    """Delta, of the same paper, after Clip: a step counts by its difference to the next, the last by nothing,
    so that repeating good steps earns nothing."""
    coefficient: float = 1.0
    """Factor of the rewards of steps, after Clip and Delta."""
    replaces: bool = False
    """Rewards of steps in place of that of the whole completion, which is then only reported, and not on top
    of it. So SPA-RL redistributes an outcome, which its contributions add up to."""
    options: dict[str, Any] = field(default_factory=dict)
    """Other arguments of `ProcessRewardModel`."""

    def __post_init__(self) -> None:
        if not 0 < self.coefficient < math.inf:
            raise UserError(
                f"process.coefficient is {self.coefficient:g}; it must be positive and finite. For no "
                "rewards of steps set process to null."
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ServerConfig:
    """A vLLM (or other OpenAI-compatible) server that writes the completions; see
    `visalign.adapters.server.generator`."""

    base_url: str
    """For example http://localhost:8000/v1."""
    model: str
    """The model's name on the server."""
    logprobs_mode: str = "raw_logprobs"
    """As the server was started; processed_logprobs is needed for any temperature but 1, top-k and top-p."""
    max_logprobs: Count = 20
    """As the server was started."""
    api_key_env: str | None = None
    """Environment variable with the key; a key has no place in a file."""
    parallel: Count = 64
    """Requests at a time."""
    timeout: float = 600.0
    """Seconds for one completion."""
    patience: float = 600.0
    """Seconds for which a server that has answered once may be away while it is started anew."""
    sync_every: Count = 1
    """Iterations between two loads of the adapters into the server; above 1 is off-policy on purpose."""
    server_folder: str | None = None
    """The run's folder `server_adapter` as the server sees it; null: the same path."""
    model_folder: str | None = None
    """Without model.lora: the folder that the server was started on, as it is seen here. The whole model is
    written there, in place of all *.safetensors, and read anew by the server."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextConfig:
    """What the jobs of reinforcement learning share."""

    pipeline: ClassVar[str]
    method: ClassVar[str]
    """In the title of the report."""

    seed: Natural = 0
    """Of the run: prompts, completions, new weights."""
    model: ActorCriticConfig = field(default_factory=ActorCriticConfig)
    """The language model."""
    data: TextDataConfig = field(default_factory=TextDataConfig)
    """The prompts."""
    rewards: RewardsConfig = field(default_factory=lambda: RewardsConfig(terms={"task_answer": RewardTerm()}))
    """What is optimized."""
    rollout: TextRolloutSettings = field(default_factory=TextRolloutSettings)
    """How completions are made."""
    process: ProcessConfig | None = None
    """Rewards of single steps, for ppo, reinforce_pp, remax and advantage group_returns; null: none."""
    server: ServerConfig | None = None
    """Who writes the completions; null: the model itself."""
    dynamic: DynamicSettings = field(default_factory=DynamicSettings)
    """Dynamic sampling."""
    self_imitation: SelfImitationSettings | None = None
    """SPEAR's replay of completions that beat their group; {} has the paper's numbers, null: none."""
    latent_flow: LatentFlowSettings | None = None
    """RLFR's rewards of tokens by a flow over hidden states; {} has the paper's numbers, null: none."""
    objective: TextObjectiveSettings = field(default_factory=TextObjectiveSettings)
    """The loss."""
    optimizer: OptimizerSettings = field(
        default_factory=lambda: OptimizerSettings(
            lr=1e-5, weight_decay=0.0, updates_per_iteration=1, micro_batch=32, ema_decay=0.0, ema_every=1
        )
    )
    """How the weights move; micro_batch counts completions, ema_decay 0 leaves averaging out."""
    evaluation: TextEvaluationConfig = field(default_factory=TextEvaluationConfig)
    """What is measured before, on the way, and after."""
    monitor: MonitorSettings = field(default_factory=MonitorSettings)
    """What warns and stops while the policy moves."""
    run: PolicyRunConfig = field(default_factory=PolicyRunConfig)
    """Length, checkpoints, machine."""

    def __post_init__(self) -> None:
        check_batch_algebra(self.rollout.prompts_per_iteration, self.rollout.group_size)
        self.evaluation.check_correctness(*self.rewards.terms)
        self.rewards.check_monitor(self.monitor, self.evaluation, feature_drift=(False, "It is of images."))
        if self.self_imitation is not None and self.data.question is not None:
            raise UserError(
                "self_imitation keeps tokens, and data.question asks about images. Set one of the two "
                "to null."
            )
        objective = self.objective.build(length=self.rollout.max_new_tokens)
        if objective.value and self.model.value == "none":
            raise UserError(
                f"objective.algorithm={self.objective.algorithm} fits a value function, and model.value is "
                "none. Set model.value to shared (a head on the policy) or separate (a network of its own)."
            )
        if self.server is not None:
            self._check_handed_over(self.server)
        if self.server is not None and objective.importance_sampling is None:
            raise UserError(
                "server: another engine's log-probs differ a little from the policy's, and nothing corrects "
                "for it. Set objective.changes={importance_sampling: {level: token, mode: truncate, "
                "high: 2.0}}."
            )
        if objective.ptx and self.data.demonstrations is None:
            raise UserError(
                f"objective.algorithm={self.objective.algorithm} has a ptx term, and data.demonstrations is "
                "null. Set data.demonstrations to a file of records with prompt and completion, or to "
                "tasks:train."
            )

    def _check_handed_over(self, server: ServerConfig) -> None:
        """How the server gets new weights: adapters, or a folder that is written for it alone."""
        folder, adapters = server.model_folder, self.model.lora is not None
        if folder is None and not adapters:
            raise UserError(
                "server.model_folder is null, and so is model.lora: nothing could be handed over between two "
                "iterations. Set model.lora={rank: 16, alpha: 32}, or copy the model into a folder, start "
                "the server on it, and set server.model_folder to it."
            )
        if folder is not None and adapters:
            raise UserError(
                "server.model_folder takes whole models, and model.lora trains adapters, which are handed "
                "over by themselves. Leave one of the two out."
            )
        begins = {Path(self.model.path).resolve(), (assets_folder() / self.model.path).resolve()}
        if folder is not None and Path(folder).resolve() in begins:
            raise UserError(
                f"server.model_folder is {folder}, which is model.path: the run would write over the model "
                "that it begins with. Copy it, and start the server on the copy."
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextGRPOConfig(TextConfig):
    """GRPO, Dr.GRPO, GSPO, DAPO and kin: completions are compared within the group of their prompt."""

    pipeline: ClassVar[str] = "text_grpo"
    method: ClassVar[str] = "GRPO"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextPPOConfig(TextConfig):
    """PPO-clip, PPO-KL, PPO-ptx: completions are compared with what a value function expected."""

    pipeline: ClassVar[str] = "text_ppo"
    method: ClassVar[str] = "PPO"

    model: ActorCriticConfig = field(default_factory=lambda: ActorCriticConfig(value="separate"))
    """The language model and its value function."""
    rollout: TextRolloutSettings = field(
        default_factory=lambda: TextRolloutSettings(prompts_per_iteration=64, group_size=2)
    )
    """How completions are made; groups serve dynamic sampling and statistics alone."""
    objective: TextObjectiveSettings = field(
        default_factory=lambda: TextObjectiveSettings(algorithm="ppo", epochs=2)
    )
    """The loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        built = self.objective.build(length=self.rollout.max_new_tokens)
        if built.advantage != "gae":
            raise UserError(
                f"objective.algorithm={self.objective.algorithm} has no value function (advantage "
                f"{built.advantage}), and this is the pipeline text_ppo. Use ppo, ppo_kl or ppo_ptx here, or "
                "write 'pipeline: text_grpo' in the file."
            )
