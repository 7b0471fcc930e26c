# SPDX-License-Identifier: Apache-2.0
"""What an address, an error answer and a header of a server say."""

from __future__ import annotations

import json
from urllib.parse import urlsplit

from visalign.errors import UserError

HINTS = {
    401: "Give api_key the key that the server was started with.",
    403: "Give api_key the key that the server was started with.",
    404: "Check base_url (the API is at …/v1) and the name of the model.",
}
"""What to do about a status."""


def address(base_url: str) -> tuple[bool, str, int | None, str]:
    """(TLS, host, port, path) of a base URL."""
    wrong = (
        f"base_url is {base_url!r}; it must be the http or https address of a server's API, e.g. "
        '"http://localhost:8000/v1".'
    )
    parts = urlsplit(base_url if isinstance(base_url, str) else "")
    try:
        port = parts.port
    except ValueError as error:
        raise UserError(f"{wrong} ({error}.)") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(wrong)
    if parts.query or parts.fragment or parts.username is not None:
        raise UserError(
            f"base_url for {parts.hostname} holds a user name, or something after ? or #. Leave these out; a "
            "key goes into api_key."
        )
    return parts.scheme == "https", parts.hostname, port, parts.path.rstrip("/") or "/v1"


def complaint(raw: bytes) -> str:
    """What an error answer says, from the places where servers put it."""
    try:
        read = json.loads(raw)
    except ValueError:
        return short(raw)
    error = read.get("error", read) if isinstance(read, dict) else read
    said = (
        next((error[k] for k in ("message", "detail") if error.get(k)), error)
        if isinstance(error, dict)
        else error
    )
    return short((said if isinstance(said, str) else json.dumps(said)).encode())


def short(raw: bytes, limit: int = 400) -> str:
    text = raw.decode("utf-8", "replace").strip()
    return text[:limit] + " …" * (len(text) > limit) if text else "(nothing)"


def named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def seconds(header: str | None) -> float | None:
    """Retry-After in seconds; its other form, a date, is passed over."""
    return float(header) if header is not None and header.strip().isdigit() else None
