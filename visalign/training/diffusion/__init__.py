# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning of diffusion policies.

It depends on a diffusion policy, a reward and the loop; on no model family and no text trajectory.
"""
