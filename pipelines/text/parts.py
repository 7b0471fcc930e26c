# SPDX-License-Identifier: Apache-2.0
"""From the configuration of a text job to its objects: policy, heads, records, rewards."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from visalign.data.assets import resolve_model
from visalign.data.sets.checks import check_preferences, check_quality
from visalign.data.sets.prompt_files import load_demonstrations, with_completion
from visalign.data.sets.records import PreferencePair, PreferenceSet, QualityRecord, QualitySet
from visalign.data.sets.sources import GENERATED, load_source, shapes_pairs, shapes_quality
from visalign.data.text_tasks.tasks import TASKS, heldout_tasks, text_tasks
from visalign.errors import UserError
from visalign.evaluation.heldout.text import check_labels, check_text_judge
from visalign.pipelines.shared.parts import Records, build_records, load_terms, no_loading_bars, weighted_sum
from visalign.pipelines.shared.sections import RewardsConfig, RewardTerm
from visalign.precision import autocast_dtype
from visalign.text import TextRollout
from visalign.text.tools import ToolPolicy
from visalign.training.loop.sampler import PromptSampler
from visalign.training.text.answers import check_answers

from .config import (
    ActorCriticConfig,
    HeldoutPromptsConfig,
    PromptsConfig,
    TextConfig,
    TextEvaluationConfig,
    TextModelConfig,
)

if TYPE_CHECKING:
    from accelerate import Accelerator

    from visalign.adapters.causal_lm.policy import CausalLMPolicy

TASKS_TRAIN, TASKS_HELDOUT = "tasks:train", "tasks:heldout"
"""Names of the packaged records."""
HELDOUT_PER_TASK = 15
"""Packaged held-out records of each kind, where nothing else is said."""


@dataclass(frozen=True, kw_only=True)
class TextInputs:
    """Records and rewards of a job."""

    records: Records
    heldout: Records
    rewards: Mapping[str, Any]
    """label -> reward, those that are trained on and those that are only reported."""
    reward: Any
    """The sum that is optimized."""
    demonstrations: Records | None
    """Demonstrations for the ptx term, each with prompt and completion."""


def prepare(config: TextConfig, device: str | None = None) -> TextInputs:
    """Read what the configuration names and check it: all that can be known without the model.

    Raises:
        UserError, ValueError: something cannot be used, or does not fit the rest.
        RewardError: a reward that cannot be loaded.
    """
    data, seed = config.data, config.seed
    records = text_records("train", data, seed)
    heldout, rewards = heldout_inputs(data, config.evaluation, seed, device, trained=config.rewards.terms)
    check_answers(config.objective.build(length=config.rollout.max_new_tokens), records)
    PromptSampler(len(records), config.rollout.prompts_per_iteration, config.rollout.group_size, seed)
    demonstrations = None
    if data.demonstrations is not None:
        demonstrations = text_demonstrations("demonstrations", data, seed, "solution", "completion")
    return TextInputs(
        records=records,
        heldout=heldout,
        rewards=rewards,
        reward=text_sum(config.rewards, rewards),
        demonstrations=demonstrations,
    )


def heldout_inputs(
    data: HeldoutPromptsConfig,
    evaluation: TextEvaluationConfig,
    seed: int,
    device: str | None,
    trained: Mapping[str, RewardTerm] | None = None,
) -> tuple[Records, dict[str, Any]]:
    """Held-out records and the rewards that judge them, those that are trained on among them."""
    heldout, judge = text_records("heldout", data, seed), evaluation.correctness
    rewards = text_rewards({**evaluation.rewards, **(trained or {})}, device)
    check_labels(rewards)
    if judge is not None:
        check_text_judge(judge, rewards[judge], heldout[0])
    return heldout, rewards


def text_records(key: str, data: PromptsConfig, seed: int) -> Records:
    """Prompt records of a source, packaged ones or those of a file; `key` is that of the source in `data`."""
    source, tasks = getattr(data, key), TASKS if data.tasks is None else tuple(data.tasks)
    if data.question is not None:
        size = data.size if key == "train" else data.heldout_size  # type: ignore[attr-defined]
        return asked_images(key, source, data.question, size, seed)
    chosen: dict[str, Any] = {} if data.levels is None else {"levels": tuple(data.levels)}
    try:
        if source == TASKS_TRAIN:
            return text_tasks(data.size, seed=seed, split="train", tasks=tasks, **chosen)
        if source == TASKS_HELDOUT:
            return heldout_tasks(getattr(data, "heldout_per_task", HELDOUT_PER_TASK), tasks=tasks, **chosen)
    except UserError as error:
        raise UserError(f"data.{key}: {error}") from error
    if source.startswith("tasks:"):
        raise UserError(
            f"data.{key} is {source!r}; the packaged records are {TASKS_TRAIN} and {TASKS_HELDOUT}, anything "
            "else is a .jsonl file."
        )
    return build_records(source, f"data.{key}")


def asked_images(key: str, source: str, question: str, size: int, seed: int) -> Records:
    """Prompts that ask about the images of a set: rated ones with image, mos (higher is better), set,
    task and caption (their prompt); or pairs with the label, the share of the votes for the first image,
    without ties.

    Args:
        key: of the source in `data`.
        source: as `visalign.data.sets.sources.load_source` takes it.
        question: behind the images; {prompt} in it is theirs.
        size: records at most.
        seed: of generated ones for training.
    """
    found = _images(key, source, size, seed)
    if isinstance(found, PreferenceSet):
        return [_about_pair(pair, question) for pair in found.pairs if pair.label != 0.5]
    return [_about_image(found, one, question) for one in found.records]


def _images(key: str, source: str, size: int, seed: int) -> PreferenceSet | QualitySet:
    """The set of a source, checked."""
    try:
        if source in GENERATED:
            make = {"shapes:pairs": shapes_pairs, "shapes:quality": shapes_quality}[source]
            train = key == "train"
            found = make(size, seed=seed if train else 0, split="train" if train else "heldout")
        else:
            found = load_source(source, limit=size)
        if not isinstance(found, PreferenceSet):
            check_quality(found)
            return found
        check_preferences(found, judge_sees_sides=True)
        if all(pair.label == 0.5 for pair in found.pairs):
            raise UserError(f"'{source}' holds nothing but ties, of which nothing can be learnt.")
    except UserError as error:
        raise UserError(f"data.{key}: {error}") from error
    return found


def decided_pairs(
    key: str, data: PromptsConfig, words: Sequence[str], reason: str | None, seed: int
) -> Records:
    """Questions about pairs and the answers that the votes give: the decision, behind it a teacher's reason.

    Args:
        key: of the source in `data`.
        data: the section, with a question.
        words: for "the first is better" and for "the second is better".
        reason: column of the reasons; None: decisions alone.
        seed: of generated pairs.
    """
    assert data.question is not None
    source = getattr(data, key)
    found, made = _images(key, source, data.size, seed), []
    if not isinstance(found, PreferenceSet):
        raise UserError(
            f"data.decision decides between two images, and data.{key} is '{source}', a set of rated ones. "
            "Give pairs, or take data.decision out."
        )
    for number, pair in enumerate(found.pairs):
        if pair.label == 0.5:
            continue
        said = words[pair.label < 0.5]
        if reason is not None:
            told = pair.extra.get(reason)
            if not isinstance(told, str) or not told.strip():
                raise UserError(
                    f"data.{key}: row {found.row(number)} of '{source}' has no text in the column {reason!r} "
                    f"(data.field); its other columns are {', '.join(pair.extra) or 'none'}. Take out pairs "
                    "without a reason, or set data.field to null."
                )
            said = f"{said}, {told.strip()}"
        made.append({**_about_pair(pair, data.question), "completion": said})
    return made


def _about_image(images: QualitySet, one: QualityRecord, question: str) -> dict[str, Any]:
    mos = one.mos if images.higher_is_better else -one.mos
    tag = {} if one.category is None else {"task": one.category}
    tag |= {"caption": one.prompt} if one.prompt else {}
    asked = question.replace("{prompt}", one.prompt)
    return {"prompt": _shown([one.image], asked), "image": one.image, "mos": mos, "set": images.name, **tag}


def _about_pair(pair: PreferencePair, question: str) -> dict[str, Any]:
    asked = question.replace("{prompt}", pair.prompt)
    tag = {} if pair.category is None else {"task": pair.category}
    return {"prompt": _shown([pair.image_left, pair.image_right], asked), "label": pair.label, **tag}


def _shown(images: Sequence[str], question: str) -> list[dict[str, Any]]:
    """A conversation that shows parts and asks."""
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


def text_demonstrations(
    key: str, data: PromptsConfig, seed: int, packaged: str | None, written: str | None
) -> Records:
    """Records with prompt and completion; a file may hold several for a prompt.

    Args:
        key: of the source in `data`.
        data: the section.
        seed: of the packaged records.
        packaged: field of their completions; None: completion, or solution.
        written: the same for a file.
    """
    source, decision = getattr(data, key), getattr(data, "decision", None)
    if decision is not None:
        return decided_pairs(key, data, decision, written, seed)
    if source.startswith("tasks:") and data.question is not None:
        raise UserError(
            f"data.{key} is '{source}', whose records show no images, and data.question asks about some. "
            "Give a .jsonl file of answers about images, such as the dataset.jsonl of text_sample."
        )
    if source.startswith("tasks:"):
        records = text_records(key, data, seed)
        return [with_completion(r, f"data.{key}: record {i}", packaged) for i, r in enumerate(records)]
    try:
        return load_demonstrations(source, written)
    except UserError as error:
        raise UserError(f"data.{key}: {error}") from error


def prompt_keys(records: Records) -> set[str]:
    """The different prompts of some records, as text."""
    return {json.dumps(record["prompt"], sort_keys=True) for record in records}


def text_rewards(terms: Mapping[str, RewardTerm], device: str | None = None) -> dict[str, Any]:
    """Label -> loaded reward."""
    from visalign.rewards.catalogue import load_text_reward

    return load_terms(terms, load_text_reward, device)


def text_sum(config: RewardsConfig, rewards: Mapping[str, Any]) -> Any:
    """The weighted sum of the loaded rewards."""
    from visalign.rewards.text.weighted_sum import WeightedTextSum

    for label, term in config.terms.items():
        if term.bound is not None:
            raise UserError(
                f"rewards.terms.{label}.bound is {term.bound}, and constraints are held in trainings of "
                "images alone. Set it to null and give the term a weight."
            )

    return weighted_sum(config, rewards, WeightedTextSum)


def build_text_policy(
    model: TextModelConfig, device: torch.device, seed: int, *, reference: bool = True
) -> CausalLMPolicy:
    """The language model on its device, with its adapters (new weights by the seed) and its value head;
    `reference` keeps what `reference()` needs.

    Raises:
        UserError, FileNotFoundError: a folder that is missing, incomplete, or of another kind.
    """
    from visalign.adapters.causal_lm.loading import load_causal_lm
    from visalign.adapters.causal_lm.policy import CausalLMPolicy
    from visalign.adapters.causal_lm.value_head import ValueHead

    with no_loading_bars():
        network, tokenizer = load_causal_lm(resolve_model(model.path), dtype=getattr(torch, model.dtype))
    head = None
    if getattr(model, "value", "none") == "shared":
        critics = getattr(model, "critics", 1)
        head = ValueHead(network.config.get_text_config().hidden_size, critics=critics)
    moved: Any = network
    return CausalLMPolicy(
        moved.to(device),
        tokenizer,
        lora=_lora(model, seed),
        prompts=prompt_encoder(model, tokenizer),
        value_head=head,
        max_prompt_tokens=model.max_prompt_tokens,
        long_prompts=model.long_prompts,
        autocast=autocast_dtype(model.autocast, device),
        gradient_checkpointing=model.gradient_checkpointing,
        reference=reference,
        generate_batch=model.generate_batch,
        score_batch=model.score_batch,
    )


def _lora(model: TextModelConfig, seed: int) -> Any:
    from visalign.adapters.causal_lm.lora import text_lora

    if model.lora is None:
        return None
    targets = model.lora.target_modules
    chosen: dict[str, Any] = {} if targets is None else {"target_modules": tuple(targets)}
    return text_lora(rank=model.lora.rank, alpha=model.lora.alpha, seed=seed, **chosen)


def text_adapters(model: TextModelConfig, network: Any, seed: int) -> None:
    """Freeze a network and give it the adapters that the configuration names, in place."""
    from visalign.adapters.causal_lm.lora import add_text_lora

    add_text_lora(network, _lora(model, seed))


def prompt_encoder(model: TextModelConfig, tokenizer: Any) -> Any:
    """How prompts become tokens."""
    from visalign.adapters.causal_lm.chat import PromptEncoder

    as_chat = model.chat == "chat" or (model.chat == "auto" and bool(tokenizer.chat_template))
    return PromptEncoder(tokenizer, plain_as_chat=as_chat, system=model.system)


def build_value_model(model: ActorCriticConfig, device: torch.device) -> Any:
    """The value network of its own, or None."""
    if model.value != "separate":
        return None
    from visalign.adapters.causal_lm.value_head import ValueModel

    with no_loading_bars():
        return ValueModel.from_pretrained(
            resolve_model(model.path),
            dtype=getattr(torch, model.dtype),
            device=str(device),
            critics=model.critics,
        )


def build_log_partition(config: TextConfig, policy: CausalLMPolicy) -> Any:
    """log Z for an objective of trajectory balance, else None."""
    objective = config.objective.build(length=config.rollout.max_new_tokens)
    if objective.surrogate != "flow_balance":
        return None
    from visalign.adapters.causal_lm.log_partition import PromptLogPartition

    return PromptLogPartition(policy, seed=config.seed)


def build_demonstrations(
    config: TextConfig, policy: CausalLMPolicy, demonstrations: Sequence[Any] | None
) -> Any:
    """The stream of demonstrations, or None."""
    if demonstrations is None:
        return None
    from visalign.adapters.causal_lm.demonstrations import DemonstrationBatches, fitting_demonstrations

    try:
        fitting_demonstrations(policy, demonstrations, too_long="refuse")
    except UserError as error:
        raise UserError(f"data.demonstrations: {error}") from error
    return DemonstrationBatches(
        policy, demonstrations, size=config.data.demonstrations_batch, seed=config.seed
    )


def build_process(config: TextConfig, policy: CausalLMPolicy) -> Any:
    """The judge of steps, which reads rollouts of the policy's tokenizer, or None."""
    process = config.process
    if process is None:
        return None
    from visalign.rewards.text.process_reward import ProcessRewardModel

    model = ProcessRewardModel(model=process.model, separator=process.separator, **process.options)

    def score_rollout(rollout: TextRollout) -> Any:
        scores = model.score_rollout(rollout, tokenizer=policy.tokenizer)
        bounded = scores.bounded(clip=process.clip, delta=process.delta)
        return replace(bounded, reward=process.coefficient * bounded.reward)

    return SimpleNamespace(score_rollout=score_rollout, replaces=process.replaces)


