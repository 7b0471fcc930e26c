# SPDX-License-Identifier: Apache-2.0
"""Resolve model folders and hub names, and read the index of a diffusers pipeline."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from visalign.errors import UserError
from visalign.hub import hub_file
from visalign.model_files import LOADING_ERRORS, open_tensors, read_object

INDEX = "model_index.json"  # index file that diffusers' `save_pretrained` writes next to a pipeline's components
MODULAR_INDEX = "modular_model_index.json"  # index file of a modular pipeline; the classic one takes precedence


def local_folder(folder_or_id: str | Path, content: str) -> Path | None:
    """Return the local folder, or None for a string that reads as a hub name `owner/name` and whose owner is
    no folder here. `content` describes such a folder in the message.
    """
    folder = Path(folder_or_id)
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise UserError(f"{folder} is a file, and a model is a folder that {content}.")
    name = str(folder_or_id) if isinstance(folder_or_id, str) else ""
    if name.count("/") == 1 and len(folder.parts) == 2 and name[0] not in "./~" and not folder.parent.is_dir():
        return None
    if name.startswith(("http://", "https://")):
        raise UserError(f"{name} is an address. Download the file, and give its path.")
    kind = "file" if folder.suffix in (".safetensors", ".ckpt", ".gguf") else "folder"
    raise FileNotFoundError(
        f"There is no model {kind} {folder}. Give a folder that {content} or a hub name of the form owner/name."
    )


def pipeline_index(folder_or_id: str | Path) -> dict[str, Any]:
    """Read the index of a diffusers pipeline, classic or modular, from a folder or the hub."""
    folder = local_folder(folder_or_id, f"a diffusers pipeline was saved to (with {INDEX})")
    if folder is None:
        return read_object(hub_file(str(folder_or_id), "model", INDEX, MODULAR_INDEX))
    file = next((folder / name for name in (INDEX, MODULAR_INDEX) if (folder / name).is_file()), None)
    if file is None:
        is_lora = (folder / "lora").is_dir() or any(folder.glob("*lora*.safetensors"))
        lora = "It holds a LoRA: give its base model here, and this folder as the LoRA (visalign sample --lora)."
        remedy = lora if is_lora else "Give the folder above transformer/, vae/ and text_encoder/."
        raise FileNotFoundError(
            f"{folder} contains no {INDEX} or {MODULAR_INDEX}, so it is no diffusers pipeline. {remedy}"
        )
    index = read_object(file)
    if not isinstance(index.get("_class_name", ""), str):
        raise UserError(f"{file} names no pipeline: its '_class_name' is no text. Copy the model folder again.")
    return index


@contextmanager
def explain_damage(folder_or_id: str | Path, kind: str) -> Iterator[None]:
    """Raise an error that says what to do where a pipeline cannot be loaded in the block."""
    try:
        yield
    except UserError:  # a ValueError too
        raise
    except LOADING_ERRORS as error:
        for file in sorted(Path(folder_or_id).glob("*/*.safetensors")):
            with open_tensors(file):  # names the damaged one
                pass
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise FileNotFoundError(
            f"{folder_or_id} cannot be loaded as {kind} ({reason}). Copy it, or save it again."
        ) from error


def stored_dtype(path: Path, variant: str | None = None) -> Literal["float32", "bfloat16", "float16"]:
    """Return the dtype of most weights in a file, or in a network's folder; float32 where it has no safetensors."""
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    counts: Counter[str] = Counter()
    for file in [file for file in files if _variant_of(file) == variant] or files:
        with open_tensors(file) as opened:
            counts.update(opened.get_slice(name).get_dtype() for name in opened.keys())  # no mapping
    (name, _), *_ = counts.most_common(1) or [("F32", 0)]
    names = {"BF16": "bfloat16", "F16": "float16", "F8_E4M3": "bfloat16", "F8_E5M2": "bfloat16"}
    return names.get(name, "float32")  # type: ignore[return-value]


def stored_variant(folder: Path) -> str | None:
    """Return the variant, such as fp16, of which alone some part of a pipeline's folder has weights."""
    for part in (path for path in folder.glob("*") if path.is_dir()):
        if (variants := stored_variants(part)) and all(variants):
            return variants[0]
    return None


def stored_variants(folder: Path) -> list[str | None]:
    """Return the variant of each file of weights in a part's folder; None of the usual ones."""
    return [_variant_of(file) for file in folder.glob("*") if file.suffix in (".safetensors", ".bin")]


def _variant_of(file: Path) -> str | None:
    match = re.search(r"\.(\w+)(-\d+-of-\d+)?$", file.stem)
    return None if match is None else match[1]
