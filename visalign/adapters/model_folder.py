# SPDX-License-Identifier: Apache-2.0
"""Whether a name is a model folder or a hub name, and what pipeline a folder holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from visalign.errors import UserError

INDEX = "model_index.json"
"""What diffusers' `save_pretrained` writes beside the folders of a pipeline's parts."""
MODULAR_INDEX = "modular_model_index.json"
"""The same of a modular pipeline; where both are, the classic one counts."""


def local_folder(folder_or_id: str | Path, holds: str) -> Path | None:
    """The folder that is named, or None for a hub name `owner/name`; an existing folder always wins. `holds`
    says what such a folder holds, for the message.

    A string is taken for a folder if it is no `owner/name`, or if `owner` is a folder here.
    """
    folder = Path(folder_or_id)
    if folder.is_dir():
        return folder
    is_hub_name = (
        isinstance(folder_or_id, str)
        and len(folder.parts) == 2 == folder_or_id.count("/") + 1
        and folder_or_id[0] not in "./~"
        and not folder.parent.is_dir()
        and not folder.exists()
    )
    if is_hub_name:
        return None
    raise FileNotFoundError(
        f"There is no model folder {folder}. Give a folder that {holds} or a hub name of the form owner/name."
    )


def pipeline_index(folder_or_id: str | Path) -> dict[str, Any]:
    """The index of a diffusers pipeline, classic or modular: of a folder as `save_pretrained` writes it, or
    from the hub.
    """
    folder = local_folder(folder_or_id, f"a diffusers pipeline was saved to (it holds {INDEX})")
    if folder is None:
        return _from_hub(str(folder_or_id))
    file = next((folder / name for name in (INDEX, MODULAR_INDEX) if (folder / name).is_file()), None)
    if file is None:
        raise FileNotFoundError(
            f"{folder} holds no {INDEX} and no {MODULAR_INDEX}, so it is no diffusers pipeline. Give the "
            "folder above transformer/, vae/ and text_encoder/, as pipe.save_pretrained writes it."
        )
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{file} is not JSON ({error}). Copy the model folder again.") from error


def _from_hub(name: str) -> dict[str, Any]:
    from diffusers import DiffusionPipeline, ModularPipeline

    try:
        try:
            fetched: Any = DiffusionPipeline.load_config(name)
        except OSError:
            fetched = ModularPipeline.load_config(name)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"There is no model folder {name}, and the hub gives no pipeline of that name "
            f"({str(error).splitlines()[0]}). Correct the path, or the name and the access to the hub."
        ) from error
    return dict(fetched)
