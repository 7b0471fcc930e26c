# SPDX-License-Identifier: Apache-2.0
"""Learning from rewards by regression of velocities, without log-probs: losses, signals and their named rows.

It needs torch and the rooms below; no policy, no sampler and no trainer comes in. Of N (sample, noise level) pairs, v
[N, ...] is the velocity, differentiable, `target` [N, ...] is u = ε − x0, `sigma` [N]; a loss is [N], float32 or
better. Rewards are [B] in any unit, what is not finite, or not `valid`, is missing; `group` holds labels.
"""
