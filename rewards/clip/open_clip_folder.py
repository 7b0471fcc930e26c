# SPDX-License-Identifier: Apache-2.0
"""open_clip models in a folder that holds everything: loading from wherever it lies, and saving.

The folder is open_clip's own hub layout (its `local-dir:` scheme, version 3), without sub-folders:

- `open_clip_config.json`: {"model_cfg": {"embed_dim", "vision_cfg": {...}, "text_cfg": {...}},
  "preprocess_cfg": {"mean", "std", "interpolation", "resize_mode"}}, and of ours "window"
  (`rewards.weights.resize.model_levels`). A text_cfg with any non-empty `hf_tokenizer_name` makes open_clip
  read the tokenizer from this same folder; without it its built-in BPE of 49408 tokens is used.
- `open_clip_model.safetensors`: the state dict of `open_clip.CLIP`; float16 or bfloat16 are widened on
  loading.
- `tokenizer.json` and `tokenizer_config.json`, as `PreTrainedTokenizerFast.save_pretrained` writes them. The
  tokenizer must end each text with its end token by a post-processor (so that cutting to `context_length`
  keeps it) and have a padding token. With the default `pool_type` "argmax" the end token must have the
  highest id of all; with "eos" text_cfg's `eos_id` must be its id.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visalign.hub import go_offline_if_unreachable
from visalign.model_files import LOADING_ERRORS, read_object
from visalign.rewards.base.contract import RewardError
from visalign.rewards.weights.hub import META

CONFIG = "open_clip_config.json"
WEIGHTS = "open_clip_model.safetensors"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_WEIGHT_ENDINGS = (".safetensors", ".bin", ".pth")

Tokenizer = Callable[..., Tensor]
"""Texts -> token ids [N, context_length] int64; takes `context_length`."""


def load_open_clip(
    folder_or_name: str | Path, *, device: str | torch.device = "cpu", precision: str = "fp32"
) -> tuple[Any, dict[str, Any], Tokenizer]:
    """Load (open_clip model in evaluation mode without gradients, its preprocess_cfg, tokenizer).

    Its name is a folder in the format above, a name of the package's own models ("shapes-clip"), a hub id
    "organisation/model" (or "hf-hub:..."), or "architecture:tag" ("ViT-B-32:openai"). On the device "meta" it has
    shapes alone.
    """
    import open_clip

    hollow = str(device) == META
    name, tag = _source(folder_or_name, weights=not hollow)
    options: dict[str, Any] = {"precision": precision, "device": str(device), "pretrained_text": False}
    if hollow:
        options["load_weights"], tag = False, None
    if not name.startswith("local-dir:"):
        go_offline_if_unreachable()
    try:
        with _by_shapes_alone() if hollow else nullcontext():
            model: Any = open_clip.create_model(name, tag, require_pretrained=not hollow, **options)
        tokenizer = open_clip.get_tokenizer(name)
        tokenizer(["a"])  # one without a pad token fails here
    except LOADING_ERRORS as error:
        raise RewardError(
            f"The open_clip model {str(folder_or_name)!r} cannot be loaded: {error}. Check config, weights, tokenizer."
        ) from error
    return model.eval().requires_grad_(False), dict(model.visual.preprocess_cfg), tokenizer


def save_open_clip(
    folder: str | Path,
    model: torch.nn.Module,
    model_cfg: Mapping[str, Any],
    tokenizer: Any,
    *,
    preprocess_cfg: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float16,
) -> None:
    """Write an `open_clip.CLIP` in the format that `load_open_clip` reads.

    `model_cfg` has the embed_dim, vision_cfg and text_cfg that it was built from; the tokenizer is transformers' own;
    a `preprocess_cfg` of None is the model's own; `dtype` is that of the weights on disk.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    chosen = preprocess_cfg or getattr(model.visual, "preprocess_cfg", {})
    keys = ("mean", "std", "interpolation", "resize_mode", "window")
    text_cfg = {**model_cfg["text_cfg"], "hf_tokenizer_name": "in this folder"}
    config = {
        "model_cfg": {**model_cfg, "text_cfg": text_cfg},
        "preprocess_cfg": {key: chosen[key] for key in keys if key in chosen},
    }
    weights = {
        key: (value.to(dtype) if value.is_floating_point() else value).detach().cpu().contiguous()
        for key, value in model.state_dict().items()
    }
    save_file(weights, folder / WEIGHTS)
    tokenizer.save_pretrained(str(folder))
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    # safetensors makes its file readable by its owner alone; a package's files must be readable by all.
    (folder / WEIGHTS).chmod((folder / CONFIG).stat().st_mode)


