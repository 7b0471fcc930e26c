# SPDX-License-Identifier: Apache-2.0
"""Configurations of jobs that train a text policy. YAML files hold only what differs from these defaults."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from visalign.core import Objective
from visalign.data.assets import assets_folder
from visalign.errors import UserError
from visalign.pipelines.shared.sections import (
    Dtype,
    HeldoutConfig,
    LoraConfig,
    PolicyRunConfig,
    RewardsConfig,
    RewardTerm,
    is_own,
)
from visalign.precision import Autocast
from visalign.schema import STRICT
from visalign.settings import Count, Finite, Natural, NonNegative, Positive, refuse, settings
from visalign.training.loop.dynamic_groups import DynamicSettings
from visalign.training.loop.monitor import MonitorSettings
from visalign.training.loop.optimizer import OptimizerSettings
from visalign.training.loop.sampler import check_batch_algebra
from visalign.training.text.settings import (
    GenerationSettings,
    LatentFlowSettings,
    OnlineProcessSettings,
    SelfImitationSettings,
    TextObjectiveSettings,
    TextRolloutSettings,
)


@settings("optimizer")
class TextOptimizerSettings(OptimizerSettings):
    """Optimizer of a text policy."""

    micro_batch: Count = 32
    """Texts that go through the network together; bounds memory only."""


text_optimizer = partial(TextOptimizerSettings, weight_decay=0.0, updates_per_iteration=1, ema_decay=0.0, ema_every=1)
"""Optimizer of a text policy, given its learning rate."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextModelConfig:
    """Language model."""

    path: str = "tasks-qwen3"
    """A packaged model, a transformers folder, or a hub id."""
    lora: LoraConfig | None = None
    """Adapters; null trains the whole model, {} adapters on all linear layers."""
    lora_path: str | None = None
    """LoRA to continue from, as peft and TRL save it: a folder, or a run. Its rank, alpha and layers replace
    model.lora's, and the reference is the model with it."""
    chat: Literal["auto", "plain", "chat"] = "auto"
    """Format of plain prompts: auto (the chat template where there is one), plain, or chat. A prompt to which the
    template was applied before is taken as it stands."""
    system: str | None = None
    """System message of every chat."""
    template: dict[str, Any] = field(default_factory=dict)
    """More variables of the chat template, e.g. {enable_thinking: false} for Qwen3 (TRL's chat_template_kwargs)."""
    dtype: Dtype = "float32"
    """Dtype of the weights: float32, bfloat16 or float16. Adapters are float32 always."""
    autocast: Autocast | None = None
    """Run the model under autocast in this dtype; raise objective.ratio_bound with it. auto: bfloat16 where
    the device multiplies it, else none (a processor without that arithmetic takes ten times as long)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, for memory."""
    max_prompt_tokens: Count | None = None
    """Longest prompt; null: limited by the context alone."""
    long_prompts: Literal["refuse", "mask"] = "refuse"
    """Treatment of a longer prompt: an error (refuse), or completions with a loss mask of 0 (mask)."""
    generate_batch: Count = 128
    """Completions that grow together; memory and speed only."""
    score_batch: Count = 64
    """Completions per forward pass without gradient; memory and speed only."""

    def __post_init__(self) -> None:
        if self.lora_path is not None and self.lora is None:
            object.__setattr__(self, "lora", LoraConfig())


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ActorCriticConfig(TextModelConfig):
    """Language model and its value function."""

    value: Literal["none", "shared", "separate"] = "none"
    """Value function of PPO: none, shared (a head on the policy's hidden states) or separate (a network of
    its own that starts from the same weights)."""
    critics: Count = 1
    """Heads of the value function, each fitted to the returns; V is their soft minimum (SAFE has two)."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PromptsConfig:
    """Prompts to complete."""

    train: str = "tasks:train"
    """tasks:train, tasks:heldout, a table (.jsonl, .json, .csv, .tsv, .parquet, .xlsx) or a dataset of the hub
    (owner/name:split, owner/name/config:split) of records with "prompt" (a text or a list of messages; GSM8K's
    "question" too) and the fields that the rewards read; or a .txt file, a prompt per line."""
    map: dict[str, str] = field(default_factory=dict)
    """Our name of a field -> that of the files, such as prompt: problem."""
    tasks: list[str] | None = None
    """Kinds of the packaged tasks; null: all."""
    levels: list[Annotated[int, Field(ge=1, le=3)]] | None = None
    """Difficulties of the packaged tasks, 1 to 3; null: all."""
    size: Count = 1900
    """Records of tasks:train."""
    question: str | None = None
    """Question about images: with it the sets are shapes:quality or shapes:pairs, tables of rated images or
    of pairs, or LAYOUT:FOLDER, of data.train at most data.size; {prompt} is the images' own prompt. With {responses}
    in it, or text_judge for that judge's own question, it is about responses, of tasks:train or tables as text_reward
    reads them. null: the sets are prompts."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HeldoutPromptsConfig(PromptsConfig):
    """Prompts to train on and prompts to measure on."""

    heldout: str | None = None
    """tasks:heldout, or prompts in a form of data.train. null: a tenth of the prompts (100 at most), which is then not
    trained on, with a model and prompts of one's own; else tasks:heldout."""
    heldout_per_task: Count = 15
    """Records of each kind in tasks:heldout."""
    heldout_size: Count = 300
    """Most records of data.heldout, with a question."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextDataConfig(HeldoutPromptsConfig):
    """Prompts and demonstrations."""

    demonstrations: str | None = None
    """Demonstrations for PPO-ptx: tasks:train, or a .jsonl file of records with prompt and completion."""
    demonstrations_batch: Count = 32
    """Demonstrations per update."""
    balance: bool = False
    """Give every kind of prompt (the field tag, else task) the same number of groups, however many it has."""
    cycle: list[str] | None = None
    """Kinds that the groups take in turn, repeats allowed; null with balance: each once."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextEvaluationConfig(HeldoutConfig):
    """Held-out evaluation: fixed seeds, the rollout's distribution, averaged weights."""

    seeds: Annotated[list[Natural], Field(min_length=1)] = field(default_factory=lambda: [0, 1, 2, 3])
    """Seeds of the completions to each prompt; one more completion is greedy."""
    rewards: dict[str, RewardTerm] = field(default_factory=lambda: {"task_answer": RewardTerm()})
    """label -> reward to report besides those trained on; weights have no effect. task_answer is left out
    with a model and prompts of one's own."""
    correctness: str | None = "task_answer"
    """Reward that says right or wrong; null for none. The default's is left out likewise."""


