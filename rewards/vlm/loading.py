# SPDX-License-Identifier: Apache-2.0
"""A vision-language model with its processor and settings, from a folder, a packaged name or a hub id.

A folder may hold a LoRA, or settings alone, and name its base.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from visalign.data.assets import resolve_model
from visalign.rewards.base.contract import RewardError
from visalign.rewards.base.identity import fingerprint
from visalign.rewards.weights.checkpoint_files import listed, quiet_loading
from visalign.rewards.weights.hub import (
    META,
    SMALL_FILES,
    TRANSFORMERS_FILES,
    is_hub_id,
    local_folder,
    revision_of,
)

from .template import SETTINGS, JudgeSettings

PLACING = ("attention", "device_map", "quantization")
"""Options of a vision-language judge that say how its weights are held."""
QUANTIZATIONS = ("int8", "int4")
"""Of the language part's linear layers, by bitsandbytes; the vision part and the head stay as they are."""
ADAPTER = "adapter_config.json"
"""The file by which peft knows the folder of a LoRA."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, without gradients."""

    model: Any
    processor: Any
    settings: JudgeSettings
    name: str
    weights: str
    """Fingerprint of the weight files."""
    revision: str
    """Commit of the hub's repository; "" for other folders."""


def load_seeing_model(
    folder_or_id: str | Path,
    *,
    device: str | torch.device,
    dtype: torch.dtype,
    adapter: str | Path | None,
    **placing: Any,
) -> LoadedModel:
    """See `VisionLanguageEngine.from_pretrained`; `placing` are its options of `PLACING`."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    own = resolve_model(folder_or_id)
    folders = [own] if isinstance(own, Path) else []
    adapters = [] if adapter is None else [_adapter_folder(adapter)]
    while folders and has_base(folders[-1]):  # a LoRA or settings alone, on a base that may be one again
        if is_adapter(folders[-1]):
            adapters.insert(0, folders[-1])
        folder_or_id = base_of(folders[-1], JudgeSettings.read(folders[-1]))
        below = resolve_model(folder_or_id)
        if not isinstance(below, Path) or below in folders:
            break
        folders.append(below)
    place = _known(find_model(folder_or_id, ("config.json",)))
    place = find_model(folder_or_id, SMALL_FILES if str(device) == META else TRANSFORMERS_FILES)
    settings = next((JudgeSettings.read(f) for f in folders if (f / SETTINGS).is_file()), JudgeSettings())
    processor = load_processor(place)
    options = placing_options(dtype, device, **placing)
    try:
        with quiet_loading():
            loaded: Any
            if str(device) == META:  # whose shapes a LoRA does not change
                with torch.device(META):
                    config = AutoConfig.from_pretrained(str(place))
                    loaded, adapters = (AutoModelForImageTextToText.from_config(config, **options), {}), []
            else:
                loaded = AutoModelForImageTextToText.from_pretrained(
                    str(place), output_loading_info=True, **options
                )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise RewardError(
            f"The vision-language model {str(folder_or_id)!r} cannot be loaded: {error}. Check that config "
            "and weights belong together and are complete."
        ) from error
    model, told = loaded
    _check_loaded(str(folder_or_id), told)
    for one in adapters:
        model = add_adapter(model, one)
    weights = "+".join([fingerprint(place), *(fingerprint(one) for one in adapters)])
    return LoadedModel(
        model=placed(model, device, **placing).eval().requires_grad_(False),
        processor=processor,
        settings=settings,
        name=own.name if isinstance(own, Path) else own,
        weights=weights,
        revision=revision_of(place),
    )


def placing_options(
    dtype: torch.dtype,
    device: str | torch.device,
    *,
    attention: str = "sdpa",
    device_map: Any = None,
    quantization: str | None = None,
) -> dict[str, Any]:
    """Arguments of transformers' from_pretrained for the options `PLACING`.

    Raises:
        RewardError: an unknown quantization, or one without the package that it needs.
    """
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    if quantization is not None:
        if quantization not in QUANTIZATIONS:
            raise RewardError(
                f"quantization is {quantization!r}; allowed are {', '.join(QUANTIZATIONS)}, or none."
            )
        if find_spec("bitsandbytes") is None:
            raise RewardError(
                f"quantization {quantization!r} needs bitsandbytes: pip install bitsandbytes. Or give a "
                "checkpoint that is stored quantised."
            )
        from transformers import BitsAndBytesConfig

        kept: list[str] = ["visual", "vision_tower", "multi_modal_projector", "lm_head"]
        settings: dict[str, Any] = {"load_in_8bit": True, "llm_int8_skip_modules": kept}
        if quantization == "int4":
            settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "llm_int8_skip_modules": kept}
            settings["bnb_4bit_compute_dtype"] = dtype
        options["quantization_config"] = BitsAndBytesConfig(**settings)
        device_map = device_map if device_map is not None else {"": str(device)}
    return options if device_map is None else {**options, "device_map": device_map}


def placed(model: Any, device: str | torch.device, **placing: Any) -> Any:
    """The model on its device; one that was placed while it was loaded stays where it is."""
    where: Mapping[str, Any] = getattr(model, "hf_device_map", None) or {}
    if away := sorted({str(one) for one in where.values()} & {"disk", "meta"}):
        raise RewardError(
            f"device_map puts parts of the model on {', '.join(away)}, where a judge cannot read them. Give "
            "a map over devices that hold it all, a quantization, or a smaller model."
        )
    is_placed = bool(where) or placing.get("device_map") is not None or placing.get("quantization")
    return model if is_placed else model.to(device)


def find_model(folder_or_id: str | Path, patterns: Sequence[str] = TRANSFORMERS_FILES) -> Path:
    """An existing folder with a config, or the local copy of a hub id's files of these names."""
    place = resolve_model(folder_or_id)
    if not isinstance(place, Path) and is_hub_id(place):
        place = local_folder(place, patterns)
    if isinstance(place, Path):
        if not (place / "config.json").is_file():
            raise FileNotFoundError(
                f"{place} holds no config.json, so it is no transformers model. Give the folder that "
                "save_pretrained wrote; for a LoRA alone give its base model here and the LoRA as adapter."
            )
        return place
    raise FileNotFoundError(
        f"There is no model folder {place}. Give a folder with config.json, weights and processor, a "
        "packaged name, or a hub id owner/name."
    )


