# SPDX-License-Identifier: Apache-2.0
"""Objects of a text job, built from its configuration: policy, heads, records, rewards, server."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from visalign.data.assets import resolve_model
from visalign.data.sets.checks import check_preferences, check_quality
from visalign.data.sets.completion_files import load_rankings
from visalign.data.sets.prompt_files import load_demonstrations, with_completion
from visalign.data.sets.records import PreferencePair, PreferenceSet, QualitySet
from visalign.data.sets.sources import GENERATED, load_source, shapes_pairs, shapes_quality
from visalign.data.text_tasks.tasks import HELDOUT_PER_TASK, TASKS, heldout_tasks, text_tasks, wrong_solutions
from visalign.errors import UserError
from visalign.evaluation.heldout.text import check_labels, check_text_judge
from visalign.pipelines.shared.parts import (
    Records,
    build_records,
    check_routes,
    first_routed,
    load_terms,
    name_key,
    no_loading_bars,
    own_heldout,
    prompt_strata,
    weighted_sum,
)
from visalign.pipelines.shared.sections import RewardsConfig
from visalign.precision import autocast_dtype
from visalign.rewards.base.contract import RewardError
from visalign.rewards.catalogue import load_text_reward
from visalign.rewards.chat.text_judge import write_question
from visalign.rewards.text.combine import WeightedTextSum
from visalign.rewards.text.implicit_process_reward import ImplicitProcessReward
from visalign.rewards.text.process_reward import ProcessRewardModel
from visalign.rewards.text.reward_model import RewardModel
from visalign.text import TextRollout
from visalign.text.steps import StepRewards
from visalign.text.tools import ToolPolicy
from visalign.text.turns import ChatTurns
from visalign.training.loop.sampler import PromptSampler
from visalign.training.text.online_process import OnlineProcessReward
from visalign.training.text.trajectories import check_answers

from .config import ActorCriticConfig, ProcessConfig, PromptsConfig, TextConfig, TextModelConfig

if TYPE_CHECKING:
    from accelerate import Accelerator

    from visalign.adapters.causal_lm.policy import CausalLMPolicy


class TextInputs(NamedTuple):
    """Records and rewards of a job."""

    records: Records
    """Prompts; of supervised jobs with a completion, a pair of completions, or a completion and its label."""
    heldout: Records
    rewards: Mapping[str, Any]  # label -> reward, those that are trained on and those that are only reported
    reward: Any = None  # The sum that is optimized; None for supervised jobs
    demonstrations: Records | None = None  # Demonstrations for the ptx term, each with prompt and completion
    strata: list[str] | None = None  # Kind of each record, with data.balance
    left_out: Mapping[str, int] = {}  # Reason -> records that are not used
    heldout_trained_on: int | None = None
    """Held-out prompts that are trained on as well; None where that is not counted."""

    @property
    def sources(self) -> dict[str, Records]:
        """Return the records by the key of their source."""
        sources = {"data.train": self.records, "data.heldout": self.heldout}
        return sources if self.demonstrations is None else {**sources, "data.demonstrations": self.demonstrations}


OWN_QUESTION = "text_judge"
"""data.question for the question that the judge of that name asks."""


def prepare(config: TextConfig, device: str | None = None) -> TextInputs:
    """Read and check the sources of the configuration, without the model."""
    data, seed = config.data, config.seed
    records = text_records("train", data, seed)
    check_routes(config.rewards.terms, records)
    heldout, rewards = heldout_inputs(config, device)
    check_answers(config.built_objective, records)
    demonstrations = None if data.demonstrations is None else text_demonstrations("demonstrations", data, seed)
    strata, rollout = prompt_strata(records, data.balance), config.rollout
    order: dict[str, Any] = {"strata": strata, "cycle": data.cycle, "compared": False}
    PromptSampler(len(records), rollout.prompts_per_iteration, 1, seed, **order)  # refuses a cycle of other kinds
    return TextInputs(records, heldout, rewards, text_sum(config.rewards, rewards), demonstrations, strata)


def heldout_inputs(config: Any, device: str | None, heldout: Records | None = None) -> tuple[Records, dict[str, Any]]:
    """Load held-out records, unless they are given, and their rewards, including those that are trained on."""
    correctness = config.evaluation.correctness
    heldout = text_records("heldout", config.data, config.seed) if heldout is None else heldout
    trained = config.rewards.terms if isinstance(config, TextConfig) else {}
    terms = {**config.evaluation.rewards, **trained}
    rewards = load_terms(terms, load_text_reward, device)
    check_labels(rewards)
    if correctness is not None:
        check_text_judge(correctness, rewards[correctness], first_routed(heldout, terms[correctness]))
    return heldout, rewards


def text_records(key: str, data: PromptsConfig, seed: int) -> Records:
    """Load prompt records of data.`key`: packaged ones, those of a file, or questions about images of a set.

    Records about rated images have image, mos (higher is better), set, task and caption (their prompt); those
    about pairs have the label, the share of the votes for the first image, and no ties.
    """
    if getattr(data, "heldout", "") is None:
        own_split = own_heldout(text_records("train", replace(data, heldout="train"), seed), seed)
        return own_split[key == "heldout"]
    source = getattr(data, key)
    if data.question is not None:
        if data.question == OWN_QUESTION or "{responses}" in data.question:
            return _ask_about_responses(key, data, seed)
        images = _images(key, data, seed)
        if isinstance(images, PreferenceSet):
            return [_ask_about_pair(pair, data.question) for pair in images.pairs if pair.label != 0.5]
        return _ask_about_images(images, data.question)
    options: dict[str, Any] = {"tasks": TASKS if data.tasks is None else tuple(data.tasks)}
    if data.levels is not None:
        options["levels"] = tuple(data.levels)
    with name_key(f"data.{key}"):
        if source == "tasks:train":
            return text_tasks(data.size, seed=seed, split="train", **options)
        if source == "tasks:heldout":
            return heldout_tasks(getattr(data, "heldout_per_task", HELDOUT_PER_TASK), **options)
        if source.startswith("tasks:"):
            raise UserError(f"there is no {source!r}; the packaged records are tasks:train and tasks:heldout.")
    return build_records(source, f"data.{key}", packaged=("tasks:train", "tasks:heldout"), names=data.map, chat=True)


def _ask_about_responses(key: str, data: Any, seed: int) -> Records:
    """Ask a judge of texts about the responses to each prompt, in an order that is drawn.

    Records have their true `rewards` and the number of the `best` one; prompts without a single best are left out.
    """
    source, records = getattr(data, key), []
    if source.startswith("tasks:"):
        pairs = wrong_solutions(text_records(key, replace(data, question=None), seed))
        rankings = [{"prompt": t["prompt"], "completions": [t["chosen"], x], "scores": [1.0, 0.0]} for t, x in pairs]
    else:
        with name_key(f"data.{key}"):
            rankings = load_rankings(source, unusable="drop", names=data.map).records
    text = None if data.question == OWN_QUESTION else data.question
    for number, ranking in enumerate(rankings[: data.size if key == "train" else data.heldout_size]):
        order = np.random.default_rng([seed, 63, number]).permutation(len(ranking["scores"])).tolist()
        rewards = [float(ranking["scores"][i]) for i in order]
        if rewards.count(max(rewards)) == 1:
            prompt = write_question(text, ranking["prompt"], [ranking["completions"][i] for i in order])
            records.append({"prompt": prompt, "rewards": rewards, "best": rewards.index(max(rewards)) + 1})
    if not records:
        raise UserError(f"data.{key}: no prompt of '{source}' has one best response. Give pairs, or other scores.")
    return records


def _images(key: str, data: Any, seed: int) -> PreferenceSet | QualitySet:
    source = getattr(data, key)
    with name_key(f"data.{key}"):
        if key != "train":
            images = load_source(source, limit=data.heldout_size)
        elif source in GENERATED:
            generate = shapes_pairs if source == "shapes:pairs" else shapes_quality
            images = generate(data.size, seed=seed, split="train")
        else:
            images = load_source(source, limit=data.size)
        if isinstance(images, QualitySet):
            check_quality(images)
            return images
        check_preferences(images, judge_sees_sides=True)  # a question may name the left or the right image
    return images


def _decided_pairs(key: str, data: Any, words: Sequence[str], reason: str | None, seed: int) -> Records:
    """Ask about pairs, with the decision of the votes as completion, followed by a teacher's reason.

    `words` are those for "the first is better" and "the second is better", `reason` the column of the reasons;
    pairs without a text in it are left out.
    """
    images, records = _images(key, data, seed), []
    if isinstance(images, QualitySet):
        raise UserError(f"data.decision decides between two images, and data.{key} is a set of rated ones.")
    for pair in images.pairs:
        if pair.label == 0.5:  # a tie prefers no word
            continue
        completion = words[pair.label < 0.5]  # the label is the share of votes for the first image
        if reason is not None:
            text = pair.extra.get(reason)
            if not isinstance(text, str) or not text.strip():
                continue
            completion = f"{completion}, {text.strip()}"
        records.append({**_ask_about_pair(pair, data.question), "completion": completion})
    if not records:
        columns = ", ".join(sorted({name for pair in images.pairs for name in pair.extra}))
        raise UserError(
            f"data.{key}: no decided pair has a text in {reason!r} (data.field). Set it to null, or one of: {columns}."
        )
    return records


def _ask_about_images(images: QualitySet, question: str) -> Records:
    sign = 1 if images.higher_is_better else -1  # DMOS counts upwards for worse images
    return [
        {
            "prompt": _conversation([record.image], question.replace("{prompt}", record.prompt)),
            "image": record.image,
            "mos": sign * record.mos,
            "set": images.name,
            **({} if record.category is None else {"task": record.category}),
            **({"caption": record.prompt} if record.prompt else {}),
        }
        for record in images.records
    ]


def _ask_about_pair(pair: PreferencePair, question: str) -> dict[str, Any]:
    text = question.replace("{prompt}", pair.prompt)
    return {
        "prompt": _conversation([pair.image_left, pair.image_right], text),
        "label": pair.label,
        **({} if pair.category is None else {"task": pair.category}),
    }


def _conversation(images: Sequence[str], question: str) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


def text_demonstrations(key: str, data: PromptsConfig, seed: int, field: str | None = None) -> Records:
    """Load records of data.`key` with prompt and completion; a file may hold several for a prompt.

    `field` names the completion in a record; None: completion, or solution where there is none.
    """
    source, decision = getattr(data, key), getattr(data, "decision", None)
    if decision is not None:
        return _decided_pairs(key, data, decision, field, seed)
    if data.question is not None or not source.startswith("tasks:"):
        with name_key(f"data.{key}"):
            return load_demonstrations(source, field, data.map)
    records = text_records(key, data, seed)
    return [with_completion(r, f"data.{key}: record {i}", field) for i, r in enumerate(records)]


def text_sum(config: RewardsConfig, rewards: Mapping[str, Any]) -> Any:
    for label, term in config.terms.items():
        if term.bound is not None:
            where = f"rewards.terms.{label}.bound is {term.bound}"
            raise UserError(f"{where}, and constraints are held in trainings of images alone. Set it to null.")
    return weighted_sum(config, rewards, WeightedTextSum)


def retokenized(rewards: Mapping[str, Any], tokenizer: Any) -> list[str]:
    """Write a note for each reward model whose vocabulary is not that of the policy's tokenizer."""
    models = {label: reward for label, reward in rewards.items() if isinstance(reward, RewardModel)}
    labels = [label for label, model in models.items() if model.tokenizer.get_vocab() != tokenizer.get_vocab()]
    return [f"{other} has another tokenizer than the policy: completions are tokenized again." for other in labels]