def _set_own_heldout(config: Any, trained: Collection[str]) -> None:
    """Leave packaged prompts and rewards out of the evaluation of a model and prompts of one's own."""
    if is_own(config.model.path, config.data.train) and config.data.question is None:
        object.__setattr__(config, "evaluation", config.evaluation.without_packaged(trained))
    elif config.data.heldout is None:
        object.__setattr__(config, "data", replace(config.data, heldout="tasks:heldout"))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SupervisedConfig:
    """Sections of jobs that learn from records and generate completions for the evaluation alone."""

    seed: Natural = 0
    """Seed of the run: order and split of the records, new weights of adapters."""
    model: TextModelConfig = field(default_factory=TextModelConfig)
    """Language model; before training it is the reference where a loss has one."""
    generation: GenerationSettings = field(default_factory=GenerationSettings)
    """Generation of the held-out completions."""
    evaluation: TextEvaluationConfig = field(default_factory=TextEvaluationConfig)
    """Evaluation before, during, and after training."""
    run: PolicyRunConfig = field(default_factory=PolicyRunConfig)
    """Length, checkpoints, machine."""

    def __post_init__(self) -> None:
        _set_own_heldout(self, {})
        self.evaluation.check_rewards()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ProcessConfig:
    """Process reward model of a completion's steps (`visalign.rewards.text.process_reward`)."""

    model: str
    """A transformers folder or hub id of a token classifier with two labels, or with one: a progress
    estimator (SPA-RL, arXiv 2505.20732). With `reference`, of a causal language model, or a folder of its adapters.
    The job text_process leaves each of them in its folder `judge`."""
    reference: str | None = None
    """Language model that `model` was before its training on outcomes or pairs (text_process learns=implicit,
    text_dpo): a token's reward is β log π_model/π_reference (arXiv 2412.01981). null: `model` is a classifier."""
    beta: Positive = 0.05
    """With `reference`, β: that of the training, so that the rewards add up to what was learnt."""
    unit: Literal["step", "token"] = "step"
    """With `reference`, what is rewarded: the steps, at their last token, or each token as in PRIME."""
    online: OnlineProcessSettings | None = None
    """With `reference`, go on training `model` on the run's own completions (PRIME); {} has the paper's numbers."""
    separator: str = "\n"
    """Text that ends a step in a completion."""
    clip: Finite | None = None
    """η of Clip (arXiv 2410.15115): a step's reward is min(r − η, 0), so that a step can only cost. For a
    probability of being right it is between 0 and 1; null leaves it out."""
    delta: bool = False
    """Delta, of the same paper, after Clip: a step counts by its difference to the next, the last by nothing,
    so that repeating good steps earns nothing."""
    coefficient: Positive = 1.0
    """Factor of the rewards of steps, after Clip and Delta."""
    replaces: bool = False
    """Use the rewards of steps instead of that of the whole completion, which is then only reported. So
    SPA-RL redistributes an outcome, which its contributions add up to."""
    options: dict[str, Any] = field(default_factory=dict)
    """Other arguments of `ProcessRewardModel`."""

    def __post_init__(self) -> None:
        if self.reference is None and (self.online is not None or self.unit == "token"):
            raise UserError(
                "process.online and process.unit=token need process.reference, which is null. Name the model that "
                "process.model was before its training; PRIME begins with both the same."
            )
        if self.unit == "token" and self.delta:
            raise UserError("process.delta=true compares steps, and process.unit is token. Set process.unit=step.")
        if self.online is not None and self.replaces:
            raise UserError("process.online learns from the outcome, which process.replaces leaves out. Drop one.")
        if self.options and self.reference is not None:
            raise UserError(
                f"process.options {', '.join(self.options)} are of a classifier, not of process.reference's models."
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ServerConfig:
    """A vLLM (or other OpenAI-compatible) server that generates the completions; see
    `visalign.adapters.server.generator`."""

    base_url: str
    """URL, for example http://localhost:8000/v1."""
    model: str
    """Name of the model on the server."""
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    """The server's own setting; processed_logprobs is needed for any temperature but 1, top-k and top-p."""
    max_logprobs: Count = 20
    """The server's own setting."""
    api_key_env: str | None = None
    """Environment variable with the key, which must not stand in a file."""
    parallel: Count = 64
    """Requests at a time."""
    timeout: Positive = 600.0
    """Seconds for one completion."""
    patience: NonNegative = 600.0
    """Seconds for which a server that has answered once may be away while it restarts."""
    server_folder: str | None = None
    """Path on the server of the run's folder `server_adapter`; null: the same path."""
    model_folder: str | None = None
    """Without model.lora: local path of the folder that the server was started on. The whole model is written
    there, in place of all *.safetensors, and the server loads it again."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextConfig:
    """Sections of the jobs of reinforcement learning."""

    pipeline: ClassVar[str]

    seed: Natural = 0
    """Seed of the run: prompts, completions, new weights."""
    model: ActorCriticConfig = field(default_factory=ActorCriticConfig)
    """Language model."""
    data: TextDataConfig = field(default_factory=TextDataConfig)
    """Prompts."""
    rewards: RewardsConfig = field(default_factory=lambda: RewardsConfig(terms={"task_answer": RewardTerm()}))
    """Rewards to optimize."""
    rollout: TextRolloutSettings = field(default_factory=TextRolloutSettings)
    """Sampling of the completions."""
    process: ProcessConfig | None = None
    """Rewards of single steps, for ppo, reinforce_pp, remax, prime, grpo_process and advantage group_returns; null:
    none."""
    server: ServerConfig | None = None
    """Server that generates the completions; null: the model itself."""
    dynamic: DynamicSettings = field(default_factory=DynamicSettings)
    """Dynamic sampling."""
    self_imitation: SelfImitationSettings | None = None
    """SPEAR's replay of completions that beat their group; {} has the paper's numbers, null: none."""
    latent_flow: LatentFlowSettings | None = None
    """RLFR's rewards of tokens by a flow over hidden states; {} has the paper's numbers, null: none."""
    objective: TextObjectiveSettings = field(default_factory=TextObjectiveSettings)
    """Loss."""
    optimizer: TextOptimizerSettings = field(default_factory=lambda: text_optimizer(lr=1e-5))
    """Optimizer; micro_batch counts completions, ema_decay 0 leaves averaging out."""
    evaluation: TextEvaluationConfig = field(default_factory=TextEvaluationConfig)
    """Evaluation before, during, and after training."""
    monitor: MonitorSettings = field(default_factory=MonitorSettings)
    """Warnings and stops while the policy moves."""
    run: PolicyRunConfig = field(default_factory=PolicyRunConfig)
    """Length, checkpoints, machine."""

    def __post_init__(self) -> None:
        _set_own_heldout(self, self.rewards.terms)
        compared = self.objective.compares or self.dynamic.enabled
        check_batch_algebra(self.rollout.prompts_per_iteration, self.rollout.group_size, compared=compared)
        self.evaluation.check_rewards(*self.rewards.terms)
        self.rewards.check_monitor(self.monitor, self.evaluation, feature_drift=(False, "It is of images."))
        refuse(_broken_rules(self))

    @property
    def generation(self) -> TextRolloutSettings:
        """Generation of the held-out completions, by the name that supervised jobs have for it."""
        return self.rollout

    @property
    def built_objective(self) -> Objective:
        return self.objective.build(length=self.rollout.max_new_tokens)


def _broken_rules(s: TextConfig) -> Iterator[str]:
    objective, server = s.built_objective, s.server
    if s.data.cycle is not None and not s.data.balance:
        yield "data.cycle orders the kinds of a balanced set; set data.balance=true with it."
    algorithm = f"objective.algorithm={s.objective.algorithm}"
    if isinstance(s, TextPPOConfig) and objective.advantage != "gae":
        yield f"{algorithm} has no value function. Use ppo, ppo_kl or ppo_ptx, or write 'pipeline: text_grpo'."
    acts = s.rollout.environment is not None and s.rollout.environment.use is not None
    names = {term.name or label for label, term in s.rewards.terms.items()}
    if not acts and "environment" in names:
        yield "rewards.terms names environment, and there is none. Set rollout.environment={use: FILE.py:Class}."
    if s.rollout.tool is None and s.rollout.environment is None and "tool_calls" in names:
        yield "rewards.terms names tool_calls, and there is no tool. Set rollout.tool={} or rollout.environment."
    if s.self_imitation is not None and s.data.question is not None:
        yield "self_imitation stores tokens, and data.question asks about images. Set one of the two to null."
    if s.model.critics > 1 and s.model.value == "none":
        yield f"model.critics is {s.model.critics} and model.value none. Set model.value=separate."
    if (objective.value or objective.advantage == "gae") and s.model.value == "none":
        yield f"{algorithm} fits a value function, and model.value is none. Set model.value to shared or separate."
    if objective.ptx and s.data.demonstrations is None:
        yield f"{algorithm} has a ptx term, and data.demonstrations is null. Set it to a .jsonl file or tasks:train."
    if server is None:
        return
    if server.model_folder is None and s.model.lora is None:
        yield "server.model_folder and model.lora are null: nothing can be handed over. Set either of them."
    if server.model_folder is not None:
        if s.model.lora is not None:
            yield "server.model_folder takes whole models, and model.lora trains adapters. Leave one of the two out."
        start = Path(s.model.path), assets_folder() / s.model.path
        if Path(server.model_folder).resolve() in (path.resolve() for path in start):
            folder = f"server.model_folder is {server.model_folder}, which is model.path"
            yield f"{folder}: the run would write over its start. Copy it, and start the server on the copy."
    if objective.importance_sampling is None:
        remedy = "objective.changes={importance_sampling: {level: token, mode: truncate, high: 2.0}}"
        yield f"server: nothing corrects for another engine's log-probs. Set {remedy}."


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextGRPOConfig(TextConfig):
    """GRPO, Dr.GRPO, GSPO, DAPO and variants: completions are compared within the group of their prompt."""

    pipeline: ClassVar[str] = "text_grpo"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextPPOConfig(TextConfig):
    """PPO-clip, PPO-KL, PPO-ptx: completions are compared with the prediction of a value function."""

    pipeline: ClassVar[str] = "text_ppo"

    model: ActorCriticConfig = field(default_factory=lambda: ActorCriticConfig(value="separate"))
    """Language model and its value function."""
    rollout: TextRolloutSettings = field(
        default_factory=lambda: TextRolloutSettings(prompts_per_iteration=64, group_size=2)
    )
    """Sampling of the completions; groups serve dynamic sampling and statistics alone."""
    objective: TextObjectiveSettings = field(default_factory=lambda: TextObjectiveSettings(algorithm="ppo", epochs=2))
    """Loss."""
