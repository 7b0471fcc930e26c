# SPDX-License-Identifier: Apache-2.0
"""New weights for a vLLM server: an adapter under a name made from its bytes, or its folder read anew."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from visalign.atomic import umask_permissions
from visalign.errors import UserError
from visalign.remote import ServerConnection, ServerError

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def adapter_files(folder: Path) -> tuple[Path, Path]:
    """The config and the weights of an adapter in a folder as peft's `save_pretrained` writes it."""
    weights = [folder / name for name in _WEIGHTS if (folder / name).is_file()]
    if not (folder / _CONFIG).is_file() or not weights:
        raise UserError(
            f"{folder} holds no LoRA adapter ({_CONFIG} and {' or '.join(_WEIGHTS)}). Give the folder that "
            "policy.save wrote of a policy with lora=text_lora(). A whole model goes into the folder that "
            "the server was started on: see `reload`."
        )
    return folder / _CONFIG, weights[0]


def adapter_name(folder: Path) -> str:
    """A name that two adapters share only if their bytes are the same.

    vLLM's prefix cache goes by the adapter's name: under one name for all it would hand out what it computed
    with the weights before (vllm-project/vllm, issues 30931 and 42125). A resumed run finds its own again.
    """
    digest = hashlib.sha256()
    for file in adapter_files(folder):
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return f"visalign-{digest.hexdigest()[:16]}"


@contextmanager
def rewriting(folder: Path) -> Iterator[Path]:
    """A folder to write weights into, whose files are renamed into `folder` at the end, in place of all
    weights there: no file is ever half written, whenever the process is killed.

    The folder itself stays, since a server in a container may have it mounted.
    """
    aside = folder / ".writing"
    shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed
    aside.mkdir(parents=True)
    yield aside
    umask_permissions(aside)
    written = {file.relative_to(aside) for file in aside.rglob("*") if file.is_file()}
    for file in sorted(written):
        (folder / file).parent.mkdir(exist_ok=True)
        os.replace(aside / file, folder / file)
    shutil.rmtree(aside)
    for stale in folder.glob("*.safetensors*"):  # of a model that was cut otherwise, with its index
        if stale.relative_to(folder) not in written:
            stale.unlink()


def load_adapter(connection: ServerConnection, name: str, where: str) -> None:
    """Let the server load an adapter from the folder as the server sees it; one that is loaded already under
    its name has the same bytes and stays.
    """
    try:
        connection.tell("load_lora_adapter", {"lora_name": name, "lora_path": where})
    except ServerError as error:
        if error.status == 400 and name in served_models(connection):
            return
        raise ServerError(
            f"{error} vLLM takes adapters at run time if it was started with --enable-lora, a "
            "--max-lora-rank of at least the adapter's and the environment variable "
            f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, and if it can read {where}.",
            status=error.status,
        ) from error


def unload_adapter(connection: ServerConnection, name: str) -> None:
    """Let the server forget an adapter; one that it has forgotten already is no error."""
    try:
        connection.tell("unload_lora_adapter", {"lora_name": name})
    except ServerError as error:
        if error.status not in (400, 404):
            raise


def reload_weights(connection: ServerConnection) -> None:
    """Let the server read its folder anew, and forget what it computed with the weights before.

    These are vLLM's own calls of development mode, which it has for waking from sleep.

    Raises:
        ServerError: the server has no such calls, or could not read the folder; says how to start it.
    """
    try:
        connection.tell("/collective_rpc", {"method": "reload_weights"})
        connection.tell("/reset_prefix_cache", {})
    except ServerError as error:
        raise ServerError(
            f"{error} vLLM reads whole models anew if it was started with the environment variable "
            "VLLM_SERVER_DEV_MODE=1, on a network that only you reach, from the folder that the weights are "
            "written to.",
            status=error.status,
        ) from error


def served_models(connection: ServerConnection) -> dict[str, dict[str, object]]:
    """What /v1/models lists, by name; empty for a server without such a list."""
    try:
        listed = connection.get("models").get("data")
    except ServerError as error:
        if error.status in (404, 405):
            return {}
        raise
    cards = listed if isinstance(listed, list) else []
    return {card["id"]: card for card in cards if isinstance(card, dict) and isinstance(card.get("id"), str)}
