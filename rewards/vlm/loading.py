# SPDX-License-Identifier: Apache-2.0
"""Loading of vision-language models: a folder, packaged name or hub id; a LoRA's or settings' folder has a base."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from visalign.data.assets import resolve_model
from visalign.data.sets.tables import listed
from visalign.model_files import LOADING_ERRORS, read_object
from visalign.rewards.base.contract import RewardError
from visalign.rewards.base.identity import fingerprint
from visalign.rewards.weights.checkpoint_files import quiet_loading
from visalign.rewards.weights.hub import META, SMALL_FILES, TRANSFORMERS_FILES, is_hub_id, local_folder, revision_of

from .template import SETTINGS, JudgeSettings

PLACING = ("attention", "device_map", "quantization")
"""Options of a vision-language judge for placing and quantizing its weights."""
ADAPTER = "adapter_config.json"  # File that marks the folder of a peft LoRA


def load_seeing_model(
    folder_or_id: str | Path,
    *,
    device: str | torch.device,
    dtype: torch.dtype,
    adapter: str | Path | None,
    **placing: Any,
) -> tuple[dict[str, Any], str]:
    """Load the arguments of `VisionLanguageEngine`, and the commit of the hub's repository ("" for other folders)."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    source = resolve_model(folder_or_id)
    folders = [source] if isinstance(source, Path) else []
    adapters: list[str | Path] = []
    if adapter is not None:
        is_remote = is_hub_id(adapter) and not Path(adapter).exists()
        adapters = [local_folder(adapter, ("adapter_*",)) if is_remote else adapter]
    while folders and _has_base(folders[-1]):  # the base of a LoRA or of settings may have a base itself
        if is_adapter(folders[-1]):
            adapters.insert(0, folders[-1])
        folder_or_id = base_of(folders[-1], JudgeSettings.read(folders[-1]))
        base = resolve_model(folder_or_id)
        if not isinstance(base, Path) or base in folders:
            break
        folders.append(base)
    _check_model_type(find_model(folder_or_id, ("config.json",)))  # before the weights are fetched
    folder = find_model(folder_or_id, SMALL_FILES if str(device) == META else TRANSFORMERS_FILES)
    settings = next((JudgeSettings.read(f) for f in folders if (f / SETTINGS).is_file()), JudgeSettings())
    processor = load_processor(folder)
    options = placing_options(dtype, device, **placing)
    try:
        with quiet_loading():
            info: dict[str, Any] = {}
            if str(device) == META:  # a LoRA does not change the shapes
                with torch.device(META):
                    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
                    model: Any = AutoModelForImageTextToText.from_config(config, trust_remote_code=False, **options)
                adapters = []
            else:
                load: Any = AutoModelForImageTextToText.from_pretrained
                model, info = load(str(folder), output_loading_info=True, trust_remote_code=False, **options)
        # transformers fills missing weights with random numbers
        _check_keys(info.get("missing_keys", ()), info.get("unexpected_keys", ()))
    except LOADING_ERRORS as error:
        raise RewardError(
            f"The vision-language model {str(folder_or_id)!r} cannot be loaded: {error}. Copy it whole."
        ) from error
    for lora in adapters:
        model = add_adapter(model, lora)
    loaded = {
        "model": placed(model, device, **placing).eval().requires_grad_(False),
        "processor": processor,
        "settings": settings,
        "name": source.name if isinstance(source, Path) else source,
        "weights": "+".join(map(fingerprint, [folder, *adapters])),
    }
    return loaded, revision_of(folder)


def placing_options(
    dtype: torch.dtype,
    device: str | torch.device,
    *,
    attention: str = "sdpa",
    device_map: Any = None,
    quantization: str | None = None,
) -> dict[str, Any]:
    """Arguments of from_pretrained for the options `PLACING`; only the language part's linear layers are quantized."""
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    if quantization is not None:
        settings: dict[str, dict[str, Any]] = {
            "int8": {"load_in_8bit": True},
            "int4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype},
        }
        if quantization not in settings or find_spec("bitsandbytes") is None:
            raise RewardError(f"quantization is {quantization!r}; allowed, with bitsandbytes: {', '.join(settings)}.")
        from transformers import BitsAndBytesConfig

        skipped = ["visual", "vision_tower", "multi_modal_projector", "lm_head"]
        options["quantization_config"] = BitsAndBytesConfig(**settings[quantization], llm_int8_skip_modules=skipped)
        device_map = device_map if device_map is not None else {"": str(device)}
    return options if device_map is None else {**options, "device_map": device_map}


