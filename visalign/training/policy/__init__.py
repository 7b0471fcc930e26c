# SPDX-License-Identifier: Apache-2.0
"""Policy updates of images and texts: the objective's settings, the update, the reference, balanced rewards.

It needs the core's `Objective` and the loop; how a sample is made, and what a decision is, never comes in.
"""
