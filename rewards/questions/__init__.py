# SPDX-License-Identifier: Apache-2.0
"""Judges that ask a vision-language model: RewardDance, VisualQuality-R1, VisionReward, with their
prompts.

It needs `vlm` and `reading`; networks are run by `vlm` alone.
"""
