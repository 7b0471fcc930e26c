# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning and supervised fine-tuning of text policies.

It needs a text policy, a reward and the loop; no model family and no picture trajectory comes in.
"""
