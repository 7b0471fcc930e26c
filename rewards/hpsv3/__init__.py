# SPDX-License-Identifier: Apache-2.0
"""HPSv3, its ensemble of LoRA members in one pass, EditReward and VideoAlign: heads at a reward token.

`**options` are those of `rewards.vlm.engine_of`, such as device and precision; heads are always float32.
Imports `vlm` and `combine`.
"""