def placed(model: Any, device: str | torch.device, **placing: Any) -> Any:
    """Move the model to its device, unless it was placed while loading."""
    device_map: Mapping[str, Any] = getattr(model, "hf_device_map", None) or {}
    if offloaded := sorted(set(map(str, device_map.values())) & {"disk", "meta"}):
        raise RewardError(
            f"device_map puts parts of the model on {', '.join(offloaded)}, where none reads. Name devices for all."
        )
    is_placed = bool(device_map) or placing.get("device_map") is not None or placing.get("quantization")
    return model if is_placed else model.to(device)


def find_model(folder_or_id: str | Path, patterns: Sequence[str] = TRANSFORMERS_FILES) -> Path:
    """Return an existing folder with a config, or a local copy of a hub id's files of these patterns."""
    folder = resolve_model(folder_or_id)
    if not isinstance(folder, Path) and is_hub_id(folder):
        folder = local_folder(folder, patterns)
    if not isinstance(folder, Path) or not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"There is no model folder {folder} with a config.json. Give one, a packaged name, or a hub id; of a LoRA "
            "give the base model, and the LoRA as adapter."
        )
    return folder


def _check_model_type(folder: Path) -> None:
    """Refuse a model that transformers does not know, such as one with its own code."""
    from transformers import CONFIG_MAPPING, __version__

    model_type = read_object(folder / "config.json").get("model_type", "")
    if model_type and model_type not in CONFIG_MAPPING:
        raise RewardError(
            f"{folder.name} is a {model_type!r}, which transformers {__version__} does not know, and its own code is "
            "not run. Give a Qwen2-VL, Qwen2.5-VL, Qwen3-VL, InternVL or SmolVLM, or ask this one through a server."
        )


def load_processor(folder: Path) -> Any:
    from transformers import AutoProcessor, ProcessorMixin

    reason = ""
    try:
        processor: Any = AutoProcessor.from_pretrained(str(folder), trust_remote_code=False)
    except ImportError as error:  # SmolVLM's needs num2words
        raise RewardError(f"The processor of {folder} lacks a package: {error}") from error
    except LOADING_ERRORS as error:
        processor, reason = None, f" ({error})"
    if not isinstance(processor, ProcessorMixin):
        raise RewardError(f"{folder} has no processor of a vision-language model{reason}. Copy the original's there.")
    return processor


def add_adapter(model: Any, adapter: str | Path) -> Any:
    """Merge the peft LoRA of a folder into the weights; refuse keys that do not fit."""
    from peft import PeftModel

    folder = Path(adapter)
    if not (folder / ADAPTER).is_file() or not any(folder.glob("adapter_model.*")):
        raise FileNotFoundError(
            f"{adapter} holds no {ADAPTER} with adapter_model.safetensors; give the folder of a LoRA."
        )
    try:
        with warnings.catch_warnings(), quiet_loading():
            # peft 0.18 reads a property that transformers 5.23 has renamed
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
            warnings.filterwarnings("ignore", "Found missing adapter keys", UserWarning)
            wrapped: Any = PeftModel.from_pretrained(model, str(adapter))
            info = wrapped.load_adapter(str(adapter), "default")  # again: only this reports the keys
        _check_keys(info.missing_keys, info.unexpected_keys)
        return wrapped.merge_and_unload()
    except LOADING_ERRORS as error:
        raise RewardError(
            f"The LoRA {adapter} does not fit the model: {error}. Give that of this base, complete."
        ) from error


def _check_keys(missing: Iterable[Any], unexpected: Iterable[Any]) -> None:
    keys = [sorted(map(str, part)) for part in (missing, unexpected)]
    if any(keys):
        raise ValueError(f"missing {listed(keys[0]) or 'nothing'}; unexpected {listed(keys[1]) or 'nothing'}")


def base_of(folder: Path, settings: JudgeSettings) -> str | Path:
    """Find the base of a folder in its `judge.json` or peft's file (name, hub id, relative folder), or itself."""
    base = settings.rest.get("base")
    if base is None and is_adapter(folder):
        base = read_object(folder / ADAPTER).get("base_model_name_or_path")
    if not base:
        return folder
    relative = folder / str(base)
    return relative.resolve() if relative.is_dir() else str(base)


def is_adapter(folder: Path) -> bool:
    """True for a folder with a LoRA and no model of its own."""
    return (folder / ADAPTER).is_file() and not (folder / "config.json").is_file()


def _has_base(folder: Path) -> bool:
    has_model = (folder / "config.json").is_file()
    return not has_model and (is_adapter(folder) or "base" in JudgeSettings.read(folder).rest)


def name_base(folder: Path, base: str) -> None:
    """Write the base's name into a LoRA's config, where peft writes the path it was loaded from."""
    file = folder / ADAPTER
    config = read_object(file)
    config["base_model_name_or_path"] = base
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
