# SPDX-License-Identifier: Apache-2.0
"""Upload of a run's result to the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError

from visalign.errors import UserError
from visalign.hub import go_offline_if_unreachable

from .model_card import write_card


def check_name(name: str) -> None:
    """Refuse a name that the hub would refuse."""
    if not re.fullmatch(r"([\w][\w.-]*/)?[\w][\w.-]*", name):
        raise UserError(f"The name on the hub is {name!r}. Give owner/name, such as me/my-lora.")


def check_push(name: str, *, then: str) -> None:
    """Refuse an upload that cannot succeed: the name, the token, the network; `then` says how to upload later."""
    check_name(name)
    if not get_token():
        raise UserError(f"No token for {constants.ENDPOINT} is stored. Run `hf auth login`, or set HF_TOKEN. {then}")
    if reason := go_offline_if_unreachable():
        raise UserError(f"{constants.ENDPOINT} cannot be reached ({reason}). Connect to the network. {then}")


def push_run(run: Path, name: str, *, license: str | None = None, private: bool = False) -> str:
    """Write the model card and upload the result's folder; return its address."""
    folder, api = write_card(run, license=license, repo=name), HfApi()
    try:
        repo = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo.repo_id, folder_path=folder, commit_message="Upload with visalign")
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{name} was not uploaded ({reason}). Check that the token may write there: hf auth whoami."
        ) from error
    return str(repo)
