# SPDX-License-Identifier: Apache-2.0
"""Models of other libraries as policies: SD3 pipelines, LoRA, and the contract test for your own adapter."""

from .check import AdapterError, check_adapter
from .joint_attention import append_null_token, collapse_null_tokens, use_weighted_attention
from .lora import LoraSettings
from .sd3 import SD3Policy
from .sd3_text import SD3Condition

__all__ = [
    "AdapterError",
    "LoraSettings",
    "SD3Condition",
    "SD3Policy",
    "append_null_token",
    "check_adapter",
    "collapse_null_tokens",
    "use_weighted_attention",
]
