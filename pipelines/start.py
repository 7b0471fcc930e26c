# SPDX-License-Identifier: Apache-2.0
"""A first configuration for a model, from its files: the job, the dtype, the layers of a LoRA, a batch that fits."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from visalign.adapters.catalogue import index_source, is_distilled, own_sampling
from visalign.adapters.model_folder import INDEX, MODULAR_INDEX, local_folder, pipeline_index
from visalign.adapters.pipeline.arguments import known_family
from visalign.data.assets import resolve_model
from visalign.errors import UserError
from visalign.hub import hub_file
from visalign.model_files import read_object

from .jobs import load_job

MEMORY = 24.0  # GB that are planned for where there is no GPU
EDITED = 1024  # Pixels along the sides of an edited image
HEADROOM = 0.9  # Share of the memory that a plan may fill: it counts no workspaces
_SAVING, _LORA = {"gradient_checkpointing": True}, {"lora": {"rank": 32, "alpha": 64}}
_IMAGE_SIZES = [(16, {}), (8, {}), (4, {}), (8, _SAVING), (2, _SAVING), (1, {**_SAVING, "offload": True})]
_TEXT_SIZES = [(32, {}), (4, _SAVING), (32, _LORA), (8, {**_LORA, **_SAVING})]
"""Micro-batch and settings of the model, the fastest first."""
_KINDS: dict[str, dict[str, Any]] = {
    "clip": {"pipeline": "train_reward", "model": {"kind": "ict"}, "objective": {"task": "ict"}},
    "vision_config": {"pipeline": "train_reward", "model": {"kind": "hpsv3"}},
    "ForSequenceClassification": {"pipeline": "text_reward"},
    "ForCausalLM": {"pipeline": "text_grpo"},
    "LMHeadModel": {"pipeline": "text_grpo"},
}
"""Mark in the config.json of transformers -> job; the first that is there counts."""


def draft_config(
    model: str, *, images: str | None = None, prompts: str | None = None, memory: float | None = None
) -> str:
    """Return the YAML of a job that trains `model`, headed by what was looked at, as its own plan accepts it.

    `images` is a set of images with captions to fine-tune on, `prompts` those of an image model's samples, and
    `memory` the GB of a device; None: this GPU's.
    """
    settings, notes, sizes = _look(model, images, prompts)
    if memory is None:
        memory = torch.cuda.get_device_properties(0).total_memory / 1e9 if torch.cuda.is_available() else MEMORY
    with tempfile.TemporaryDirectory() as folder:
        planned: Any = None  # Of the last plan: settings, GB without activations, GB of activations of an image
        for size, more in sizes:
            if planned and more == planned[0] and planned[1] + size * planned[2] > HEADROOM * memory:
                continue  # a plan of a large network takes a minute
            settings["optimizer"] = {**settings.get("optimizer", {}), **({"micro_batch": size} if size else {})}
            text = OmegaConf.to_yaml({**settings, "model": {**settings["model"], **more}})
            (file := Path(folder) / "draft.yaml").write_text(text, encoding="utf-8")
            job = load_job(str(file))
            estimate = job.estimate(job.config).get("memory_in_GB", {})
            needed, activations = estimate.get("in_all", 0.0), estimate.get("activations_of_a_micro_batch", 0.0)
            planned = more, needed - activations, activations / max(size, 1)
            if fits := needed <= HEADROOM * memory:
                break
    counted = f"{needed:.3g} of {memory:.4g} GB by the plan" if needed else "the job's own; its plan counts no memory"
    remedy = "" if fits else ". It does not fit: take quantization, several devices, or a smaller model"
    return "".join(f"# {line}\n" for line in ("Written by visalign init.", *notes, f"batch: {counted}{remedy}")) + text


def _look(
    model: str, images: str | None, prompts: str | None
) -> tuple[dict[str, Any], list[str], list[tuple[int, dict[str, Any]]]]:
    """Tell by its files what a model is: settings of its job, notes on what was looked at, batches to try."""
    names, path = (INDEX, MODULAR_INDEX, "config.json", "open_clip_config.json"), Path(resolve_model(model))
    file = next((path / name for name in names if (path / name).is_file()), path)
    if path.is_dir() and file == path:
        content = ", ".join(sorted(item.name for item in path.iterdir())[:8]) or "nothing"
        raise UserError(
            f"{model} is no model: it has {content}, and neither {INDEX} (diffusers) nor config.json (transformers). "
            "Give the folder that save_pretrained wrote, or a hub id. Of a LoRA or a run give the base model, and "
            "add the LoRA as model.lora_path."
        )
    if not path.is_file() and local_folder(resolve_model(model), "save_pretrained wrote") is None:
        file = hub_file(model, "model", *names)
    if not file.name.endswith("config.json"):
        return *_look_at_pipeline(model, images, prompts), _IMAGE_SIZES
    if option := "--images" * (images is not None) or "--prompts" * (prompts is not None):
        raise UserError(f"{option} is for an image model, and {model} is none. Leave {option} out.")
    config = read_object(file)
    kind = config.get("model_type") or config.get("_class_name", "model of no type")
    kind = "clip" if file.name == "open_clip_config.json" else kind
    classes = ", ".join(map(str, config.get("architectures") or ["no class"]))
    looked = f"{kind} {classes} {'vision_config' if 'vision_config' in config else ''}"
    if (job := next((job for mark, job in _KINDS.items() if mark in looked), None)) is None:
        raise UserError(
            f"{model} is a {kind} ({classes}), and no job starts from one. Give an image pipeline of diffusers, a "
            "causal language model, a CLIP or vision-language model, or a sequence classifier."
        )
    settings, is_policy = {**job, "model": {**job.get("model", {}), "path": model}}, job["pipeline"] == "text_grpo"
    if is_policy:
        settings["model"]["dtype"] = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        settings["optimizer"] = {"lr": 1e-5}
    note = f"model: {file.name} names {classes}, of the type {kind}: {job['pipeline']}"
    return settings, [note], _TEXT_SIZES if is_policy else [(0, {})]


def _look_at_pipeline(model: str, images: str | None, prompts: str | None) -> tuple[dict[str, Any], list[str]]:
    index = pipeline_index(index_source(model))
    family = known_family(index.get("_class_name"), model)
    if images is not None and prompts is not None:
        raise UserError("--images are learnt from, and --prompts are drawn and judged. Leave one of the two out.")
    if family.source == "needed" and images is None and prompts is None:
        raise UserError(
            f"{model} edits an image, and no prompts say which. Give --prompts with a .jsonl file of "
            '{"prompt": "make it blue", "source": "cup.png"}.'
        )
    sampling = own_sampling(model, None, "cuda" if torch.cuda.is_available() else "cpu")
    lora = {"rank": 32, "alpha": 64, "target_modules": [*family.lora]}
    settings: dict[str, Any] = {
        "pipeline": "sft_images",
        "model": {"path": model, "dtype": sampling.dtype, "lora": lora},
    }
    settings |= {"data": {"images": images}, "rollout": {"steps": sampling.steps}, "optimizer": {"lr": 1e-4}}
    if images is None:
        guidance = {} if sampling.guidance is None else {"guidance": sampling.guidance}
        settings |= {"pipeline": "flow_grpo", "model": {**settings["model"], **guidance}, "optimizer": {"lr": 3e-4}}
        settings |= {"data": {"train": prompts or "shapes:train"}, "rewards": {"terms": {"clip_score": {}}}}
        settings["rollout"] = {"prompts_per_iteration": 16, "group_size": 8, "steps": min(sampling.steps, 10)}
    size = {"image_size": EDITED} if family.source == "needed" else {}  # a batch of edits has one
    settings["model"] |= size
    takes_few = is_distilled(model, index_source(model), None)
    is_guided = images is not None and sampling.guidance is not None and not takes_few
    scale = {"guidance": sampling.guidance} if is_guided else {}
    settings["evaluation"] = {"correctness": None, "rewards": {"clip_score": {}}, **scale}
    hint = "" if images or prompts else ", and your prompts as data.train"
    usual = sampling.guidance or family.usual
    steps = ". It is distilled: set rollout.steps to those of its card" * takes_few
    return settings, [
        f"model: its index names a {index['_class_name']}: {settings['pipeline']}",
        f"dtype: {sampling.dtype}, as the weights are stored; adapters are float32",
        f"call: the pipeline's own {sampling.steps} steps and guidance {usual or 'none'}{steps}",
        f"clip_score: the packaged CLIP knows rendered shapes alone. Name your reward{hint}",
    ]
