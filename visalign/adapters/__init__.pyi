# SPDX-License-Identifier: Apache-2.0
"""The public names and the modules they come from; `__init__.py` reads them as type checkers do."""

from .catalogue import ADAPTERS as ADAPTERS
from .catalogue import find_adapter as find_adapter
from .catalogue import load_policy as load_policy
from .causal_lm.demonstrations import DemonstrationBatches as DemonstrationBatches
from .causal_lm.demonstrations import demonstration_rollout as demonstration_rollout
from .causal_lm.log_partition import PromptLogPartition as PromptLogPartition
from .causal_lm.lora import text_lora as text_lora
from .causal_lm.policy import CausalLMPolicy as CausalLMPolicy
from .causal_lm.policy import PromptEncoder as PromptEncoder
from .causal_lm.value_head import ValueHead as ValueHead
from .causal_lm.value_head import ValueModel as ValueModel
from .check import AdapterError as AdapterError
from .check import check_adapter as check_adapter
from .lora import LoraSettings as LoraSettings
from .pipeline.policy import PipelinePolicy as PipelinePolicy
from .sd3.joint_attention import collapse_null_tokens as collapse_null_tokens
from .sd3.joint_attention import use_weighted_attention as use_weighted_attention
from .sd3.policy import SD3Policy as SD3Policy
from .sd3.text import SD3Condition as SD3Condition
from .server.generator import ServerError as ServerError
from .server.generator import ServerGenerator as ServerGenerator
from .steering import SteeringCallback as SteeringCallback
