# SPDX-License-Identifier: Apache-2.0
"""HPSv3, its ensemble of LoRA members in one pass, EditReward and VideoAlign: heads at a reward token.

Imports `vlm` and `combine`.
"""
