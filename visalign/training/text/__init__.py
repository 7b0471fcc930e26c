# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning, supervised fine-tuning and direct preference optimisation of text policies.

It needs a text policy, a reward and the loop; no model family and no image trajectory.
"""