def check_end_token(model: torch.nn.Module, tokenizer: Tokenizer) -> int | None:
    """Return the id of the end token that the model pools at; None where it pools elsewhere."""
    text_model = getattr(model, "text", None)
    pool = getattr(model, "text_pool_type", None) or getattr(text_model, "pool_type", None)
    if pool not in ("argmax", "eos"):
        return None
    declared = getattr(model, "text_eos_id", None) or getattr(text_model, "eos_id", None)
    length = int(getattr(tokenizer, "context_length", 77))
    return check_pooling(tokenizer, declared if pool == "eos" else None, length)


def check_pooling(tokenizer: Any, pooled: int | None, length: int) -> int:
    """Return the end token's id; short and cut texts must hold it where the text tower pools.

    The tower pools at the token `pooled`, or at the largest id of a text when None.
    """
    wrapped = getattr(tokenizer, "tokenizer", None)
    end: Any = getattr(tokenizer, "eot_token_id", None) if wrapped is None else wrapped.eos_token_id
    for name, text in (("short", "a"), ("long", "a " * (2 * length))):
        row = tokenizer([text])[0].tolist()
        if end not in row or (max(row) if pooled is None else pooled) != end:
            where = f"the largest id, {max(row)}" if pooled is None else f"token {pooled}"
            raise RewardError(
                f"The text tower pools at {where}, but the tokenizer's end token is {end} and a {name} text ends in "
                f"{row[-1]}. Give the tokenizer of the weights, which ends each text, also one that is cut."
            )
    return end


def open_clip_place(folder_or_name: str | Path) -> Path | None:
    """Return the folder that `load_open_clip` reads, or None where open_clip fetches the model itself."""
    name, _ = _source(folder_or_name, weights=False)
    return Path(name.removeprefix("local-dir:")) if name.startswith("local-dir:") else None


def _source(folder_or_name: str | Path, *, weights: bool = True) -> tuple[str, str | None]:
    """Return open_clip's model name and tag for what the user gave; a folder needs its `weights`."""
    path = Path(str(folder_or_name).removeprefix("local-dir:"))
    if not path.is_dir():
        from visalign.data.assets import resolve_model

        path = Path(resolve_model(folder_or_name))
    if path.is_dir():
        _check_folder(path, weights=weights)
        return f"local-dir:{path}", None
    name = str(folder_or_name)
    if name.startswith("hf-hub:"):
        return name, None
    if ":" in name:
        architecture, _, tag = name.partition(":")
        return architecture, tag
    if name.count("/") == 1 and not name.startswith((".", "/")):
        return f"hf-hub:{name}", None
    raise RewardError(
        f"There is no CLIP model {name!r}. Give a folder with {CONFIG}, 'shapes-clip', a hub id, or 'ViT-B-32:openai'."
    )


@contextmanager
def _by_shapes_alone() -> Iterator[None]:
    """Create models on the meta device, without open_clip's warning that they have no weights."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with torch.device(META):
            yield
    finally:
        logging.disable(before)


def _check_folder(folder: Path, *, weights: bool) -> None:
    """Name the missing part before open_clip falls back to random weights or to the network."""
    missing = [] if (folder / CONFIG).is_file() else [CONFIG]
    if weights and not any(file.suffix in _WEIGHT_ENDINGS for file in folder.iterdir()):
        missing.append(WEIGHTS)
    if not missing:
        try:
            text = read_object(folder / CONFIG)["model_cfg"]["text_cfg"]
        except (KeyError, TypeError) as error:
            raise RewardError(
                f"{folder / CONFIG} is no open_clip config ({type(error).__name__} {error}); needs model_cfg.text_cfg."
            ) from error
        if text.get("hf_tokenizer_name"):
            missing = [name for name in TOKENIZER if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"The model folder {folder} lacks {', '.join(missing)}; copy it again.")
