# SPDX-License-Identifier: Apache-2.0
"""Give a vLLM server new weights: a LoRA adapter named after its bytes, or a reload of its folder."""

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


def adapter_name(folder: Path) -> str:
    """Name an adapter by a hash of its files: vLLM's prefix cache goes by the name (vllm issues 30931, 42125)."""
    digest = hashlib.sha256()
    for file in (folder / "adapter_config.json", folder / "adapter_model.safetensors"):
        if not file.is_file():
            raise UserError(
                f"{folder} contains no LoRA adapter ({file.name}). Give the folder that policy.save wrote for a "
                "policy with LoRA; `reload` sends whole models."
            )
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return f"visalign-{digest.hexdigest()[:16]}"


@contextmanager
def replace_weights(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder whose files then replace those in `folder`, one by one, so that none is half written.

    The folder itself stays: a server in a container may have it mounted.
    """
    temporary = folder / ".writing"
    shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process
    temporary.mkdir(parents=True)
    yield temporary
    umask_permissions(temporary)
    written = {file.relative_to(temporary) for file in temporary.rglob("*") if file.is_file()}
    for file in sorted(written):
        (folder / file).parent.mkdir(exist_ok=True)
        os.replace(temporary / file, folder / file)
    shutil.rmtree(temporary)
    for stale in folder.glob("*.safetensors*"):  # shards of an earlier save, and its index
        if stale.relative_to(folder) not in written:
            stale.unlink()


def load_adapter(connection: ServerConnection, name: str, server_folder: str) -> None:
    """Let the server load an adapter from `server_folder`, a path as the server sees it."""
    try:
        connection.post("load_lora_adapter", {"lora_name": name, "lora_path": server_folder})
    except ServerError as error:
        if error.status == 400 and name in served_models(connection):  # the same bytes, loaded before
            return
        raise ServerError(
            f"{error} Start vLLM with --enable-lora, a --max-lora-rank of at least the adapter's and "
            f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, where it can read {server_folder}.",
            status=error.status,
        ) from error


def unload_adapter(connection: ServerConnection, name: str) -> None:
    """Let the server unload an adapter, if it still has it."""
    try:
        connection.post("unload_lora_adapter", {"lora_name": name})
    except ServerError as error:
        if error.status not in (400, 404):
            raise


def reload_weights(connection: ServerConnection) -> None:
    """Let the server read its folder again and drop its prefix cache, by vLLM's development-mode calls."""
    try:
        connection.post("/collective_rpc", {"method": "reload_weights"})
        connection.post("/reset_prefix_cache", {})
    except ServerError as error:
        raise ServerError(
            f"{error} vLLM reloads whole models if started with VLLM_SERVER_DEV_MODE=1, from the folder of the "
            "weights.",
            status=error.status,
        ) from error


def served_models(connection: ServerConnection) -> dict[str, dict[str, object]]:
    """Return the entries of /v1/models by name; empty for a server without that endpoint."""
    try:
        cards = connection.get("models").get("data")
    except ServerError as error:
        if error.status in (404, 405):
            return {}
        raise
    return {card["id"]: card for card in cards or [] if isinstance(card, dict) and "id" in card}
