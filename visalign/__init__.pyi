# SPDX-License-Identifier: Apache-2.0
"""The names that most programs need, and whose faces have them; type checkers and `__init__.py` read it."""

from .adapters import CausalLMPolicy as CausalLMPolicy
from .adapters import LoraSettings as LoraSettings
from .adapters import check_adapter as check_adapter
from .adapters import load_policy as load_policy
from .core import PolicyOutput as PolicyOutput
from .core import Trajectories as Trajectories
from .core import check_invariance as check_invariance
from .core import explain as explain
from .core import named_objective as named_objective
from .data.assets import resolve_model as resolve_model
from .evaluation import compare as compare
from .evaluation import evaluate as evaluate
from .rewards import FunctionReward as FunctionReward
from .rewards import check_reward as check_reward
from .rewards import load_judge as load_judge
from .rewards import load_reward as load_reward
from .rewards import load_text_reward as load_text_reward
from .training import FlowGRPO as FlowGRPO
from .training import OptimizerSettings as OptimizerSettings
from .training import RolloutSettings as RolloutSettings
from .training import RunSettings as RunSettings
from .training import TextRL as TextRL
from .training import TextRolloutSettings as TextRolloutSettings
from .training import Trainer as Trainer
from .training import read_metrics as read_metrics

__version__: str