def build_text_policy(model: TextModelConfig, device: Any, seed: int, *, reference: bool = True) -> CausalLMPolicy:
    """Load the language model with adapters and value head; `reference` keeps what `reference()` needs."""
    from visalign.adapters.causal_lm.loading import load_causal_lm
    from visalign.adapters.causal_lm.policy import CausalLMPolicy
    from visalign.adapters.causal_lm.value_head import ValueHead

    network: Any
    with no_loading_bars():
        network, tokenizer = load_causal_lm(resolve_model(model.path), dtype=getattr(torch, model.dtype))
    head = None
    if isinstance(model, ActorCriticConfig) and model.value == "shared":
        head = ValueHead(network.config.get_text_config().hidden_size, critics=model.critics)
    same_names = ("max_prompt_tokens", "long_prompts", "gradient_checkpointing", "generate_batch", "score_batch")
    return CausalLMPolicy(
        network.to(device),
        tokenizer,
        lora=lora_settings(model, seed),
        lora_path=model.lora_path,
        prompts=prompt_encoder(model, tokenizer),
        value_head=head,
        autocast=autocast_dtype(model.autocast, device),
        reference=reference,
        **{name: getattr(model, name) for name in same_names},
    )


def lora_settings(model: TextModelConfig, seed: int) -> Any:
    from visalign.adapters.causal_lm.lora import ALL_LINEAR, settings_of, text_lora

    if (lora := model.lora) is None:
        return None
    if model.lora_path is not None:
        return settings_of(model.lora_path, seed)
    targets = tuple(lora.target_modules or (ALL_LINEAR,))
    return text_lora(rank=lora.rank, alpha=lora.alpha, target_modules=targets, seed=seed)


