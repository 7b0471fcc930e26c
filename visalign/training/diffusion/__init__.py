# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning of diffusion policies.

It needs a diffusion policy, a reward and the loop; no model family and no text trajectory comes in.
"""
