# SPDX-License-Identifier: Apache-2.0
"""Names of settings in TRL, transformers, diffusers and kohya, and ours; for messages about unknown keys and docs."""

from __future__ import annotations

from collections.abc import Collection, Iterable

_BY_SETTING: dict[str, tuple[str, ...]] = {
    "model_name_or_path pretrained_model_name_or_path": ("model.path",),
    "torch_dtype": ("model.dtype",),
    "bf16": ("model.autocast=bfloat16",),
    "fp16": ("model.autocast=float16",),
    "gradient_checkpointing": ("model.gradient_checkpointing",),
    "optim optimizer_type": ("optimizer.name",),
    "use_8bit_adam": ("optimizer.name=adamw_8bit",),
    "enable_model_cpu_offload": ("model.offload=true",),
    "use_peft": ("model.lora={}",),
    "peft_config": ("model.lora={rank: 16, alpha: 32}",),
    "lora_r rank network_dim": ("model.lora.rank",),
    "lora_alpha network_alpha": ("model.lora.alpha",),
    "lora_target_modules": ("model.lora.target_modules",),
    "chat_template_kwargs": ("model.template",),
    "enable_thinking": ("model.template.enable_thinking",),
    "system_prompt": ("model.system",),
    "max_prompt_length": ("model.max_prompt_tokens",),
    "dataset_name train_dataset": ("data.train",),
    "eval_dataset": ("data.heldout",),
    "reward_funcs": ("rewards.terms={my_rewards.py:my_function: {}}",),
    "reward_weights": ("rewards.terms.LABEL.weight",),
    "num_generations": ("rollout.group_size",),
    "generation_batch_size": ("rollout.prompts_per_iteration (times rollout.group_size completions)",),
    "per_device_train_batch_size train_batch_size": (
        "optimizer.micro_batch (memory only; rollout.prompts_per_iteration sets the batch)",
    ),
    "gradient_accumulation_steps": ("optimizer.updates_per_iteration (1: all samples of an iteration in one update)",),
    "steps_per_generation": ("optimizer.updates_per_iteration",),
    "num_iterations": ("objective.epochs",),
    "max_completion_length max_new_tokens": ("rollout.max_new_tokens", "generation.max_new_tokens"),
    "temperature": ("rollout.temperature", "generation.temperature", "rollout.temperatures"),
    "top_p": ("rollout.top_p", "generation.top_p"),
    "top_k": ("rollout.top_k",),
    "stop_strings": ("rollout.stop", "generation.stop"),
    "tools": ("rollout.environment.tools", "generation.environment.tools"),
    "environment_factory": ("rollout.environment.use", "generation.environment.use"),
    "max_tool_calling_iterations": ("rollout.environment.max_turns (one more)",),
    "mask_truncated_completions": ("rollout.truncated=mask",),
    "use_vllm": ("server={base_url: 'http://localhost:8000/v1', model: NAME}",),
    "vllm_server_base_url": ("server.base_url",),
    "loss_type": ("objective.algorithm", "loss.row"),
    "beta": ("objective.changes.kl", "loss.beta"),
    "epsilon": ("objective.changes.surrogate_options.eps_low (and eps_high)",),
    "epsilon_high": ("objective.changes.surrogate_options.eps_high",),
    "delta": ("objective.changes.surrogate_options.dual_clip",),
    "importance_sampling_level": ("objective.changes.level=sequence",),
    "scale_rewards": ("objective.changes.advantage_options.scale",),
    "entropy_coef": ("objective.changes.entropy",),
    "top_entropy_quantile": ("objective.algorithm=top_entropy",),
    "multi_objective_aggregation": ("objective.algorithm=gdpo",),
    "sync_ref_model ref_model_sync_steps": ("objective.reset_reference_every",),
    "label_smoothing": ("loss.label_smoothing",),
    "learning_rate": ("optimizer.lr",),
    "warmup_steps lr_warmup_steps": ("optimizer.warmup_updates",),
    "lr_scheduler_type lr_scheduler": ("optimizer.decay",),
    "weight_decay": ("optimizer.weight_decay",),
    "max_grad_norm": ("optimizer.max_grad_norm",),
    "adam_beta1 adam_beta2": ("optimizer.betas",),
    "adam_epsilon": ("optimizer.eps",),
    "max_steps num_train_epochs max_train_steps": ("run.iterations",),
    "eval_steps": ("evaluation.every",),
    "save_steps checkpointing_steps": ("run.checkpoint_every",),
    "save_total_limit": ("run.keep_checkpoints",),
    "metric_for_best_model": ("run.best_by",),
    "report_to": ("run.trackers",),
    "output_dir": ("the option --output",),
    "resume_from_checkpoint": ("the option --resume",),
    "mixed_precision": ("model.autocast",),
    "guidance_scale": ("model.guidance", "rollout.guidance"),
    "num_inference_steps": ("rollout.steps",),
    "negative_prompt": ("model.options.negative_prompt",),
    "resolution": ("model.image_size",),
}
OTHER_NAMES = {name: ours for names, ours in _BY_SETTING.items() for name in names.split()}
"""Name elsewhere -> our settings, of which a job has the first that it allows; a remark may stand in brackets."""


def our_names(names: Iterable[str], allowed: Collection[str]) -> str:
    """Write the settings of a job that names stand for elsewhere; "" without any.

    >>> our_names(["learning_rate", "beta"], ["optimizer.lr", "loss.beta"])
    'learning_rate is optimizer.lr; beta is loss.beta'
    """
    answers = []
    for name in dict.fromkeys(names):
        settings = [text for text in OTHER_NAMES.get(name, ()) if _key(text) is None or _key(text) in allowed]
        answers += [f"{name} is {settings[0]}"] if settings else []
    return "; ".join(answers)


def _key(setting: str) -> str | None:
    """Return the key of a setting in a schema, up to a field with free entries; None of an option."""
    key = setting.split("=")[0].split(" (")[0].replace(".LABEL.", ".*.")
    for free in ("objective.changes", "model.template", "model.options"):
        key = free if key.startswith(free) else key
    return None if " " in key else key