def build_server(config: TextConfig, policy: CausalLMPolicy) -> Any:
    """The server that writes the completions, or None.

    Raises:
        UserError: the environment variable of the key is not set, or an option the generator refuses.
    """
    server = config.server
    if server is None:
        return None
    from visalign.adapters.server.generator import ServerGenerator

    key = None if server.api_key_env is None else os.environ.get(server.api_key_env)
    if server.api_key_env is not None and key is None:
        raise UserError(
            f"server.api_key_env is {server.api_key_env}, and there is no such environment variable. Set it "
            "to the server's key, or leave api_key_env null."
        )
    mode: Any = server.logprobs_mode
    return ServerGenerator.for_policy(
        policy,
        server.base_url,
        server.model,
        api_key=key,
        logprobs_mode=mode,
        max_logprobs=server.max_logprobs,
        parallel=server.parallel,
        timeout=server.timeout,
        patience=server.patience,
    )


def with_tool(generation: Any, engine: Any, policy: CausalLMPolicy, *, branching: bool = True) -> Any:
    """Who completes with `generation.tool`; the engine itself where there is none."""
    tool = generation.tool
    if tool is None:
        return engine
    return ToolPolicy(engine, policy.tokenizer, tool.build(), tool.branch if branching else None)


def syncing(
    config: TextConfig, policy: CausalLMPolicy, generator: Any, output: Path, accelerator: Accelerator
) -> Any:
    """What hands the weights to the server after an iteration's update, or None without a server.

    The first process does so; all processes call it, wait, and ask for the new adapter from then on.

    Raises:
        UserError: `server.model_folder` is no folder with a model.
    """
    server = config.server
    if server is None:
        return None
    from accelerate import utils

    from visalign.adapters.server.weights import replace_weights
    from visalign.training.loop.sharding import unsharded_state

    folder = Path(server.model_folder or output / "server_adapter")
    if server.model_folder and not (folder / "config.json").is_file():
        raise UserError(
            f"server.model_folder is {folder}, where no model stands. Copy the one that is trained there, "
            "and start the server on it."
        )
    last: list[int] = []

    def sync(iteration: int) -> None:
        if not last or iteration - last[0] >= server.sync_every:
            last[:] = [iteration]
            with unsharded_state(policy.module), no_loading_bars():
                if accelerator.is_main_process:
                    with replace_weights(folder) as aside:
                        (policy.model.save_pretrained if server.model_folder else policy.save)(aside)
                    if server.model_folder:
                        generator.reload(folder)
                    else:
                        generator.sync(folder, server_folder=server.server_folder)
            generator.model, generator.weights_folder = utils.broadcast_object_list(
                [generator.model, generator.weights_folder]
            )

    return sync
