# SPDX-License-Identifier: Apache-2.0
"""Rewards to advantages: baselines, scales, returns, and published rules.

It needs `groups`; no ratio and no log-probability comes in.

Common to all functions: rewards are [B], in any unit; `group` [B] holds labels, an integer tensor or a
sequence of hashables in any order; decisions (tokens, denoising steps) are [B, T]. Statistics are float64
over all that is passed in: pass the whole optimizer step, gathered from all devices. Results have no gradient
and are float32, or float64 for float64 inputs.

Missing rewards (not finite, or `valid` False) leave the statistics and get 0. A group with one member or
equal rewards gives exactly 0. Absent decisions (`weight` 0: padding on either side, tokens a tool wrote) get
0, and their values are never read. `ddof` is 1 for the unbiased std (TRL, verl), 0 for the biased one
(flow_grpo); `eps` is added to the std, in units of the reward.
"""
