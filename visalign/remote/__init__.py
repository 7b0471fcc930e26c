# SPDX-License-Identifier: Apache-2.0
"""Requests to OpenAI-compatible servers, for generation and for judging alike."""

from .connection import ServerConnection, ServerError

__all__ = ["ServerConnection", "ServerError"]
