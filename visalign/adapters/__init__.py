# SPDX-License-Identifier: Apache-2.0
"""Models of other libraries as policies: diffusers pipelines, causal language models, LoRA, contract tests.

It needs `flow`, `text` and the libraries of the models; no objective and no reward comes in. Everything is
imported at its first use: text policies do without diffusers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from visalign.adapters.causal_lm.chat import PromptEncoder
    from visalign.adapters.causal_lm.demonstrations import DemonstrationBatches, demonstration_rollout
    from visalign.adapters.causal_lm.log_partition import PromptLogPartition
    from visalign.adapters.causal_lm.lora import text_lora
    from visalign.adapters.causal_lm.policy import CausalLMPolicy
    from visalign.adapters.causal_lm.value_head import ValueHead, ValueModel
    from visalign.adapters.pipeline.policy import PipelinePolicy
    from visalign.adapters.sd3.joint_attention import (
        append_null_token,
        collapse_null_tokens,
        use_weighted_attention,
    )
    from visalign.adapters.sd3.policy import SD3Policy
    from visalign.adapters.sd3.text import SD3Condition
    from visalign.adapters.server.generator import ServerGenerator
    from visalign.adapters.server.rollout import Rescored, rescored
    from visalign.remote import ServerError

    from .catalogue import ADAPTERS, find_adapter, load_policy
    from .check import AdapterError, check_adapter
    from .lora import LoraSettings
    from .steering import SteeringCallback

__all__ = [
    "ADAPTERS",
    "AdapterError",
    "CausalLMPolicy",
    "DemonstrationBatches",
    "LoraSettings",
    "PipelinePolicy",
    "PromptEncoder",
    "PromptLogPartition",
    "Rescored",
    "SD3Condition",
    "SD3Policy",
    "ServerError",
    "ServerGenerator",
    "SteeringCallback",
    "ValueHead",
    "ValueModel",
    "append_null_token",
    "check_adapter",
    "collapse_null_tokens",
    "demonstration_rollout",
    "find_adapter",
    "load_policy",
    "rescored",
    "text_lora",
    "use_weighted_attention",
]

_HOME = {
    "ADAPTERS": "catalogue",
    "AdapterError": "check",
    "CausalLMPolicy": "causal_lm.policy",
    "LoraSettings": "lora",
    "PipelinePolicy": "pipeline.policy",
    "PromptEncoder": "causal_lm.chat",
    "PromptLogPartition": "causal_lm.log_partition",
    "Rescored": "server.rollout",
    "SD3Condition": "sd3.text",
    "SD3Policy": "sd3.policy",
    "ServerError": "server.generator",
    "ServerGenerator": "server.generator",
    "SteeringCallback": "steering",
    "ValueHead": "causal_lm.value_head",
    "ValueModel": "causal_lm.value_head",
    "DemonstrationBatches": "causal_lm.demonstrations",
    "append_null_token": "sd3.joint_attention",
    "check_adapter": "check",
    "collapse_null_tokens": "sd3.joint_attention",
    "find_adapter": "catalogue",
    "load_policy": "catalogue",
    "rescored": "server.rollout",
    "text_lora": "causal_lm.lora",
    "use_weighted_attention": "sd3.joint_attention",
    "demonstration_rollout": "causal_lm.demonstrations",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