def prompt_encoder(model: TextModelConfig, tokenizer: Any) -> Any:
    from visalign.text.chat import PromptEncoder

    as_chat = model.chat == "chat" or (model.chat == "auto" and bool(tokenizer.chat_template))
    encoder = PromptEncoder(tokenizer, plain_as_chat=as_chat, system=model.system, template_options=model.template)
    with name_key("model.template"):
        encoder.check_options(model.template)
    return encoder


def planned_encoder(config: TextConfig) -> Any:
    """Build the encoder of prompts without the model, with the tools of an environment; refuse a template without."""
    from transformers import AutoTokenizer

    from visalign.adapters.causal_lm.loading import from_pretrained

    tokenizer = from_pretrained(AutoTokenizer, str(resolve_model(config.model.path)))
    encoder = prompt_encoder(config.model, tokenizer)
    if config.rollout.environment is not None:
        with name_key("rollout.environment"):
            ChatTurns(encoder, config.rollout.environment.build())
    return encoder


def build_value_model(model: ActorCriticConfig, device: torch.device) -> Any:
    from visalign.adapters.causal_lm.value_head import ValueModel

    if model.value != "separate":
        return None
    path, dtype = resolve_model(model.path), getattr(torch, model.dtype)
    with no_loading_bars():
        return ValueModel.from_pretrained(path, dtype=dtype, device=str(device), critics=model.critics)


