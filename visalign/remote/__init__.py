# SPDX-License-Identifier: Apache-2.0
"""Requests to OpenAI-compatible servers, for generation and for judging alike.

It needs httpx; no judge and no policy comes in.
"""

from .connection import ServerConnection, ServerError

__all__ = ["ServerConnection", "ServerError"]
