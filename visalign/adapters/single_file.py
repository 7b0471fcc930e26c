# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of one .safetensors file, as CivitAI and ComfyUI have them: their family, description and parts.

Such a file has weights alone. A diffusers folder, or a repository of the hub, describes its parts and provides those
that it lacks, such as the text encoders of a FLUX file. The keys are converted by diffusers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from visalign.data.assets import resolve_model
from visalign.errors import UserError
from visalign.hub import go_offline_if_unreachable
from visalign.model_files import LOADING_ERRORS, open_tensors, read_tensors

from .model_folder import INDEX, pipeline_index, stored_variant, stored_variants

PIPELINES = {
    "StableDiffusionPipeline": ("v1", "v2"),
    "StableDiffusionXLPipeline": ("xl_base", "playground-v2-5"),
    "StableDiffusion3Pipeline": ("sd3", "sd35_medium", "sd35_large"),
    "FluxPipeline": ("flux-dev", "flux-schnell"),
    "FluxKontextPipeline": ("flux-dev",),
    "Flux2Pipeline": ("flux-2-dev",),
    "Flux2KleinPipeline": ("flux-2-dev",),
    "ChromaPipeline": ("chroma",),
    "ZImagePipeline": ("z-image-turbo",),
    "Lumina2Pipeline": ("lumina2",),
    "SanaPipeline": ("sana",),
    "AuraFlowPipeline": ("auraflow",),
    "HiDreamImagePipeline": ("hidream",),
    "Krea2Pipeline": ("krea2",),
    "WanPipeline": ("wan-t2v-1.3B", "wan-t2v-14B"),
    "HunyuanVideoPipeline": ("hunyuan-video",),
}
"""Pipeline -> diffusers' names for the checkpoints that it runs."""
PREFIXES = {
    "vae": ("first_stage_model.", "vae."),
    "text_encoder": ("cond_stage_model.", "conditioner.embedders.0.", "text_encoders.clip_l."),
    "text_encoder_2": ("conditioner.embedders.1.", "text_encoders.clip_g."),
    "T5EncoderModel": ("text_encoders.t5xxl.",),
}
"""Part of a pipeline, or class of a part -> how its keys begin; all other keys are the network's."""
NO_MODELS = {
    "LoRA": ("lora_unet_", "lora_te", ".lora_A.", ".lora_B.", ".lora_up.", ".lora_down.", ".hada_w", ".lokr_w"),
    "ControlNet": ("control_model.", "controlnet_"),
    "textual inversion": ("emb_params", "string_to_param"),
    "checkpoint of rounded weights": ("scale_weight", "scaled_fp8", ".absmax", ".qweight", ".wscales"),
}
"""Kind of file that training cannot start from -> parts of its keys."""


