# SPDX-License-Identifier: Apache-2.0
"""Published scorers that give an image one number from features: CLIP score, PickScore, HPSv2, LAION,
ImageReward, ICT, HP.

`**towers` are options of `ClipJudge`. It needs `clip` and `weights`; nothing that asks a model a question comes in.
"""
