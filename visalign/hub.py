# SPDX-License-Identifier: Apache-2.0
"""Name a Hugging Face hub that cannot be reached within seconds.

The hub's client retries each file for most of a minute. Here one short request decides. Without an answer the client
is switched to its offline mode, in which it reads its cache only.
"""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import Any

WAIT = 3.0  # seconds for an answer; a name server that is silent would take longer than the request's own limit


@functools.cache
def go_offline_if_unreachable() -> str:
    """Take the hub's client offline if the hub cannot be reached; return why, "" if it can. It asks once a process."""
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import HfHubHTTPError

    # errors of the hub's HTTP library, which depends on its version, derive from this base class
    http_error: type[Exception] = HfHubHTTPError.__bases__[0]  # type: ignore[assignment]
    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    reasons = [f"no answer within {WAIT:.0f} s"]

    def request() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=WAIT)
            reasons.append("")
        except (OSError, ValueError, RuntimeError, http_error) as error:
            reasons.append(str(error).strip().partition("\n")[0] or type(error).__name__)

    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(WAIT + 0.5)
    if reasons[-1]:
        constants.HF_HUB_OFFLINE = True  # the client reads it at each request
    return reasons[-1]


def hub_file(name: str, kind: str, *files: str) -> Path:
    """Download the first of `files` that a repository has to the hub's cache; a `FileNotFoundError` says why not."""
    from huggingface_hub import hf_hub_download

    go_offline_if_unreachable()
    errors: list[Exception] = []
    for file in files:
        try:
            return Path(hf_hub_download(name, file))
        except (OSError, ValueError) as error:
            errors.append(error)
    raise FileNotFoundError(f"There is no {kind} {name}. {hub_message(name, kind, errors[0])}") from errors[0]


def hub_message(name: str, kind: str, error: Any) -> str:
    """Word the error that the hub's client raised for `name`, of which a `kind` ("model", "dataset") was needed."""
    from huggingface_hub import constants

    if reason := go_offline_if_unreachable():
        kinds = " --repo-type dataset" if kind == "dataset" else ""
        return (
            f"The {kind} {name} is not in the hub's cache ({constants.HF_HUB_CACHE}), and {constants.ENDPOINT} cannot "
            f"be reached ({reason}). Connect to the network, or run `hf download {name}{kinds} --local-dir FOLDER` "
            "where there is one and give that folder."
        )
    return (
        f"The hub has no {kind} {name} for you ({str(error).strip().partition(chr(10))[0]}). Correct the name; where "
        "it is gated, accept its terms on its page and run `hf auth login`."
    )