def build_process(config: TextConfig, policy: CausalLMPolicy) -> Any:
    """Build the process reward of rollouts with the policy's tokenizer, or None."""
    if (process := config.process) is None:
        return None
    if process.reference is None:
        try:
            model = ProcessRewardModel(model=process.model, separator=process.separator, **process.options)
        except RewardError as error:
            hint = "A language model is a process reward with process.reference, the model before its training."
            raise UserError(f"process.model: {error} {hint}") from error
        score = partial(model.score_rollout, tokenizer=policy.tokenizer)
    else:
        implicit = _build_implicit(process, config.model, policy)

        def score(rollout: TextRollout) -> StepRewards:
            scores = implicit.score_rollout(rollout)
            if process.unit == "step":
                return scores.steps
            token = torch.arange(scores.token.shape[1]).expand_as(scores.token)
            return StepRewards(reward=scores.token, step=token, valid=scores.valid, reason=scores.reason)

    def score_rollout(rollout: TextRollout) -> Any:
        steps = score(rollout)
        bounded = steps.bounded(clip=process.clip, delta=process.delta)
        return replace(bounded, reward=process.coefficient * bounded.reward)

    if process.online is not None:
        models = implicit.policy, implicit.reference_policy
        return OnlineProcessReward(score_rollout, *models, process.online, beta=process.beta, seed=config.seed)
    return SimpleNamespace(score_rollout=score_rollout, replaces=process.replaces)


