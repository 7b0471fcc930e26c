# SPDX-License-Identifier: Apache-2.0
"""Rewards that read a vision-language model's next token: RewardDance, VisualQuality-R1, VisionReward, ...

Imports `vlm` and `reading`; only `vlm` runs networks.
"""