@dataclass(frozen=True)
class ModelSource:
    """Files of a model: a folder or hub name, and the checkpoint of one file that replaces parts of it."""

    folder: Path | str
    file: Path | None = None

    def variant(self, variant: str | None) -> str | None:
        """Return the variant to read from the folder: the one asked for, or the only one that there is."""
        folder = Path(self.folder)
        if variant is None or not folder.is_dir():
            return variant or stored_variant(folder)
        variants = sorted({end for part in folder.glob("*/") for end in stored_variants(part) if end})
        if variant in variants:
            return variant
        choices = f"; its variants are: {', '.join(variants)}." if variants else "."
        raise UserError(
            f"{folder} has no weights of the variant {variant!r}{choices} Correct model.variant (--variant)."
        )

    def parts(
        self, index: Mapping[str, Any], dtypes: Mapping[str, torch.dtype], quantization_config: Any = None
    ) -> dict[str, Any]:
        """Load the parts of the index that the file holds; none where there is no file.

        `dtypes` has "default" for parts that it does not name; the network is rounded as `quantization_config` says.
        """
        if self.file is None:
            return {}
        with open_tensors(self.file) as opened:
            keys = _keys_of_parts(index, list(opened.keys()))
        self._check_rest(index, keys)
        state, rounded = read_tensors(self.file), getattr(quantization_config, "quant_mapping", {})
        parts = dict[str, Any]()
        for name, part_keys in keys.items():
            options: dict[str, Any] = {"torch_dtype": dtypes.get(name, dtypes["default"])}
            options |= {"quantization_config": rounded[name]} if name in rounded else {}
            parts[name] = self._part(name, index[name], {key: state[key] for key in part_keys}, options)
        return parts

    def _part(self, name: str, entry: Any, state: dict[str, Any], options: dict[str, Any]) -> Any:
        from diffusers import pipelines
        from diffusers.loaders import single_file

        loader: Any = single_file.load_single_file_sub_model
        projection = state.get("text_encoders.clip_l.transformer.text_projection.weight")
        try:
            part = loader(*entry, name, state, pipelines, hasattr(pipelines, entry[0]), str(self.folder), **options)
            if projection is not None and hasattr(part, "text_projection"):
                part.text_projection.weight.data.copy_(projection)  # diffusers puts the identity there
            empty = [key for key, weight in part.named_parameters() if weight.is_meta]
            problem = f"it has no {', '.join(empty[:3])} ({len(empty)} weights are missing)" if empty else ""
        except LOADING_ERRORS as error:
            problem = str(error).strip().partition("\n")[0].partition(". If you want")[0]
            problem = f"it has no {problem}" if isinstance(error, KeyError) else problem
        if problem:
            raise UserError(
                f"{self.file} does not fit the {name} ({entry[1]}) of {self.folder}: {problem}. Give the same "
                "model's: model.config=FOLDER."
            )
        return part

    def _check_rest(self, index: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
        """Refuse a local folder that lacks the weights of a part that the file lacks as well."""
        folder = Path(self.folder)
        names = [n for n in index if n.startswith(("text_encoder", "vae", "unet", "transformer")) and n not in parts]
        missing = [name for name in names if folder.is_dir() and not stored_variants(folder / name)]
        if missing:
            without_t5 = ", or model.use_t5=false" if missing == ["text_encoder_3"] else ""
            raise UserError(
                f"{self.file} holds {', '.join(parts)} only, and {folder} has no weights of {', '.join(missing)}. "
                f"Give a diffusers folder that has them: model.config=FOLDER{without_t5}."
            )


def model_source(path: str | Path, config: str | Path | None = None) -> ModelSource:
    """Find the files of a packaged model, a diffusers folder, a hub name, or a checkpoint of one file.

    `config` is a folder or hub name that describes the file; None is a folder beside it, else the hub's of its family.
    """
    model = resolve_model(path)
    if not (file := Path(model)).is_file():
        if config is not None:
            raise UserError(f"model.config is for a model of one file, and {path} is none. Leave model.config out.")
        return ModelSource(model)
    kind = checkpoint_kind(file)
    fitting = [pipeline for pipeline, kinds in PIPELINES.items() if kind in kinds]
    if config is None:
        return ModelSource(_neighbour(file, kind, fitting), file)
    pipeline = str(pipeline_index(folder := resolve_model(config)).get("_class_name"))
    if pipeline not in (fitting or PIPELINES) and (fitting or "Modular" in pipeline):
        raise UserError(
            f"{file} is a checkpoint of the kind {kind or 'diffusers'}, and model.config={config} is a {pipeline}. "
            f"Give the folder of a {' or '.join(fitting) or 'pipeline that is not modular'}."
        )
    return ModelSource(folder, file)


def checkpoint_kind(file: Path) -> str | None:
    """Return diffusers' name for the kind of a checkpoint, None if its keys are of diffusers' own layout."""
    from diffusers.loaders import single_file_utils

    with open_tensors(file) as opened:
        shapes = {key: torch.empty(opened.get_slice(key).get_shape(), device="meta") for key in opened.keys()}
    for name, marks in NO_MODELS.items():
        if key := next((key for key in shapes if any(mark in key for mark in marks)), None):
            raise UserError(f"{file} is a {name} (a key: {key}). Give its base model; a LoRA goes to --lora.")
    try:
        kind: str | None = single_file_utils.infer_diffusers_model_type(shapes)
    except (LookupError, UnboundLocalError):  # sizes that no published model of the family has
        kind = "v1"
    network = {key.removeprefix("model.diffusion_model.") for key in shapes}
    if kind in ("v1", "instruct-pix2pix"):  # what diffusers falls back to; latents of 8 channels look like the other
        is_xl = "label_emb.0.0.weight" in network or any(key.startswith("conditioner.") for key in shapes)
        kind = "xl_base" if is_xl else "v1" if "input_blocks.0.0.weight" in network else None
        kind = "sd3" if "joint_blocks.0.x_block.attn.qkv.weight" in network else kind
    if kind is None and not {"conv_in.weight", "proj_out.weight"} & network:
        families = ", ".join(name.removesuffix("Pipeline") for name in PIPELINES)
        raise UserError(
            f"{file} is of no known family; its keys look like {', '.join(list(shapes)[:3])}. Give a folder, or a "
            f"file of {families}."
        )
    if kind is not None and not any(kind in kinds for kinds in PIPELINES.values()):
        raise UserError(f"{file} is a checkpoint of the kind {kind}, which is not read. Give a base model.")
    return kind


def holds_pipeline(file: Path) -> bool:
    """Return True if a file holds an autoencoder besides the network."""
    with open_tensors(file) as opened:
        return any(key.startswith(PREFIXES["vae"]) for key in opened.keys())  # no mapping


def _neighbour(file: Path, kind: str | None, pipelines: list[str]) -> Path | str:
    """Find the folder that describes a file: its own, the one of its name, another beside it; else the hub's."""
    from diffusers.loaders.single_file_utils import DIFFUSERS_DEFAULT_PIPELINE_PATHS
    from huggingface_hub import try_to_load_from_cache

    if kind is None:
        raise UserError(
            f"{file} holds one network in diffusers' own layout, which many families have. Give the folder of its "
            "pipeline: model.config=FOLDER, or model.path."
        )
    first = [file.parent, file.with_suffix("")]
    folders = [*first, *(path for path in sorted(file.parent.iterdir()) if path.is_dir() and path not in first)]
    fitting = [f for f in folders if (f / INDEX).is_file() and pipeline_index(f).get("_class_name") in pipelines]
    if fitting and (len(fitting) == 1 or fitting[0] in first):
        return fitting[0]
    name = str(DIFFUSERS_DEFAULT_PIPELINE_PATHS[kind]["pretrained_model_name_or_path"])
    needs = f"{file} is a checkpoint of the kind {kind}, without configuration and tokenizers of a {pipelines[0]}."
    if fitting:
        raise UserError(f"{needs} Say which of {', '.join(map(str, fitting))} fits: model.config=FOLDER.")
    if not isinstance(try_to_load_from_cache(name, INDEX), str) and (reason := go_offline_if_unreachable()):
        raise UserError(
            f"{needs} The hub has them as {name} and cannot be reached ({reason}). Give a folder of the family: "
            "model.config=FOLDER."
        )
    return name


def _keys_of_parts(index: Mapping[str, Any], keys: list[str]) -> dict[str, list[str]]:
    """Return part of the pipeline -> keys of its weights in the file, without parts that the file lacks."""
    prefixes = {name: PREFIXES.get(entry[1], PREFIXES.get(name)) for name, entry in index.items() if name[0] != "_"}
    parts = {name: [key for key in keys if key.startswith(starts)] for name, starts in prefixes.items() if starts}
    if "text_encoder" in parts and parts.get("text_encoder_2"):
        parts["text_encoder"] += parts["text_encoder_2"]  # by which diffusers knows that a file of SDXL has the first
    every = tuple(prefix for starts in PREFIXES.values() for prefix in starts)
    if network := next((name for name in ("unet", "transformer") if name in index), None):
        parts[network] = [key for key in keys if not key.startswith(every)]
    return {name: part_keys for name, part_keys in parts.items() if part_keys}