def _build_implicit(process: ProcessConfig, model: TextModelConfig, policy: CausalLMPolicy) -> ImplicitProcessReward:
    """Load the two language models of an implicit process reward, which read the policy's token ids."""
    from visalign.adapters.causal_lm.lora import WEIGHT_FILE

    folder, reference = resolve_model(process.model), str(process.reference)
    is_adapter = any((Path(folder) / name / WEIGHT_FILE).is_file() for name in ("", "lora"))
    sources = {
        "model": {"path": reference, "lora_path": str(folder)} if is_adapter else {"path": str(folder)},
        "reference": {"path": reference},
    }
    loaded = {}
    for key, source in sources.items():
        same = {name: getattr(model, name) for name in ("dtype", "autocast", "score_batch")}
        with name_key(f"process.{key}"):
            loaded[key] = build_text_policy(TextModelConfig(**source, **same), policy.device, 0, reference=False)
            if loaded[key].tokenizer.get_vocab() != policy.tokenizer.get_vocab():
                raise UserError(
                    f"{process.model if key == 'model' else reference} has another vocabulary than model.path. Train "
                    "it from a model of the policy's family, or use a classifier."
                )
    options = {"tokenizer": policy.tokenizer, "beta": process.beta, "separator": process.separator}
    return ImplicitProcessReward(loaded["model"], reference=loaded["reference"], **options)


def build_server(config: TextConfig, policy: CausalLMPolicy) -> Any:
    """Build the client of the server that generates the completions, or None."""
    from visalign.adapters.server.generator import ServerGenerator

    if (server := config.server) is None:
        return None
    key = None if server.api_key_env is None else os.environ.get(server.api_key_env)
    if server.api_key_env is not None and key is None:
        where = f"server.api_key_env is {server.api_key_env}"
        raise UserError(f"{where}, and there is no such environment variable. Set it to the server's key.")
    same_names = ("logprobs_mode", "max_logprobs", "parallel", "timeout", "patience")
    options: dict[str, Any] = {name: getattr(server, name) for name in same_names}
    return ServerGenerator(policy, server.base_url, server.model, api_key=key, **options)


def with_tool(generation: Any, engine: Any, policy: CausalLMPolicy, records: Records) -> Any:
    """Add `generation.tool` or `.environment` to a generator of completions; without either return it unchanged."""
    tool, environment = generation.tool, generation.environment
    if environment is not None:
        with name_key("rollout.environment"):
            return ToolPolicy(engine, policy.tokenizer, ChatTurns(policy.prompts, environment.build(), records))
    return engine if tool is None else ToolPolicy(engine, policy.tokenizer, tool.build())


def syncing(config: TextConfig, policy: CausalLMPolicy, generator: Any, output: Path, accelerator: Accelerator) -> Any:
    """Return what hands the weights to the server after an iteration, called by all processes; None without one."""
    from accelerate import utils

    from visalign.adapters.server.weights import replace_weights
    from visalign.training.loop.sharding import unsharded_state

    if (server := config.server) is None:
        return None
    folder = Path(server.model_folder or output / "server_adapter")
    if server.model_folder and not (folder / "config.json").is_file():
        where = f"server.model_folder is {folder}"
        raise UserError(f"{where}, which holds no model. Copy that of model.path there, and start the server on it.")

    def sync(_: int) -> None:
        with unsharded_state(policy.module), no_loading_bars():
            if accelerator.is_main_process:
                with replace_weights(folder) as temporary:
                    (policy.model.save_pretrained if server.model_folder else policy.save)(temporary)
                if server.model_folder:
                    generator.reload(folder)
                else:
                    generator.sync(folder, server_folder=server.server_folder)
        version = utils.broadcast_object_list([generator.model, generator.weights_folder])
        generator.model, generator.weights_folder = version

    return sync