def _known(place: Path) -> Path:
    """A folder whose model transformers knows; one that brings its own code is refused by name."""
    from transformers import CONFIG_MAPPING, __version__

    kind = json.loads((place / "config.json").read_text(encoding="utf-8")).get("model_type", "")
    if kind and kind not in CONFIG_MAPPING:
        raise RewardError(
            f"{place.name} is a {kind!r}, which transformers {__version__} does not know. Code that comes "
            "with a checkpoint is not run here; give a model of the families Qwen2-VL, Qwen2.5-VL, Qwen3-VL "
            "or InternVL, or ask this one through a server of its own."
        )
    return place


def load_processor(place: Path) -> Any:
    """The processor of a model that sees."""
    from transformers import AutoProcessor, ProcessorMixin

    reason = ""
    try:
        found: Any = AutoProcessor.from_pretrained(str(place))
    except (OSError, ValueError, ImportError) as error:
        found, reason = None, f" ({error})"
    if not isinstance(found, ProcessorMixin):
        raise RewardError(
            f"{place} has no processor of a model that sees{reason}. Save it there from the model it came "
            "from: AutoProcessor.from_pretrained(original).save_pretrained(folder)."
        )
    return found


def _adapter_folder(adapter: str | Path) -> str | Path:
    """The folder of a LoRA, fetched where it is a hub id."""
    is_here = Path(adapter).exists() or not is_hub_id(adapter)
    return adapter if is_here else local_folder(adapter, ("adapter_*",))


def add_adapter(model: Any, adapter: str | Path) -> Any:
    """A LoRA of peft (folder or hub id) added to the weights; keys of another model are named."""
    from peft import PeftModel
    from safetensors import SafetensorError

    folder = Path(adapter)
    if not (folder / "adapter_config.json").is_file() and (
        folder.exists() or str(adapter).count("/") != 1 or str(adapter)[0] in "./~"
    ):
        raise FileNotFoundError(f"{adapter} holds no adapter_config.json; give the folder of a peft LoRA.")
    if folder.is_dir() and not any(
        (folder / f"adapter_model.{end}").is_file() for end in ("safetensors", "bin")
    ):
        raise FileNotFoundError(
            f"{adapter} lacks adapter_model.safetensors; copy the folder of the LoRA again."
        )
    try:
        with warnings.catch_warnings(), quiet_loading():
            # peft 0.18 reads a property that transformers 5.23 has renamed
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
            warnings.filterwarnings("ignore", "Found missing adapter keys", UserWarning)
            wrapped: Any = PeftModel.from_pretrained(model, str(adapter))
            told = wrapped.load_adapter(str(adapter), "default")  # again, to hear what did not fit
    except (ValueError, RuntimeError, KeyError, OSError, SafetensorError) as error:
        raise RewardError(
            f"The LoRA {adapter} does not fit the model: {error}. Give the adapter of this base model."
        ) from error
    if wrong := _unfit(told.missing_keys, told.unexpected_keys):
        raise RewardError(
            f"The LoRA {adapter} does not fit the model: {wrong}. Give the adapter of this base model, "
            "complete."
        )
    return wrapped.merge_and_unload()


def _check_loaded(name: str, told: Mapping[str, Any]) -> None:
    """Refuse weights of which some are missing or left over: transformers fills gaps with random numbers."""
    if wrong := _unfit(told.get("missing_keys", ()), told.get("unexpected_keys", ())):
        raise RewardError(
            f"The weights of {name!r} do not fit its config: {wrong}. Give config and weights of one model, "
            "complete."
        )


def _unfit(missing: Iterable[Any], left: Iterable[Any]) -> str:
    """Keys that are missing or left over, in words; "" where there are none."""
    both = [sorted(map(str, keys)) for keys in (missing, left)]
    return f"missing {listed(both[0])}; unexpected {listed(both[1])}" if any(both) else ""


def base_of(folder: Path, settings: JudgeSettings) -> str | Path:
    """Where the base of a folder's LoRA is: `judge.json`'s "base" (packaged name, hub id, or folder relative
    to this one), else what peft's file names, else the folder itself.
    """
    named = settings.rest.get("base")
    if named is None and (folder / ADAPTER).is_file() and not (folder / "config.json").is_file():
        try:
            named = json.loads((folder / ADAPTER).read_text(encoding="utf-8")).get("base_model_name_or_path")
        except ValueError as error:
            raise RewardError(f"{ADAPTER} of {folder.name} is no JSON: {error}.") from error
    if not named:
        return folder
    beside = folder / str(named)
    return beside.resolve() if beside.is_dir() else str(named)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds a LoRA and no model of its own."""
    return (folder / ADAPTER).is_file() and not (folder / "config.json").is_file()


def has_base(folder: Path) -> bool:
    """Whether a folder holds no model of its own but a LoRA, or a `judge.json` that names a base."""
    if (folder / "config.json").is_file():
        return False
    return is_adapter(folder) or "base" in JudgeSettings.read(folder).rest


def name_base(folder: Path, base: str) -> None:
    """Put the base's name into a LoRA's config, where peft writes the place it was loaded from."""
    file = folder / ADAPTER
    config = json.loads(file.read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = base
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
