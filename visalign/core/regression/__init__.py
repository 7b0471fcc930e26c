# SPDX-License-Identifier: Apache-2.0
"""Learning from rewards by regression of velocities, without log-probs: losses, signals and their named rows.

It needs torch and the rooms below; no policy, no sampler and no trainer comes in.
"""
