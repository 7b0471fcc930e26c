# SPDX-License-Identifier: Apache-2.0
"""Models of other libraries as policies: SD3 pipelines, causal language models, LoRA, contract tests.

Everything is imported at its first use: text policies do without diffusers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from visalign.remote import ServerError

    from .causal_lm import CausalLMPolicy
    from .causal_lm_lora import text_lora
    from .chat import PromptEncoder
    from .check import AdapterError, check_adapter
    from .joint_attention import append_null_token, collapse_null_tokens, use_weighted_attention
    from .log_partition import PromptLogPartition
    from .lora import LoraSettings
    from .sd3 import SD3Policy
    from .sd3_text import SD3Condition
    from .server_generation import ServerGenerator
    from .server_rollout import Rescored, rescored
    from .value_head import ValueHead, ValueModel
    from .written_answers import WrittenBatches, written_rollout

__all__ = [
    "AdapterError",
    "CausalLMPolicy",
    "LoraSettings",
    "PromptEncoder",
    "PromptLogPartition",
    "Rescored",
    "SD3Condition",
    "SD3Policy",
    "ServerError",
    "ServerGenerator",
    "ValueHead",
    "ValueModel",
    "WrittenBatches",
    "append_null_token",
    "check_adapter",
    "collapse_null_tokens",
    "rescored",
    "text_lora",
    "use_weighted_attention",
    "written_rollout",
]

_HOME = {
    "AdapterError": "check",
    "CausalLMPolicy": "causal_lm",
    "LoraSettings": "lora",
    "PromptEncoder": "chat",
    "PromptLogPartition": "log_partition",
    "Rescored": "server_rollout",
    "SD3Condition": "sd3_text",
    "SD3Policy": "sd3",
    "ServerError": "server_generation",
    "ServerGenerator": "server_generation",
    "ValueHead": "value_head",
    "ValueModel": "value_head",
    "WrittenBatches": "written_answers",
    "append_null_token": "joint_attention",
    "check_adapter": "check",
    "collapse_null_tokens": "joint_attention",
    "rescored": "server_rollout",
    "text_lora": "causal_lm_lora",
    "use_weighted_attention": "joint_attention",
    "written_rollout": "written_answers",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
