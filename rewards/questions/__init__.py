# SPDX-License-Identifier: Apache-2.0
"""Rewards that read a vision-language model's next token: RewardDance, VisualQuality-R1, VisionReward, ...

`**loading` are options of `rewards.vlm.engine_of`, such as device and precision. `model` is a folder, hub id or
packaged name, or a loaded `rewards.vlm.VisionLanguageEngine`.
"""
